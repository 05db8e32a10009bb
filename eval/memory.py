"""What a sweep will take in memory, told before it starts.

Every cache is filled with tensors without memory, so the bytes are those it will allocate, whatever the policy.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import DynamicCache

from .errors import InputError
from .protocols import NewCache
from .walk import EXACT_CHUNK

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE | re.ASCII)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_MOST = 2.0**60  # bytes that anybody may have
_SLICES = 64 << 20  # float64 work of the scores, and what libraries allocate by and by


def parse_size(text: str) -> int:
    """Bytes; ``4G`` is 4 · 2³⁰. Raises `InputError`."""
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * 2.0 ** _UNITS[match[2].lower()] if match else 0.0
    if not 1 <= size < _MOST:
        raise InputError(f"--max-memory: {text!r} is not an amount of memory; allowed: bytes, or with K, M, G, T")
    return int(size)


@dataclass(frozen=True)
class Estimate:
    """Bytes: what the process holds already, the exact history, each policy's copy of it, and work beside them."""

    held: int
    exact: int
    policies: dict[str, int]
    work: int

    def total(self, names: Sequence[str]) -> int:
        """The peak with the caches of ``names`` alive at once."""
        return self.held + self.exact + self.work + sum(self.policies[name] for name in names)


def estimate(
    model: Any, policies: Sequence[Any], new: NewCache, context: int, chunk: int, copied: int = 0
) -> Estimate:
    """The memory of a walk to ``context`` tokens in chunks of ``chunk``; runs the model on two tokens.

    ``copied`` tokens of the exact history are held once more: by the noise floor, or while they are written to disk.
    """
    states, logits = states_of(model, context)
    sizes = [keys.nbytes + values.nbytes for keys, values in states.values()]
    exact, largest = sum(sizes), max(sizes, default=0)
    mask = EXACT_CHUNK * context * logits.itemsize
    exact += exact * min(copied, context) // context
    # Of one layer: its history decoded, the pieces that is made of, and heads repeated for their queries; and as much
    # again that the allocator keeps, since every chunk's history is longer than the one before.
    work = 8 * largest + mask + 3 * chunk * logits.shape[-1] * logits.itemsize + _SLICES
    copies = {policy.name: _filled(new(policy), states) for policy in policies}
    return Estimate(resident_memory(), exact, copies, work)


def states_of(model: Any, context: int) -> tuple[dict[int, tuple[Tensor, Tensor]], Tensor]:
    """Keys and values, without memory, that layers hold of one row of ``context`` tokens, and logits of two tokens.

    ``[1, heads, tokens, dim]`` by layer, of those layers that hold keys and values. Runs the model on two tokens.
    """
    small = DynamicCache(config=model.config)
    with torch.inference_mode():
        logits = model(input_ids=torch.zeros(1, 2, dtype=torch.long), cache=small, use_cache=True).logits
    states = {}
    for index, layer in enumerate(small.layers):
        if isinstance(getattr(layer, "keys", None), Tensor):
            tokens = min(context, getattr(layer, "sliding_window", None) or context)
            keys, values = (
                part.new_empty((1, part.shape[1], tokens, part.shape[3]), device="meta")
                for part in (layer.keys, layer.values)
            )
            states[index] = keys, values
    return states, logits


def groups(found: Estimate, limit: int) -> list[list[str]]:
    """Names of policies whose caches fit into ``limit`` bytes at once, in order; `InputError` where one does not."""
    parts: list[list[str]] = []
    for name in found.policies:
        if (needed := found.total([name])) > limit:
            terms = {
                "held already": found.held,
                "exact history": found.exact,
                "compressed": found.policies[name],
                "of work": found.work,
            }
            told = ", ".join(f"{in_words(size)} {what}" for what, size in terms.items())
            raise InputError(
                f"--max-memory: {in_words(limit)}, but {name} alone needs {in_words(needed)} ({told}); "
                "allowed: more, or shorter contexts"
            )
        if parts and found.total([*parts[-1], name]) <= limit:
            parts[-1].append(name)
        else:
            parts.append([name])
    return parts


def resident_memory() -> int:
    """Bytes of memory this process has in use."""
    return int(psutil.Process().memory_info().rss)


def peak_memory() -> int:
    """Bytes of the most memory this process has had in use at once."""
    try:
        import resource
    except ImportError:  # Windows
        return int(getattr(psutil.Process().memory_info(), "peak_wset"))  # noqa: B009
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10  # KiB elsewhere


def in_words(size: int) -> str:
    """``1.5 GiB``, or MiB or KiB below one."""
    for unit, bits in (("GiB", 30), ("MiB", 20)):
        if size >= 1 << bits:
            return f"{size / 2**bits:.{1 if bits == 30 else 0}f} {unit}"
    return f"{size / 1024:.1f} KiB"


def _filled(cache: Any, states: dict[int, tuple[Tensor, Tensor]]) -> int:
    """Bytes a policy's cache allocates for ``states`` (keys and values by layer)."""
    total = 0
    for index, (keys, values) in states.items():
        if cache.resolved.layers[index].policy is None:
            total += keys.nbytes + values.nbytes
            continue
        cache.update(keys, values, index)
        total += sum(tensor.nbytes for tensor in cache.layers[index].held.tensors())
    return total
