"""How far tensors are from what they should be. All numeric tests use these.

assert relative_rms(decoded, x) < 0.05
"""

from __future__ import annotations

import math

from torch import Tensor


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the error over that of ``expected``; 0 where both are all zero."""
    error = (actual.double() - expected.double()).square().mean().sqrt()
    size = expected.double().square().mean().sqrt()
    return float(error / size) if error else 0.0


def sqnr_db(actual: Tensor, expected: Tensor) -> float:
    """Signal to quantisation noise in dB; infinite where equal."""
    rms = relative_rms(actual, expected)
    return -20 * math.log10(rms) if rms else math.inf
