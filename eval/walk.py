"""One walk through a text: the uncompressed model, and beside it every policy's cache, in lockstep.

The reference logits of one chunk are compared with those of each cache and dropped, so memory is bounded by
chunk × vocabulary. Attention being causal, one walk to the longest context serves the shorter ones too; chunks are
cut at each context, so that every cache holds exactly that context when its bytes are read.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import one_line
from .exact import exact_cache
from .metrics import Reference, compare
from .prefix import Prefix

EXACT_CHUNK = 1024  # tokens per forward where only the uncompressed model reads: fewer calls, same text


@dataclass
class Lane:
    """One cache's part of the walk: it reads tokens ``first ≤ p < stop``, and ``open`` makes it when they come.

    ``open`` is given the reference's cache, which holds exactly ``first`` tokens. Each chunk is fed in ``parts``. A
    lane without a name measures noise, and its cache has no statistics.

    Scores are by position of the token, NaN if not scored: ``nll`` and ``kl`` float64 in nats, ``agree`` 1 where the
    top-1 tokens are the same. ``checkpoints`` maps a context to the cache's statistics and the seconds its forwards
    had taken when it was reached. ``error``: why the cache failed, in one line; it reads no further then.
    """

    name: str
    first: int
    stop: int
    open: Callable[[Any], Any]
    parts: int = 1
    cache: Any = None
    nll: np.ndarray = field(init=False)
    kl: np.ndarray = field(init=False)
    agree: np.ndarray = field(init=False)
    open_seconds: float = 0.0
    seconds: float = 0.0
    scoring_seconds: float = 0.0
    error: str | None = None
    checkpoints: dict[int, tuple[Any, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Its last row predicts the token at ``stop``, which a longer context may score.
        self.nll, self.kl, self.agree = np.full((3, self.stop + 1), np.nan)

    def reads(self, position: int) -> bool:
        """Whether the token at ``position`` is one of the lane's."""
        return self.first <= position < self.stop


@dataclass
class Walk:
    """The reference and every lane over ``ids`` (int64 ``[n]``).

    ``windows`` maps each context (at most n) to the positions of the tokens scored for it, none of them 0; ``bounds``
    are the start and end of every chunk, in order, each context being the end of one (see `steps`).
    ``tick(start, end)`` is called after every forward. ``reference_nll``: as in `Lane`, of the uncompressed cache;
    ``seconds`` is the time of its forwards. What ``prefix`` has of the exact history is not computed again.
    """

    model: Any
    ids: Tensor
    windows: Mapping[int, Sequence[int]]
    lanes: list[Lane]
    bounds: Sequence[tuple[int, int]]
    tick: Callable[[int, int], None] = lambda start, end: None
    prefix: Prefix | None = None
    reference_nll: np.ndarray = field(init=False)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.reference_nll = np.full(max(self.windows), np.nan)

    def run(self) -> Iterator[int]:
        """Yields each context, ascending, when its scores and checkpoints are complete.

        What a lane raises ends that lane only; what the reference raises is raised.
        """
        cache: Any = exact_cache(self.model, self.bounds[-1][1])
        scored = {position for window in self.windows.values() for position in window}
        restored = 0
        for start, end in self.bounds:
            if start >= restored and (there := self._restored(start)):
                restored, cache = there
            if start < restored:
                self.tick(start, end)
                continue
            targets = [position for position in range(start + 1, end + 1) if position in scored]
            with torch.inference_mode():
                if self.prefix is not None and any(lane.first == start for lane in self.lanes):
                    self.prefix.note(start, cache)
                for lane in self.lanes:
                    if lane.first == start:
                        self._attempt(lane, partial(_open, lane, cache))
                self._chunk(cache, start, end, targets)
            if end in self.windows:
                yield end
        if self.prefix is not None:
            self.prefix.save(cache)

    def _restored(self, start: int) -> tuple[int, Any] | None:
        """Where the next lane begins and a cache that holds the text up to there, if no lane reads before."""
        if self.prefix is None or any(lane.reads(start) for lane in self.lanes):
            return None
        stop = min((lane.first for lane in self.lanes if lane.first > start), default=0)
        cache = self.prefix.restore(stop, self.bounds[-1][1])
        return None if cache is None else (stop, cache)

    def _chunk(self, cache: Any, start: int, end: int, targets: list[int]) -> None:
        ids = self.ids[None, start:end]  # [1, chunk]
        positions = torch.tensor(targets, dtype=torch.long)
        rows = positions - 1 - start  # a token is predicted by the row before it
        logits, seconds = forward(self.model, ids, cache, rows)
        self.seconds += seconds
        self.tick(start, end)
        reference = Reference.of(logits, self.ids[positions])
        self.reference_nll[targets] = _numbers(reference.nll(), targets)
        del logits
        for lane in self.lanes:
            if lane.reads(start):
                self._attempt(lane, partial(self._score, lane, ids, reference, rows, targets))
                if end in self.windows and lane.error is None and lane.name:
                    lane.checkpoints[end] = lane.cache.stats(), lane.seconds
                if end == lane.stop:
                    lane.cache = None
                self.tick(start, end)

    def _attempt(self, lane: Lane, step: Callable[[], None]) -> None:
        if lane.error is None:
            try:
                step()
            except Exception as error:  # whatever becomes of one cache, the others go on
                lane.error = one_line(error)
                lane.cache = None

    def _score(self, lane: Lane, ids: Tensor, reference: Reference, rows: Tensor, targets: list[int]) -> None:
        done, first = 0, 0
        for part in torch.split(ids, -(-ids.shape[1] // lane.parts), dim=1):
            inside = rows[(rows >= first) & (rows < first + part.shape[1])] - first
            logits, seconds = forward(self.model, part, lane.cache, inside)
            lane.seconds += seconds
            began = time.perf_counter()
            at = slice(done, done + len(inside))
            scores = compare(reference.rows(at), logits)
            lane.nll[targets[at]] = _numbers(scores.nll, targets[at])
            lane.kl[targets[at]] = _numbers(scores.kl, targets[at])
            lane.agree[targets[at]] = scores.agree.numpy()
            lane.scoring_seconds += time.perf_counter() - began
            del logits  # or they would live on through the next forward
            done, first = at.stop, first + part.shape[1]


def steps(contexts: Iterable[int], chunk: int, lanes: Sequence[Lane]) -> list[tuple[int, int]]:
    """Start and end of every forward of the walk: `chunk_bounds`, joined to `EXACT_CHUNK` where no lane reads."""
    joined: list[tuple[int, int]] = []
    starts = {lane.first for lane in lanes}
    quiet_before = False
    for start, end in chunk_bounds(contexts, chunk):
        quiet = not any(lane.reads(start) for lane in lanes)
        if quiet and quiet_before and start not in starts and end - joined[-1][0] <= EXACT_CHUNK:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
        quiet_before = quiet
    return joined


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


def _open(lane: Lane, reference: Any) -> None:
    start = time.perf_counter()
    lane.cache = lane.open(reference)
    lane.open_seconds = time.perf_counter() - start


def _numbers(scores: Tensor, targets: list[int]) -> np.ndarray:
    bad = scores.isnan()
    if bad.any():
        raise ArithmeticError(f"the logits at position {targets[int(bad.nonzero()[0])] - 1} are not numbers")
    return scores.numpy()
