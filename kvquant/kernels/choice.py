"""Which of the ways to attend is taken, and what the means of this machine are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import eager, gpu, gpu_attention, native, wide
from .loading import ISAS, isa, missing
from .segments import Segment

Attend = Callable[..., tuple[Tensor, Tensor]]


def chosen(query: Tensor, segments: Sequence[Segment], dim: int, softcap: float = 0.0) -> Attend:
    """The way to attend that is taken; all have the signature of `eager.attend`."""
    if query.is_cuda:
        return gpu_attention.attend if gpu.serves(query) else eager.attend
    if wide.serves(query, segments, dim, softcap):
        return wide.attend
    return native.attend if native.serves(query, segments) else eager.attend


def serving(query: Tensor, segments: Sequence[Segment], dim: int, softcap: float = 0.0) -> str:
    """What `attend` takes for this, in words."""
    way = chosen(query, segments, dim, softcap)
    if way is native.attend:
        return f"compiled kernel ({ISAS[isa()]})"
    if way is wide.attend:
        return "decoded piece by piece into torch's fused kernel"
    return "Triton kernel" if way is gpu_attention.attend else "plain torch"


def means() -> dict[str, str]:
    """What attends, encodes and decodes on each device of this machine, in words; where that is plain torch, why."""
    threads = torch.get_num_threads()
    compiled = f"compiled kernels of integer codecs ({ISAS[isa()]}), {threads} thread{'s' if threads > 1 else ''}"
    found = {"cpu": f"plain torch, which is slower: {missing()}" if missing() else compiled}
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        why = gpu.obstacle(device)
        name = torch.cuda.get_device_name(device)
        found[str(device)] = f"plain torch on {name}: {why}" if why else f"Triton kernels of integer codecs on {name}"
    return found
