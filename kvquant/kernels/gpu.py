"""Where Triton kernels run: on GPUs that multiply bfloat16, or, slowly, interpreted (``TRITON_INTERPRET=1``)."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def installed() -> bool:
    """Whether there is a Triton."""
    return find_spec("triton") is not None


def obstacle(device: torch.device) -> str:
    """Why kernels can't work on a GPU, or nothing."""
    if not installed():
        return "there is no Triton; pip install triton"
    return "" if _recent_enough(device) else "it does not multiply bfloat16"


def runs_on(x: Tensor) -> bool:
    """Whether kernels can work on a tensor where it is."""
    if x.is_cuda:
        return not obstacle(x.device)
    return x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1" and installed()


def serves(x: Tensor) -> bool:
    """Whether kernels are the means for a tensor. Interpreted, they are for tests."""
    return x.is_cuda and runs_on(x)


def on(x: Tensor) -> AbstractContextManager[object]:
    """Kernels start on the current GPU, which must be that of their tensors."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def power_of_two(number: int) -> int:
    """The power of two from 16 on, which matrix units want, that ``number`` fits in."""
    return max(16, 1 << (number - 1).bit_length())


@lru_cache(maxsize=16)
def _recent_enough(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)
