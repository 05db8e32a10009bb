"""Packed calls: rows that begin, read and decode in one line of tokens are what each is alone."""

from __future__ import annotations

import copy
import functools
import warnings
import weakref

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvquant
from kvquant import KVQuantCache, KVQuantWarning
from kvquant.arena import SlotPool
from kvquant.cache.hooks import why_decoded
from tests.models import FAMILIES, feed, prompt, small, tiny
from tests.packed.pairs import POLICIES, Pair, enabled, packed

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
        assert bool(pair.cache.stats().fallbacks) == bool(why_decoded(model))


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
