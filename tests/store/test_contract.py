"""The contract of stores, kept by every shape there is."""

from __future__ import annotations

import pytest

from kvquant.store.base import BlockStore
from kvquant.store.disk import DiskStore
from kvquant.store.tiered import TieredStore
from kvquant.testing import LatencyStore, StoreContract, WrappedStore


class OnDisk(StoreContract):
    """Has a folder."""

    @pytest.fixture(autouse=True)
    def folder(self, fast_path):
        self.path = fast_path / "store"

    def budget(self, payloads: int) -> int:
        self.bytes = payloads * self.nbytes
        return self.bytes

    def reopen(self, store: BlockStore) -> BlockStore:
        store.close()
        return self.open()


class TestDisk(OnDisk):
    def make(self, payloads):
        self.budget(payloads)
        return self.open()

    def open(self):
        return DiskStore(self.path, self.bytes)


class TestDevice(StoreContract):
    def make(self, payloads):
        return TieredStore(device_budget=payloads * self.nbytes)


class TestHost(StoreContract):
    def make(self, payloads):
        return TieredStore(host_budget=payloads * self.nbytes)

    @staticmethod
    def hostile_keys():
        return [*StoreContract.hostile_keys(), bytearray(b"a"), [b"a"], {b"a"}]


class TestDeviceAndHost(StoreContract):
    ordered = False  # what is below is not known to be used less

    def make(self, payloads):
        above = payloads // 2 * self.nbytes
        return TieredStore(device_budget=above, host_budget=payloads * self.nbytes - above)


class TestHostAndDisk(OnDisk):
    ordered = False

    def make(self, payloads):
        above = payloads // 2 * self.nbytes
        self.budgets = above, payloads * self.nbytes - above
        return self.open()

    def open(self):
        return TieredStore(host_budget=self.budgets[0], disk_budget=self.budgets[1], disk_path=self.path)


class TestDeviceHostAndDisk(OnDisk):
    ordered = False
    room = 9

    def make(self, payloads):
        third = payloads // 3 * self.nbytes
        above = third or self.nbytes
        self.budgets = above, third or None, payloads * self.nbytes - above - third
        return self.open()

    def open(self):
        device, host, disk = self.budgets
        return TieredStore(device, host, disk, self.path)


class TestWrapped(StoreContract):
    def make(self, payloads):
        return WrappedStore(LatencyStore(TieredStore(host_budget=payloads * self.nbytes)))


del OnDisk
