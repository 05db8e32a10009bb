"""What tests of packed calls are given."""

from __future__ import annotations

import pytest

from kvquant.cache.packing import PackedMask
from tests.packed.pairs import POLICIES


@pytest.fixture(params=POLICIES)
def policy(request):
    return POLICIES[request.param]


@pytest.fixture
def unmade(monkeypatch):
    """Masks are never made: nothing is as large as tokens by tokens."""

    def made(mask):
        raise AssertionError(f"a mask of {tuple(mask.shape)} was made")

    monkeypatch.setattr(PackedMask, "solid", made)
