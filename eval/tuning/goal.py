"""What a policy is tuned for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import InputError

_ALLOWED = {
    "--budget": "a share of the bytes at 16 bits an element, above 0 and at most 1, e.g. 0.28",
    "--max-kl": "nats per token, above 0, e.g. 0.005",
    "--max-delta-ppl": "percent, above 0, e.g. 1.0",
    "--minutes": "a number above 0",
}


@dataclass(frozen=True)
class Goal:
    """Exactly one is set: a ``budget`` as a share of the 16-bit bytes, or the most loss that fewest bytes are sought
    for: ``max_kl`` in nats per token, or ``max_delta_ppl`` in percent."""

    budget: float | None = None
    max_kl: float | None = None
    max_delta_ppl: float | None = None

    @classmethod
    def parse(cls, budget: str | None, max_kl: str | None, max_delta_ppl: str | None) -> Goal:
        """From the options as typed. Raises `InputError` unless exactly one is given, and makes sense."""
        given = {"--budget": budget, "--max-kl": max_kl, "--max-delta-ppl": max_delta_ppl}
        named = [option for option, text in given.items() if text is not None]
        if len(named) != 1:
            raise InputError(
                f"{' and '.join(named) or 'no goal'}: exactly one of {', '.join(given)} says what to tune for"
            )
        return cls(
            *(
                None if text is None else positive(option, text, most=1.0 if option == "--budget" else math.inf)
                for option, text in given.items()
            )
        )

    @property
    def max_loss(self) -> float:
        """The most KL. On text drawn from the model itself it is the gap in loss, of which ΔPPL is the exponential."""
        if self.max_delta_ppl is not None:
            return math.log1p(self.max_delta_ppl / 100)
        return math.inf if self.max_kl is None else self.max_kl

    def __str__(self) -> str:
        if self.budget is not None:
            return f"the least KL in {self.budget:g} of the bytes"
        if self.max_kl is not None:
            return f"the fewest bytes with a KL of at most {self.max_kl:g} nats per token"
        return f"the fewest bytes with perplexity up by at most {self.max_delta_ppl:g} %"


def positive(option: str, text: str, most: float = math.inf) -> float:
    """A finite number above 0 and at most ``most``. Raises `InputError`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most or math.isinf(value):
        raise InputError(f"{option}: {text!r}; allowed: {_ALLOWED[option]}")
    return value
