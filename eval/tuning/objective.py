"""What a policy costs a model at the end of a text: the objective that `kvquant.tune_policy` is given."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from kvquant import PrecisionPolicy

from ..rows import Scores
from .tail import Tail


class KLObjective:
    """KL from the uncompressed model, nats per token, over the last ``score_tokens`` of ``ids`` (int64 ``[context]``).

    The past is computed once, exactly, and encoded by the real cache (see `Tail`), in the model's dtype.

    Attributes:
        tail: what is scored.
        seconds: spent on policies so far.
    """

    def __init__(
        self,
        model: Any,
        ids: Tensor,
        score_tokens: int = 512,
        tick: Callable[[int, int], None] = lambda start, end: None,
    ) -> None:
        self.tail = Tail(model, ids, score_tokens, tick)
        self.seconds = 0.0

    def __call__(self, policy: PrecisionPolicy) -> float:
        """Mean KL of a policy; 0 where it loses nothing."""
        return float(self.scores(policy).kl.mean())

    def scores(self, policy: PrecisionPolicy) -> Scores:
        """The same token by token, with losses and agreement."""
        began = time.perf_counter()
        found = self.tail.run(policy)
        self.seconds += time.perf_counter() - began
        return Scores(
            positions=self.tail.targets,
            nll=found.nll.cpu().numpy(),
            reference_nll=self.tail.reference_nll().cpu().numpy(),
            kl=found.kl.cpu().numpy(),
            agree=found.agree.cpu().numpy().astype(np.float64),
        )

    @property
    def passes(self) -> float:
        """``seconds`` in units of one scored pass of the uncompressed model over the same text."""
        return self.seconds / self.tail.exact_seconds
