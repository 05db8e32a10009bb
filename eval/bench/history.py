"""Histories that no model has read: caches filled with random keys and values, so that 32K tokens take seconds.

How long a step takes does not depend on the numbers, as long as they are not all alike: they are standard normal.
Nor does it depend on whether the model was made for so many tokens, so no limit of the model's counts here: rotary
positions go on beyond it, and a model with a table of positions is told the last ones it has.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvquant import KVQuantCache

from ..memory import states_of
from ..rope import context_limit, is_rotary
from .layer import block_bytes

FILL_TOKENS = 8192  # that a cache is given at once
_RAGGED = 0.25  # how far, of the context, the shortest row of a batch is below it, and the longest above


@dataclass(frozen=True)
class Rows:
    """Lengths of a batch's rows in tokens; shorter ones are padded on the left to the longest."""

    lengths: tuple[int, ...]

    @classmethod
    def around(cls, context: int, batch: int) -> Rows:
        """``batch`` rows of different lengths whose mean is ``context``; one row is just that."""
        if batch == 1:
            return cls((context,))
        step = 2 * _RAGGED / (batch - 1)
        return cls(tuple(max(1, round(context * (1 - _RAGGED + step * row))) for row in range(batch)))

    @property
    def width(self) -> int:
        """Columns, padding included."""
        return max(self.lengths)

    def mask(self, columns: int) -> Tensor:
        """1 for tokens and 0 for padding, int64 ``[rows, columns]``."""
        starts = self.width - torch.tensor(self.lengths)
        return (torch.arange(columns) >= starts[:, None]).long()

    def positions(self, start: int, stop: int, room: int | None = None) -> Tensor:
        """Positions of the tokens in columns ``start ≤ c < stop``, int64 ``[rows, stop - start]``.

        Where there is ``room`` for fewer than a row has, its last token is at the last, its first ones share one.
        """
        lengths = torch.tensor(self.lengths)
        shifts = torch.zeros_like(lengths) if room is None else (lengths - room).clamp(min=0)
        return (torch.arange(start, stop) - (self.width - lengths + shifts)[:, None]).clamp(min=0)


def seals(policy: Any, length: int) -> bool:
    """Whether the token that makes a row ``length`` long completes a block beyond the last `recent_tokens`."""
    old: int = length - policy.recent_tokens
    return old > 0 and old % int(policy.block_tokens) == 0


def plain_rows(policy: Any, rows: Rows, steps: int) -> Rows:
    """The rows, each so many tokens longer that none of so many steps seals a block."""
    lengths = []
    for length in rows.lengths:
        while any(seals(policy, length + 1 + step) for step in range(steps)):
            length += 1
        lengths.append(length)
    return Rows(tuple(lengths))


def sealing_rows(policy: Any, rows: Rows, before: int) -> Rows | None:
    """Rows not longer than these, all of which seal a block in the step after ``before`` others; None if too short."""
    lengths = []
    for length in rows.lengths:
        while length > 0 and not seals(policy, length):
            length -= 1
        lengths.append(length - 1 - before)
    return Rows(tuple(lengths)) if min(lengths) > 0 else None


@dataclass(frozen=True)
class Decoder:
    """A transformers model, and what has to be known of it to fill its caches and take at most ``steps`` steps.

    ``states``: one row's keys and values by layer, of any number of tokens, without memory.
    """

    model: Any
    states: Mapping[int, tuple[Tensor, Tensor]]
    steps: int

    @classmethod
    def of(cls, model: Any, steps: int) -> Decoder:
        """Runs the model on two tokens."""
        return cls(model, states_of(model, 2)[0], steps)

    @torch.inference_mode()
    def fill(self, cache: Any, rows: Rows, pieces: Sequence[int] | None = None) -> None:
        """Have an empty cache hold ``rows``.

        It is given ``pieces`` columns at a time, by default `FILL_TOKENS`. Layers that hold no keys and values read
        one token in their place.
        """
        done = self._prime(cache, rows) if len(self.states) < len(cache.layers) else 0
        if pieces is None:  # positions that are moved can't be told to go on from one piece to the next
            size = rows.width if self._room is not None else min(rows.width, FILL_TOKENS)
            pieces = [size] * -(-rows.width // size)
        given = {
            shape: torch.randn(len(rows.lengths), shape[0], max(pieces), shape[1]).to(self.model.dtype)
            for pair in self.states.values()
            for shape in {(states.shape[1], states.shape[3]) for states in pair}
        }
        for piece in pieces:
            stop = min(done + piece, rows.width)
            if stop == done:
                continue
            self._announce(cache, rows, done, stop)
            for index, pair in self.states.items():
                keys, values = (given[states.shape[1], states.shape[3]][:, :, : stop - done] for states in pair)
                cache.update(keys, values, index)
            done = stop

    def inputs(self, rows: Rows, done: int) -> dict[str, Tensor]:
        """What the model is told in the step after ``done`` others, as `generate` tells it."""
        columns = rows.width + done + 1
        given = {
            "input_ids": torch.zeros(len(rows.lengths), 1, dtype=torch.long),
            "attention_mask": rows.mask(columns),
            "position_ids": rows.positions(columns - 1, columns, self._room),
        }
        known = inspect.signature(self.model.forward).parameters
        return {name: value for name, value in given.items() if name in known}

    def _prime(self, cache: Any, rows: Rows) -> int:
        self._announce(cache, rows, 0, 1)
        self.model(
            input_ids=torch.zeros(len(rows.lengths), 1, dtype=torch.long),
            attention_mask=rows.mask(1),
            cache=cache,
            use_cache=True,
        )
        return 1

    def _announce(self, cache: Any, rows: Rows, start: int, stop: int) -> None:
        if isinstance(cache, KVQuantCache):
            positions = rows.positions(start, stop, self._room)
            # Said to be streamed, it does not decode what it holds at every update.
            cache.begin(attention_mask=rows.mask(stop), position_ids=positions, new=stop - start, streamed=True)

    @property
    def _room(self) -> int | None:
        """How many positions a history may have in a model with a table of them; None where they go on."""
        limit = context_limit(self.model.config)
        return None if limit is None or is_rotary(self.model.config) else limit - self.steps


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a cache layer's value, also those within tensors that quantise."""
    if isinstance(value, dict | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)
    elif hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from tensors_in(getattr(value, name))
    elif isinstance(value, Tensor) and value.dim():
        yield value


def held_bytes(cache: Any) -> int:
    """Bytes of what a cache's layers hold of their histories, room for what may come left out."""
    total = 0
    blocks = cache.stats().blocks if isinstance(cache, KVQuantCache) else 0
    for layer in cache.layers:
        if isinstance(cache, KVQuantCache) and hasattr(layer, "held"):
            total += sum(_bytes(side, blocks) for side in layer.held.sides)
        else:
            total += sum(tensor.nbytes for value in vars(layer).values() for tensor in tensors_in(value))
    return total


def device_bytes(cache: KVQuantCache) -> int:
    """Bytes of all that a cache has allocated itself, where it computes; what its store holds is not among them."""
    total = 0
    for layer in cache.layers:
        own = layer.held.tensors() if hasattr(layer, "held") else tensors_in(vars(layer))
        total += sum(tensor.nbytes for tensor in own)
    return total


def _bytes(side: Any, blocks: int) -> int:
    """Bytes of so many blocks, tails and sinks."""
    tails = [tail.tokens for tail in side.tails]
    if not tails:
        return 0
    heads, _, dim = tails[0].shape
    raw: int = sum(tensor.nbytes for tensor in (*tails, *side.sinks.values()))
    return raw + blocks * block_bytes(side.codec, heads, side.block_tokens, dim, tails[0].dtype)
