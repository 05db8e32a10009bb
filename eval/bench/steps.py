"""Taking decode steps again and again after the same history."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

import kvquant
from kvquant import KVQuantWarning

from .history import Decoder, Rows, held_bytes
from .peak import extra_peak, least

UNTIMED = 1  # steps of a turn before those that count: a cache's first step after a copy sets things up


@dataclass
class Stepper:
    """A way to take steps after ``rows`` that ``cache`` holds, of which ``steps`` are timed in a turn.

    The model attends as within ``attention()``. Steps are taken with ``fork(cache)``, each after ``prepare()``, and
    ``rewind`` is given that cache and the number of steps afterwards. ``nbytes``: those of the history.
    """

    decoder: Decoder
    cache: Any
    rows: Rows
    steps: int
    attention: Callable[[], AbstractContextManager[None]] = nullcontext
    fork: Callable[[Any], Any] = lambda cache: cache
    rewind: Callable[[Any, int], None] = lambda cache, steps: None
    detail: str = ""
    prepare: Callable[[], None] = lambda: None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = held_bytes(self.cache)  # now, before steps make room for more

    @torch.inference_mode()
    def run(self) -> list[float]:
        """The seconds of each step."""
        with self.attention():
            cache = self.fork(self.cache)
            seconds = [self._step(cache, done) for done in range(UNTIMED + self.steps)]
            self.rewind(cache, len(seconds))
        return seconds[UNTIMED:]

    def first(self) -> None:
        """A turn that does not count; what kvquant warns of is put into the detail as well."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", KVQuantWarning)
            self.run()
        told = {str(warning.message): warning for warning in caught}  # layers say the same
        self.detail = "; ".join([self.detail] * bool(self.detail) + list(told))
        for warning in told.values():
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    @torch.inference_mode()
    def peak(self) -> int | None:
        """Bytes a step takes beside the cache; see `extra_peak`."""
        with self.attention():
            return least(self._peak)

    def _peak(self) -> int | None:
        cache = self.fork(self.cache)
        for done in range(UNTIMED):
            self._step(cache, done)
        given = self.decoder.inputs(self.rows, UNTIMED)  # whoever calls the model has them anyway
        found = extra_peak(lambda: self._run(cache, given))
        self.rewind(cache, UNTIMED + 1)
        return found

    def _step(self, cache: Any, done: int) -> float:
        given = self.decoder.inputs(self.rows, done)
        self.prepare()
        began = time.perf_counter()
        self._run(cache, given)
        return time.perf_counter() - began

    def _run(self, cache: Any, given: dict[str, Tensor]) -> None:
        self.decoder.model(**given, cache=cache, use_cache=True)


@contextmanager
def streamed(model: Any) -> Iterator[None]:
    """Have a model attend to codes where they lie."""
    kvquant.enable(model)
    try:
        yield
    finally:
        kvquant.disable(model)


def share(cache: Any) -> Any:
    """A copy of a cache whose growing layers are its own, to be shortened again; the others', copied, are dropped.

    A copy of growing layers would take fresh memory for everything at its first step, which no real one does.
    """
    twin = copy.copy(cache)
    twin.layers = [layer if grows(layer) else copy.copy(layer) for layer in cache.layers]
    return twin


def rewind(cache: Any, steps: int) -> None:
    """Shorten the growing layers of what `share` gave."""
    for layer in cache.layers:
        if grows(layer):
            layer.crop(-steps)


def grows(layer: Any) -> bool:
    """Whether a layer keeps every token, and nothing else."""
    return bool(getattr(type(layer), "crop", None) is DynamicLayer.crop)
