"""Every policy at every context: which cells can be run, and the rows they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .errors import one_line
from .models import context_limit
from .rows import Row, Scores, fidelity, footprint
from .streaming import Lane, Stream, chunk_bounds


@dataclass(frozen=True)
class Settings:
    """What a sweep measures. ``contexts`` ascending, in tokens; ``score_tokens`` at the end of each are scored."""

    contexts: tuple[int, ...]
    protocol: str = "streaming"
    chunk: int = 128
    score_tokens: int = 2048
    dtype: str = "float32"
    seed: int = 0


@dataclass
class Sweep:
    """``policies``, an empty cache for each, on ``model`` (shown as ``name``) over ``ids`` (int64 ``[n]``)."""

    name: str
    model: Any
    ids: Tensor
    policies: Sequence[Any]
    caches: Sequence[Any]
    settings: Settings

    def runnable(self) -> list[int]:
        """The contexts that will be run."""
        return list(self._windows())

    def rows(self, tick: Callable[[int, int], None] = lambda start, end: None) -> Iterator[Row]:
        """The rows by context, then policy. First those that can't be run, the others as they finish."""
        for context in self.settings.contexts:
            if obstacle := self._obstacle(context):
                for policy in self.policies:
                    yield self._row(policy.name, context).without_numbers("skipped", obstacle)
        contexts = self.runnable()
        if not contexts:
            return
        windows = self._windows()
        lanes = [Lane.new(p.name, cache, contexts[-1]) for p, cache in zip(self.policies, self.caches, strict=True)]
        stream = Stream(self.model, self.ids[: contexts[-1]], windows, lanes, self.settings.chunk, tick)
        left = list(contexts)
        try:
            for context in stream.run():
                left.remove(context)
                yield from (self._measured(stream, lane, context) for lane in lanes)
        except Exception as error:  # the reference run; rows that were reached stand
            reason = f"reference run: {one_line(error)}"
            for context in left:
                yield from (self._row(lane.name, context).without_numbers("failed", reason) for lane in lanes)

    def _measured(self, stream: Stream, lane: Lane, context: int) -> Row:
        row = self._row(lane.name, context)
        if context not in lane.checkpoints:
            return row.without_numbers("failed", lane.error or "not reached")
        at = list(stream.windows[context])
        scores = Scores(lane.nll[at], stream.reference_nll[at], lane.kl[at], lane.agree[at])
        stats, seconds = lane.checkpoints[context]
        return replace(row, **fidelity(scores, self.settings.seed), **footprint(stats, seconds))

    def _row(self, policy: str, context: int) -> Row:
        return Row(self.name, policy, context, self.settings.protocol, self.settings.dtype)

    def _windows(self) -> dict[int, list[int]]:
        """The positions scored for each context that can be run, ascending; one choice for all policies.

        Scored is the end of a context, less tokens that would show little of the compression: those before the
        position where half of the past can be sealed under every policy, and those of a chunk so long that less than
        half of their past was sealed before it (a chunk attends to itself uncompressed).
        """
        fitting = [context for context in self.settings.contexts if not self._too_long(context)]
        windows: dict[int, list[int]] = {context: [] for context in fitting}
        for start, end in chunk_bounds(fitting, self.settings.chunk) if fitting else []:
            sealed = min(max(0, start - p.recent_tokens) // p.block_tokens * p.block_tokens for p in self.policies)
            for context, window in windows.items():
                first = max(start + 1, context - self.settings.score_tokens, self._mostly_compressed())
                window += range(first, min(end + 1, context, 2 * sealed + 1))
        return {context: window for context, window in windows.items() if window}

    def _mostly_compressed(self) -> int:
        return 2 * max(int(policy.recent_tokens + policy.block_tokens) for policy in self.policies)

    def _too_long(self, context: int) -> str:
        """Why model or text can't serve a context, or nothing."""
        limit = context_limit(self.model)
        if limit is not None and context > limit:
            return f"the model's limit is {limit} tokens (max_position_embeddings)"
        if context > len(self.ids):
            return f"the text has only {len(self.ids)} tokens"
        return ""

    def _obstacle(self, context: int) -> str:
        """Why a context can't be run, or nothing."""
        if obstacle := self._too_long(context):
            return obstacle
        if context not in self._windows():
            return (
                f"no tokens scored: scoring starts at token {self._mostly_compressed()}, and where half of the past "
                f"was sealed, under every policy of the sweep, before a chunk of {self.settings.chunk} began"
            )
        return ""
