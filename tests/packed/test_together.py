"""Packed rows together with what else a cache does: batches, beams, crops, stores, sessions, windows, devices."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import dispatch_model

import kvquant
from kvquant import KVQuantCache
from kvquant.cache.packing import PackedMask
from kvquant.store.tiered import TieredStore
from tests.models import feed, generate, prompt, small, tiny
from tests.packed.pairs import POLICIES, WINDOWED, Pair, enabled, packed


def padded(pair):
    """The mask of rows that end at the same column, and what to add to it for more."""
    rows = pair.cache.rows
    mask = torch.ones(len(rows.rows), rows.width, dtype=torch.long)
    for row, shown in zip(rows.rows, mask, strict=True):
        shown[: row.start] = 0
    return mask


@torch.no_grad()
def rectangular(pair, new, **given):
    """As many tokens for each row, as a batch with left padding."""
    ids = pair.ids(new * len(pair.alone)).view(-1, new)
    mask = torch.cat((padded(pair), torch.ones_like(ids)), dim=1)
    logits = pair.model(ids, cache=pair.cache, attention_mask=mask, **given).logits
    for row, (one, found) in enumerate(zip(pair.alone, logits, strict=True)):
        expected = pair.model(ids[row : row + 1], cache=one).logits[0]
        assert (found - expected).norm() <= pair.limit * expected.norm()
    pair.check()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "deepseek_v3", *WINDOWED])
def test_packed_calls_and_padded_batches_take_turns(family, policy):
    pair = Pair(enabled(family), policy)
    pair.step([30, 3, 50])
    for new in (1, 1, 20, 1):
        rectangular(pair, new)
    pair.step([1, 40, 1, 9], [1, 0, 2, None])
    rectangular(pair, 2)
    lengths = torch.tensor([[row.length] for row in pair.cache.rows.rows])
    rectangular(pair, 3, position_ids=lengths + torch.arange(3))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_a_padded_batch_becomes_packed(family, policy):
    pair = Pair(enabled(family), policy)
    ids, mask = prompt(40, rows=3), torch.ones(3, 40, dtype=torch.long)
    mask[1, :25], mask[2, :39] = 0, 0
    with torch.no_grad():
        pair.model(ids, cache=pair.cache, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
        for row, start in enumerate((0, 25, 39)):
            pair.alone.append(KVQuantCache.for_model(pair.model, policy))
            pair.model(ids[row : row + 1, start:], cache=pair.alone[-1])
    pair.exact = False  # rows of a batch share slabs
    pair.step([1, 30, 20])
    pair.step([1, 1, 1, 5], [2, 0, 1, None])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generate_goes_on_with_packed_rows(family, policy):
    pair = Pair(enabled(family), policy)
    counts = [30, 3, 50]
    parts = [pair.ids(count) for count in counts]
    with torch.no_grad():
        packed(pair.model, pair.cache, [part[:-1] for part in parts])
    ids, mask = torch.zeros(3, 50, dtype=torch.long), torch.zeros(3, 50, dtype=torch.long)
    for row, part in enumerate(parts):
        ids[row, -len(part) :], mask[row, -len(part) :] = part, 1
    text = generate(pair.model, pair.cache, ids, new=20, attention_mask=mask)
    for row, part in enumerate(parts):
        alone = generate(pair.model, KVQuantCache.for_model(pair.model, policy), part[None], new=20)
        assert torch.equal(text[row, 50:], alone[0, len(part) :])


def test_rows_change_places_multiply_and_are_cut(policy):
    pair = Pair(enabled(), policy)
    pair.step([60, 3, 40])
    pair.cache.reorder_cache(torch.tensor([2, 0, 1]))
    pair.alone = [pair.alone[row] for row in (2, 0, 1)]
    pair.step([1, 5, 1])
    pair.cache.batch_repeat_interleave(2)
    pair.alone = [copy.deepcopy(one) for one in pair.alone for _ in range(2)]
    with torch.no_grad():
        parts = [pair.ids(count) for count in (1, 20, 3, 1, 7, 30)]
        for one, part, found in zip(pair.alone, parts, packed(pair.model, pair.cache, parts), strict=True):
            expected = pair.model(part[None], cache=one).logits[0]
            assert (found - expected).norm() <= pair.limit * expected.norm()
    pair.cache.crop(-8)  # the last tokens of each row
    for one in pair.alone:
        one.crop(-8)
    lengths = [one.get_seq_length() for one in pair.alone]
    assert [row.length for row in pair.cache.rows.rows] == lengths
    assert pair.cache.rows.width == max(lengths)
    parts = [pair.ids(count) for count in (4, 1, 1, 20, 1, 2)]
    with torch.no_grad():
        for one, part, found in zip(pair.alone, parts, packed(pair.model, pair.cache, parts), strict=True):
            expected = pair.model(part[None], cache=one).logits[0]
            assert (found - expected).norm() <= pair.limit * expected.norm()


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3", "cohere2"])
def test_windows_change_places_multiply_and_are_cut(family):
    pair = Pair(enabled(family), POLICIES["fp16"])
    pair.step([4, 2])
    pair.cache.crop(-1)
    for one in pair.alone:
        one.crop(-1)
    pair.step([2, 1])
    pair.step([40, 3], [1, 0])
    pair.cache.reorder_cache(torch.tensor([1, 0]))
    pair.cache.batch_repeat_interleave(torch.tensor([1, 2]))
    pair.alone = [pair.alone[1], pair.alone[0], copy.deepcopy(pair.alone[0])]
    pair.exact = False
    pair.step([1, 5, 30])
    rectangular(pair, 3)
    pair.cache.reorder_cache(torch.tensor([2, 0, 1]))
    pair.cache.batch_repeat_interleave(1)
    pair.alone = [pair.alone[row] for row in (2, 0, 1)]
    rectangular(pair, 1)
    pair.step([1, 1, 1])
    with pytest.raises(RuntimeError, match="does not track past states"):
        pair.cache.crop(-1)
    pair.cache.reset()
    pair.alone = []
    pair.step([9, 3])


def test_windows_hold_no_more_than_themselves():
    pair = Pair(enabled("gemma3"), POLICIES["fp16"])
    pair.step([40, 3, 9])
    pair.step([1, 30, 1])
    assert pair.cache.stats().other_bytes == sum(one.stats().other_bytes for one in pair.alone)
    layer = pair.cache.layers[0]
    assert layer.keys.shape == (3, 2, 7, 16)
    torch.testing.assert_close(layer.keys[:1], pair.alone[0].layers[0].keys, rtol=1e-4, atol=1e-4)
    assert (layer.get_seq_length(), layer.get_max_length()) == (41, 8)


def test_windows_of_long_prompts(unmade):
    """In portions of queries, and with a window longer than those."""
    for window in (8, 1500):
        pair = Pair(enabled("gemma3", sliding_window=window), POLICIES["fp16"])
        pair.step([1100, 3, 2100])
        pair.step([1, 1200, 1])


def test_a_row_that_was_cut_to_nothing_begins_anew():
    pair = Pair(enabled(), POLICIES["fp16"])
    pair.step([40, 3])
    pair.cache.crop(-5)
    pair.alone[0].crop(-5)
    pair.alone[1].crop(-3)
    pair.step([1, 30])


@pytest.mark.parametrize("tiers", [("1MiB", None), ("12KiB", "1MiB"), (None, "1MiB")])
@pytest.mark.parametrize("when", ["seal", "evict"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_blocks_in_a_store(tiers, when, family):
    policy = small(when=when) if when == "seal" else small("fp16", "fp16", when=when)
    with TieredStore(*tiers, staging="64KiB") as store:
        pair = Pair(enabled(family), policy, store)
        pair.step([100, 3, 60])
        for _ in range(4):
            pair.step([1, 1, 1])
        pair.step([30, 1], [1, 0])
        held = store.stats()
        pair.keep([1, 2])
        pair.step([1, 50, 80], [1, 0, None])
        pair.step([1] * 3)
        assert not pair.cache.stats().fallbacks
        assert held != store.stats()


@pytest.mark.parametrize(("family", "codec"), [("llama", "fp16"), ("llama", "int4"), ("gemma3", "fp16")])
def test_sessions_are_resumed_where_packed_rows_were(tmp_path, family, codec):
    policy = small(codec, codec, when="seal")
    with TieredStore("1MiB", "1MiB", "4MiB", tmp_path, staging="64KiB") as store:
        pair = Pair(enabled(family), policy, store)
        pair.step([70, 3, 40])
        pair.cache.save("rows")
        resumed = KVQuantCache.load(pair.model, "rows", store)
        assert resumed.rows.packed
        pair.cache = resumed
        rectangular(pair, 1)
        pair.step([1, 30, 1, 9], [2, 1, 0, None])


def test_packed_rows_share_their_beginnings(tmp_path):
    policy, model = small(), enabled()
    with TieredStore("1MiB", "4MiB", staging="64KiB") as store:
        texts = [prompt(count, seed=count)[0] for count in (80, 100)]
        cache = KVQuantCache.for_model(model, policy, store=store)
        with torch.no_grad():
            packed(model, cache, [text[:50] for text in texts])
            packed(model, cache, [text[50:] for text in texts])
        alone = KVQuantCache.for_model(model, policy, store=store)
        feed(model, alone, texts[1][None])
        assert cache.content_keys(1) == alone.content_keys(0)
        assert cache.share() == 4 * (4 + 5)
        reader = KVQuantCache.for_model(model, policy, store=store)
        assert reader.reuse(texts[1][None]) == 80
        with torch.no_grad():
            packed(model, reader, [texts[1][80:], texts[0][:30]], [0, None])
        assert [row.length for row in reader.rows.rows] == [100, 30]


def test_layers_on_several_devices(tmp_path):
    places = {f"model.layers.{index}": "disk" if index % 2 else "cpu" for index in range(4)}
    places |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    model = dispatch_model(tiny(), places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    kvquant.enable(model)
    pair = Pair(model, POLICIES["int4"])
    pair.step([70, 3])
    pair.step([1, 20])
    assert not pair.cache.stats().fallbacks


def test_a_mask_moves_and_is_cut_without_being_made(unmade):
    mask = PackedMask([(3, 2), (0, 4)], torch.bool, torch.device("cpu"))
    assert mask.shape == (1, 1, 6, 9)
    for same in (mask.to("meta"), mask[:, :, :, :9], mask.detach(), mask.to(torch.bool)):
        assert isinstance(same, PackedMask)
        assert same.shape == mask.shape
    assert mask.to("meta").device.type == "meta"


def test_what_a_mask_shows():
    expected = torch.tensor(
        [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1, 1]]
    )
    sizes = [(3, 2), (0, 2)]
    shown = PackedMask(sizes, torch.bool, torch.device("cpu"))
    assert torch.equal(shown & True, expected.bool()[None, None])
    added = PackedMask(sizes, torch.float32, torch.device("cpu")) + 0
    assert torch.equal(added == 0, expected.bool()[None, None])
    assert added.min() == torch.finfo(torch.float32).min
    assert torch.equal(shown[..., 1:], expected.bool()[None, None, :, 1:])
    assert shown.to(torch.float32).dtype == torch.float32
