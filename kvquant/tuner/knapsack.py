"""The multiple-choice knapsack: of each group one item, the least cost within a limit of weight, exactly.

A price of weight gives a solution, and a bound on what any other costs. The bound tells which items cannot be part of
a better one (Sinha and Zoltners, 1979): of thousands, tens are left. Among these, group after group, those partial
sums are kept that no other beats in both cost and weight (Nemhauser and Ullmann, 1969) and that the bound allows.
Costs may differ by any number of orders of magnitude: nothing here has a tolerance but the rounding of floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Picks = NDArray[np.int64]
"""The item picked from each group ``[groups]``."""

ROUNDING = 1e-12  # relative: what sums of floats may be off by
NEAR = 1e-6  # relative: how near the best price is found, which any price will do for
WIDENING = tuple(4.0**power for power in range(-8, 1))  # of the gap in which solutions are looked for
MOST_SUMS = 1 << 15  # kept; more takes costs that are all but proportional to weights without a common measure


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
        for part in WIDENING:  # most solutions come near the bound: few items, and few sums, can be part of one
            within = part * gap + ROUNDING * cost
            picks = self._decided(picks, limit, price, within)
            if self.totals(picks)[0] <= cost - gap + within:
                break
        return picks

    def _relaxed(self, limit: float) -> tuple[Picks, float] | None:
        """The cheapest items at a price of weight, and the price: about the lowest that keeps them to ``limit``."""

        def at(price: float) -> Picks:
            picks: Picks = (self.costs + price * self.weights).argmin(1)
            return picks

        def fits(picks: Picks) -> bool:
            return self.totals(picks)[1] <= limit

        if not fits(np.where(np.isinf(self.costs), np.inf, self.weights).argmin(1)):
            return None
        if fits(at(0.0)):
            return at(0.0), 0.0
        high = max(ROUNDING * self.costs[np.isfinite(self.costs)].max() / self.weights.max(), np.finfo(float).tiny)
        while not fits(at(high)):
            high *= 64
        low = high / 64
        while high > (1 + NEAR) * low:
            middle = math.sqrt(low) * math.sqrt(high)
            low, high = (low, middle) if fits(at(middle)) else (middle, high)
        return at(high), high

    def _decided(self, picks: Picks, limit: float, price: float, gap: float) -> Picks:
        """The best solution there is of items that raise the bound by ``gap`` at most, as ``picks`` do by nothing."""
        priced = self.costs + price * self.weights
        regret = priced - priced.min(1, keepdims=True)  # by how much an item raises the bound
        lightest = np.where(np.isinf(self.costs), np.inf, self.weights).min(1)
        costs, weights, regrets = np.zeros((3, 1))  # of partial sums
        trail = []  # of each group, where its sums come from: which one before, and which item
        for row in range(len(picks)):
            items = np.flatnonzero(regret[row] <= gap)
            sums = [
                (before[:, None] + table[row, items]).ravel()
                for before, table in ((costs, self.costs), (weights, self.weights), (regrets, regret))
            ]
            rest = lightest[row + 1 :].sum()
            open_ = np.flatnonzero((sums[2] <= gap) & (sums[1] + rest <= limit * (1 + ROUNDING)))
            order = open_[np.lexsort((sums[1][open_], sums[0][open_]))]
            least = np.minimum.accumulate(sums[1][order])
            order = order[np.concatenate(([True], sums[1][order][1:] < least[:-1]))]
            order = order[:: -(-len(order) // MOST_SUMS)]
            costs, weights, regrets = (numbers[order] for numbers in sums)
            trail.append((order // len(items), items[order % len(items)]))
        for state in range(len(costs)):
            found = np.array(picks)
            for row, (parents, items) in reversed([*enumerate(trail)]):
                found[row], state = items[state], parents[state]
            if self.totals(found)[1] <= limit:
                return min(picks, found, key=self.totals)
        return picks
