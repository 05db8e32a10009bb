"""What each layer's keys and values lose under each codec, and what a whole choice loses if that adds up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import PolicyError
from .candidates import RAW, Assignment, Candidates, Frame
from .footprint import ROLES


@dataclass(frozen=True)
class Cell:
    """What one layer's keys, or values, lose under a codec, all else uncompressed: nats per token.

    ``estimate`` is to second order, ``measured`` by forward passes; at least one of the two is known.
    """

    layer: int
    role: str
    codec: str
    estimate: float | None
    measured: float | None


@dataclass(frozen=True)
class Sensitivity:
    """The losses of a model's ``candidates``.

    Attributes:
        candidates: what losses are of.
        cells: one for each layer, role and codec but ``fp16``; what has none is not chosen.
        frame_factors: the loss in a frame over that in ``candidates.frames[0]``, of one and the same choice of codecs;
            a frame that has none is not chosen.
        fingerprint: `kvquant.model_fingerprint` of the model, empty where unknown.
        facts: model, text, protocol, versions: told, not used.
        corrections: by layer and role, what a loss is multiplied by since, in company, it is another than by itself.
    """

    candidates: Candidates
    cells: tuple[Cell, ...]
    frame_factors: Mapping[Frame, float]
    fingerprint: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    corrections: Mapping[tuple[int, str], float] = field(default_factory=dict)

    def loss(self, layer: int, role: str, codec: str) -> float:
        """In ``frames[0]``; 0 for ``fp16``. Raises `PolicyError` where there is no such cell.

        What was not measured is the estimate, times what measuring made of the nearest estimate of the same layer and
        role.
        """
        try:
            return self.losses[layer, role][codec]
        except KeyError:
            raise PolicyError(f"layer {layer} {role}: nothing is known of {codec!r}") from None

    def predicted(self, assignment: Assignment) -> float:
        """The sum of all losses in the assignment's frame."""
        if assignment.frame not in self.frame_factors:
            raise PolicyError(f"nothing is known of {assignment.frame}")
        return self.frame_factors[assignment.frame] * math.fsum(self.loss(*place) for place in assignment.places())

    def covers(self, assignment: Assignment) -> bool:
        """Whether there is a prediction."""
        return assignment.frame in self.frame_factors and all(
            codec in self.losses.get((layer, role), ()) for layer, role, codec in assignment.places()
        )

    @cached_property
    def losses(self) -> Mapping[tuple[int, str], Mapping[str, float]]:
        """By layer and role, what is lost under each codec of which anything is known."""
        groups: dict[tuple[int, str], list[Cell]] = {
            (layer, role): [] for layer in self.candidates.footprint.shapes for role in ROLES
        }
        for cell in self.cells:
            groups[cell.layer, cell.role].append(cell)
        return {place: _losses(cells, self.corrections.get(place, 1.0)) for place, cells in groups.items()}

    def require(self, fingerprint: str) -> None:
        """`PolicyError` unless this is of the model of that fingerprint."""
        if fingerprint != self.fingerprint:
            raise PolicyError(
                f"the sensitivity is of another model: of {self.fingerprint or 'an unknown one'}, not {fingerprint}"
            )

    def to_json(self) -> str:
        """As `from_json` reads it."""
        from .files import written

        return written(self)

    @classmethod
    def from_json(cls, text: str, source: str = "sensitivity") -> Sensitivity:
        """Read what `to_json` wrote; `PolicyError` in one line, ``source`` first, on anything else."""
        from .files import read

        return read(text, source)


def _losses(cells: list[Cell], correction: float) -> dict[str, float]:
    """The losses of one layer's keys, or values."""
    known = [
        (math.log(cell.estimate), cell.measured / cell.estimate)
        for cell in cells
        if cell.measured is not None and cell.estimate
    ]
    losses = {RAW: 0.0}
    for cell in cells:
        loss = cell.measured
        if loss is None:
            loss = cell.estimate or 0.0
            if loss and known:
                here = math.log(loss)
                loss *= min(known, key=lambda entry: abs(entry[0] - here))[1]
        losses[cell.codec] = _clipped(correction * loss)
    return losses


def _clipped(loss: float) -> float:
    """Within what sums and quotients of losses do not overflow."""
    return 0.0 if loss < 1e-100 else min(loss, 1e100)
