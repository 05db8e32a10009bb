"""The known part of a model's keys: the bias of its key projection, turned by RoPE to each key's position.

Qwen2 has biases many times larger than what they are added to (norms of hundreds), and RoPE turns them as positions
grow, so neither a block's mean nor, at low bits, a scale per channel catches them. The model knows both parts: what
is subtracted before encoding and added back after decoding costs no bits. A bias that did not fit would cost
precision, never correctness; still, each is compared with what the layer's own attention would cache.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .geometry import decoder_module

MOVING = ("dynamic", "longrope")  # types of RoPE whose frequencies change with the length of the text
PROBED = 8  # positions compared


@dataclass(frozen=True)
class Turn:
    """How a layer turns keys: the model's own embedding module and function.

    ``partial`` where the attention hands the function only as many channels as there are angles.
    """

    rotary: nn.Module
    apply: Callable[..., Any]
    kind: dict[str, str]  # which of the module's embeddings, where it has one per layer kind
    partial: bool

    def angles(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines as the model computes them for states of the dtype and device of ``like``."""
        cos, sin = self.rotary.forward(like.new_empty(0), positions[None], **self.kind)  # past any hooks
        return cos, sin

    def __call__(self, keys: Tensor, positions: Tensor, like: Tensor) -> Tensor:
        """``keys`` ``[heads, tokens, dim]`` turned to ``positions`` ``[tokens]``."""
        cos, sin = self.angles(positions, like)
        width = cos.shape[-1] if self.partial else keys.shape[-1]
        taken = keys[None, :, :, :width]
        _, turned = self.apply(taken, taken, cos, sin)
        return torch.cat((turned[0], keys[:, :, width:]), dim=-1)


@dataclass(frozen=True)
class KeyBias:
    """One layer's key bias, float32 ``[heads, dim]``; ``turn`` is None where keys carry no position."""

    bias: Tensor
    turn: Turn | None

    def __call__(self, positions: Tensor, like: Tensor) -> Tensor:
        """The bias in keys at ``positions``, int64 ``[tokens]``: float32 ``[heads, tokens, dim]``."""
        keys = self.bias.to(like.device)[:, None].expand(-1, len(positions), -1)
        return keys if self.turn is None else self.turn(keys, positions.to(like.device), like)


@dataclass(frozen=True)
class BiasScores:
    """What a key bias adds to q·k, without the bias of every token.

    RoPE turns by sums of angles: q · R(s + i) b = R(-s) q · R(i) b. So a query is turned back by each block's first
    position, and meets a table of the bias at the positions within a block.
    """

    known: KeyBias
    block_tokens: int

    def __call__(self, query: Tensor, starts: Tensor, like: Tensor) -> Tensor:
        """For ``query`` ``[heads, queries, dim]`` and blocks whose tokens are at ``starts`` ``[n]`` and on.

        Float32 ``[n, heads, queries, block tokens]``; ``like`` as for `KeyBias`.
        """
        heads, queries, dim = query.shape
        query = query.float()
        turn = self.known.turn
        if turn is None:
            scores = (query * self.known.bias.to(query.device)[:, None]).sum(-1)
            return scores[None, :, :, None].expand(len(starts), -1, -1, self.block_tokens).contiguous()
        table = self.known(torch.arange(self.block_tokens, device=like.device), like)  # [heads, tokens, dim]
        each = query.reshape(heads * queries, 1, dim).expand(-1, len(starts), -1)
        back = turn(each, -starts.to(like.device), like).view(heads, queries * len(starts), dim)
        # Some rules (YaRN) also lengthen what they turn; it is to count once.
        cos, sin = turn.angles(torch.zeros(1, dtype=torch.int64, device=like.device), like)
        length = torch.sqrt(cos.float().square() + sin.float().square()).max()  # not read: that would wait for a GPU
        scores = (back.float() @ table.mT).view(heads, queries, len(starts), self.block_tokens) / length
        return scores.permute(2, 0, 1, 3).contiguous()


def key_biases(model: nn.Module, layers: Container[int]) -> dict[int, KeyBias]:
    """The key biases of those of ``layers`` that have one which can be removed.

    Left out: biases that are zero or on the ``meta`` device, keys that are normalised after their projection, fused
    projections, and RoPE whose frequencies change with the length of the text or that turns by several positions at
    once (image and video models).
    """
    decoder: Any = decoder_module(model)
    found: dict[int, KeyBias] = {}
    for attention in decoder.modules():
        index, bias = getattr(attention, "layer_idx", None), getattr(getattr(attention, "k_proj", None), "bias", None)
        if (
            isinstance(index, int)
            and index in layers
            and index not in found
            and isinstance(bias, Tensor)
            and not bias.is_meta
            and bool(bias.any())
        ):
            for turn in _turns(decoder, attention, index):
                if fitting := _fit(attention, bias.detach(), turn):
                    found[index] = fitting
                    break
    return found


def _turns(decoder: Any, attention: nn.Module, index: int) -> Iterator[Turn | None]:
    """The ways in which a layer may turn its keys."""
    rotary = getattr(attention, "rotary_emb", None) or getattr(decoder, "rotary_emb", None)
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if isinstance(rotary, nn.Module) and apply:
        kind = {}
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            kind = {"layer_type": decoder.config.layer_types[index]}
        rope_type = getattr(rotary, "rope_type", "default")
        if isinstance(rope_type, dict):
            rope_type = rope_type[kind["layer_type"]]
        several = any("mrope" in name for name in getattr(decoder.config, "rope_parameters", None) or {})
        if not several and not any(moving in rope_type for moving in MOVING):
            yield Turn(rotary, apply, kind, partial=False)
            yield Turn(rotary, apply, kind, partial=True)
    yield None


def _fit(attention: Any, bias: Tensor, turn: Turn | None) -> KeyBias | None:
    """The layer's `KeyBias` under ``turn``, if that is what its attention adds to keys."""
    positions = torch.arange(PROBED, device=bias.device)
    states = torch.randn(PROBED, attention.k_proj.in_features, generator=torch.Generator().manual_seed(0)).to(bias)
    try:
        keys, once, twice = (
            _cached_keys(attention, times * states, bias, positions, turn).float() for times in (0, 100, 200)
        )
        fitting = KeyBias(bias.to(torch.float32, copy=True).view(keys.shape[0], keys.shape[2]), turn)
        expected = fitting(positions, bias)
    except Exception:  # whatever it is that a foreign attention raises, this is not how it works
        return None
    # bfloat16 rounds twice on the way. Where twice the states do not move keys twice as far, they are normalised.
    slack = 0.01 * max(bias.abs().max().item(), twice.abs().max().item())
    fits = torch.allclose(keys, expected, rtol=0.02, atol=slack)
    return fitting if fits and torch.allclose(twice - keys, 2 * (once - keys), rtol=0.05, atol=4 * slack) else None


class _Caught(Exception):
    """Ends a probe: carries the keys an attention layer wants to cache."""


class _Net:
    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise _Caught(keys)


@torch.no_grad()
def _cached_keys(attention: Any, states: Tensor, bias: Tensor, positions: Tensor, turn: Turn | None) -> Tensor:
    """The keys ``[heads, tokens, dim]`` an attention layer caches for ``states`` at ``positions``."""
    offered: dict[str, Any] = {
        "hidden_states": states[None],
        "position_ids": positions[None],
        "attention_mask": None,
        "cache": _Net(),
        "past_key_values": _Net(),
    }
    if turn is None:  # a layer that looks at this after all must not seem to leave keys as they are
        halves = bias.new_full((1, len(positions), attention.head_dim), 0.5)
        offered["position_embeddings"] = halves, halves
    else:
        offered["position_embeddings"] = turn.angles(positions, bias)
    accepted = inspect.signature(attention.forward).parameters
    try:
        _without_hooks(attention).forward(**{name: value for name, value in offered.items() if name in accepted})
    except _Caught as caught:
        keys: Tensor = caught.args[0]
        return keys[0]
    raise RuntimeError("the layer caches nothing")


def _without_hooks(module: Any) -> Any:
    """The same module, its tensors shared, without the hooks users put on it and its parts."""
    bare = object.__new__(type(module))
    bare.__dict__.update(vars(module))
    for name in [name for name in vars(module) if name.endswith("_hooks")]:
        bare.__dict__[name] = type(vars(module)[name])()
    bare.__dict__["_modules"] = {name: part and _without_hooks(part) for name, part in module._modules.items()}
    return bare
