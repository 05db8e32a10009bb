"""Bytes are those of real caches."""

from __future__ import annotations

import itertools

import pytest

from kvquant import KVQuantCache
from kvquant.tuner.candidates import Assignment, Candidates, Frame
from kvquant.tuner.footprint import Footprint
from tests.models import feed, prompt, tiny

FRAMES = [Frame(4, 128), Frame(0, 0), Frame(16, 7), Frame(8, 300)]
CODECS = ["fp16", "int8/token/g64/none", "int4/channel/g32/hadamard", "int3/token/g32/none", "nf4/channel/g32/none"]


def mixed(given: Candidates, frame: Frame) -> Assignment:
    """Another pair of codecs in every layer."""
    pairs = itertools.cycle(itertools.product(given.key[::5], given.value[::7]))
    return Assignment(frame, dict(zip(given.footprint.shapes, pairs, strict=False)))


def measured(model, policy, context, *calls):
    """After calls of these many tokens, the last again and again."""
    cache = KVQuantCache.for_model(model, policy)
    feed(model, cache, prompt(context).to(model.device), *calls)
    return cache.stats()


def ways(context, frame, block_tokens):
    """Calls in which a text may come, the last of which need the most room: a block, and tokens, one by one."""
    blocks = max(0, context - frame.recent_tokens) // block_tokens
    prompt = (blocks - 1) * block_tokens + frame.recent_tokens if blocks else 1
    return [(context,), (128,), (max(1, prompt), 1)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma3", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("context", [2, 300, 717])
def test_bytes_are_those_of_real_caches(family, context):
    model = tiny(family)
    for frame, block_tokens in zip(FRAMES, (128, 64, 32, 128), strict=True):
        given = Candidates.of(model, context, block_tokens=block_tokens, frames=[frame])
        assignment = mixed(given, frame)
        policy = given.policy(assignment, "mixed")
        stats = [measured(model, policy, context, *calls) for calls in ways(context, frame, block_tokens)]
        assert given.footprint.baseline == stats[0].kv_bytes_baseline
        assert all(one.kv_ratio <= given.footprint.ratio(assignment) for one in stats)
        for layer, (key, value) in assignment.layers.items():
            nbytes = [one.layers[layer].kv_bytes for one in stats]
            assert given.footprint.layer_bytes(layer, key, value, frame) == max(nbytes)


@pytest.mark.parametrize("context", [4096, 5000])
def test_slabs_of_long_texts(context):
    """Without memory, since nothing needs to be computed."""
    model = tiny("llama", num_hidden_layers=1).to("meta")
    given = Candidates.of(model, context, codecs=["int8"], block_tokens=16, frames=[Frame(4, 100)])
    assignment = mixed(given, given.frames[0])
    policy = given.policy(assignment, "mixed")
    ratios = [measured(model, policy, context, *calls).kv_ratio for calls in ways(context, given.frames[0], 16)]
    assert max(ratios) == ratios[2] == given.footprint.ratio(assignment)


def test_depth_counts_layers_of_all_kinds():
    footprint = Footprint.of(tiny("gemma3", layer_types=["full_attention", "sliding_attention"] * 2), 100, 16)
    assert [*footprint.shapes] == [0, 2]
    assert footprint.depth == 4
    assert Footprint({0: (1, 8, 8), 5: (1, 8, 8)}, 100, 16).depth == 6
