"""`KVQuantCache` with its blocks in a store, against the same cache without one."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

import kvquant
from kvquant import KVQuantCache, PrecisionPolicy
from kvquant.blocks import BlockKey
from kvquant.errors import StoreError
from kvquant.store.placement import SHRINKABLE
from kvquant.store.residency import DEVICE
from kvquant.store.tiered import BUFFERS, TieredStore
from kvquant.testing import assert_same_fields
from tests.models import SMALL, feed, generate, prompt, tiny
from tests.store.streams import at_rest
from tests.test_cache import padded

RECORD = 4096  # bytes; more than a block of any policy here

SHAPES = {
    "device": ("1MiB", None, None),
    "host": (None, "1MiB", None),
    "tiny device": (3 * RECORD, "1MiB", None),
    "disk": (None, None, "1MiB"),
    "all three": (3 * RECORD, 4 * RECORD, "1MiB"),
}


def policy(when="seal", key="int4", value="int4", **settings):
    return PrecisionPolicy(name="p", default={"key": key, "value": value}, when=when, **{**SMALL, **settings})


POLICIES = {
    "int4": {},
    "int8 and nf4": {"key": "int8", "value": "nf4", "block_tokens": 32},
    "raw keys": {"key": "fp16", "value": "int2"},
    "raw": {"key": "fp16", "value": "fp16"},
    "mixed": {"layers": {"0": {"key": "fp16", "value": "fp16"}, "2-3": {"key": "int8", "value": "int2"}}},
}


@pytest.fixture(params=SHAPES)
def shape(request):
    return request.param


@pytest.fixture
def make(fast_path):
    made = []

    def build(shape="tiny device", overlaps=False, **settings):
        device, host, disk = SHAPES[shape]
        path = None if disk is None else fast_path / f"{len(made)}"
        made.append(TieredStore(device, host, disk, path, **{"staging": 4 * 2 * RECORD, **settings}))
        made[-1].lane.overlaps = overlaps
        return made[-1]

    yield build
    gc.collect()
    for store in made:
        if not store.closed:
            at_rest(store)
            store.close()


def pair(model, store, **settings):
    chosen = policy(**settings)
    return KVQuantCache.for_model(model, chosen, store=store), KVQuantCache.for_model(model, chosen)


def assert_close(mine, other):
    torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


# --- blocks that are encoded at once ---


@pytest.mark.parametrize("streamed", [False, True], ids=["dense", "streamed"])
@pytest.mark.parametrize("name", POLICIES)
def test_policies(make, name, streamed):
    for family in ("llama", "qwen2"):
        model = tiny(family)
        if streamed:
            kvquant.enable(model)
        mine, other = pair(model, make(), **POLICIES[name])
        ids = prompt(150)
        assert_close(feed(model, mine, ids, 100, 7), feed(model, other, ids, 100, 7))
        assert mine.stats().blocks == other.stats().blocks > 0
        for layer in range(4):
            for side in ("key", "value"):
                one, two = (getattr(cache.block(layer, 0, 2), side) for cache in (mine, other))
                if layer == 0:  # what comes later depends on how attention was rounded
                    assert_same_fields(one.fields, two.fields)


@pytest.mark.parametrize("overlaps", [False, True], ids=["by the reader", "by a worker"])
def test_shapes(llama, make, shape, overlaps):
    kvquant.enable(llama)
    mine, other = pair(llama, make(shape, overlaps))
    ids = prompt(300, rows=2)
    assert_close(feed(llama, mine, ids, 130, 60, 1, 20), feed(llama, other, ids, 130, 60, 1, 20))
    assert torch.equal(
        generate(llama, mine, torch.cat((ids, prompt(2, rows=2)), 1)),
        generate(llama, other, torch.cat((ids, prompt(2, rows=2)), 1)),
    )


@pytest.mark.parametrize("chunks", [(1,), (3, 8, 13), (90,)])
def test_ragged_batches(llama, make, chunks):
    kvquant.enable(llama)
    ids, mask = padded([90, 9, 47], 90)
    mine, other = pair(llama, make())
    got = []
    for cache in (mine, other):
        logits, at, sizes = [], 0, list(chunks)
        while at < 90:
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            part = {"attention_mask": mask[:, : at + size]}
            with torch.no_grad():
                logits.append(llama(input_ids=ids[:, at : at + size], cache=cache, use_cache=True, **part).logits)
            at += size
        got.append(torch.cat(logits, 1)[mask.bool()])
    assert_close(*got)
    more = generate(
        llama, mine, torch.cat((ids, prompt(1, rows=3)), 1), 40, attention_mask=torch.cat((mask, mask[:, -1:]), 1)
    )
    assert torch.equal(
        more,
        generate(
            llama, other, torch.cat((ids, prompt(1, rows=3)), 1), 40, attention_mask=torch.cat((mask, mask[:, -1:]), 1)
        ),
    )


def test_beams(llama, make):
    mine, other = pair(llama, make())
    found = [generate(llama, cache, prompt(60), 40, num_beams=3, num_return_sequences=2) for cache in (mine, other)]
    assert torch.equal(*found)


@pytest.mark.parametrize("streamed", [False, True], ids=["dense", "streamed"])
def test_rows_that_are_cropped_reordered_selected_copied_and_reset(llama, make, streamed):
    if streamed:
        kvquant.enable(llama)
    store = make()
    mine, other = pair(llama, store)
    both = [mine, other]
    ids = prompt(100, rows=3)

    def same(caches, count, rows=3, seed=1):
        more = prompt(count, rows=rows, seed=seed)
        assert_close(*(feed(llama, cache, more, 5) for cache in caches))

    assert_close(*(feed(llama, cache, ids) for cache in both))
    for cache in both:
        cache.crop(-37)
    same(both, 30)
    for cache in both:
        cache.reorder_cache(torch.tensor([2, 0, 0]))
    same(both, 30, seed=2)
    twins = [copy.deepcopy(cache) for cache in both]
    for cache in both:
        cache.batch_select_indices(torch.tensor([1, 2]))
    same(both, 40, rows=2, seed=3)
    same(twins, 40, seed=4)
    for cache in both:
        cache.batch_repeat_interleave(2)
        cache.crop(-60)
    same(both, 40, rows=4, seed=5)
    same(twins, 40, seed=6)
    blocks = {key.block for key in store.keys()}  # noqa: SIM118
    assert len(blocks) == mine.rows.pool.live
    for cache in both:
        cache.reset()
    same(twins, 20, seed=7)
    assert len({key.block for key in store.keys()}) == mine.rows.pool.live < len(blocks)  # noqa: SIM118
    assert_close(*(feed(llama, cache, ids, 50) for cache in both))
    for cache in (*twins, *both):
        cache.reset()
    assert store.keys() == []


def test_caches_share_a_store(llama, make):
    store = make("all three")
    pairs = [pair(llama, store) for _ in range(3)]
    for turn in range(4):
        for number, caches in enumerate(pairs):
            ids = prompt(40 + turn, seed=10 * turn + number)
            assert_close(*(feed(llama, cache, ids, 9) for cache in caches))


def test_blocks_of_caches_that_are_gone_leave(llama, make):
    store = make()
    cache = KVQuantCache.for_model(llama, policy(), store=store)
    feed(llama, cache, prompt(100))
    twin = copy.deepcopy(cache)
    count = len(store)
    assert count == 4 * 5
    del cache
    gc.collect()
    assert len(store) == count
    feed(llama, twin, prompt(50), 7)
    assert len(store) > count
    del twin
    gc.collect()
    assert store.keys() == []
    assert store.stats().used == 0
    assert store.streams == []


def test_a_copy_that_goes_takes_only_what_it_alone_has(llama, make):
    store = make()
    mine, other = pair(llama, store)
    for cache in (mine, other):
        feed(llama, cache, prompt(100))
    twin = copy.deepcopy(mine)
    feed(llama, twin, prompt(100, seed=2))
    del twin
    gc.collect()
    assert mine.rows.pool.live == 5  # which has the pool let go of what was the copy's
    assert len(store) == 4 * 5
    assert_close(*(feed(llama, cache, prompt(60, seed=3), 11) for cache in (mine, other)))


def test_a_store_that_is_full_says_so_and_the_cache_can_be_reset(llama, make):
    store = TieredStore(host_budget=20 * RECORD // 4, staging=BUFFERS * RECORD)
    cache, other = pair(llama, store)
    with pytest.raises(StoreError, match="no room for .* blocks of layer"):
        feed(llama, cache, prompt(900), 10)
    cache.reset()
    assert_close(*(feed(llama, each, prompt(40), 9) for each in (cache, other)))
    assert store.check() == []
    store.close()
    with pytest.raises(StoreError, match="closed"):
        feed(llama, cache, prompt(100), 10)


def test_a_tier_that_holds_no_block_is_refused(llama):
    with TieredStore(device_budget=64, host_budget="1MiB") as store:
        with pytest.raises(StoreError, match="the smallest that can is"):
            KVQuantCache.for_model(llama, policy(), store=store)
        model = tiny("deepseek_v3")  # whose config does not tell what a block takes
        cache = KVQuantCache.for_model(model, policy(), store=store)
        with pytest.raises(StoreError, match="the smallest that can is"):
            feed(model, cache, prompt(100))


# --- blocks that stay as they were while there is room ---


def encoded(cache, layer, number):
    """The payload of a block, and its tag."""
    shared = cache._offload.shared
    key = BlockKey(shared.sequence, layer, cache.rows.rows[0].slots[number])
    return shared.store.get(key), shared.store.tag(key)


@pytest.mark.parametrize("streamed", [False, True], ids=["dense", "streamed"])
def test_with_room_on_the_device_nothing_is_lost(llama, make, streamed):
    if streamed:
        kvquant.enable(llama)
    for key, value in (("int4", "int4"), ("int2", "int8")):
        cache = KVQuantCache.for_model(llama, policy("evict", key, value), store=make("device"))
        exact = KVQuantCache.for_model(llama, policy(key="fp16", value="fp16"))
        ids = prompt(200, rows=2)
        assert_close(*(feed(llama, each, ids, 50, 9) for each in (cache, exact)))
        assert set(cache.store.placed(cache._offload.shared.sequence, 0, DEVICE).values()) == {SHRINKABLE}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("key", ["int4", "int8", "int2"])
def test_what_shrinks_becomes_what_it_would_have_been(make, family, key):
    """Bit for bit: in layer 0, whose states depend on nothing that was encoded."""
    model = tiny(family)
    cache = KVQuantCache.for_model(model, policy("evict", key), store=make("tiny device"))
    once = KVQuantCache.for_model(model, policy("seal", key), store=make("host"))
    ids = prompt(400)
    for each in (cache, once):
        feed(model, each, ids, 100, 20)
    tags = []
    for number in range(cache.stats().blocks):
        payload, tag = encoded(cache, 0, number)
        tags.append(tag)
        expected, other = encoded(once, 0, number)
        if tag != SHRINKABLE:
            assert tag == other
            assert torch.equal(payload, expected), number
    assert len(tags) == 24
    assert sum(tag != SHRINKABLE for tag in tags) > 12
    assert cache.store.stats().evictions["dense→compressed"] > 0
    for number in range(cache.stats().blocks):
        blocks = (each.block(0, 0, number) for each in (cache, once))
        if tags[number] != SHRINKABLE:
            one, two = blocks
            assert_same_fields(one.key.fields, two.key.fields)
            assert_same_fields(one.value.fields, two.value.fields)


def test_codes_stay_codes(llama, make):
    """What was encoded once is not touched again, wherever it moves."""
    store = make("all three")
    cache = KVQuantCache.for_model(llama, policy("evict"), store=store)
    feed(llama, cache, prompt(200), 10)
    known = {(layer, n): encoded(cache, layer, n) for layer in range(4) for n in range(11)}
    for step in range(8):
        feed(llama, cache, prompt(20, seed=step), 10)
        for place, (payload, tag) in known.items():
            now, other = encoded(cache, *place)
            if tag != SHRINKABLE:
                assert other == tag
                assert torch.equal(now, payload)
    assert any(tag != SHRINKABLE for _, tag in known.values())


@pytest.mark.parametrize("streamed", [False, True], ids=["dense", "streamed"])
def test_rows_and_copies_of_blocks_that_shrink(llama, make, streamed):
    """Blocks as they were beside encoded ones: near a cache whose blocks were all encoded."""
    if streamed:
        kvquant.enable(llama)
    store = make("tiny device")
    cache, once = (
        KVQuantCache.for_model(llama, policy(when, "int8", "int8"), store=s)
        for when, s in (("evict", store), ("seal", None))
    )
    ids = prompt(120, rows=2)
    for _ in range(2):
        for each in (cache, once):
            each.reset()
        logits = [feed(llama, each, ids, 60, 10) for each in (cache, once)]
        torch.testing.assert_close(*logits, atol=0.05, rtol=0.05)
        twins = [copy.deepcopy(each) for each in (cache, once)]
        for each in (cache, once):
            each.crop(-33)
            each.reorder_cache(torch.tensor([1, 0]))
        for caches in ((cache, once), twins):
            logits = [feed(llama, each, prompt(50, rows=2, seed=5), 9) for each in caches]
            torch.testing.assert_close(*logits, atol=0.05, rtol=0.05)
