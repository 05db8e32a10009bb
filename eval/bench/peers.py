"""`kvquant bench peers`: the decode step (`decode`) through other caches that compress, beside kvquant's.

They are transformers' `QuantizedCache` on its three backends. quanto and HQQ keep up to 128 tokens as they are and the
others as codes, which every step decodes to a copy of the whole history; one step in 128 decodes and encodes all of
it anew, and is a row of its own. fp8 decodes all at every step too, and appends codes. What isn't installed is a row
that says how to get it; what fails is one that says why.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import QuantizedCache
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from ..errors import InputError
from ..ppl import Progress
from .decode import DecodeBench, DecodeOptions, run_steps
from .rows import Outcome
from .steps import Stepper

RESIDUAL = 128  # tokens that transformers' group-wise caches keep as they are, at most


@dataclass(frozen=True)
class Peer:
    """A `QuantizedCache`: ``options`` of its constructor, whether it is ``installed``, and what to hand to pip."""

    name: str
    backend: str
    options: dict[str, int] = field(default_factory=dict)
    installed: Callable[[], bool] = lambda: True
    install: str = ""

    @property
    def flushes(self) -> bool:
        """Whether some steps encode everything anew."""
        return bool(self.options)

    def make(self, model: Any) -> Any:
        """An empty one. Raises `InputError` where its package is not installed."""
        if not self.installed():
            raise InputError(f"not installed: pip install {self.install}")
        return QuantizedCache(backend=self.backend, config=model.config, **self.options)


def _group_wise(backend: str, bits: int, axis: int, installed: Callable[[], bool], install: str) -> Peer:
    options = {"nbits": bits, "axis_key": axis, "axis_value": axis, "residual_length": RESIDUAL}
    return Peer(f"{backend}-{bits}", backend, options, installed, install)


# Axes are those transformers' documentation tells to use with each.
PEERS = (
    _group_wise("quanto", 4, 0, is_optimum_quanto_available, "optimum-quanto"),
    _group_wise("quanto", 2, 0, is_optimum_quanto_available, "optimum-quanto"),
    _group_wise("hqq", 8, 1, is_hqq_available, "hqq"),
    _group_wise("hqq", 4, 1, is_hqq_available, "hqq"),
    Peer("fp8", "fp8"),
)


def run_peers(options: DecodeOptions, say: Callable[[str], None], progress: Progress) -> Outcome:
    """The rows of every context, peer, policy and baseline. Raises `kvquant.KVQuantError` for bad input."""
    return run_steps("peers", options, _subjects, say, progress)


def _subjects(bench: DecodeBench) -> Iterator[tuple[str, Callable[[], Stepper]]]:
    for peer in PEERS:
        yield peer.name, partial(_stepper, bench, peer, min(RESIDUAL // 2, bench.context // 2), bench.steps)
        if peer.installed() and peer.flushes and min(bench.rows.lengths) > RESIDUAL:
            yield f"{peer.name} (flush)", partial(_stepper, bench, peer, RESIDUAL - 2, 1)


def _stepper(bench: DecodeBench, peer: Peer, residual: int, steps: int) -> Stepper:
    """Steps with ``residual`` tokens not yet encoded."""
    cache = peer.make(bench.model)
    bench.decoder.fill(cache, bench.rows, [bench.rows.width - residual, residual])
    return Stepper(bench.decoder, cache, bench.rows, steps, fork=_copied)


def _copied(cache: Any) -> Any:
    """A copy that shares what is held, none of which is ever changed in place."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin
