"""`enable` and `disable`: tell a `KVQuantCache` what each forward pass brings, and attend to codes where they lie.

A cache alone sees keys and values, never token ids or padding. `enable` puts one removable pre-hook on the
model's decoder that announces them through `KVQuantCache.begin`, and has its layers call `streaming.attend`.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from ..errors import KVQuantWarning, UnsupportedError
from ..geometry import CACHE_NAMES, caches_latents, decoder_module, takes_cache
from .arguments import next_positions, of_packed_call, repeats
from .hf import KVQuantCache
from .packing import Plain
from .streaming import attend

_HANDLE = "_kvquant_hook"  # kept on the decoder itself, so that a copy of the model has its own


def enable(model: nn.Module) -> None:
    """Install the hook on a transformers model; does nothing if it is there already.

    With it, attention reads sealed blocks where they lie instead of decoding them, left padding takes no memory,
    blocks get content keys, a prompt that is cached whole costs one token, and inputs that do not continue the cache
    are refused. What cannot be attended to so (an unusual mask, attention weights that are wanted, gradients) is
    decoded as without the hook; `CacheStats.fallbacks` counts it, and a `KVQuantWarning` tells the first time why.
    So are all keys and values where `why_decoded` says so, without a warning. Forward passes with other caches are not
    affected. Raises `UnsupportedError` for a model whose decoder takes no cache.
    """
    decoder = _decoder(model)
    if not takes_cache(decoder):
        raise UnsupportedError(
            f"{type(decoder).__name__}.forward takes neither {' nor '.join(CACHE_NAMES)}: there is no cache to serve"
        )
    if _HANDLE not in vars(decoder):
        hook = partial(_announce, tuple(inspect.signature(decoder.forward).parameters))
        handle = decoder.register_forward_pre_hook(hook, with_kwargs=True)
        setattr(decoder, _HANDLE, _Installed(handle, _switch(decoder)))
        if not _streams(decoder) and _attention(decoder) not in _ATTENTION:
            warnings.warn(
                f"keys and values are decoded at every step: {why_decoded(model)}", KVQuantWarning, stacklevel=2
            )


def why_decoded(model: nn.Module) -> str:
    """Why a model that is enabled has what is held decoded for attention; nothing if it reads codes where they lie."""
    decoder = _decoder(model)
    if caches_latents(decoder.config):
        return "multi-head latent attention expands what is held"
    if _streams(decoder):
        return ""
    if (attention := _attention(decoder)) in _ATTENTION:
        return f"{type(decoder).__name__} has an attention of its own"
    return f"attention is {attention!r}; load the model with attn_implementation='sdpa'"


def disable(model: nn.Module) -> None:
    """Remove what `enable` installed, if anything."""
    decoder = _decoder(model)
    if found := vars(decoder).pop(_HANDLE, None):
        found.hook.remove()
        if found.attention and _streams(decoder):  # else another was chosen since
            decoder.set_attn_implementation(found.attention)


class _Installed:
    """What `enable` changed: a hook, and the ``attention`` there was before, empty if it stays."""

    def __init__(self, hook: Any, attention: str) -> None:
        self.hook, self.attention = hook, attention

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        _register()  # an enabled model may be loaded, hook and all, in another process


def _switch(decoder: Any) -> str:
    """Switch a decoder to attention that takes what is held as it is; what it had before, empty if it can't."""
    before = _attention(decoder)
    if before not in _ATTENTION or not decoder._can_set_attn_implementation():
        return ""
    _register()
    decoder.set_attn_implementation(_ATTENTION[before])
    return before if _attention(decoder) == _ATTENTION[before] else ""


def _attention(decoder: Any) -> str:
    """What transformers calls the attention of a decoder's layers."""
    return str(getattr(decoder.config, "_attn_implementation", ""))


def _streams(decoder: Any) -> bool:
    """Whether a decoder's layers call `streaming.attend`."""
    return _attention(decoder) in _ATTENTION.values()


def _register() -> None:
    """Have transformers know the names in `_ATTENTION`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for kind, name in _ATTENTION.items():
        ALL_ATTENTION_FUNCTIONS.register(
            name, partial(attend, Plain(_eager, True) if kind == "eager" else Plain(ALL_ATTENTION_FUNCTIONS[kind]))
        )
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[kind])


def _eager(module: Any, *args: Any, **given: Any) -> Any:
    """The model's own attention, where it has no other."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **given)


_ATTENTION = {"sdpa": "kvquant", "eager": "kvquant_eager"}


def _decoder(model: nn.Module) -> Any:
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise UnsupportedError(f"{type(model).__name__} is not a transformers model")
    return decoder_module(model)


def _announce(
    names: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    given = dict(zip(names, args, strict=False)) | kwargs
    cache = outer = next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
    if isinstance(outer, EncoderDecoderCache):
        cache = outer.self_attention_cache
    if not isinstance(cache, KVQuantCache):
        return None
    wanted = given.get("output_attentions")
    cache.calls.weights = bool(getattr(module.config, "output_attentions", False) if wanted is None else wanted)
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    shaped = ids if isinstance(ids, Tensor) else embeds
    if cache.calls.packing is not None:
        own = ids if isinstance(ids, Tensor) and _is_of(cache, module) else None
        try:
            dtype = _mask_dtype(names, module, outer)
            added = of_packed_call(cache, given, own, shaped, _streams(module), dtype)
            _check_frequencies(module.config, added["position_ids"], cache)
            return (), given | added
        except Exception:
            cache.calls.forget_packing()
            raise
    repeated = isinstance(ids, Tensor) and repeats(cache, ids, given.get("attention_mask"), given.get("position_ids"))
    if repeated:
        # `generate` feeds a prompt that is cached whole again from its start: there is nothing left to read, but
        # the last token must be, for its logits.
        cache.crop(-1)
        given |= {name: given[name][..., -1:] for name in ("input_ids", "position_ids") if given.get(name) is not None}
        shaped = ids = given["input_ids"]
    added = next_positions(cache, given, shaped) if "position_ids" in names else {}
    given |= added
    if not _is_of(cache, module):
        ids = None  # another model's keys and values must not get this model's content keys
    if isinstance(shaped, Tensor):
        cache.begin(ids, given.get("attention_mask"), given.get("position_ids"), shaped.shape[1], _streams(module))
    return ((), given) if repeated or added else None


def _is_of(cache: KVQuantCache, module: nn.Module) -> bool:
    """Whether a cache was built for this decoder, or for none in particular."""
    return cache.model is None or cache.decoder is module


def _mask_dtype(names: tuple[str, ...], decoder: Any, cache: Any) -> torch.dtype:
    """What masks of a decoder's packed calls are of. Raises `UnsupportedError` where there are none."""
    why = ""
    if isinstance(cache, EncoderDecoderCache):
        why = "an encoder-decoder reads one input a row"
    elif "position_ids" not in names or getattr(decoder.config, "alibi", False) or _pads_positions(decoder):
        why = f"{type(decoder).__name__} counts positions itself"
    elif "local" in getattr(decoder.config, "attention_layers", ()):
        why = f"{type(decoder).__name__} has windows of its own, over columns"
    elif _attention(decoder) not in {*_ATTENTION, *_ATTENTION.values()}:
        why = f"attention is {_attention(decoder)!r} where 'sdpa' or 'eager' would do"
    elif cache.foreign() and not _streams(decoder):
        why = f"{type(decoder).__name__} has an attention of its own, and layers that are not compressed"
    if why:
        raise UnsupportedError(f"packed rows: {why}; give a batch with left padding")
    return torch.bool if "eager" not in _attention(decoder) else decoder.dtype


def _pads_positions(decoder: Any) -> bool:
    """Whether positions begin after that of padding, as RoBERTa's do."""
    table = getattr(getattr(decoder, "embeddings", None), "position_embeddings", None)
    return getattr(table, "padding_idx", None) is not None


def _check_frequencies(config: Any, positions: Tensor, cache: KVQuantCache) -> None:
    """`UnsupportedError` for rows of one call that RoPE would turn by frequencies of the longest."""
    rope = getattr(config, "rope_parameters", None) or {}
    limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    several = cache.calls.packing is None and bool((positions[0].diff() != 1).any())
    if several and rope.get("rope_type") in ("dynamic", "longrope") and int(positions.max()) >= limit:
        raise UnsupportedError(
            f"packed rows: {rope['rope_type']} RoPE turns all of a call as its longest row needs, here beyond {limit} "
            f"tokens; give such a row a call of its own"
        )
