"""Random keys and values of one layer, as they are and as a cache holds them compressed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvquant import Codec
from kvquant.attention import reference
from kvquant.kernels import Dense, Sealed, Segment, encode

from ..errors import InputError
from .machine import cache_bytes


@dataclass(frozen=True)
class Shape:
    """One layer's attention of ``queries`` new tokens, the last of ``tokens``; ``q_heads`` heads of queries."""

    kv_heads: int
    q_heads: int
    head_dim: int
    tokens: int
    queries: int
    dtype: torch.dtype
    device: str = "cpu"

    @property
    def scale(self) -> float:
        """That of q·k."""
        return float(self.head_dim**-0.5)

    @property
    def dense_bytes(self) -> int:
        """Bytes of keys and values as they are."""
        return 2 * self.kv_heads * self.tokens * self.head_dim * self.dtype.itemsize

    def states(self, heads: int, tokens: int) -> Tensor:
        """Standard normal ``[heads, tokens, head_dim]``."""
        return torch.randn(heads, tokens, self.head_dim, device=self.device).to(self.dtype)

    def folded(self, query: Tensor) -> Tensor:
        """``[1, q_heads, queries, head_dim]`` as ``[kv_heads, q_heads / kv_heads · queries, head_dim]``."""
        return query[0].reshape(self.kv_heads, -1, self.head_dim)

    def mask(self) -> Tensor | None:
        """What each new token sees, bool ``[queries, tokens]``; None where there is one, which sees all."""
        if self.queries == 1:
            return None
        return torch.ones(self.queries, self.tokens, dtype=torch.bool).tril(self.tokens - self.queries)


def sealed_tokens(policy: Any, shape: Shape) -> int:
    """How many tokens a policy seals of so many; `InputError` if none."""
    tail = max(policy.recent_tokens, shape.queries)
    sealed: int = max(0, shape.tokens - tail) // policy.block_tokens * policy.block_tokens
    if not sealed:
        raise InputError(
            f"--tokens: of {shape.tokens} {policy.name} compresses none; allowed: from {tail + policy.block_tokens}"
        )
    return sealed


def compressed(policy: Any, keys: Tensor, values: Tensor, shape: Shape) -> list[Segment]:
    """Keys and values ``[kv_heads, tokens, head_dim]`` as a row of the cache holds them: one run of blocks, a tail.

    Codecs are those of layers the policy does not name.
    """
    size, stop = policy.block_tokens, sealed_tokens(policy, shape)
    key, value = policy.default.key, policy.default.value
    fields = [
        encode(codec, torch.unflatten(states[:, :stop], 1, (-1, size)).transpose(0, 1))
        for codec, states in ((key, keys), (value, values))
    ]
    dims = shape.head_dim, shape.head_dim
    tail = Dense(keys[:, stop:].clone(), values[:, stop:].clone(), causal=True)
    return [Sealed(key, value, fields[0], fields[1], dims, size, 0, stop), tail]


def block_bytes(codec: Codec, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes a codec stores of a block ``[heads, tokens, dim]``."""
    layout = codec.layout(heads, tokens, dim, dtype)
    return sum(math.prod(shape) * field.itemsize for shape, field in layout.values())


def stored_bytes(segments: Sequence[Segment]) -> int:
    """Bytes of everything that attention reads of segments."""
    return sum(tensor.nbytes for segment in segments for tensor in _tensors(segment))


def _tensors(segment: Segment) -> list[Tensor]:
    if isinstance(segment, Dense):
        return [segment.keys, segment.values]
    return [*segment.keys.values(), *segment.values.values()]


def copied(segment: Segment) -> Segment:
    """The same in memory of its own."""
    if isinstance(segment, Dense):
        return replace(segment, keys=segment.keys.clone(), values=segment.values.clone())
    keys, values = ({name: x.clone() for name, x in fields.items()} for fields in (segment.keys, segment.values))
    return replace(segment, keys=keys, values=values)


def head_of(segment: Segment, head: int) -> Segment:
    """One head of keys and values."""
    if isinstance(segment, Dense):
        return replace(segment, keys=segment.keys[head, None], values=segment.values[head, None])
    keys, values = (
        {name: x[:, head, None] for name, x in fields.items()} for fields in (segment.keys, segment.values)
    )
    return replace(segment, keys=keys, values=values)


def exact_attention(query: Tensor, segments: Sequence[Segment], shape: Shape) -> Tensor:
    """Attention of a folded query in float64, ``[kv_heads, …, head_dim]``; one head at a time, to bound the memory."""
    outputs = [
        reference.attend(
            query[head, None],
            [head_of(segment, head) for segment in segments],
            shape.head_dim,
            scale=shape.scale,
            news=shape.queries,
            dtype=torch.float64,
        )[0]
        for head in range(shape.kv_heads)
    ]
    return torch.cat(outputs)


def copies_of(nbytes: int) -> int:
    """How many copies of so many bytes fill the last-level caches twice over before the first is read again."""
    return max(2, math.ceil(2 * cache_bytes() / nbytes) + 1)


def memory(policies: Sequence[Any], shape: Shape) -> int:
    """Bytes that a shape's bench takes: all copies, the states they are made of, and one head in float64."""
    stored = [shape.dense_bytes]
    for policy in policies:
        sealed = sealed_tokens(policy, shape)
        block = sum(
            block_bytes(codec, shape.kv_heads, policy.block_tokens, shape.head_dim, shape.dtype)
            for codec in (policy.default.key, policy.default.value)
        )
        tail = shape.dense_bytes * (shape.tokens - sealed) // shape.tokens
        stored.append(sealed // policy.block_tokens * block + tail)
    numbers = 2 * shape.kv_heads * shape.tokens * shape.head_dim
    exact = 4 * 8 * shape.tokens * (shape.head_dim + shape.queries * shape.q_heads // shape.kv_heads)
    return sum(size * copies_of(size) for size in stored) + 4 * numbers + exact + 8 * cache_bytes()
