"""Numbers from logits, one per scored token.

All sums are float64 on the logits as the model gave them, in slices of rows small enough to stay in the
processor's cache: memory is bounded by one slice, whatever the chunk or vocabulary, and the log-softmaxes are
never stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_SLICE_ELEMENTS = 1 << 18  # 2 MiB of float64
_RESAMPLES = 2000
_RESAMPLE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Reference:
    """What the uncompressed model says: logits ``[n, vocabulary]`` and, derived from them, tensors ``[n]``."""

    logits: Tensor
    log_sum_exp: Tensor  # float64
    top1: Tensor
    targets: Tensor

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor) -> Reference:
        """``logits``: ``[n, vocabulary]`` of any float dtype; ``targets``: int64 ``[n]``, the next tokens."""
        log_sum_exp = logits.new_empty(len(logits), dtype=torch.float64)
        for rows in _slices(logits):
            log_sum_exp[rows] = torch.logsumexp(logits[rows].double(), dim=-1)
        return cls(logits, log_sum_exp, logits.argmax(dim=-1), targets)

    def rows(self, rows: slice) -> Reference:
        """The same for some of the tokens."""
        return Reference(self.logits[rows], self.log_sum_exp[rows], self.top1[rows], self.targets[rows])

    def nll(self) -> Tensor:
        """Negative log-likelihood of each target in nats, float64 ``[n]``."""
        return self.log_sum_exp - _of_targets(self.logits, self.targets)


@dataclass(frozen=True)
class Comparison:
    """A policy against the reference: ``nll`` and ``kl`` in nats, float64 ``[n]``; ``agree``: bool ``[n]``."""

    nll: Tensor
    kl: Tensor
    agree: Tensor


def compare(reference: Reference, logits: Tensor) -> Comparison:
    """Scores ``[n, vocabulary]`` logits on the reference's targets; KL(reference ‖ policy) is 0 if they are equal.

    With d = x - y the difference of the logits, KL = Σ p·d - log Σ eˣ + log Σ eʸ, which needs one exp for p and
    one for y, and loses nothing to cancellation because d is exact in float64.
    """
    kl = torch.empty_like(reference.log_sum_exp)
    log_sum_exp = torch.empty_like(kl)
    for rows in _slices(logits):
        x, y = reference.logits[rows].double(), logits[rows].double()
        log_sum_exp[rows] = torch.logsumexp(y, dim=-1)
        difference = torch.sub(x, y, out=y)
        p = x.sub_(reference.log_sum_exp[rows, None]).exp_()
        kl[rows] = _weighted_sum(p, difference) + (log_sum_exp[rows] - reference.log_sum_exp[rows])
    # Rounding may leave -1e-16 where the distributions are equal in all but a shift.
    kl.clamp_(min=0.0)
    nll = log_sum_exp - _of_targets(logits, reference.targets)
    return Comparison(nll, kl, logits.argmax(dim=-1) == reference.top1)


def bootstrap_delta_pct(difference: np.ndarray, seed: int) -> tuple[float, float] | None:
    """95 % interval of ΔPPL in percent from the per-token differences in NLL (policy - reference, nats).

    Tokens are resampled in pairs, so what both runs find hard cancels. None where it is not finite.
    """
    generator = np.random.default_rng(seed)
    count = len(difference)
    batch = max(1, _RESAMPLE_ELEMENTS // count)
    with np.errstate(over="ignore", invalid="ignore"):
        means = [
            difference[generator.integers(0, count, (min(batch, _RESAMPLES - done), count))].mean(axis=1)
            for done in range(0, _RESAMPLES, batch)
        ]
        low, high = 100 * np.expm1(np.quantile(np.concatenate(means), [0.025, 0.975]))
    return (float(low), float(high)) if np.isfinite([low, high]).all() else None


def _slices(logits: Tensor) -> list[slice]:
    step = max(1, _SLICE_ELEMENTS // logits.shape[-1])
    return [slice(start, start + step) for start in range(0, len(logits), step)]


def _of_targets(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.gather(-1, targets[:, None])[:, 0].double()


def _weighted_sum(p: Tensor, difference: Tensor) -> Tensor:
    total: Tensor = torch.linalg.vecdot(p, difference)
    if total.isnan().any():
        # Both logits -inf (a masked vocabulary entry): impossible in both, so it adds nothing.
        total = torch.linalg.vecdot(p, difference.masked_fill(p == 0, 0.0))
    return total
