"""Contracts that others can hold their own codecs and stores to, faults to try them with, and measures of error.

    from kvquant.testing import CodecContract, StoreContract

    class TestMyCodec(CodecContract):
        codec = MyCodec()
        sqnr_floor = 20.0

    class TestMyStore(StoreContract):
        def make(self, payloads):
            return MyStore(budget=payloads * self.nbytes)

Needs pytest only to be collected; importing it runs nothing.
"""

from .codecs import CodecContract, assert_same_fields
from .faults import FaultyFiles, FaultyStore, LatencyStore, WrappedStore, at_calls, at_random
from .measures import relative_rms, sqnr_db
from .store_case import payload_of, version_of
from .stores import StoreContract

__all__ = [
    "CodecContract",
    "FaultyFiles",
    "FaultyStore",
    "LatencyStore",
    "StoreContract",
    "WrappedStore",
    "assert_same_fields",
    "at_calls",
    "at_random",
    "payload_of",
    "relative_rms",
    "sqnr_db",
    "version_of",
]
