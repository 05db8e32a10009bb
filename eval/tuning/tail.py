"""The end of a text, read over and over: each time attending to a past that is compressed otherwise.

The uncompressed model reads the text once. Of a policy only what it changes is computed: its lossy layers encode the
exact past, all others go on with the exact keys and values where they lie, and layers below the first lossy one, whose
output cannot differ, give again what they gave.

::

    0                                              P      128     256            context
    |  read once, exact; encoded by lossy layers   |  chunk |  chunk |  ···         |
    |                                              |  scored, its tokens age as in generation
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvquant import KVQuantCache, PrecisionPolicy
from kvquant.geometry import decoder_config, decoder_module
from kvquant.policy import ResolvedPolicy

from ..errors import InputError
from ..exact import exact_cache, rewound
from ..metrics import Comparison, Reference, compare
from ..walk import EXACT_CHUNK, forward

CHUNK = 128
_SAME = 1e-4  # of the largest logit: what the order of sums may change


class Tail:
    """The last ``score_tokens`` of ``ids`` (int64 ``[context]``) under ``model``, and the exact past before them.

    Reads the text once, ``tick(start, end)`` after every forward. Raises `InputError` where little lies before it.

    Attributes:
        bounds: start and end of each chunk of the tail.
        exact_seconds: what reading the whole text took, and scoring all of it would have, uncompressed.
    """

    def __init__(
        self, model: Any, ids: Tensor, score_tokens: int, tick: Callable[[int, int], None] = lambda start, end: None
    ) -> None:
        self.model, self.ids = model, ids.to(model.device)
        self.first = len(ids) - score_tokens
        if score_tokens < 2:
            raise InputError(f"--score-tokens: {score_tokens}; allowed: 2 or more, since the first only predicts")
        if self.first < 4 * CHUNK:
            raise InputError(
                f"--context: {len(ids)} tokens, of which the last {score_tokens} are scored, are too few; "
                f"allowed: at least {4 * CHUNK} before them"
            )
        self.bounds = [(start, min(start + CHUNK, len(ids))) for start in range(self.first, len(ids), CHUNK)]
        self._blocks = _decoder_layers(model)
        self._outputs: list[list[Any]] = []  # of each chunk, what each layer of the decoder gave
        self._references: list[Reference] = []
        self._states: list[Any] = []  # at the start of each chunk: an exact cache, whose growing layers are views
        self._overwritten = True  # whether the exact tail is
        self.exact_seconds = 0.0
        with torch.no_grad():
            self._read(tick)
            self._tail = [
                [buffer[:, :, self.first :].clone() for buffer in getattr(layer, "buffers", ())]
                for layer in self._exact.layers
            ]
            if not self._outputs_serve():
                self._outputs.clear()

    def exact(self, chunk: int) -> Any:
        """An uncompressed cache that holds all tokens before a chunk; until the next one is asked for, or `run`."""
        self._restore()
        return rewound(self._states[chunk], self.bounds[chunk][0])

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's exact keys and values of the whole text, ``[1, heads, tokens, dim]``; until `run`."""
        self._restore()
        keys, values = self._exact.layers[layer].buffers
        return keys, values

    def run(self, policy: PrecisionPolicy) -> Comparison:
        """The tail's scores under a policy, ``[score_tokens - 1]`` of each: its first token only predicts."""
        resolved, first = _lossy_only(policy.resolve(self.model))
        self._overwritten = True
        parts = []
        with torch.no_grad():
            if first is None:
                return self._unchanged()
            cache = self._compressed(resolved)
            for number in range(len(self.bounds)):
                with self._repeating(number, first, cache):
                    logits, _ = self._forward(number, cache)
                parts.append(compare(self._references[number], logits))
        return Comparison(*(torch.cat([getattr(part, name) for part in parts]) for name in ("nll", "kl", "agree")))

    @property
    def targets(self) -> range:
        """Positions of the tokens scored."""
        return range(self.first + 1, len(self.ids))

    def reference_nll(self) -> Tensor:
        """Of the uncompressed model, nats per scored token, float64."""
        return torch.cat([reference.nll() for reference in self._references])

    def _read(self, tick: Callable[[int, int], None]) -> None:
        """The exact cache of the whole text, and what is kept of its tail."""
        self._exact = exact_cache(self.model, len(self.ids))
        for start in range(0, self.first, EXACT_CHUNK):
            end = min(start + EXACT_CHUNK, self.first)
            _, seconds = forward(self.model, self.ids[None, start:end], self._exact, torch.tensor([0]))
            self.exact_seconds += seconds
            tick(start, end)
        scoring = 0.0
        for number, (start, end) in enumerate(self.bounds):
            self._states.append(rewound(self._exact, start))
            with self._recorded():
                logits, seconds = self._forward(number, self._exact)
            self.exact_seconds += seconds
            began = time.perf_counter()
            self._references.append(Reference.of(logits, self.ids[start + 1 : end + 1]))
            self._references[-1].nll()
            scoring += time.perf_counter() - began
            tick(start, end)
        self.exact_seconds += scoring * len(self.ids) / len(self.targets)

    def _forward(self, number: int, cache: Any) -> tuple[Tensor, float]:
        start, end = self.bounds[number]
        rows = torch.arange(min(end, len(self.ids) - 1) - start)  # nothing follows the very last token
        return forward(self.model, self.ids[None, start:end], cache, rows)

    def _compressed(self, resolved: ResolvedPolicy) -> KVQuantCache:
        """A cache with the exact past before the tail, encoded in lossy layers."""
        cache = KVQuantCache(resolved, self.model.config)
        past = rewound(self._states[0], self.first)
        for index, (layer, told) in enumerate(zip(past.layers, resolved.layers, strict=True)):
            if told.policy is None:
                cache.layers[index] = layer
            else:
                cache.update(layer.keys, layer.values, index)
        return cache

    def _restore(self) -> None:
        """Put back the tail's exact keys and values, over which runs have written theirs."""
        if self._overwritten:
            for layer, tail in zip(self._exact.layers, self._tail, strict=True):
                for buffer, kept in zip(getattr(layer, "buffers", ()), tail, strict=True):
                    buffer[:, :, self.first :] = kept
            self._overwritten = False

    def _unchanged(self) -> Comparison:
        nll = self.reference_nll()
        return Comparison(nll, torch.zeros_like(nll), torch.ones(len(nll), dtype=torch.bool))

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Keeps what each layer of the decoder gives."""
        with ExitStack() as hooks:
            outputs: list[Any] = []
            for block in self._blocks:
                handle = block.register_forward_hook(lambda module, given, output: outputs.append(output))
                hooks.callback(handle.remove)
            yield
        if outputs:
            self._outputs.append(outputs)

    @contextmanager
    def _repeating(self, number: int, first: int, cache: Any) -> Iterator[None]:
        """Has the decoder's layers below ``first`` give what they gave, in chunk ``number``, at no cost."""
        if not self._outputs:
            yield
            return
        start, end = self.bounds[number]
        with ExitStack() as undo:
            for index, block in enumerate(self._blocks[:first]):
                own = block.__dict__.get("forward")  # somebody else's, or the class's
                undo.callback(partial(setattr, block, "forward", own) if own else partial(delattr, block, "forward"))
                block.forward = _repeater(cache.layers[index], end - start, self._outputs[number][index])
            yield

    def _outputs_serve(self) -> bool:
        """Whether a layer of this model depends on nothing but what the one below gave: it is tried."""
        if not self._outputs or len(self._outputs[0]) != len(self._blocks):
            return False
        try:
            cache = rewound(self._states[0], self.first)
            with self._repeating(0, len(self._blocks) - 1, cache):
                logits, _ = self._forward(0, cache)
        except Exception:  # whatever the model makes of it, all its layers are computed then
            return False
        expected = self._references[0].logits
        return bool((logits - expected).abs().max() <= _SAME * expected.abs().max())


def _lossy_only(resolved: ResolvedPolicy) -> tuple[ResolvedPolicy, int | None]:
    """The same with lossless layers as transformers keeps them, and the first lossy one."""
    layers = tuple(
        replace(layer, policy=None)
        if layer.policy and layer.policy.key.lossless and layer.policy.value.lossless
        else layer
        for layer in resolved.layers
    )
    return replace(resolved, layers=layers), next((layer.index for layer in layers if layer.policy is not None), None)


def _decoder_layers(model: Any) -> list[nn.Module]:
    """The layers of the decoder, where they are as many as its cache has."""
    layers = getattr(decoder_module(model), "layers", None)
    count = decoder_config(model.config).num_hidden_layers
    return list(layers) if isinstance(layers, nn.ModuleList) and len(layers) == count else []


def _repeater(layer: Any, tokens: int, output: Any) -> Callable[..., Any]:
    """What stands in for a decoder layer: its cache's ``layer`` grows, by nothing of meaning."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        keys, values = (
            states.new_zeros(1).expand(1, states.shape[1], tokens, states.shape[3])
            for states in (layer.keys, layer.values)
        )
        layer.update(keys, values)
        return output

    return forward
