"""Attention and coding of one layer by the Triton kernels on a GPU, against the best that torch does without.

Attention of one new token of each sequence of a batch reads all of their history, as a step of decoding does: int4
codes and their parameters are 0.28 of bfloat16's bytes. A multiprocessor takes five to six instructions for each
code; at half the speed of its memory an H200 has time to issue seven, an H100 eleven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvquant
from kvquant import Codec
from kvquant.codecs.affine import Affine
from kvquant.kernels import Memo, Segment, gpu_attention, gpu_codecs
from kvquant.testing import relative_rms

from .dense import FOLDED
from .device import Stopwatch, Trial
from .layer import Shape, block_bytes, compressed, exact_attention, stored_bytes
from .rows import DENSE, SDPA, Outcome, Result, best_of, compare

COPY = "copy"
AS_IT_IS = "as it is"
WAYS = ("fused", "two products")  # of `dense`, those that a GPU can do

POLICIES: dict[str, Any] = {
    "int8": "int8",
    "int4": "int4",
    "int2": "int2-aggressive",
    "int4-tokens": {"codec": "int4", "axis": "token", "rotate": "hadamard"},
    "int4-channels": {"codec": "int4", "axis": "channel", "rotate": "hadamard"},
}
"""By subject, a preset, or what both keys and values are: all widths of codes, both axes, rotated and not."""

CONFIGS: tuple[dict[str, int], ...] = (
    {"tokens": 32},
    {"warps": 8, "programs": 2},
    {"stages": 2},
    {"stages": 4},
    {"programs": 3},
    {"programs": 5},
    {"waves": 2},
    {"waves": 12},
)
"""What might be better than `gpu_attention.config`."""


def policy(subject: str) -> Any:
    """One of `POLICIES`."""
    given = POLICIES[subject]
    if isinstance(given, str):
        return kvquant.PrecisionPolicy.load(given)
    return kvquant.PrecisionPolicy(name=subject, default={"key": given, "value": given})


@dataclass(frozen=True)
class Batch:
    """``rows`` sequences of one shape, on its device."""

    shape: Shape
    rows: int

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values as they are."""
        return self.rows * self.shape.dense_bytes

    def states(self, heads: int, tokens: int) -> Tensor:
        """Standard normal ``[rows, heads, tokens, head_dim]``."""
        return torch.stack([self.shape.states(heads, tokens) for _ in range(self.rows)])

    def fitting(self) -> Batch:
        """The same of half as many rows, and so on, until a GPU has memory for it and all that is made of it."""
        device, rows = torch.device(self.shape.device), self.rows
        # Beside it and its codes, one row is there in float32, several times over while it is rotated.
        while device.type == "cuda" and rows > 1:
            if 2.5 * rows * self.shape.dense_bytes < torch.cuda.mem_get_info(device)[0]:
                break
            rows //= 2
        return replace(self, rows=rows)


@torch.inference_mode()
def run_attention(batch: Batch, subjects: Sequence[str], watch: Stopwatch, repeats: int) -> Outcome:
    """The rows of ``subjects`` of `POLICIES`. ``value``: relative RMS error of a sequence's output against float64."""
    shape, trial = batch.shape, Trial(watch)
    query, keys, values = _states(batch)
    folded = query.reshape(batch.rows, shape.kv_heads, -1, shape.head_dim)
    for subject in subjects:
        try:
            rows = _compressed(subject, keys, values, shape)
        except Exception as error:  # as in `Trial.add`
            trial.fail(subject, error)
            continue
        output = trial.add(subject, partial(_attend, folded, rows, shape, Memo()), _stored(rows))
        if output is not None:
            error_of_row = relative_rms(output[-1], exact_attention(folded[-1], rows[-1], shape))
            trial.results[subject] = replace(trial.results[subject], value=error_of_row)
    stock = partial(scaled_dot_product_attention, query, keys, values, scale=shape.scale, enable_gqa=True)
    trial.add(SDPA, stock, batch.nbytes)
    for name in WAYS:
        trial.add(name, partial(FOLDED[name], folded, keys, values, None, shape.scale), batch.nbytes)
    case = trial.run(repeats, shape.tokens)
    ways = {name: trial.results.pop(name) for name in WAYS}
    trial.results[DENSE] = best_of(ran) if (ran := {n: way for n, way in ways.items() if way.seconds}) else Result()
    note = f"{batch.rows} rows, {shape.kv_heads} of {shape.q_heads} heads × {shape.head_dim}"
    results = {name: result.noted(note) for name, result in trial.results.items()}
    return Outcome(list(compare("attention", shape.tokens, results, [SDPA, DENSE])), [case])


@torch.inference_mode()
def run_tuning(
    batch: Batch, subject: str, watch: Stopwatch, repeats: int, configs: Sequence[Mapping[str, int]] = CONFIGS
) -> Outcome:
    """The rows of a subject's attention under other configurations than the usual one, their baseline."""
    query, keys, values = _states(batch)
    folded = query.reshape(batch.rows, batch.shape.kv_heads, -1, batch.shape.head_dim)
    rows, usual, trial = _compressed(subject, keys, values, batch.shape), gpu_attention.config, Trial(watch)
    del keys, values

    def attend(changes: Mapping[str, int], memo: Memo) -> Tensor:
        gpu_attention.config = usual._replace(**changes)
        try:
            return _attend(folded, rows, batch.shape, memo)
        finally:
            gpu_attention.config = usual

    for changes in ({}, *configs):
        name = ", ".join(f"{key} {value}" for key, value in changes.items()) or AS_IT_IS
        trial.add(name, partial(attend, changes, Memo()), _stored(rows))
    case = trial.run(repeats, batch.shape.tokens)
    return Outcome(list(compare("tuning", batch.shape.tokens, trial.results, [AS_IT_IS])), [case])


@torch.inference_mode()
def run_codecs(states: Tensor, codecs: Sequence[Codec], watch: Stopwatch, repeats: int) -> Outcome:
    """The rows of encoding blocks ``states`` ``[n, heads, tokens, dim]``, and of decoding them again.

    ``value``: GB of states a second. The baseline is copying them.
    """
    trial, number = Trial(watch), states.shape[0] * states.shape[2]
    trial.add(COPY, states.clone, 2 * states.nbytes)
    for codec in codecs:
        assert isinstance(codec, Affine)
        count, heads, tokens, dim = states.shape
        moved = states.nbytes + count * block_bytes(codec, heads, tokens, dim, states.dtype)
        fields = trial.add(f"encode {codec.name}", partial(gpu_codecs.encode, codec, states), moved)
        if fields is not None:
            decode = partial(gpu_codecs.decode, codec, fields, dim, states.dtype)
            trial.add(f"decode {codec.name}", decode, moved)
    case = trial.run(repeats, number)
    results = {
        name: replace(result, value=states.nbytes / median(result.seconds) / 1e9) if result.seconds else result
        for name, result in trial.results.items()
    }
    return Outcome(list(compare("codecs", number, results, [COPY])), [case])


def _states(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """A random query, keys and values."""
    shape = batch.shape
    keys, values = (batch.states(shape.kv_heads, shape.tokens) for _ in range(2))
    return batch.states(shape.q_heads, shape.queries), keys, values


def _compressed(subject: str, keys: Tensor, values: Tensor, shape: Shape) -> list[list[Segment]]:
    return [compressed(policy(subject), *row, shape) for row in zip(keys, values, strict=True)]


def _stored(rows: Sequence[Sequence[Segment]]) -> int:
    return sum(stored_bytes(row) for row in rows)


def _attend(folded: Tensor, rows: Sequence[Sequence[Segment]], shape: Shape, memo: Memo) -> Tensor:
    return gpu_attention.attend_rows(folded, rows, shape.head_dim, scale=shape.scale, memo=memo)[0]
