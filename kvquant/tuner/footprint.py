"""Bytes that a cache of one text takes under any choice of codecs: what `CacheStats.kv_bytes` would measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import torch

from ..arena import most_slots
from ..cache.tail import GROWTH
from ..codecs import get_codec
from ..errors import PolicyError
from ..policy import PrecisionPolicy
from ..records import Record

if TYPE_CHECKING:
    from .candidates import Assignment, Frame

ROLES = ("key", "value")


@dataclass(frozen=True)
class Footprint:
    """What a text of ``context`` tokens takes in the compressed layers of a model, in bytes.

    ``shapes`` tell heads, key channels and value channels of each compressed layer, and ``depth`` how many layers of
    all kinds the model has (by default none after the last compressed one). Slots and tails have slack, which depends
    on the calls that brought the text: what is told is the most they may come to.
    """

    shapes: Mapping[int, tuple[int, int, int]]
    context: int
    block_tokens: int
    depth: int = 0

    def __post_init__(self) -> None:
        if not self.shapes or self.context < 1:
            raise PolicyError(f"a footprint of {len(self.shapes)} layers, {self.context} tokens; allowed: 1 or more")
        object.__setattr__(self, "depth", max(self.depth, 1 + max(self.shapes)))

    @classmethod
    def of(cls, model: Any, context: int, block_tokens: int = 128) -> Self:
        """For a transformers model, whose shapes two tokens through a real cache tell."""
        from ..cache.hf import KVQuantCache

        fp16 = {"key": "fp16", "value": "fp16"}
        cache = KVQuantCache.for_model(model, PrecisionPolicy(name="shapes", default=fp16))
        with torch.no_grad():
            ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
            model(input_ids=ids, cache=cache, use_cache=True)
        shapes = {}
        for layer in cache.compressed():
            keys, values = (side.tails[0].tokens.shape for side in layer.held.sides)
            shapes[layer.index] = keys[0], keys[2], values[2]
        return cls(shapes, context, block_tokens, len(cache.layers))

    @property
    def baseline(self) -> int:
        """Bytes of an uncompressed 16-bit cache."""
        return 2 * self.context * sum(heads * (key + value) for heads, key, value in self.shapes.values())

    def side_bytes(self, layer: int, role: str, codec: str, frame: Frame) -> int:
        """Bytes of a layer's keys, or of its values."""
        heads, *dims = self.shapes[layer]
        dim = dims[ROLES.index(role)]
        slots, room = _held(self.context, self.block_tokens, frame.recent_tokens)
        block, lossless = _block(codec, role, heads, dim, self.block_tokens)
        sinks = frame.sink_tokens if slots and not lossless else 0
        return slots * block + 2 * heads * dim * (room + sinks)

    def layer_bytes(self, layer: int, key: str, value: str, frame: Frame) -> int:
        """Bytes of a layer under the codecs of its keys and its values."""
        return self.side_bytes(layer, "key", key, frame) + self.side_bytes(layer, "value", value, frame)

    def ratio(self, assignment: Assignment) -> float:
        """Bytes of all layers over the baseline: what a budget limits."""
        layers = assignment.layers.items()
        return sum(self.layer_bytes(layer, *codecs, assignment.frame) for layer, codecs in layers) / self.baseline


@lru_cache(maxsize=4096)
def _block(codec: str, role: str, heads: int, dim: int, tokens: int) -> tuple[int, bool]:
    """Bytes that a block's keys, or values, count, and whether they are as they were."""
    built = get_codec(codec, role, tokens)
    # A record counts its sides one by one: padding between them is not counted.
    return Record.of(built.layout(heads, tokens, dim, torch.float16), {}).counted((built, built)), built.lossless


def _held(context: int, block_tokens: int, recent_tokens: int) -> tuple[int, int]:
    """Slots allocated for sealed blocks, and tokens that tails have room for."""
    blocks = max(0, context - recent_tokens) // block_tokens
    tail = context - blocks * block_tokens
    return most_slots(blocks), -(-tail // GROWTH) * GROWTH
