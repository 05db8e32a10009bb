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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvquant import KVQuantCache, PrecisionPolicy

from ..exact import branch
from .tail import Tail

if TYPE_CHECKING:
    from kvquant.tuner.candidates import Candidates

SAMPLES = 6  # backward passes of each chunk
MEMORY = 2 << 30  # bytes of gradients held at once; layers that do not fit take passes of their own
_CODECS = 8  # whose errors are held at once

Estimates = dict[tuple[int, str, str], float]
"""By layer, role (``key`` or ``value``) and codec, nats per token."""


def estimates(
    tail: Tail,
    candidates: Candidates,
    samples: int = SAMPLES,
    memory: int = MEMORY,
    seed: int = 0,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Estimates:
    """Of every candidate in every layer, in ``candidates.frames[0]``; ``tick(done, total)`` as it goes."""
    layers = list(candidates.footprint.shapes)
    size = max(_gradient_bytes(tail, layer) for layer in layers) * samples * len(tail.bounds)
    parts = _batched(layers, max(1, memory // size))
    found: Estimates = {}
    total, done = len(parts) * samples * len(tail.bounds) + 4 * len(layers), 0

    def step(amount: int = 1) -> None:
        nonlocal done
        done += amount
        tick(done, total)

    for part in parts:
        gradients = _gradients(tail, part, samples, seed, step)
        for layer in part:
            found |= _of_layer(tail, candidates, layer, gradients.pop(layer), samples)
            step(4)
    return found


def _gradient_bytes(tail: Tail, layer: int) -> int:
    keys, values = tail.held(layer)
    return 2 * (keys.numel() + values.numel())


def _gradients(
    tail: Tail, layers: Sequence[int], samples: int, seed: int, step: Callable[[], None]
) -> dict[int, list[tuple[int, Tensor, Tensor]]]:
    """By layer, for each chunk and sample, where the chunk starts and ∇ of keys and values before it.

    Gradients are ``[heads, tokens, dim]``, in bfloat16, which has float32's range.
    """
    found: dict[int, list[tuple[int, Tensor, Tensor]]] = {layer: [] for layer in layers}
    generator = torch.Generator().manual_seed(seed)  # the same draws for all layers
    with _frozen(tail.model):
        for number, (start, end) in enumerate(tail.bounds):
            ids = tail.ids[None, start:end]
            for _ in range(samples):
                leaves: list[Tensor] = []
                cache = branch(tail.exact(number))
                for layer in layers:
                    trunk = tuple(states.detach().requires_grad_() for states in cache.layers[layer].trunk)
                    cache.layers[layer].trunk = trunk
                    leaves += trunk
                with torch.enable_grad():
                    logits = tail.model(input_ids=ids, cache=cache, use_cache=True).logits[0].float()
                    log_p = logits.log_softmax(-1)
                    drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
                    signs = 2 * torch.randint(0, 2, drawn.shape, generator=generator) - 1
                    gradients = torch.autograd.grad((log_p.gather(1, drawn) * signs).sum(), leaves)
                for layer, pair in zip(layers, _batched(gradients, 2), strict=True):
                    keys, values = (gradient[0].bfloat16() for gradient in pair)
                    found[layer].append((start, keys, values))
                step()
    return found


def _of_layer(
    tail: Tail,
    candidates: Candidates,
    layer: int,
    gradients: Sequence[tuple[int, Tensor, Tensor]],
    samples: int,
) -> Estimates:
    found: Estimates = {}
    tokens = tail.bounds[-1][1] - tail.first
    for which, role in enumerate(("key", "value")):
        codecs = [codec for codec in getattr(candidates, role) if codec != "fp16"]
        for some in _batched(codecs, _CODECS):
            errors = [_error(tail, candidates.isolated(layer, role, codec), layer, which) for codec in some]
            stacked = torch.stack(errors, dim=1)  # [heads, codecs, tokens, dim]
            sums = torch.zeros(len(some), dtype=torch.float64)
            frame, block = candidates.frames[0], candidates.footprint.block_tokens
            for start, *both in gradients:
                # What a call of the cache at `start` finds sealed.
                sealed = (start - frame.recent_tokens) // block * block
                gradient = both[which][:, :sealed].float().flatten(1)
                products = torch.bmm(stacked[:, :, :sealed].flatten(2), gradient[:, :, None])[..., 0]
                sums += products.double().square().sum(dim=0)
            for codec, total in zip(some, sums.tolist(), strict=True):
                found[layer, role, codec] = total / (2 * samples * tokens) if math.isfinite(total) else math.inf
    return found


def _error(tail: Tail, policy: PrecisionPolicy, layer: int, which: int) -> Tensor:
    """Decoded less exact, ``[heads, tokens, dim]`` float32, of all tokens but the last few of the text."""
    cache = KVQuantCache(policy.resolve(tail.model), tail.model.config)
    exact = tail.held(layer)
    with torch.no_grad():
        cache.update(*exact, layer)
        held = cache.layers[layer]
        decoded = held.values if which else held.keys
        error: Tensor = (decoded.float() - exact[which].float())[0]
    return error


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
