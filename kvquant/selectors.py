"""Layer selectors of a policy: ``3``, ``0-7``, ``25%-60%``, ``0,5,9-11``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .errors import shown

_INDEX = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%-(\d{1,3}(?:\.\d{1,6})?)%", re.ASCII)
_HELP = "allowed: an index (3), a range (0-7), a share of depth (25%-60%), or a list of these (0,5,9-11)"


@dataclass(frozen=True)
class _Span:
    """Layers ``first ≤ i < stop``, counted in layers or in percent of depth."""

    first: Fraction
    stop: Fraction
    percent: bool

    def indices(self, count: int) -> range:
        if not self.percent:
            return range(int(self.first), int(self.stop))
        return range(_ceil(self.first * count / 100), _ceil(self.stop * count / 100))


@dataclass(frozen=True)
class Selector:
    """A parsed selector; ``text`` is its canonical spelling."""

    text: str
    spans: tuple[_Span, ...]

    @classmethod
    def parse(cls, given: Any) -> Selector:
        """Parse text, an integer or a built selector; `ValueError` says what is allowed."""
        if isinstance(given, Selector):
            return given
        if isinstance(given, bool) or not isinstance(given, int | str):
            raise ValueError(f"{shown(given)} is not a layer selector; {_HELP}")
        text = "".join(str(given).split())
        spans: list[_Span] = []
        for part in text.split(","):
            span = _parse_span(part)
            if any(_overlap(span, other) for other in spans):
                raise ValueError(f"{shown(part)} selects layers that {shown(text)} has selected already")
            spans.append(span)
        return cls(text, tuple(spans))

    @property
    def names_indices(self) -> bool:
        """Whether layers are named one by one, so that naming none that exists must be a mistake."""
        return any(not span.percent for span in self.spans)

    def indices(self, count: int) -> list[int]:
        """The selected layers of a model of ``count`` layers; `ValueError` where there is no such layer."""
        selected = [index for span in self.spans for index in span.indices(count)]
        if selected and max(selected) >= count:
            raise ValueError(f"layer {max(selected)} does not exist; the model has layers 0-{count - 1}")
        if len(set(selected)) != len(selected):
            raise ValueError("a layer is selected twice")
        return selected

    def refuse_overlap(self, others: Iterable[Selector]) -> None:
        """`ValueError` where another selector takes the same layers of every model."""
        for other in others:
            if any(_overlap(mine, theirs) for mine in self.spans for theirs in other.spans):
                raise ValueError(f"overlaps with {shown(other.text)}; each layer may be selected once")


def _parse_span(part: str) -> _Span:
    if match := _INDEX.fullmatch(part):
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        span = _Span(Fraction(first), Fraction(last + 1), percent=False)
    elif match := _PERCENT.fullmatch(part):
        span = _Span(Fraction(match[1]), Fraction(match[2]), percent=True)
        if span.stop > 100:
            raise ValueError(f"{shown(part)} goes beyond 100%")
    else:
        raise ValueError(f"{shown(part)} is not a layer selector; {_HELP}")
    if span.first >= span.stop:
        raise ValueError(f"{shown(part)} selects nothing: its start must come before its end")
    return span


def _overlap(a: _Span, b: _Span) -> bool:
    return a.percent == b.percent and max(a.first, b.first) < min(a.stop, b.stop)


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)
