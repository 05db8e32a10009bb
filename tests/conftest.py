"""Every test starts seeded; reads of memory nobody wrote give NaN or 0xFF instead of luck."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in the Makefile; read when torch is loaded
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or products on a GPU are refused as not deterministic

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is loaded, which other packages do too

from tests.models import tiny


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def deterministic_torch():
    # In this mode torch fills what `empty` returns with NaN or the largest integer.
    # Some of what models do on a GPU cannot be deterministic: there it is only warned of.
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    torch.set_num_threads(1)  # tiny models: waking a second thread costs more than it does
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def llama():
    return tiny("llama")
