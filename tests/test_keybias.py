"""Key biases: found where the model's own attention has them, and taken out of what is encoded."""

from __future__ import annotations

import copy

import pytest
import torch

import kvquant
from kvquant import KVQuantCache, PrecisionPolicy
from kvquant.keybias import key_biases
from tests.models import feed, generate, prompt, stock, tiny

INT4_VALUES = {"codec": "int4", "rotate": "hadamard"}

# Families whose key projection has, or can have, a bias of its own, and the layers in which it can be removed.
BIASED = {
    "qwen2": {},
    "qwen2_yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    "qwen2_moe": {},
    "llama": {"attention_bias": True},
    "starcoder2": {},
    "stablelm": {"use_qkv_bias": True},
    "phi": {},
    "glm4": {"attention_bias": True},
    "smollm3": {"attention_bias": True},  # no RoPE in its last layer
    "cohere2": {"attention_bias": True},  # nor in its full-attention ones
    "gpt_oss": {},
    "opt": {},
}


def biased(family="qwen2", dtype=torch.float32, scale=0.1, outliers=(), seed=0, **changes):
    """A tiny model with random key biases, a hundred times larger in the layers ``outliers``."""
    model = tiny(family.removesuffix("_yarn"), dtype, **changes)
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        projection = getattr(module, "k_proj", None)
        if projection is not None and projection.bias is not None:
            drawn = torch.randn(projection.bias.shape, generator=generator) * scale
            projection.bias.data = (drawn * (100 if module.layer_idx in outliers else 1)).to(dtype)
    return model


def policy(key="int4", bias="remove", **settings):
    return PrecisionPolicy(name="p", key_bias=bias, default={"key": key, "value": INT4_VALUES}, **settings)


def mean_kl(model, chosen, ids, cold, past=256):
    """Mean KL, in nats, of what is predicted after ``past`` tokens."""
    exact = cold.log_softmax(-1)
    found = feed(model, KVQuantCache.for_model(model, chosen), ids, 64).log_softmax(-1)
    return (exact.exp() * (exact - found)).sum(-1)[:, past:].mean().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", BIASED)
def test_the_bias_is_what_attention_caches_when_the_projection_gives_nothing(family, dtype):
    model = biased(family, dtype, scale=3.0, **BIASED[family])
    compressed = [layer.index for layer in policy().resolve(model).layers if layer.policy]
    biases = key_biases(model, compressed)
    assert list(biases) == compressed
    for module in model.modules():
        if projection := getattr(module, "k_proj", None):
            torch.nn.init.zeros_(projection.weight)
    cache = stock(model)
    feed(model, cache, prompt(40))
    for index in compressed:
        keys = cache.layers[index].keys[0].float()
        close = {"rtol": 0.02, "atol": 0.1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(biases[index](torch.arange(40), cache.layers[index].keys), keys, **close)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("gpt2", {}),  # its projection is fused
        ("qwen3", {"attention_bias": True}),  # normalised after the bias
        ("olmo2", {"attention_bias": True}),
        ("gemma3", {"attention_bias": True}),
        ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}),
        ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
        ("deepseek_v3", {}),
    ],
)
def test_where_it_cannot_be_removed_it_stays(family, changes):
    model = biased(family, scale=1.0, **changes)  # a bias that its norm leaves nearly as it is
    chosen = policy()
    assert not key_biases(model, range(4))
    assert chosen.resolve(model).describe() == chosen.resolve(model.config).describe()


def test_zero_meta_and_lossless_biases_are_left_alone():
    assert not key_biases(tiny("qwen2"), range(4))  # transformers begins with zeros
    assert not key_biases(biased().to("meta"), range(4))
    assert list(key_biases(biased(), [1, 3])) == [1, 3]
    mixed = policy("int4", layers={"1": {"key": "fp16", "value": "int4"}})
    assert [layer.key_bias is not None for layer in mixed.resolve(biased()).layers] == [True, False, True, True]


def test_probing_runs_no_hooks_and_leaves_the_model_as_it_was():
    model = biased()
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append(1))
        module.register_forward_pre_hook(lambda *_: calls.append(1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert key_biases(model, range(4))
    assert not calls
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_int4_survives_the_biases_that_ruin_keys_per_token(seed):
    model = biased(outliers=(0, 3), seed=seed, initializer_range=0.1)
    ids = prompt(768, rows=2, seed=seed)
    cold = feed(model, stock(model), ids, 64)
    per_token = mean_kl(model, policy({"codec": "int4", "axis": "token"}, "keep"), ids, cold)
    assert mean_kl(model, "int4", ids, cold) <= 0.1 * per_token


@pytest.mark.parametrize("key", ["nf4", "fp4", "int2", {"codec": "int4", "axis": "token", "rotate": "hadamard"}])
def test_every_codec_gains_from_removal(key):
    model = biased(outliers=(0, 3), initializer_range=0.1)
    ids = prompt(640)
    cold = feed(model, stock(model), ids, 64)
    kept, removed = (mean_kl(model, policy(key, bias), ids, cold) for bias in ("keep", "remove"))
    assert removed <= 0.5 * kept


SMALL = {"block_tokens": 8, "recent_tokens": 8}


def key_error(model, cache, ids, first=0, **kwargs):
    """Largest error of a key in columns from ``first`` on; of layer 0, since deeper layers see other inputs."""
    exact = stock(model)
    feed(model, exact, ids, **kwargs)
    return (cache.layers[0].keys - exact.layers[0].keys)[:, :, first:].abs().max().item()


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_the_bias_follows_the_positions_of_padded_rows(enabled, counted):
    model = biased(scale=30.0)
    ids = prompt(90, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :37] = ids[1, :37] = 0
    kwargs = {"attention_mask": mask}
    if counted:
        kwargs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    if enabled:
        kvquant.enable(model)
    errors = []
    for bias in ("remove", "keep"):
        cache = KVQuantCache.for_model(model, policy("int8", bias, **SMALL))
        feed(model, cache, ids, **kwargs)
        errors.append(key_error(model, cache, ids, first=40, **kwargs))  # past the block in which padding ends
    expected = kwargs.get("position_ids", torch.arange(90).expand(2, -1))[1, 37 if enabled else 0 :]
    assert torch.equal(torch.cat(cache.rows.rows[1].positions), expected)
    assert errors[0] < 0.02 < errors[1]


def test_chunks_copies_rollback_and_beams_keep_the_bias_apart():
    model = biased(scale=30.0)
    ids = prompt(120)
    cache = KVQuantCache.for_model(model, policy("int8", **SMALL))
    feed(model, cache, ids[:, :100], 7, 30, 1)
    twin = copy.deepcopy(cache)
    twin.crop(-37)  # into a block
    feed(model, twin, ids[:, 63:], 5)
    twin.batch_repeat_interleave(3)
    twin.reorder_cache(torch.tensor([2, 0, 1]))
    feed(model, cache, ids[:, 100:])
    for held, rows in ((cache, 1), (twin, 3)):
        assert key_error(model, held, ids.expand(rows, -1)) < 0.02
    assert torch.equal(twin.layers[0].keys[:1, :, :56], cache.layers[0].keys[:, :, :56])  # the same codes


def test_float16_keys_near_the_edge_of_their_range():
    model = biased(dtype=torch.float16, scale=2e4, initializer_range=0.1)
    ids = prompt(60)
    cache = KVQuantCache.for_model(model, policy("int4", **SMALL))
    feed(model, cache, ids)
    assert cache.layers[0].keys.isfinite().all()
    assert key_error(model, cache, ids) <= 64  # two steps of float16 there


def test_text_of_a_lossless_policy_is_untouched():
    model = biased(outliers=(0, 3))
    ids = prompt(40, rows=2)
    assert torch.equal(generate(model, KVQuantCache.for_model(model, "fp16"), ids), generate(model, stock(model), ids))


def test_positions_that_count_padding_give_no_content_keys():
    model = biased()
    kvquant.enable(model)
    ids = prompt(40)
    mask = torch.ones_like(ids)
    mask[:, :9] = 0
    cache = KVQuantCache.for_model(model, policy(block_tokens=8, recent_tokens=8))
    feed(model, cache, ids, attention_mask=mask, position_ids=torch.arange(40)[None])
    with pytest.raises(kvquant.CacheStateError, match="content keys need tokens at positions 0, 1"):
        cache.content_keys(0)


def test_blocks_keep_the_bias_they_were_made_with():
    model = biased(scale=30.0)
    cache = KVQuantCache.for_model(model, policy("int8", **SMALL))
    feed(model, cache, prompt(60))
    before = cache.layers[0].keys
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.add_(5.0)
    assert torch.equal(cache.layers[0].keys, before)


def right_padded(mask):
    return {
        "columns": torch.arange(mask.shape[1]).expand(len(mask), -1),
        "counted": mask.cumsum(1) - 1,
        "filled with 0": (mask.cumsum(1) - 1).masked_fill(mask == 0, 0),
        "filled with 1": (mask.cumsum(1) - 1).masked_fill(mask == 0, 1),
        "packed": torch.arange(mask.shape[1]).remainder(50).expand(len(mask), -1),
        "in steps of 2": 2 * torch.arange(mask.shape[1]).expand(len(mask), -1),
        "from 1000": 1000 + torch.arange(mask.shape[1]).expand(len(mask), -1),
    }


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("hidden", [slice(80, 120), slice(40, 60), slice(0, 30)])
@pytest.mark.parametrize("counting", right_padded(torch.ones(1, 1, dtype=torch.long)))
def test_the_bias_is_at_the_positions_the_model_was_given(counting, hidden, hooked):
    model = biased(scale=30.0)
    if hooked:
        kvquant.enable(model)
    ids = prompt(120, rows=2)
    mask = torch.ones_like(ids)
    mask[1, hidden] = 0
    kwargs = {"attention_mask": mask, "position_ids": right_padded(mask)[counting]}
    exact, errors = stock(model), []
    feed(model, exact, ids, **kwargs)
    seen = mask.bool()[:, None, :, None]
    for bias in ("remove", "keep"):
        cache = KVQuantCache.for_model(model, policy("int4", bias, **SMALL))
        feed(model, cache, ids, **kwargs)
        errors.append(((cache.layers[0].keys - exact.layers[0].keys) * seen).square().mean().sqrt().item())
    assert errors[0] < 0.05 * errors[1]
