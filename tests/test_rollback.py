"""Rows of a cache taken back, reordered, repeated, selected and copied: pointer work that moves no code."""

from __future__ import annotations

import copy

import pytest
import torch

from kvquant import CacheStateError, KVQuantCache
from kvquant.testing import relative_rms
from tests.models import feed, generate, prompt, small, stock


def test_crop_rolls_back_to_what_was(llama):
    ids = prompt(100)
    cache = KVQuantCache.for_model(llama, small())
    feed(llama, cache, ids)
    blocks = [cache.block(1, 0, n).to_bytes(b"") for n in range(3)]
    cache.crop(-40)
    assert cache.get_seq_length() == 60
    # Tokens 0-60 stay sealed (they were, up to 80), and what follows continues them.
    assert cache.rows.rows[0].ends == [16, 32, 48, 60]
    logits = feed(llama, cache, ids[:, 60:], 5)
    assert cache.rows.rows[0].ends == [16, 32, 48, 60, 64, 80]
    assert [cache.block(1, 0, n).to_bytes(b"") for n in range(3)] == blocks
    assert relative_rms(logits, feed(llama, stock(llama), ids)[:, 60:]) < 0.3
    cache.crop(0)
    assert cache.get_seq_length() == 100
    cache.crop(-1000)
    assert cache.get_seq_length() == 0
    assert cache.rows.pool.live == 0
    with pytest.raises(CacheStateError, match="as a negative"):
        cache.crop(5)


def test_reorder_composes_and_moves_no_code(llama):
    ids = prompt(60, rows=4)
    cache = KVQuantCache.for_model(llama, small())
    feed(llama, cache, ids)
    before = cache.layers[1].keys
    written = cache.stats().encode_seconds
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    assert torch.equal(cache.layers[1].keys, before.flip(0))
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    assert torch.equal(cache.layers[1].keys, before)
    assert cache.stats().encode_seconds == written
    with pytest.raises(CacheStateError, match="selected from a cache of 4 rows"):
        cache.reorder_cache(torch.tensor([4, 0, 0, 0]))


def test_repeat_and_select(llama):
    cache = KVQuantCache.for_model(llama, small())
    feed(llama, cache, prompt(60, rows=2))
    before, bytes_before = cache.layers[0].values, cache.stats().kv_bytes
    cache.batch_repeat_interleave(3)
    assert torch.equal(cache.layers[0].values, before.repeat_interleave(3, dim=0))
    assert cache.stats().layers[0].block_bytes * 4 <= bytes_before  # blocks are shared
    cache.batch_select_indices(torch.tensor([0, 5]))
    assert torch.equal(cache.layers[0].values, before)
    cache.batch_select_indices(torch.tensor([False, True]))
    assert torch.equal(cache.layers[0].values, before[1:])
    feed(llama, cache, prompt(10))
    assert cache.stats().tokens == (70,)


def test_reset_starts_anew(llama):
    cache = KVQuantCache.for_model(llama, small())
    first = feed(llama, cache, prompt(80, rows=3))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.stats().kv_bytes == cache.stats().kv_bytes_baseline == 0
    assert torch.equal(feed(llama, cache, prompt(80, rows=3)), first)


@pytest.mark.parametrize("grad", [False, True])
def test_deepcopy_shares_blocks_and_leaves_the_original_alone(llama, grad):
    cache = KVQuantCache.for_model(llama, small())
    feed(llama, cache, prompt(80))
    before = [cache.block(layer, 0, n).to_bytes(b"") for layer in range(4) for n in range(4)]
    with torch.set_grad_enabled(grad):
        twin = copy.deepcopy(cache)
        assert cache.rows.pool.live == 4
        generate(llama, twin, torch.cat((prompt(80), prompt(5)), dim=1), new=60)
    assert [cache.block(layer, 0, n).to_bytes(b"") for layer in range(4) for n in range(4)] == before
    assert cache.get_seq_length() == 80
    assert twin.get_seq_length() == 144
    longer = feed(llama, cache, prompt(30, seed=5))
    again = KVQuantCache.for_model(llama, small())
    feed(llama, again, prompt(80))
    assert torch.equal(feed(llama, again, prompt(30, seed=5)), longer)
    live = cache.rows.pool.live
    del twin
    assert cache.rows.pool.live < live
