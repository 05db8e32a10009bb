"""What each layer's keys and values would lose under every codec, from a few backward passes.

Small errors δ in what a layer holds change the model's distribution p at a later token by KL ≈ ½ δᵀ F δ, F being the
Fisher information E_y∼p[g gᵀ] of g = ∇ log p(y): the second-order expansion that HAWQ (Dong et al., 2019) and Optimal
Brain Surgeon rest on. One backward pass of Σₜ ±log pₜ(yₜ), with random signs and yₜ drawn from the model, gives a g
whose (g·δ)² is on average the sum over tokens, for every layer, so that candidates cost no forward pass of their own,
only their encoding. Keys and values of different heads err independently: their squares are added head by head, which
makes the estimate steadier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import psutil
import torch
from torch import Tensor

from kvquant import KVQuantCache
from kvquant.tuner.candidates import Assignment, Candidates

from ..exact import branch
from .tail import Tail

SAMPLES = 6  # backward passes of each chunk
_FREE = 4  # of the memory that is free a fourth is for gradients; layers that do not fit take passes of their own
_ERRORS = 256 << 20  # bytes of errors held at once, of keys or values

Estimates = dict[tuple[int, str, str], float]
"""By layer, role (``key`` or ``value``) and codec, nats per token."""


def estimates(
    tail: Tail,
    candidates: Candidates,
    samples: int = SAMPLES,
    memory: int | None = None,
    seed: int = 0,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Estimates:
    """Of every candidate in every layer, in ``candidates.frames[0]``; ``tick(done, total)`` as it goes.

    The mean over the tokens of the tail, whose chunks each find sealed what a cache would have by then. Gradients take
    up to ``memory`` bytes, by default a fourth of what is free.
    """
    layers = list(candidates.footprint.shapes)
    recent, block = candidates.frames[0].recent_tokens, candidates.footprint.block_tokens
    sealed = [max(0, start - recent) // block * block for start, _ in tail.bounds]
    size = 2 * samples * sum(sealed) * max(h * (k + v) for h, k, v in candidates.footprint.shapes.values())
    parts = _batched(layers, max(1, (memory or _free_memory(tail.ids.device) // _FREE) // size))
    errors = _Errors(tail, candidates, sealed[-1])
    found: Estimates = {}
    total, done = len(parts) * samples * len(tail.bounds) + 2 * len(layers), 0

    def step(amount: int = 1) -> None:
        nonlocal done
        done += amount
        tick(done, total)

    for part in parts:
        gradients = _gradients(tail, part, samples, sealed, seed, step)
        for layer in part:
            sides = [_stacked(side, sealed[-1]) for side in zip(*gradients.pop(layer), strict=True)]
            for role, codec, squares in errors.projected(layer, sides):
                loss = squares / (2 * samples * (len(tail.ids) - tail.first))
                found[layer, role, codec] = loss if math.isfinite(loss) else math.inf
            step(2)
    return found


def _gradients(
    tail: Tail, layers: Sequence[int], samples: int, sealed: Sequence[int], seed: int, step: Callable[[], None]
) -> dict[int, list[tuple[Tensor, Tensor]]]:
    """By layer, for each chunk and sample, ∇ of the keys and values that are sealed before it.

    Gradients are ``[heads, tokens, dim]``, in bfloat16, which has float32's range.
    """
    found: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}
    generator = torch.Generator(tail.ids.device).manual_seed(seed)  # the same draws for all layers
    with _frozen(tail.model):
        for number, (start, end) in enumerate(tail.bounds):
            for _ in range(samples):
                leaves: list[Tensor] = []
                cache = branch(tail.exact(number))
                for layer in layers:
                    trunk = tuple(states.detach().requires_grad_() for states in cache.layers[layer].trunk)
                    cache.layers[layer].trunk = trunk
                    leaves += trunk
                with torch.enable_grad():
                    logits = tail.model(input_ids=tail.ids[None, start:end], cache=cache, use_cache=True).logits[0]
                    log_p = logits.float().log_softmax(-1)
                    drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
                    signs = 2 * torch.randint(0, 2, drawn.shape, generator=generator, device=drawn.device) - 1
                    gradients = torch.autograd.grad((log_p.gather(1, drawn) * signs).sum(), leaves)
                for layer, pair in zip(layers, _batched(gradients, 2), strict=True):
                    keys, values = (gradient[0, :, : sealed[number]].bfloat16() for gradient in pair)
                    found[layer].append((keys, values))
                step()
    return found


def _stacked(gradients: Sequence[Tensor], tokens: int) -> Tensor:
    """Gradients of one layer's keys, or values, ``[heads, samples, tokens · dim]``, 0 where they do not reach."""
    heads, _, dim = gradients[0].shape
    stacked = gradients[0].new_zeros(heads, len(gradients), tokens, dim)
    for number, gradient in enumerate(gradients):
        stacked[:, number, : gradient.shape[1]] = gradient
    return stacked.flatten(2)


class _Errors:
    """What each candidate makes of a layer's exact keys and values, less these, by the real cache."""

    def __init__(self, tail: Tail, candidates: Candidates, tokens: int) -> None:
        self._tail, self._tokens = tail, tokens
        frame = candidates.frames[0]
        self._read = tokens + frame.recent_tokens  # of which all but the last are sealed
        pairs = list(zip_longest(candidates.key, candidates.value, fillvalue="fp16"))
        self._caches = []
        for pair in pairs:
            assignment = Assignment(frame, dict.fromkeys(candidates.footprint.shapes, pair))
            resolved = candidates.policy(assignment, "candidate").resolve(tail.model)
            self._caches.append((pair, KVQuantCache(resolved, tail.model.config)))

    def projected(self, layer: int, sides: Sequence[Tensor]) -> Iterator[tuple[str, str, float]]:
        """Role, codec and Σ (g·δ)² over samples and heads, ``sides`` being the gradients (see `_stacked`)."""
        exact = [states[:, :, : self._read] for states in self._tail.held(layer)]
        at_once = max(1, _ERRORS // max(4 * states[0].numel() for states in exact))
        for some in _batched(self._caches, at_once):
            found: tuple[list[Tensor], list[Tensor]] = ([], [])
            with torch.no_grad():
                for _, cache in some:
                    cache.update(*exact, layer)
                    held = cache.layers[layer]
                    for errors, decoded, states in zip(found, (held.keys, held.values), exact, strict=True):
                        errors.append((decoded - states)[0, :, : self._tokens].float().flatten(1))
                    cache.reset()
                for which, role in enumerate(("key", "value")):
                    squares = _squares(sides[which], found[which])
                    for (pair, _), total in zip(some, squares, strict=True):
                        if pair[which] != "fp16":
                            yield role, pair[which], total


def _squares(gradients: Tensor, errors: Sequence[Tensor]) -> list[float]:
    """Σ (g·δ)² over heads and samples for each of ``errors`` ``[heads, tokens · dim]``."""
    total = torch.zeros(len(errors), dtype=torch.float64, device=gradients.device)
    for head, samples in enumerate(gradients):  # by head, since they are widened
        products = samples.float() @ torch.stack([error[head] for error in errors], dim=1)
        total += products.double().square().sum(dim=0)
    return total.tolist()


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _batched(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """No weight asks for a gradient, so that nothing is kept for it."""
    asking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in asking:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)
