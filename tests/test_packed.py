"""Packed calls: rows that begin, read and decode in one line of tokens are what each is alone."""

from __future__ import annotations

import copy
import functools
import warnings
import weakref

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import kvquant
from kvquant import CacheStateError, KVQuantCache, KVQuantWarning, UnsupportedError
from kvquant.arena import SlotPool
from kvquant.cache.packing import PackedMask
from kvquant.store.tiered import TieredStore
from tests.models import FAMILIES, feed, generate, prompt, small, tiny
from tests.packing import Pair, enabled, packed

POLICIES = {"fp16": small("fp16", "fp16"), "int4": small("int4", {"codec": "int4", "rotate": "hadamard"})}
WINDOWED = ["cohere2", "gemma2", "gemma3", "gemma3n", "gpt_oss"]


@pytest.fixture(params=POLICIES)
def policy(request):
    return POLICIES[request.param]


@pytest.fixture
def unmade(monkeypatch):
    """Masks are never made: nothing is as large as tokens by tokens."""

    def made(mask):
        raise AssertionError(f"a mask of {tuple(mask.shape)} was made")

    monkeypatch.setattr(PackedMask, "solid", made)


# --- equal to each row alone ---


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"qwen3_next", "bloom"}))
def test_prompts_chunks_and_steps_in_one_call(family):
    model = tiny(family)
    kvquant.enable(model)
    for policy in POLICIES.values() if family in ("llama", "qwen2", "gemma3") else [POLICIES["int4"]]:
        pair = Pair(model, policy)
        with warnings.catch_warnings():
            warnings.simplefilter("error", KVQuantWarning)
            pair.step([60, 1, 40, 17])
            for _ in range(6):
                pair.step([1, 1, 1, 1])
            pair.step([20, 1, 5, 33], [2, 0, 3, None])
            pair.step([1, 60, 1], [4, 1, 3])
            pair.step([1] * 5)
        assert not pair.cache.stats().fallbacks


def test_codes_are_those_of_the_row_alone_within_rounding():
    pair = Pair(enabled("qwen2"), POLICIES["int4"])
    pair.step([70, 3, 40, 17])
    for _ in range(20):
        pair.step([1, 1, 1, 1])
    pair.keep([0, 2, 3])
    pair.step([1, 100, 1, 50], [0, 1, 2, None])
    assert pair.off_codes() < 1e-3


def test_the_same_states_give_the_same_codes_bit_for_bit():
    """Without the model's products: states are given to the cache as they are."""
    model = enabled()
    pair = Pair(model, POLICIES["int4"])
    counts = [[60, 1, 33], [1, 1, 1], [20, 70, 1], [1, 16, 1]]
    pair.alone = [KVQuantCache.for_model(model, pair.policy) for _ in counts[0]]
    for step in counts:
        bounds = [0, *np.cumsum(step).tolist()]
        pair.cache.begin(cu_seqlens=bounds)
        pair.cache.calls.complete(None, None, streamed=True)
        for layer in range(4):
            states = torch.randn(2, 1, 2, bounds[-1], 16)
            pair.cache.update(*states, layer)
            for one, part in zip(pair.alone, states.split(step, dim=3), strict=True):
                one.update(*part, layer)
        pair.check()
    assert pair.off_codes() == 0


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_no_mask_is_made(family, unmade):
    pair = Pair(enabled(family), POLICIES["int4"])
    pair.step([300, 9, 500, 2, 64])
    pair.step([200, 1, 1, 100, 1])
    pair.step([1] * 5)


made = functools.cache(enabled)
TOKENS = st.one_of(st.just(1), st.integers(1, 6), st.integers(7, 90))
EVENTS = st.one_of(
    st.tuples(st.just("step"), st.lists(TOKENS, min_size=6, max_size=6), st.permutations(range(6)), st.integers(1, 6)),
    st.tuples(st.just("keep"), st.permutations(range(6)), st.integers(1, 5)),
    st.tuples(st.just("decode"), st.integers(1, 20)),
    st.tuples(st.just("copy"), st.booleans()),
)


@torch.no_grad()
@settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(EVENTS, min_size=1, max_size=7),
    st.sampled_from(["llama", "qwen2", "gemma3"]),
    st.sampled_from(list(POLICIES)),
)
def test_any_schedule(events, family, name):
    """Rows begin, go on in any order and portions, end, change places, and are copied."""
    pair = Pair(made(family), POLICIES[name])
    pair.step([20, 5])
    for kind, *told in events:
        held = len(pair.alone)
        if kind == "step":
            counts, order, many = told
            rows = [row if row < held else None for row in order[:many]]
            pair.step(counts[:many], rows)
        elif kind == "keep":
            order, many = told
            pair.keep([row for row in order if row < held][:many])
        elif kind == "decode":
            for _ in range(told[0]):
                pair.step([1] * held)
        else:
            twin, pair.exact = copy.deepcopy(pair.cache), False  # they share slabs
            if told[0]:  # go on with the copy; the original must not matter any more
                packed(pair.model, pair.cache, [pair.ids(3)] * held)
                pair.cache = twin
            else:
                packed(pair.model, twin, [pair.ids(40)] * held)


def test_a_continuous_batch_of_sixteen_rows():
    """Rows of 9 to 1000 tokens are replaced as they end: the text of each, and at each step the bytes of all."""
    torch.manual_seed(0)
    model, policy = tiny(initializer_range=0.3), small("fp16", "fp16", block_tokens=32, recent_tokens=32)
    kvquant.enable(model)
    lengths = [round(9 * (1000 / 9) ** (number / 23)) for number in range(24)]
    prompts = [prompt(lengths[number], seed=number)[0] for number in torch.randperm(24).tolist()]
    news = torch.randint(5, 30, (24,)).tolist()
    texts, sizes = [], {}
    for ids, new in zip(prompts, news, strict=True):
        cache, text = KVQuantCache.for_model(model, policy), ids
        for _ in range(new):
            logits = feed(model, cache, text[None, cache.get_seq_length() :])
            sizes[len(texts), len(text)] = cache.stats().kv_bytes
            text = torch.cat((text, logits[0, -1:].argmax(-1)))
        texts.append(text)
    cache, waiting, running, done, worst = KVQuantCache.for_model(model, policy), list(range(24)), [], {}, 0.0
    held = dict(enumerate(prompts))
    while waiting or running:
        fresh, waiting = waiting[: 16 - len(running)], waiting[16 - len(running) :]
        parts = [held[number][-1:] for number in running] + [prompts[number] for number in fresh]
        running += fresh
        with torch.no_grad():
            logits = packed(model, cache, parts, range(len(running)))
        alone = sum(sizes[number, len(held[number])] for number in running)
        worst = max(worst, abs(cache.stats().kv_bytes / alone - 1))
        for number, found in zip(running, logits, strict=True):
            held[number] = torch.cat((held[number], found[-1:].argmax(-1)))
        keep = [row for row, number in enumerate(running) if len(held[number]) < len(texts[number])]
        done |= {number: held[number] for row, number in enumerate(running) if row not in keep}
        running = [running[row] for row in keep]
        if keep:
            cache.batch_select_indices(keep)
        else:
            cache.reset()
    assert worst <= 0.03
    assert all(torch.equal(done[number], text) for number, text in enumerate(texts))
    assert len({int(token) for text in texts for token in text[-5:]}) > 20  # they are no loops of a few tokens


# --- together with what else a cache does ---


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


# --- memory ---


def test_a_row_that_ends_takes_its_memory_with_it(policy):
    pair = Pair(enabled(), policy)
    pair.step([100, 3, 200])
    for _ in range(20):
        pair.step([1, 1, 1])
    pair.step([1, 1, 1])
    layer = pair.cache.layers[0].held
    slabs = [weakref.ref(slab) for slab in layer.blocks.tensors()]
    tails = [weakref.ref(tail.room) for tail in layer.key.tails]
    pair.keep([0, 1])
    alive = [ref() is not None for ref in slabs]
    assert alive.count(False) == len(list(pair.alone[0].layers[0].held.blocks.tensors())) + (len(alive) - 4)
    assert [ref() is not None for ref in tails] == [True, True, False]
    pair.step([1, 1])
    pair.cache.reset()
    assert pair.cache.stats().kv_bytes == 0


def test_slabs_go_with_their_owner():
    pool = SlotPool()
    one, other = pool.allocate(6, owner=1), pool.allocate(1, owner=2)
    more = pool.allocate(1, owner=1)
    runs = pool.runs([*one, *other, *more])
    assert [len(run) for run in runs] == [6, 1, 1]
    assert len({run.slab for run in runs}) == 3  # what is free of the second's slab is not the first's
    assert pool.allocate(2, owner=2) == [other[0] + 1, other[0] + 2]
    pool.release([*one, *more])
    assert [pool.has(run.slab) for run in runs] == [False, True, False]
    again = pool.allocate(3, owner=1)
    assert min(again) > max(more)
    assert pool.live == 6


# --- fallbacks ---


def test_gradients_are_those_of_the_rows_alone():
    model = enabled()
    parts = [prompt(count, seed=count)[0] for count in (30, 12, 7)]

    def gradients(step):
        caches = []
        with torch.no_grad():
            step(caches, [part[:-4] for part in parts])
        model.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = sum(logits.square().sum() for logits in step(caches, [part[-4:] for part in parts]))
        loss.backward()
        assert any("gradients are wanted" in str(one.message) for one in caught)
        return {name: x.grad.clone() for name, x in model.named_parameters()}

    def together(caches, given):
        caches += [] if caches else [KVQuantCache.for_model(model, POLICIES["fp16"])]
        return packed(model, caches[0], given)

    def alone(caches, given):
        caches += [] if caches else [KVQuantCache.for_model(model, POLICIES["fp16"]) for _ in given]
        return [model(part[None], cache=cache).logits[0] for part, cache in zip(given, caches, strict=True)]

    mine, theirs = gradients(together), gradients(alone)
    assert all(torch.allclose(mine[name], theirs[name], rtol=1e-3, atol=1e-4) for name in theirs)


def test_attention_weights_are_those_of_rows_that_do_not_see_each_other():
    model = tiny()
    model.set_attn_implementation("eager")
    kvquant.enable(model)
    cache = KVQuantCache.for_model(model, POLICIES["fp16"])
    with torch.no_grad():
        packed(model, cache, [prompt(5)[0], prompt(3)[0]])
        cache.begin(cu_seqlens=[0, 2, 3], rows=[1, 0])
        with pytest.warns(KVQuantWarning, match="output_attentions"):
            weights = model(prompt(3), cache=cache, output_attentions=True).attentions[0]
    assert weights.shape == (1, 4, 3, 5 + 6)
    assert (weights[..., :2, 5:] == 0).all()
    assert (weights[..., 2:, :5] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 3))
    assert cache.stats().fallbacks


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_either_attention_of_transformers(implementation, policy, unmade):
    model = tiny()
    model.set_attn_implementation(implementation)
    kvquant.enable(model)
    pair = Pair(model, policy)
    pair.step([70, 2, 30])
    pair.step([1, 9, 1])
    pair.step([1, 1, 1])


def test_embeddings_in_place_of_ids():
    model = enabled()
    cache, told = (KVQuantCache.for_model(model, POLICIES["fp16"]) for _ in range(2))
    ids = prompt(12)
    with torch.no_grad():
        expected = packed(model, told, [ids[0, :5], ids[0, 5:]])
        cache.begin(cu_seqlens=[0, 5, 12])
        logits = model(inputs_embeds=model.get_input_embeddings()(ids), cache=cache).logits[0]
    assert torch.equal(logits, torch.cat(expected))
    with pytest.raises(CacheStateError, match="content keys need token ids"):
        cache.content_keys(0)
    assert told.content_keys(0) == []


# --- what is refused ---


@pytest.fixture
def two():
    """A model, and its cache of two rows."""
    model = enabled()
    cache = KVQuantCache.for_model(model, POLICIES["fp16"])
    with torch.no_grad():
        packed(model, cache, [prompt(5)[0], prompt(3)[0]])
    return model, cache


BOUNDS = [
    *([], [0], [1, 3], [0, 3, 3], [0, 3, 2], [-1, 3], [0, -3], [0, 2.0], [0, True], [0, None], "03", 5, 0.5, {0: 3}),
    *(torch.tensor([0.0, 3.0]), torch.tensor([[0, 3]]), torch.tensor(3), torch.tensor([False, True])),
    *(torch.empty(2, dtype=torch.long, device="meta"), np.array([0.0, 3.0]), np.array([[0, 3]])),
]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_bounds_that_are_none(two, bounds):
    with pytest.raises(CacheStateError, match=r"^cu_seqlens: .*; allowed: a list or an integer tensor") as error:
        two[1].begin(cu_seqlens=bounds, rows=[0])
    assert "\n" not in str(error.value)


ROWS = [[0], [0, 0], [0, 3], [0, -1], [None, 2], [0, 1.0], [0, True], "01", 1, [0, 1, None], torch.tensor([0.0, 1.0])]


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_rows_that_are_none(two, rows):
    with pytest.raises(CacheStateError, match=r"^rows: .*; allowed: one for each of 2 segments") as error:
        two[1].begin(cu_seqlens=[0, 1, 3], rows=rows)
    assert "\n" not in str(error.value)


def test_which_rows_go_on_must_be_told(two):
    with pytest.raises(CacheStateError, match="cu_seqlens of 3 segments, but the cache holds 2 rows: tell with rows="):
        two[1].begin(cu_seqlens=[0, 1, 2, 3])
    with pytest.raises(CacheStateError, match="takes cu_seqlens and rows"):
        two[1].begin(rows=[0])
    with pytest.raises(CacheStateError, match="takes cu_seqlens and rows"):
        two[1].begin(prompt(3), cu_seqlens=[0, 1, 3])


@pytest.mark.parametrize("make", [torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32), np.array, tuple])
def test_bounds_of_any_kind(two, make):
    model, cache = two
    cache.begin(cu_seqlens=make([0, 1, 3]), rows=make([1, 0]))
    with torch.no_grad():
        model(prompt(3), cache=cache)
    assert [row.length for row in cache.rows.rows] == [7, 4]


@torch.no_grad()
def test_another_call_than_was_announced(two):
    model, cache = two
    for ids in (prompt(2), prompt(4), prompt(3, rows=2), prompt(1, rows=3)):
        cache.begin(cu_seqlens=[0, 1, 3])
        with pytest.raises(CacheStateError, match=r"but begin\(cu_seqlens=…\) told of a packed one of \[1, 3\]"):
            model(ids, cache=cache)
        with pytest.raises(CacheStateError, match="holds packed rows of different lengths|a batch of 1 rows"):
            model(prompt(3), cache=cache)  # what was announced is gone
    assert [row.length for row in cache.rows.rows] == [5, 3]


@torch.no_grad()
def test_an_announcement_that_comes_to_nothing_leaves_no_trace(two):
    model, cache = two
    twin, before = copy.deepcopy(cache), cache.stats()
    cache.begin(cu_seqlens=[0, 4, 9], rows=[None, 0])
    cache.begin(cu_seqlens=[0, 1], rows=[1])  # the last one counts
    assert cache.stats() == before
    ids = prompt(1)
    logits = model(ids, cache=cache).logits
    assert [row.length for row in cache.rows.rows] == [5, 4]
    assert torch.equal(logits[0], packed(model, twin, [ids[0]], [1])[0])
    cache.begin(cu_seqlens=[0, 4, 9], rows=[None, 0])
    cache.batch_select_indices([0])  # rows are others now
    assert cache.calls.packing is None
    feed(model, cache, prompt(3))
    assert [row.length for row in cache.rows.rows] == [8]


@torch.no_grad()
def test_a_call_that_fails_before_the_first_layer(two):
    model, cache = two
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda *_: 1 / 0)
    cache.begin(cu_seqlens=[0, 1, 3])
    with pytest.raises(ZeroDivisionError):
        model(prompt(3), cache=cache)
    handle.remove()
    assert [row.length for row in cache.rows.rows] == [5, 3]
    model(prompt(1, rows=2), cache=cache, attention_mask=torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]))
    assert [row.length for row in cache.rows.rows] == [6, 4]


@torch.no_grad()
@pytest.mark.parametrize("first", [feed, lambda model, cache, ids: packed(model, cache, [ids[0]])])
def test_a_pass_that_stopped_after_a_window_is_found(first):
    model = enabled("gemma3")
    cache = KVQuantCache.for_model(model, POLICIES["fp16"])
    handle = model.get_decoder().layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first(model, cache, prompt(9))
    handle.remove()
    with pytest.raises(CacheStateError, match=r"half-way.*reset\(\) the cache"):
        packed(model, cache, [prompt(9)[0]])
    cache.reset()
    packed(model, cache, [prompt(9)[0]])


@torch.no_grad()
def test_a_call_that_stops_between_layers_is_found(two):
    model, cache = two
    handle = model.get_decoder().layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        packed(model, cache, [prompt(1)[0]], [1])  # the longest row stays the longest
    handle.remove()
    with pytest.raises(CacheStateError, match="in the midst of a packed call"):
        _ = cache.layers[3].keys
    with pytest.raises(CacheStateError, match="stopped after 2 of 4 layers"):
        packed(model, cache, [prompt(1)[0]], [1])
    with pytest.raises(CacheStateError, match="stopped after 2 of 4 layers"):
        cache.batch_select_indices([0])
    cache.reset()
    packed(model, cache, [prompt(9)[0]])


@torch.no_grad()
def test_positions_are_checked(two):
    model, cache = two
    told = torch.tensor([[3, 5, 6]])
    wrong = {
        "go on at 5": [[5, 5, 6]],
        "go on at 0": [[3, 0, 1]],
        "shape": [[3, 4]],
        r"allowed for a packed call: \[1, 3\]": [[[3, 5, 6]]],
    }
    for message, positions in wrong.items():
        cache.begin(cu_seqlens=[0, 1, 3], rows=[1, 0])
        with pytest.raises(CacheStateError, match=message):
            model(prompt(3), cache=cache, position_ids=torch.tensor(positions))
    twin = copy.deepcopy(cache)
    cache.begin(cu_seqlens=[0, 1, 3], rows=[1, 0])
    twin.begin(cu_seqlens=[0, 1, 3], rows=[1, 0])
    assert torch.equal(model(prompt(3), cache=cache, position_ids=told).logits, model(prompt(3), cache=twin).logits)


@torch.no_grad()
def test_masks_of_packed_calls(two):
    model, cache = two
    for mask in (torch.tensor([[0, 1, 1]]), torch.ones(1, 4), torch.ones(1, 1, 3, 11, dtype=torch.bool)):
        cache.begin(cu_seqlens=[0, 1, 3])
        with pytest.raises(CacheStateError, match="a packed call takes none"):
            model(prompt(3), cache=cache, attention_mask=mask)
    cache.begin(cu_seqlens=[0, 1, 3])
    model(prompt(3), cache=cache, attention_mask=torch.ones(1, 3, dtype=torch.long))  # as tokenizers give it
    assert [row.length for row in cache.rows.rows] == [6, 5]


@torch.no_grad()
def test_rows_of_different_lengths_need_a_mask(two):
    model, cache = two
    with pytest.raises(CacheStateError, match=r"attention_mask of \[rows, 6\], 0 on the left"):
        model(prompt(1, rows=2), cache=cache)
    with pytest.raises(CacheStateError, match="go on at 5, but the cache holds 3 tokens"):
        model(
            prompt(1, rows=2),
            cache=cache,
            attention_mask=torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]),
            position_ids=torch.tensor([[5], [5]]),
        )


def test_without_the_hook():
    model = tiny()
    cache = KVQuantCache.for_model(model, POLICIES["fp16"])
    cache.begin(cu_seqlens=[0, 2, 5])
    with torch.no_grad(), pytest.raises(CacheStateError, match=r"a packed call needs kvquant\.enable\(model\)"):
        model(prompt(5), cache=cache)
    feed(model, cache, prompt(5))
    assert cache.get_seq_length() == 5


def test_models_that_cannot():
    cache = KVQuantCache.for_model(tiny("qwen3_next"), POLICIES["fp16"])
    with pytest.raises(UnsupportedError, match="layers of kind linear_attention, .*; give a batch with left padding"):
        cache.begin(cu_seqlens=[0, 2, 5])
    model = enabled("bloom")
    cache = KVQuantCache.for_model(model, POLICIES["fp16"])
    cache.begin(cu_seqlens=[0, 2, 5])
    with torch.no_grad(), pytest.raises(UnsupportedError, match="BloomModel counts positions itself"):
        model(prompt(5), cache=cache)
    model = enabled()
    cache = KVQuantCache.for_model(model, POLICIES["fp16"])
    cache.begin(cu_seqlens=[0, 2, 5])
    with torch.no_grad(), pytest.raises(UnsupportedError, match="an encoder-decoder reads one input a row"):
        model(prompt(5), cache=EncoderDecoderCache(cache, DynamicCache()))
    assert cache.calls.packing is None
