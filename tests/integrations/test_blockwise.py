"""`BlockTier`: what comes back is what was put, whole and under the same everything, or nothing."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant import CodecError, KVQuantWarning, PolicyError, PrecisionPolicy, StoreError, TieredStore
from kvquant.integrations.blockwise import BlockTier, LayerShape
from kvquant.keys import Identity
from kvquant.store.base import ALIGNMENT
from kvquant.testing import relative_rms

BLOCK, SINKS = 32, 4
SHAPES = [LayerShape(2, 16, 16), LayerShape(1, 32, 24), LayerShape(2, 16, 16)]
ID = Identity("weights", "policy", "torch.float32", "{}")
POLICIES = {
    "fp16": {"default": "fp16"},
    "int4": {"default": "int4"},
    "mixed": {"default": "int4", "layers": {"0": "fp16", "2": {"key": "int8", "value": "int4"}}},
}


def policy(name="fp16", **settings):
    chosen = {"block_tokens": BLOCK, "sink_tokens": SINKS, **POLICIES[name], **settings}
    return PrecisionPolicy.from_yaml(
        PrecisionPolicy(name=name, **{k: layered(k, v) for k, v in chosen.items()}).to_yaml()
    )


def layered(field, value):
    both = lambda codec: codec if isinstance(codec, dict) else {"key": codec, "value": codec}  # noqa: E731
    if field == "default":
        return both(value)
    return {name: both(codec) for name, codec in value.items()} if field == "layers" else value


def tier(name="fp16", dtype=torch.float32, identity=ID, store=None, **settings):
    store = TieredStore(host_budget="8MiB") if store is None else store
    return BlockTier(policy(name, **settings), SHAPES, dtype, store, identity.digest())


def states(blocks=2, dtype=torch.float32, seed=0):
    """Keys and values of so many blocks, by layer."""
    random = torch.Generator().manual_seed(seed)
    made = [
        tuple(
            torch.randn(blocks, shape.heads, BLOCK, dim, generator=random).to(dtype)
            for dim in (shape.key_dim, shape.value_dim)
        )
        for shape in SHAPES
    ]
    return made.__getitem__


def decoded(tier, blocks):
    return [tier.decode(layer, [block[layer] for block in blocks]) for layer in range(len(SHAPES))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", POLICIES)
def test_blocks_come_back_each_layer_by_its_codec(name, dtype):
    kept, given_ = tier(name, dtype), states(dtype=dtype)
    assert kept.put([b"a", b"b"], [True, False], given_) == 2
    blocks = [kept.fetch(b"a"), kept.fetch(b"b")]
    lossless = {"fp16": {0, 1, 2}, "int4": set(), "mixed": {0}}[name]
    for layer, found in enumerate(decoded(kept, blocks)):
        for side, exact in zip(found, given_(layer), strict=True):
            exact = torch.cat(list(exact), dim=1)  # [heads, 2 blocks, dim]
            assert side.dtype == dtype
            assert side.shape == exact.shape
            if layer in lossless:
                assert torch.equal(side, exact)
            else:
                assert 0 < relative_rms(side, exact) < 0.2
                assert torch.equal(side[:, :SINKS], exact[:, :SINKS])  # of the first block
                assert not torch.equal(side[:, BLOCK : BLOCK + SINKS], exact[:, BLOCK : BLOCK + SINKS])


def test_several_at_once_are_what_each_is_alone():
    together, apart = tier("int4"), tier("int4")
    together.put([b"a", b"b", b"c"], [False, True, False], states(3))
    for at, name in enumerate([b"a", b"b", b"c"]):
        apart.put([name], [name == b"b"], lambda layer, at=at: tuple(side[at : at + 1] for side in states(3)(layer)))
        key = apart.key(name)
        assert torch.equal(apart.store.get(key), together.store.get(key))


def test_stored_when_all_layers_are():
    kept = tier()

    def broken(layer):
        k, v = states()(layer)
        return (k, v) if layer < 2 else (k, v[:, :, :-1])

    with pytest.warns(KVQuantWarning, match="2 blocks are not stored: v: "):
        assert kept.put([b"a", b"b"], [True, False], broken) == 0
    assert len(kept.store) == 0
    assert kept.fetch(b"a") is None
    assert kept.stats().dropped == 2


def test_no_flipped_byte_is_decoded():
    kept = tier("int4")
    kept.put([b"a"], [True], states(1))
    key = kept.key(b"a")
    whole = kept.store.get(key)
    for at in [*range(64), *range(64, len(whole), len(whole) // 97)]:
        damaged = whole.clone()
        damaged[at] ^= 1 << at % 8
        kept.store.put(key, damaged)
        with pytest.warns(KVQuantWarning, match="damaged, and recomputed"):
            assert kept.fetch(b"a") is None
        assert b"a" not in kept  # so that it is stored again
    assert kept.stats().damaged == kept.stats().missed > 100
    kept.store.put(key, whole)
    assert kept.fetch(b"a") is not None


def test_no_other_block_or_layer_is_decoded():
    kept = tier("fp16")
    kept.put([b"a", b"b"], [True, False], states())
    other, own = kept.store.get(kept.key(b"b")), kept.store.get(kept.key(b"a"))
    sizes = torch.frombuffer(bytearray(own[4:28].numpy().tobytes()), dtype=torch.int64)
    first, third = 28, 28 + int(sizes[:2].sum())  # the third layer is as large as the first
    swapped = torch.cat((own[:28], own[third:], own[28 + int(sizes[0]) : third], own[first : first + int(sizes[0])]))
    for payload in (other, swapped, own[:-1], torch.cat((own, own[:1])), own[:20]):
        kept.store.put(kept.key(b"a"), payload)
        with pytest.warns(KVQuantWarning, match="damaged"):
            assert kept.fetch(b"a") is None


@given(st.binary(min_size=1, max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_a_miss(data):
    kept = tier()
    kept.store.put(kept.key(b"a"), torch.frombuffer(bytearray(data), dtype=torch.uint8))
    with pytest.warns(KVQuantWarning):
        assert kept.fetch(b"a") is None


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Identity)])
def test_another_identity_misses(field):
    store = TieredStore(host_budget="8MiB")
    kept = tier(store=store)
    kept.put([b"a"], [True], states(1))
    other = dataclasses.replace(ID, **{field: getattr(ID, field) + "x"})
    assert tier(identity=other, store=store).fetch(b"a") is None
    assert tier(store=store).fetch(b"b") is None
    assert tier(store=store).fetch(b"a") is not None


def test_blocks_outlive_the_process(tmp_path):
    def opened():
        return tier("int4", store=TieredStore(host_budget="1MiB", disk_budget="8MiB", disk_path=tmp_path))

    kept = opened()
    kept.put([b"a", b"b"], [True, False], states())
    before = decoded(kept, [kept.fetch(b"a"), kept.fetch(b"b")])
    kept.close()
    again = opened()
    for found, expected in zip(decoded(again, [again.fetch(b"a"), again.fetch(b"b")]), before, strict=True):
        assert all(map(torch.equal, found, expected))
    assert again.stats().loaded == 2
    again.close()
    assert again.fetch(b"a") is None  # closed
    assert again.put([b"c"], [True], states(1)) == 0


def test_the_last_blocks_of_a_sequence_leave_first():
    size = -(-len(stored_payload()) // ALIGNMENT) * ALIGNMENT
    kept = tier(store=TieredStore(host_budget=size * 6))
    for sequence in (b"a", b"b"):
        for at in range(4):
            kept.put([sequence + bytes([at])], [at == 0], states(1))
        kept.touch([sequence + bytes([at]) for at in range(4)])
    there = {name: [at for at in range(4) if name + bytes([at]) in kept] for name in (b"a", b"b")}
    assert there == {b"a": [0, 1], b"b": [0, 1, 2, 3]}


def stored_payload():
    kept = tier()
    kept.put([b"a"], [True], states(1))
    return kept.store.get(kept.key(b"a"))


def test_forgetting_leaves_others_blocks_and_names_its_own_anew():
    store = TieredStore(host_budget="8MiB")
    mine, other = tier(store=store), tier(identity=dataclasses.replace(ID, tenant="other"), store=store)
    for each in (mine, other):
        each.put([b"a"], [True], states(1))
    mine.forget()
    assert mine.fetch(b"a") is None
    assert other.fetch(b"a") is not None
    mine.put([b"a"], [True], states(1, seed=1))
    assert mine.fetch(b"a") is not None
    assert tier(store=store).fetch(b"a") is None  # another process does not take new weights' blocks for old ones'


def test_counts():
    kept = tier("int4", torch.bfloat16)
    kept.put([b"a", b"b"], [True, False], states(dtype=torch.bfloat16))
    kept.fetch(b"a"), kept.fetch(b"c")
    stats = kept.stats()
    assert (stats.stored, stats.loaded, stats.missed, stats.dropped, stats.damaged) == (2, 1, 1, 0, 0)
    assert stats.engine_bytes == 2 * BLOCK * 2 * sum(s.heads * (s.key_dim + s.value_dim) for s in SHAPES)
    assert stats.payload_bytes == sum(len(kept.store.get(kept.key(name))) for name in (b"a", b"b"))
    assert stats.saved_bytes == stats.engine_bytes - stats.payload_bytes
    assert "2 blocks stored, 0.0 MiB of the engine's cache in 0.0 MiB (" in str(stats)
    assert "kvquant_tier_stored_blocks_total 2\n" in stats.prometheus()


def test_what_has_no_room():
    with pytest.raises(
        StoreError, match=r"host_budget: 4096 bytes can't hold one block; the smallest that can is \d+$"
    ):
        tier(store=TieredStore(host_budget=4096))
    kept = tier(store=TieredStore(host_budget=len(stored_payload()) + ALIGNMENT))
    assert kept.put([b"a", b"b"], [True, False], states()) == 2  # the second went, as the first is worth more
    assert (b"a" in kept, b"b" in kept) == (True, False)


def test_what_does_not_fit():
    with pytest.raises(PolicyError, match="layer 7 does not exist"):
        tier("fp16", layers={"7": "int8"})
    with pytest.raises(CodecError):
        BlockTier(policy(), SHAPES, torch.int8, TieredStore(host_budget="1MiB"), ID.digest())


def test_threads():
    kept, wrong = tier(), []

    def work(number):
        name = bytes([number])
        for turn in range(20):
            kept.put([name], [False], states(1, seed=number))
            blocks = kept.fetch(name)
            if blocks is None or not torch.equal(decoded(kept, [blocks])[0][0], states(1, seed=number)(0)[0][0]):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not wrong
    assert kept.stats().stored == kept.stats().loaded == 120
