"""`KVQuantCache`: the compressed cache as a transformers `Cache`.

Layers that are compressed share one set of rows and block tables; every other layer is transformers' own.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from ..arena import SlotPool
from ..blocks import BlockKey, KVBlock
from ..errors import CacheStateError, KVQuantWarning, UnsupportedError
from ..geometry import CROSS_KIND, cache_hazard, caches_latents, decoder_config, decoder_module, takes_cache
from ..keys import Identity, content_keys
from ..policy import PrecisionPolicy, ResolvedLayer, ResolvedPolicy
from ..store.tiered import TieredStore
from . import prefix, sessions
from .calls import Calls
from .hf_layer import KVQuantLayer
from .hf_window import WindowLayer, check_packable
from .layer import History, Layer
from .offload import offload_to
from .resident import Resident
from .rows import Rows
from .shared import Recompressed
from .stats import CacheStats, take_stats
from .streaming import HeldStates, Watch


class KVQuantCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """A KV cache that compresses all but the last tokens, by a per-layer precision policy.

    Build with `for_model` and pass to ``model.generate(…, cache=cache)`` or ``model(…, cache=cache)``. A batch
    with padding needs `kvquant.enable` on the model, or a call of `begin` before each forward pass. Gradients reach
    the tokens of the current call; what the cache holds is constant.
    """

    def __init__(
        self,
        resolved: ResolvedPolicy,
        config: Any,
        tenant: str = "",
        adapter: str = "",
        store: TieredStore | None = None,
    ) -> None:
        """For the model of ``config``; `for_model` is the usual way."""
        policy = resolved.policy
        self.resolved = resolved
        self.store = store
        self.tenant, self.adapter = tenant, adapter
        self.rows = Rows(SlotPool(), policy.block_tokens, policy.recent_tokens)
        self._offload = None if store is None else offload_to(store, self.rows.pool, resolved, config)
        self.calls = Calls(self.rows)
        self._config = decoder_config(config)
        self._watch = Watch()
        self._model: Callable[[], Any] = lambda: None
        self._decoder: Callable[[], Any] = lambda: None
        self._bytes: dict[int, int] = {}  # per compressed layer, as of its last update
        self._peak = 0
        layers = DynamicCache(config=config).layers
        for layer in resolved.layers:
            if layer.policy is not None:
                layers[layer.index] = self._layer(layer)
        Cache.__init__(self, layers=layers)  # a DynamicCache builds its own

    @classmethod
    def for_model(
        cls,
        model: Any,
        policy: str | Path | PrecisionPolicy,
        *,
        store: TieredStore | None = None,
        tenant: str = "",
        adapter: str = "",
    ) -> Self:
        """An empty cache for a transformers model, or for its config, which does not hold key biases to remove.

        ``policy`` is a preset's name, a YAML file or a `PrecisionPolicy`. Sealed blocks go to ``store``, which caches
        may share; without one all stay on the device. ``tenant`` and ``adapter`` become part of content keys. Raises
        `PolicyError`, `StoreError` or `UnsupportedError` in one line; warns (`KVQuantWarning`) of a model that will
        not keep the cache.
        """
        config = getattr(model, "config", model)
        if not hasattr(config, "get_text_config"):
            raise UnsupportedError(f"{type(model).__name__} is neither a transformers model nor its config")
        decoder = None if model is config else decoder_module(model)
        if decoder is not None and not takes_cache(decoder):
            raise UnsupportedError(f"{type(model).__name__} takes no cache: there is nothing to serve")
        if not isinstance(policy, PrecisionPolicy):
            policy = PrecisionPolicy.load(policy)
        if hazard := cache_hazard(config):
            warnings.warn(hazard, KVQuantWarning, stacklevel=2)
        cache = cls(policy.resolve(model), config, tenant, adapter, store)
        if decoder is not None:
            cache._model, cache._decoder = weakref.ref(model), weakref.ref(decoder)
        return cache

    @property
    def model(self) -> Any:
        """The model the cache was built for, None where that was a config or is gone."""
        return self._model()

    @property
    def decoder(self) -> Any:
        """The part of `model` that takes the cache."""
        return self._decoder()

    def begin(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        new: int | None = None,
        streamed: bool | None = None,
        *,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        rows: Sequence[int | None] | Tensor | None = None,
    ) -> None:
        """Announce the next forward pass: what its ``new`` columns are, and which are padding.

        ``input_ids`` ``[rows, new]`` give content keys; a 2-D ``attention_mask`` ``[rows, held + new]`` tells
        left padding, which is then not stored; ``position_ids`` are checked to continue the cache. Masks of other
        kinds are left to the model, and nothing is checked. Where a mask hides anything but left padding, keys and
        values depend on more than the ids: the rows get no content keys then. ``streamed`` tells whether the model's
        attention reads codes where they lie; where it does not, or can't, that is counted.
        `kvquant.enable` has all of this told.

        A packed pass is for the caller to announce, and needs `kvquant.enable`: ``input_ids`` of the model are
        ``[1, tokens]``, of which ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]`` (from 0 to the number of tokens, int) are
        the next ones of row ``rows[i]``. A row is given by its number, or begins: None, or the next free number. What
        is not named gets nothing. Without ``rows`` each row goes on, or each begins in an empty cache. Positions and
        ids are the pass's own. Rows may begin, read prompts in chunks and decode in one pass; those that have ended go
        with `batch_select_indices`. Afterwards the longest row is the width of the batch, and others are padded.
        Raises `CacheStateError`, or `UnsupportedError` for models with layers that cannot: other
        than full attention and sliding windows.
        """
        if cu_seqlens is not None or rows is not None:
            if cu_seqlens is None or any(told is not None for told in (input_ids, attention_mask, position_ids, new)):
                raise CacheStateError("begin() of a packed pass takes cu_seqlens and rows, the model gets the rest")
            check_packable(self.resolved.layers, self.layers)
            self.calls.announce_packed(cu_seqlens, rows)
            return
        if new is None:
            if input_ids is None:
                raise CacheStateError("begin() needs input_ids, or the number of new columns as new=")
            new = input_ids.shape[1]
        mask = attention_mask if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 else None
        self.calls.announce(new, input_ids, mask, position_ids, attention_mask is not None and mask is None, streamed)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to layer ``layer_idx`` and return what its attention reads; see `KVQuantLayer.update`."""
        if layer_idx >= len(self.layers):
            raise CacheStateError(f"layer {layer_idx}: the cache was built for a model of {len(self.layers)} layers")
        width, new = self.rows.width, key_states.shape[2]
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        if isinstance(layer, WindowLayer):
            return keys, values
        if not isinstance(layer, KVQuantLayer):
            # Before the first compressed layer of a pass, or after it.
            if self.resolved.layers[layer_idx].kind == CROSS_KIND:
                return keys, values  # of an image or an audio, not of the text
            if (held := layer.get_seq_length()) not in (width + new, width):
                raise CacheStateError(
                    f"layer {layer_idx} holds {held} columns, the compressed layers {width}: a pass stopped "
                    f"half-way and cannot be continued: reset() the cache"
                )
        else:
            if layer.held.key.grown or layer.held.value.grown:
                self._bytes[layer_idx] = sum(layer.held.nbytes())
            decoded = 0 if isinstance(keys, HeldStates) else 2 * (keys.numel() + values.numel())
            self._peak = max(self._peak, sum(self._bytes.values()) + decoded)
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` columns (transformers counts in negatives); 0 does nothing.

        Sealed codes stay as they are; a block cut in two keeps its first part.
        """
        tokens_to_remove = int(tokens_to_remove)  # may be a tensor
        if tokens_to_remove > 0:
            raise CacheStateError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative")
        self.calls.settle()
        for layer in self.foreign():  # first, since a window that has moved on refuses
            layer.crop(tokens_to_remove)
        self.calls.crop(-tokens_to_remove)
        for layer in self.compressed():
            layer.held.crop(self.rows.rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes row ``beam_idx[i]``: pointer work, no code moves."""
        if beam_idx.numel() and int(beam_idx.min()) < 0:
            raise CacheStateError(f"rows {beam_idx.tolist()} selected: beams count from 0")
        self._select(beam_idx)
        for layer in self.foreign():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int | Tensor) -> None:
        """Each row ``repeats`` times in a row (a number, or one per row), sharing its blocks."""
        rows = torch.arange(len(self.rows.rows))
        try:
            chosen = rows.repeat_interleave(repeats.cpu() if isinstance(repeats, Tensor) else repeats)
        except (RuntimeError, TypeError) as error:
            raise CacheStateError(f"repeats {repeats!r}: give one number, or {len(rows)} for as many rows") from error
        self._select(chosen)
        for layer in self.foreign():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor | slice | Sequence[int]) -> None:
        """Keep the rows ``indices`` (integers, a mask or a slice) only.

        The batch stays as wide as it was, until the next packed call.
        """
        self._select(indices)
        for layer in self.foreign():
            layer.batch_select_indices(indices)

    def reset(self) -> None:
        """Forget everything; memory is freed unless a copy of the cache shares it."""
        self.calls.reset()
        self._bytes.clear()
        self._peak = 0
        for layer in self.compressed():
            layer.held.clear()
            if layer.segments is not None:
                layer.segments.clear()
        for layer in self.foreign():
            layer.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A cache of its own that shares sealed blocks by reference and copies the tails."""
        self.calls.settle()
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin.rows = self.rows.fork()
        twin.calls = self.calls.fork(twin.rows)
        twin._bytes = dict(self._bytes)
        twin._offload = self._offload and self._offload.fork()
        twin._watch = self._watch.fork()
        twin.layers = [
            layer.fork(twin.calls, twin._watch, twin._offload)
            if isinstance(layer, KVQuantLayer | WindowLayer)
            else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError("a KVQuantCache cannot be pickled; copy.deepcopy(cache) copies it within the process")

    def block(self, layer: int, row: int, number: int) -> KVBlock:
        """A copy of the ``number``-th sealed span of a row in one layer, its keys less a bias that is removed."""
        target = self.layers[layer]
        if not isinstance(target, KVQuantLayer):
            raise CacheStateError(f"layer {layer} is not compressed: {type(target).__name__}")
        entry = self.rows.rows[row]
        if not 0 <= number < len(entry.slots):
            raise CacheStateError(f"row {row} has {len(entry.slots)} sealed blocks, there is no number {number}")
        return target.held.block(self.rows, entry, number)

    def block_key(self, layer: int, row: int, number: int) -> BlockKey:
        """The runtime handle of a block: unique within the process, new whenever the row is copied."""
        return BlockKey(self.rows.rows[row].sequence, layer, number)

    def content_keys(self, row: int) -> list[bytes]:
        """Content keys of a row's sealed blocks; needs a cache built for a model and ids told by `begin`."""
        entry = self.rows.rows[row]
        identity = self.identity()
        if entry.ids is None:
            raise CacheStateError("content keys need token ids: use kvquant.enable(model), or begin(input_ids)")
        if not entry.at_home():
            raise CacheStateError("content keys need tokens at positions 0, 1, …; this row's are others")
        ids = torch.cat(entry.ids) if entry.ids else torch.empty(0, dtype=torch.int64)
        return content_keys(identity, ids[: entry.sealed], self.rows.block_tokens)

    def save(self, name: str) -> None:
        """Save all that is held to the store's disk under ``name``, in place of what was; see `sessions`.

        Raises `CacheStateError` without a store, `StoreError` where it has no disk or no room.
        """
        sessions.save(self, name)

    @classmethod
    def load(cls, model: Any, name: str, store: TieredStore, *, tenant: str = "", adapter: str = "") -> Self:
        """The cache that was saved under ``name``, by any process, to go on exactly where it was.

        Raises `StoreError` where there is none for this tenant, where a part of it is damaged, or where it was saved
        with another model, dtype or adapter.
        """
        return sessions.load(cls, model, name, store, tenant, adapter)

    def share(self) -> int:
        """Put sealed blocks into the store under content keys, for caches of the same tenant; how many were new.

        Needs `content_keys`. Raises `CacheStateError` without a store, `UnsupportedError` for hybrid models.
        """
        return prefix.share(self)

    def reuse(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> int:
        """Fill an empty cache with what others shared of the beginning of ``input_ids`` ``[rows, tokens]``.

        Returns how many columns are held now, of which at least the recent tokens are missing: the model is given
        the rest, which is what ``generate(input_ids, cache=cache)`` does by itself. ``attention_mask`` tells left
        padding.
        """
        return prefix.reuse(self, input_ids, attention_mask)

    def identity(self) -> Identity:
        """All but tokens that decides the bytes of blocks; needs a cache built for a model."""
        model = self.model
        if model is None:
            raise CacheStateError("content keys need the model: build the cache with for_model(model, …)")
        return Identity.of(model, self._config, self.resolved.policy.fingerprint(), self.adapter, self.tenant)

    def stats(self) -> CacheStats:
        """See `CacheStats`."""
        again = Recompressed() if self._offload is None else self._offload.shared.recompressed
        return take_stats(self.resolved.layers, self.layers, self.rows.rows, self._peak, self._watch.fallbacks, again)

    def _layer(self, layer: ResolvedLayer) -> KVQuantLayer:
        policy = self.resolved.policy
        assert layer.policy is not None
        histories = [
            History(codec, self.rows.pool, policy.block_tokens, policy.sink_tokens, offset)
            for codec, offset in ((layer.policy.key, layer.key_bias), (layer.policy.value, None))
        ]
        key, value = histories
        place = partial(Resident, self.rows.pool)
        held = Layer(key, value, place if self._offload is None else partial(self._offload.blocks, layer.index))
        return KVQuantLayer(layer.index, self.calls, held, self._watch, not caches_latents(self._config))

    def settle(self) -> None:
        """See `Calls.settle`."""
        self.calls.settle()

    def begin_with(self, input_ids: Tensor, starts: Sequence[int], rows: Sequence[Sequence[int]]) -> list[int]:
        """Have an empty cache hold ``input_ids`` ``[rows, columns]``, row i from column ``starts[i]`` on, in blocks.

        ``rows`` number each row's blocks; returns the slots of these numbers. What they hold is up to whoever asks.
        """
        slots = self.rows.pool.allocate(1 + max((number for row in rows for number in row), default=-1))
        self.rows.begin_with(input_ids, starts, [[slots[number] for number in row] for row in rows])
        self.rows.pool.release(slots)  # whose rows have them now
        return slots

    def hold(self, layer: int) -> None:
        """A layer holds all columns of the rows now."""
        self.calls.hold(layer)

    def compressed(self) -> list[KVQuantLayer]:
        """The layers that are."""
        return [layer for layer in self.layers if isinstance(layer, KVQuantLayer)]

    def foreign(self) -> list[Any]:
        """The layers that are not: transformers' own."""
        return [layer for layer in self.layers if not isinstance(layer, KVQuantLayer)]

    def _select(self, given: Any) -> None:
        self.calls.settle()
        if not self.rows.rows:
            return
        indices = _indices(given, len(self.rows.rows))
        self.calls.forget_packing()
        self.rows.select(indices)
        for layer in self.compressed():
            layer.held.select(indices)
            if layer.segments is not None:
                layer.segments.clear()
            self._bytes[layer.index] = sum(layer.held.nbytes())


def _indices(given: Any, rows: int) -> list[int]:
    """The rows that an index of a tensor's first dimension stands for; at least one."""
    try:
        chosen = torch.arange(rows)[given.cpu() if isinstance(given, Tensor) else given]
    except (IndexError, TypeError) as error:
        raise CacheStateError(f"rows {given!r} selected from a cache of {rows} rows") from error
    if chosen.dim() != 1 or not len(chosen):
        raise CacheStateError(f"rows {given!r} selected from a cache of {rows} rows: at least one must stay")
    return [int(index) for index in chosen]
