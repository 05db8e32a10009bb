"""Whatever a test did to its stores, in the end they must be sound."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from kvquant.errors import StoreError
from kvquant.store.disk import DiskStore


@pytest.fixture
def disk(tmp_path):
    """Opens stores in ``tmp_path / "store"``; those still open at the end are checked and closed."""
    opened: list[DiskStore] = []

    def opener(budget: int = 1 << 20, **settings) -> DiskStore:
        opened.append(DiskStore(tmp_path / "store", budget, **settings))
        return opened[-1]

    yield opener
    for store in reversed(opened):
        try:
            stats = store.stats()
        except StoreError:
            continue  # closed
        assert store.check() == []
        assert stats.pinned == 0
        assert stats.used <= stats.tiers[0].budget
        store.close()


@pytest.fixture
def fast_path():
    """A folder in memory where there is such a thing, for tests that open hundreds of stores."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as path:
        yield Path(path)
