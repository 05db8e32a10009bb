"""LMCache 0.5.6's server on the CPU: its storage over an L2 adapter of files that our serde encodes."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch
from lmcache.v1.distributed import config as server_config
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.serde import create_serde_processor, get_registered_serde_types
from lmcache.v1.distributed.serde.base import Deserializer, SerdeConfig, Serializer
from lmcache.v1.distributed.storage_manager import StorageManager as Server
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator

import kvquant
from kvquant.errors import StoreError, UnsupportedError
from kvquant.integrations import lmcache as adapter
from kvquant.testing import relative_rms

README = (Path(__file__).parents[2] / "README.md").read_text()
LAYERS, HEADS, DIM, CHUNK = 4, 2, 64, 256
SHAPE = torch.Size((2, LAYERS, CHUNK, HEADS * DIM))
LAYOUT = MemoryLayoutDesc(shapes=[SHAPE], dtypes=[torch.bfloat16])


def object_key(number, model="model", **others):
    return ObjectKey(bytes([number]) * 8, model, ObjectKey.ComputeKVRank(1, 0, 1, 0), **others)


class ServerOfFiles:
    """A server's storage as the README configures it: L1 in memory, L2 in files that our serde has encoded."""

    def __init__(self, folder, **options):
        (written,) = re.findall(r"--l2-adapter '(.*?)'", README)
        plugin = json.loads(written.replace("/cache", str(folder)))
        plugin["serde"] |= {"head_dim": DIM} | options
        arguments = ["--l1-size-gb", "0.125", "--no-l1-use-lazy", "--eviction-policy", "LRU"]
        self.folder, self.closed = folder, False
        self.server = Server(server_config.parse_args([*arguments, "--l2-adapter", json.dumps(plugin)]))

    def close(self):
        if not self.closed:
            self.server.close()
        self.closed = True

    def files(self):
        return sorted(path for path in self.folder.iterdir() if path.suffix == ".data")

    def put(self, keys):
        objs = self.server.reserve_write(keys, LAYOUT)
        were = []
        for key in keys:
            objs[key].tensor.normal_()
            were.append(objs[key].tensor.clone())
        self.server.finish_write(keys)
        deadline = time.monotonic() + 60
        while len(self.files()) < len(keys) and time.monotonic() < deadline:
            time.sleep(0.01)
        deleted = 0
        while deleted < len(keys) and time.monotonic() < deadline:  # those that are still being stored are locked
            deleted += self.server.delete_l1_keys(keys)[0]
            time.sleep(0.01)
        return were

    def prefetch(self, keys):
        """How many of the first keys are in L1 again, and what they are there."""
        handle = self.server.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)]))
        assert self.server.wait_prefetch_status(handle, 60)
        result = self.server.query_prefetch_status(handle)
        count = result.hit_cells[0].popcount()
        found = []
        if count:
            with self.server.read_prefetched_results(keys[:count]) as objs:
                found = [obj.tensor.clone() for obj in objs]
            self.server.finish_read_prefetched(keys[:count])
        return count, found


@pytest.fixture
def open_server(tmp_path):
    opened = []

    def opening(**options):
        opened.append(ServerOfFiles(tmp_path, **options))
        return opened[-1]

    yield opening
    for each in opened:
        each.close()


@pytest.mark.parametrize("policy", ["fp16", "int4", "balanced"])
def test_the_server_stores_and_prefetches_encoded_chunks(open_server, policy):
    server = open_server(policy=policy)
    keys = [object_key(number) for number in range(3)]
    were = server.put(keys)
    sizes = {path.stat().st_size for path in server.files()}
    assert sizes == {estimate(policy)}
    count, found = server.prefetch(keys)
    assert count == 3
    for was, tensor in zip(were, found, strict=True):
        assert relative_rms(tensor, was) < 0.1
        assert torch.equal(tensor, was) == (policy == "fp16")
    assert policy != "int4" or 3.25 * sizes.pop() < SHAPE.numel() * 2  # heads of a tiny model: headers show


def estimate(policy):
    processor = create_serde_processor(SerdeConfig("kvquant", {"policy": policy, "head_dim": DIM}))
    try:
        return processor.estimate_serialized_size(LAYOUT)
    finally:
        processor.close()


def test_the_server_has_damaged_chunks_computed_anew(open_server):
    server = open_server(policy="int4")
    keys = [object_key(number) for number in range(2)]
    server.put(keys)
    path = server.files()[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert server.prefetch(keys)[0] == 0
    assert server.prefetch(keys[1:])[0] == 1


def test_a_file_under_another_chunks_name_is_damage(open_server):
    server = open_server(policy="fp16")
    keys = [object_key(number) for number in range(2)]
    server.put(keys)
    first, second = server.files()
    first.write_bytes(second.read_bytes())
    assert server.prefetch(keys[:1])[0] == 0


def test_files_of_another_policy_or_tenant_are_misses(open_server):
    """Case 34, as far as the server's keys tell."""
    server = open_server(policy="k4v2")
    keys = [object_key(number) for number in range(2)]
    server.put(keys)
    others = [[object_key(n, cache_salt="u") for n in range(2)], [object_key(n, model="other") for n in range(2)]]
    assert [server.prefetch(other)[0] for other in others] == [0, 0]
    for policy, hits in (("int3", 0), ("k4v2", 2)):  # as large as one another
        server.close()
        server = open_server(policy=policy)
        assert server.prefetch(keys)[0] == hits


def test_what_the_serde_cannot_encode_is_said_in_a_line():
    manager = AdHocMemoryAllocator("cpu")
    both = kvquant.PrecisionPolicy.load("int4"), DIM
    serializer, key = adapter.KVQuantSerializer(*both), object_key(1)
    room = manager.allocate(torch.Size((SHAPE.numel(),)), torch.uint8)
    groups = manager.allocate([SHAPE, SHAPE], [torch.bfloat16, torch.bfloat16])
    with pytest.raises(UnsupportedError, match=r"^2 groups of layers in a chunk; allowed: one, all layers alike$"):
        serializer.serialize(groups, room, key)
    large = manager.allocate(SHAPE, torch.bfloat16)
    large.tensor.fill_(1e5)
    with pytest.raises(
        kvquant.CodecError, match=r"^values beyond float16's range; allowed: up to 65504, rotated, since"
    ):
        serializer.serialize(large, room, key)
    large.tensor.fill_(1e3)
    assert serializer.serialize(large, room, key) == serializer.estimate_serialized_size(LAYOUT)
    layered = adapter.KVQuantSerializer(kvquant.PrecisionPolicy.load("balanced"), DIM)
    with pytest.raises(
        UnsupportedError, match=r"^object group 1 with policy 'balanced'; allowed: a policy with the same"
    ):
        layered.serialize(large, room, object_key(1, object_group_id=1))
    for shapes in ([torch.Size((1, LAYERS, CHUNK, 576))], [SHAPE, SHAPE], [torch.Size((5,))]):
        desc = MemoryLayoutDesc(shapes=shapes, dtypes=[torch.bfloat16] * len(shapes))
        assert serializer.estimate_serialized_size(desc) == 2 * sum(shape.numel() for shape in shapes)
    for obj in (room, groups, large):
        obj.ref_count_down()


def test_registering_is_idempotent_and_the_bases_are_lmcaches():
    adapter.register()
    adapter.register()
    assert get_registered_serde_types().count("kvquant") == 1
    assert issubclass(adapter.KVQuantSerializer, Serializer)
    assert issubclass(adapter.KVQuantDeserializer, Deserializer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 64, "bits": 4}, r"^serde\.bits: unknown option; allowed: policy, head_dim, workers$"),
        ({"head_dim": "64"}, r"^serde\.head_dim: '64'; allowed: a whole number$"),
        ({}, r"^serde\.head_dim: 0, .*head_dim, the channels of a head, must be given$"),
        ({"head_dim": 64, "policy": "nope"}, r"^serde\.policy: policy 'nope' is neither a file nor a preset"),
    ],
)
def test_a_serde_that_cannot_be_is_refused_in_a_line(options, message):
    with pytest.raises((StoreError, kvquant.PolicyError), match=message):
        create_serde_processor(SerdeConfig("kvquant", options))
