"""Packed calls that cannot be streamed, and such as cannot be at all."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
import transformers as tf
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import kvquant
from kvquant import CacheStateError, KVQuantCache, KVQuantWarning, UnsupportedError
from tests.models import feed, prompt, tiny
from tests.packed.pairs import POLICIES, Pair, enabled, packed

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
    for kind, told in (
        ("GPTNeo", {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4}),
        ("Roberta", {"is_decoder": True, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}),
        ("XLMRoberta", {"is_decoder": True, "num_hidden_layers": 2, "num_attention_heads": 4}),
        ("Data2VecText", {"is_decoder": True, "num_hidden_layers": 2, "num_attention_heads": 4}),
    ):
        config = getattr(tf, f"{kind}Config")(vocab_size=97, hidden_size=64, pad_token_id=1, bos_token_id=0, **told)
        model = tf.AutoModelForCausalLM.from_config(config).eval()
        kvquant.enable(model)
        cache = KVQuantCache.for_model(model, POLICIES["fp16"])
        cache.begin(cu_seqlens=[0, 2, 5])
        with torch.no_grad(), pytest.raises(UnsupportedError, match="counts positions itself|windows of its own"):
            model(prompt(5), cache=cache)
        assert cache.calls.packing is None
    model = enabled()
    cache = KVQuantCache.for_model(model, POLICIES["fp16"])
    cache.begin(cu_seqlens=[0, 2, 5])
    with torch.no_grad(), pytest.raises(UnsupportedError, match="an encoder-decoder reads one input a row"):
        model(prompt(5), cache=EncoderDecoderCache(cache, DynamicCache()))
    assert cache.calls.packing is None


def test_frequencies_that_follow_the_longest_row():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = tiny(rope_parameters=rope, max_position_embeddings=32)
    kvquant.enable(model)
    pair = Pair(model, POLICIES["fp16"])
    pair.step([20, 12])  # which the model has frequencies for
    pair.step([5, 7])
    pair.cache.begin(cu_seqlens=[0, 10, 11])
    with torch.no_grad(), pytest.raises(UnsupportedError, match="dynamic RoPE .* beyond 32 tokens; give such a row a"):
        model(prompt(11), cache=pair.cache)
    pair.step([10], [0])
    pair.step([1], [1])
