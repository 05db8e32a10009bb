"""The multiple-choice knapsack: of each group one item, the least cost within a limit of weight, exactly.

A Lagrangian bound first tells which items cannot be part of a solution (Sinha and Zoltners, 1979): of thousands, tens
are left, and HiGHS decides among them, through SciPy. What it is given is counted in units of the gap between the
bound and the best solution known so far: costs may differ by many orders of magnitude without coming near its
tolerances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedError

Numbers = NDArray[np.float64]
Picks = NDArray[np.int64]
"""The item picked from each group ``[groups]``."""

ROUNDING = 1e-12  # relative: what sums of floats may be off by
UNITS = 1e4  # that a gap is for the solver, whose tolerances are 1e-6
TIE = 1e-8  # units of cost that a unit of weight counts, so that of equals the lightest is found


@dataclass(frozen=True)
class Knapsack:
    """``costs`` and ``weights`` ``[groups, items]``; where a group has fewer items, they cost infinity."""

    costs: Numbers
    weights: Numbers

    @classmethod
    def of(cls, groups: Sequence[tuple[Numbers, Numbers]]) -> Knapsack:
        """From each group's costs and weights."""
        shape = len(groups), max(len(costs) for costs, _ in groups)
        costs, weights = np.full(shape, np.inf), np.zeros(shape)
        for row, (some_costs, some_weights) in enumerate(groups):
            costs[row, : len(some_costs)] = some_costs
            weights[row, : len(some_weights)] = some_weights
        return cls(costs, weights)

    def totals(self, picks: Picks) -> tuple[float, float]:
        """Cost and weight of the items picked."""
        rows = np.arange(len(picks))
        return math.fsum(self.costs[rows, picks]), math.fsum(self.weights[rows, picks])

    def solve(self, limit: float, below: float = math.inf) -> Picks | None:
        """Of each group one item, of least cost within a total weight of ``limit``.

        None where there is no solution, or none that costs ``below`` or less.
        """
        found = self._relaxed(limit)
        if found is None:
            return None
        picks, price = found
        cost, weight = self.totals(picks)
        gap = price * (limit - weight)  # no solution costs less than cost - gap
        if cost - gap > below:
            return None
        if gap <= ROUNDING * cost:
            return picks
        priced = self.costs + price * self.weights
        kept = priced - priced.min(1, keepdims=True) <= gap + ROUNDING * cost  # what others cost more in any solution
        return self._decided(kept, picks, limit, gap) if (kept.sum(1) > 1).any() else picks

    def _relaxed(self, limit: float) -> tuple[Picks, float] | None:
        """The cheapest items at a price of weight, the lowest at which they are within ``limit``, and the price."""

        def at(price: float) -> Picks:
            picks: Picks = (self.costs + price * self.weights).argmin(1)
            return picks

        def fits(picks: Picks) -> bool:
            return self.totals(picks)[1] <= limit

        if not fits(np.where(np.isinf(self.costs), np.inf, self.weights).argmin(1)):
            return None
        if fits(at(0.0)):
            return at(0.0), 0.0
        high = ROUNDING * self.costs[np.isfinite(self.costs)].max() / self.weights.max()
        while not fits(at(high)):
            high *= 4
        low = high / 4
        while low < (middle := (low + high) / 2) < high:
            low, high = (low, middle) if fits(at(middle)) else (middle, high)
        return at(high), high

    def _decided(self, kept: NDArray[np.bool_], picks: Picks, limit: float, gap: float) -> Picks:
        """The best solution of ``kept`` items, at least as good as ``picks``, which leave some of the limit."""
        optimize, sparse = _scipy()
        rows, items = np.nonzero(kept)
        chosen = picks[rows]
        cost, weight = self.totals(picks)
        costs = UNITS * (self.costs[rows, items] - self.costs[rows, chosen]) / gap
        weights = UNITS * (self.weights[rows, items] - self.weights[rows, chosen]) / (limit - weight)
        one_each = sparse.csr_array((np.ones(len(rows)), (rows, np.arange(len(rows)))))
        room = UNITS
        while True:
            limits = [
                optimize.LinearConstraint(one_each, 1, 1),
                optimize.LinearConstraint(weights[None], ub=room),
            ]
            solved = optimize.milp(
                costs + TIE * weights,
                integrality=np.ones(len(rows)),
                bounds=optimize.Bounds(0, 1),
                constraints=limits,
                options={"mip_rel_gap": 0, "presolve": False},
            )
            if solved.x is None:
                return picks
            taken = solved.x > 0.5
            found = np.array(picks)
            found[rows[taken]] = items[taken]
            total = self.totals(found)
            if total[1] <= limit:
                return found if total < (cost, weight) else picks
            room -= 2 * UNITS * (total[1] - limit) / (limit - weight)  # what the solver's tolerance let through


def _scipy() -> Any:
    try:
        from scipy import optimize, sparse
    except ImportError:
        raise UnsupportedError("allocation needs SciPy: pip install 'kvquant[tune]'") from None
    return optimize, sparse
