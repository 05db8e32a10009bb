"""Every policy at every context: which cells can be run, and the rows they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from .errors import one_line
from .prefix import Prefix
from .protocols import PROTOCOLS, NewCache, floor_lane
from .rope import cannot_stretch, context_limit, frequencies_of, prefixes_nest
from .rows import Row, Scores, fidelity, footprint
from .walk import Lane, Walk, chunk_bounds, steps


@dataclass(frozen=True)
class Settings:
    """What a sweep measures. ``contexts`` ascending, in tokens; ``score_tokens`` at the end of each are scored.

    ``rope_scaling``, if any, names what the model's positions were stretched by, for the rows.
    """

    contexts: tuple[int, ...]
    protocol: str = "streaming"
    chunk: int = 128
    score_tokens: int = 2048
    dtype: str = "float32"
    seed: int = 0
    rope_scaling: str = ""


@dataclass
class Terms:
    """Seconds of a sweep: forwards of the uncompressed model, compressing prefixes, forwards of the policies and their
    scoring, and what the noise floor takes beside them."""

    exact: float = 0.0
    compression: float = 0.0
    policies: float = 0.0
    scoring: float = 0.0
    floor: float = 0.0


@dataclass
class Sweep:
    """``policies`` on ``model`` (shown as ``name``) over ``ids`` (int64 ``[n]``); ``new`` makes a policy's cache.

    Cells (policy, context) that are ``done`` already are left out. Policies of different ``groups`` (by name) are not
    in memory at once: the text is read once for each group, as far as ``prefix`` has not kept its exact history.
    """

    name: str
    model: Any
    ids: Tensor
    policies: Sequence[Any]
    new: NewCache
    settings: Settings
    done: frozenset[tuple[str, int]] = frozenset()
    groups: Sequence[Sequence[str]] = ()
    prefix: Prefix | None = None
    terms: Terms = field(default_factory=Terms)

    def forwards(self) -> list[tuple[int, int]]:
        """Start and end of every forward that is to come, in any order: what progress is measured by."""
        found = []
        for windows, group in self._walks:
            lanes = self._lanes(windows, group)
            for start, end in self._bounds(windows):
                found += [(start, end)] * (1 + sum(lane.reads(start) for lane in _each(lanes)))
        return found

    def rows(self, tick: Callable[[int, int], None] = lambda start, end: None) -> Iterator[Row]:
        """The rows by context, then policy. First those that can't be run, the others as they finish."""
        for context in self.settings.contexts:
            if obstacle := self._obstacle(context):
                for policy in self.policies:
                    yield self._row(policy.name, context).without_numbers("skipped", obstacle)
        for windows, group in self._walks:
            yield from self._walk(windows, group, tick)

    def _walk(
        self, windows: dict[int, list[int]], group: Sequence[str], tick: Callable[[int, int], None]
    ) -> Iterator[Row]:
        lanes = self._lanes(windows, group)
        ids = self.ids[: max(windows)]
        walk = Walk(self.model, ids, windows, _each(lanes), self._bounds(windows), tick, self.prefix)
        left = list(windows)
        try:
            with frequencies_of(self.model, max(windows)):
                for context in walk.run():
                    left.remove(context)
                    for (_, cell), lane in lanes.items():
                        if cell == context and lane.name:
                            yield self._measured(walk, lanes, lane, context)
        except Exception as error:  # the reference run; rows that were reached stand
            reason = f"reference run: {one_line(error)}"
            for (policy, context), lane in lanes.items():
                if context in left and lane.name:
                    yield self._row(policy, context).without_numbers("failed", reason)
        self.terms.exact += walk.seconds
        for lane in _each(lanes):
            if lane.name:
                self.terms.compression += lane.open_seconds if lane.first else 0.0
                self.terms.policies += lane.seconds
                self.terms.scoring += lane.scoring_seconds
            else:
                self.terms.floor += lane.open_seconds + lane.seconds + lane.scoring_seconds

    def _lanes(self, windows: dict[int, list[int]], group: Sequence[str]) -> dict[tuple[str, int], Lane]:
        """Every cell's lane, and the noise floor's under the name ``""``."""
        cells = self._cells(windows)
        shortest = min(windows)
        missing = {cell: lane for cell, lane in cells.items() if cell not in self.done and cell[0] in group}
        if any(context == shortest for _, context in missing):
            bounds = chunk_bounds(windows, self.settings.chunk)
            missing["", shortest] = floor_lane(self.model, bounds, shortest, cells)
        return missing

    def _cells(self, windows: dict[int, list[int]]) -> dict[tuple[str, int], Lane]:
        return PROTOCOLS[self.settings.protocol](self.policies, windows, self.settings.chunk, self.new)

    def _bounds(self, windows: dict[int, list[int]]) -> list[tuple[int, int]]:
        """The same whichever cells are done, so that what is resumed gives the same numbers."""
        return steps(windows, self.settings.chunk, _each(self._cells(windows)))

    def _measured(self, walk: Walk, lanes: dict[tuple[str, int], Lane], lane: Lane, context: int) -> Row:
        row = self._row(lane.name, context)
        if context not in lane.checkpoints:
            return row.without_numbers("failed", lane.error or "not reached")
        at = list(walk.windows[context])
        scores = Scores(at, lane.nll[at], walk.reference_nll[at], lane.kl[at], lane.agree[at])
        stats, seconds = lane.checkpoints[context]
        numbers = fidelity(scores, self.settings.seed) | footprint(stats, seconds)
        if (floor := lanes.get(("", context))) and floor.error is None:
            numbers["kl_floor"] = float(np.nanmean(floor.kl[[position for position in at if position <= floor.stop]]))
        if lane.first:
            numbers["compress_seconds"] = round(lane.open_seconds, 3)
        return replace(row, **numbers)

    def _row(self, policy: str, context: int) -> Row:
        settings = self.settings
        row = Row(self.name, policy, context, settings.protocol, settings.dtype)
        return replace(row, rope_scaling=settings.rope_scaling)

    @cached_property
    def _walks(self) -> list[tuple[dict[int, list[int]], Sequence[str]]]:
        """Windows and policies by walk through the text: one for all contexts, unless their prefixes do not nest."""
        walks: list[tuple[dict[int, list[int]], Sequence[str]]] = []
        for group in self.groups or [[policy.name for policy in self.policies]]:
            missing = [context for context in self._windows if any((name, context) not in self.done for name in group)]
            if prefixes_nest(self.model.config) and missing:
                walks.append(({c: window for c, window in self._windows.items() if c <= max(missing)}, group))
            else:
                walks += [({context: self._windows[context]}, group) for context in missing]
        return walks

    @cached_property
    def _windows(self) -> dict[int, list[int]]:
        """The positions scored for each context that can be run, ascending; one choice for all policies."""
        fitting = [context for context in self.settings.contexts if not self._too_long(context)]
        if prefixes_nest(self.model.config):
            return self._windows_of(fitting)
        return {context: window for each in fitting for context, window in self._windows_of([each]).items()}

    def _windows_of(self, contexts: Sequence[int]) -> dict[int, list[int]]:
        """Scored is the end of a context, less tokens that would show little of the compression.

        Those are the tokens before the position where half of the past can be sealed under every policy, and those of
        a chunk so long that less than half of their past was sealed before it (a chunk attends to itself
        uncompressed).
        """
        windows: dict[int, list[int]] = {context: [] for context in contexts}
        for start, end in chunk_bounds(contexts, self.settings.chunk) if contexts else []:
            sealed = min(max(0, start - p.recent_tokens) // p.block_tokens * p.block_tokens for p in self.policies)
            for context, window in windows.items():
                first = max(start + 1, context - self.settings.score_tokens, self._mostly_compressed())
                window += range(first, min(end + 1, context, 2 * sealed + 1))
        return {context: window for context, window in windows.items() if window}

    def _mostly_compressed(self) -> int:
        return 2 * max(int(policy.recent_tokens + policy.block_tokens) for policy in self.policies)

    def _too_long(self, context: int) -> str:
        """Why model or text can't serve a context, or nothing."""
        limit = context_limit(self.model.config)
        if limit is not None and context > limit:
            why = cannot_stretch(self.model.config) or "allowed with --rope-scaling"
            return f"the model's limit is {limit} tokens (max_position_embeddings); {why}"
        if context > len(self.ids):
            return f"the text has only {len(self.ids)} tokens"
        return ""

    def _obstacle(self, context: int) -> str:
        """Why a context can't be run, or nothing."""
        if obstacle := self._too_long(context):
            return obstacle
        if context not in self._windows:
            return (
                f"no tokens scored: scoring starts at token {self._mostly_compressed()}, and where half of the past "
                f"was sealed, under every policy of the sweep, before a chunk of {self.settings.chunk} began"
            )
        return ""


def _each(lanes: dict[tuple[str, int], Lane]) -> list[Lane]:
    """Every lane once: some serve several cells."""
    return list({id(lane): lane for lane in lanes.values()}.values())
