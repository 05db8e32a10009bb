"""What is to be had for so many bytes: the points that no other beats, and what lies between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Costed(Protocol):
    """Something with a share of the 16-bit bytes and a KL in nats per token."""

    @property
    def ratio(self) -> float:
        """Bytes, of those at 16 bits an element."""

    @property
    def kl(self) -> float:
        """Nats per token."""


_Costed = TypeVar("_Costed", bound=Costed)


def pareto_front(points: Sequence[_Costed]) -> list[_Costed]:
    """The points that no other beats in bytes without losing in KL, by bytes."""
    front: list[_Costed] = []
    for point in sorted(points, key=lambda point: (point.ratio, point.kl)):
        if not front or point.kl < front[-1].kl:
            front.append(point)
    return front


def kl_at(points: Sequence[Costed], ratio: float) -> float | None:
    """KL at ``ratio`` on the front of ``points``, linear in its logarithm between them; None below the smallest.

    Beyond the last, and up to one whose KL is 0, it is that of the largest point before: a logarithm does not reach 0.
    """
    front = [point for point in pareto_front(points) if point.ratio <= ratio]
    above = [point for point in pareto_front(points) if point.ratio > ratio and point.kl > 0]
    if not front:
        return None
    lower = front[-1]
    if not above or lower.kl <= 0:
        return lower.kl
    share = (ratio - lower.ratio) / (above[0].ratio - lower.ratio)
    return math.exp((1 - share) * math.log(lower.kl) + share * math.log(above[0].kl))
