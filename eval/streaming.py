"""The `streaming` protocol: every chunk is scored while it attends to a past that is compressed already.

::

    0                                                            c - score_tokens            c
    |  sealed blocks, as the policy stores them  ···  | raw tail | chunk |  ···              |
    |  read, not scored                                                  |  read and scored  |

The uncompressed cache and every policy's cache go through the text in lockstep, chunk by chunk: the reference
logits of one chunk are compared with each policy's and dropped, so memory is bounded by chunk × vocabulary.
Attention being causal, one pass to the longest context serves the shorter ones too; chunks are cut at each
context, so that every cache holds exactly that context when its bytes are read.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from .errors import one_line
from .metrics import Reference, compare


@dataclass
class Lane:
    """One policy's way through the text: its cache, and the scores by position of the token, NaN if not scored.

    ``nll`` and ``kl`` are float64 ``[longest context]`` in nats, ``agree`` is 1 where the top-1 tokens are the
    same.
    ``checkpoints`` maps a context to the cache's statistics and the seconds its forwards had taken when it was
    reached. ``error``: why the policy failed, in one line; it runs no further then.
    """

    name: str
    cache: Any
    nll: np.ndarray
    kl: np.ndarray
    agree: np.ndarray
    seconds: float = 0.0
    error: str | None = None
    checkpoints: dict[int, tuple[Any, float]] = field(default_factory=dict)

    @classmethod
    def new(cls, name: str, cache: Any, length: int) -> Lane:
        """A lane that has read nothing yet, for ``length`` tokens."""
        nll, kl, agree = np.full((3, length), np.nan)
        return cls(name, cache, nll, kl, agree)


@dataclass
class Stream:
    """One pass of the reference and of every lane over ``ids`` (int64 ``[n]``).

    ``windows`` maps each context (at most n) to the positions of the tokens scored for it, none of them 0.
    ``tick(start, end)`` is called after every forward. ``reference_nll``: as in `Lane`, of the uncompressed cache.
    """

    model: Any
    ids: Tensor
    windows: Mapping[int, Sequence[int]]
    lanes: list[Lane]
    chunk: int
    tick: Callable[[int, int], None] = lambda start, end: None
    reference_nll: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.reference_nll = np.full(max(self.windows), np.nan)

    def run(self) -> Iterator[int]:
        """Yields each context, ascending, when its scores and checkpoints are complete.

        A policy's exception ends its lane only; one of the reference is raised.
        """
        cache = DynamicCache(config=self.model.config)
        scored = {position for window in self.windows.values() for position in window}
        for start, end in chunk_bounds(self.windows, self.chunk):
            targets = [position for position in range(start + 1, end + 1) if position in scored]
            with torch.inference_mode():
                self._chunk(cache, start, end, targets)
            if end in self.windows:
                yield end

    def _chunk(self, cache: Any, start: int, end: int, targets: list[int]) -> None:
        ids = self.ids[None, start:end]  # [1, chunk]
        positions = torch.tensor(targets, dtype=torch.long)
        rows = positions - 1 - start  # a token is predicted by the row before it
        logits, _ = forward(self.model, ids, cache, rows)
        self.tick(start, end)
        reference = Reference.of(logits, self.ids[positions])
        self.reference_nll[targets] = _numbers(reference.nll(), targets)
        del logits
        for lane in self.lanes:
            if lane.error is None:
                try:
                    self._score(lane, ids, reference, rows, targets)
                    if end in self.windows:
                        lane.checkpoints[end] = (lane.cache.stats(), lane.seconds)
                except Exception as error:  # whatever becomes of one policy, the others go on
                    lane.error = one_line(error)
                    lane.cache = None
            self.tick(start, end)

    def _score(self, lane: Lane, ids: Tensor, reference: Reference, rows: Tensor, targets: list[int]) -> None:
        logits, seconds = forward(self.model, ids, lane.cache, rows)
        lane.seconds += seconds
        scores = compare(reference, logits)
        lane.nll[targets] = _numbers(scores.nll, targets)
        lane.kl[targets] = _numbers(scores.kl, targets)
        lane.agree[targets] = scores.agree.numpy()


def chunk_bounds(contexts: Iterable[int], chunk: int) -> list[tuple[int, int]]:
    """Start and end of every chunk: multiples of ``chunk``, cut at each context, up to the longest one."""
    contexts = sorted(contexts)
    ends = sorted({*range(chunk, contexts[-1], chunk), *contexts})
    return list(zip([0, *ends[:-1]], ends, strict=True))


def forward(model: Any, ids: Tensor, cache: Any, rows: Tensor) -> tuple[Tensor, float]:
    """Appends ``ids`` ``[1, n]`` to the cache; logits of ``rows`` ``[rows, vocabulary]``, and the seconds."""
    start = time.perf_counter()
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=rows).logits[0]
    else:
        logits = model(input_ids=ids, cache=cache, use_cache=True).logits[0, rows]
    return logits, time.perf_counter() - start


def _numbers(scores: Tensor, targets: list[int]) -> np.ndarray:
    bad = scores.isnan()
    if bad.any():
        raise ArithmeticError(f"the logits at position {targets[int(bad.nonzero()[0])] - 1} are not numbers")
    return scores.numpy()
