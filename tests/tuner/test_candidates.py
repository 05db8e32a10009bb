"""What may be chosen, and what it is as a policy."""

from __future__ import annotations

import pytest
import torch

from kvquant import CodecError, KVQuantCache, PolicyError, PrecisionPolicy, preset_names, register_codec
from kvquant.codecs import Raw, codec_names, unregister_codec
from kvquant.tuner.candidates import Assignment, Candidates, Frame
from tests.models import feed, prompt, tiny
from tests.tuner import made


def test_all_that_differs_and_nothing_twice():
    given = Candidates.of(tiny("llama"), 1000)  # heads of 16 channels
    assert len(set(given.key)) == len(given.key) == len(given.value)
    assert "int4/channel/g32/none" in given.key
    assert "int4/channel/g32/hadamard" in given.key
    assert [name for name in given.key if name.startswith("int4/token")] == [
        "int4/token/g64/none",  # all 16 channels, as any larger group
        "int4/token/g64/hadamard",
    ]
    found = {name.split("/")[0] for name in given.key}
    assert found >= {"fp16", "int8", "int4", "int3", "int2"}
    assert not found & {"nf4", "fp4", "dynamic8"}  # attention would have to decode them
    named = Candidates.of(tiny("llama"), 1000, codecs=["nf4", "int4"])
    assert {name.split("/")[0] for name in named.key} == {"fp16", "nf4", "int4"}
    assert given.frames[0] == Frame(4, 128)
    assert {frame.key_bias for frame in given.frames} == {"remove"}


def test_wide_heads_have_wide_groups():
    given = Candidates.of(tiny("llama", head_dim=256), 1000, codecs=["int4"])
    groups = {name.split("/")[2] for name in given.value if "token" in name}
    assert groups == {"g32", "g64", "g128", "g256"}


def test_codecs_can_be_limited():
    given = Candidates.of(tiny("llama"), 1000, codecs=["int8", "int3"], frames=[Frame(0, 0)], block_tokens=16)
    assert {name.split("/")[0] for name in given.value} == {"fp16", "int8", "int3"}
    assert given.frames == (Frame(0, 0),)
    assert "int8/channel/g16/none" in given.key  # a block is no longer
    with pytest.raises(CodecError, match=r"codec: 'int9' is not a codec; allowed: .*int8"):
        Candidates.of(tiny("llama"), 1000, codecs=["int9"])
    with pytest.raises(CodecError, match="'nf4' needs block_tokens that are a multiple of 32, not 16"):
        Candidates.of(tiny("llama"), 1000, codecs=["nf4"], block_tokens=16)


def test_a_codec_without_options_is_a_candidate_too():
    register_codec("mine", lambda options, role, block_tokens: Raw("mine", False))
    try:
        given = Candidates.of(tiny("llama"), 1000, codecs=["mine"])
    finally:
        unregister_codec("mine")
    assert given.key == ("fp16", "mine")


def test_key_biases_are_kept_in_one_frame():
    model = tiny("qwen2")
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias)
    frames = Candidates.of(model, 1000).frames
    assert [frame for frame in frames if frame.key_bias == "keep"] == [Frame(4, 128, "keep")]


def test_latents_have_their_names_and_eight_bits_for_the_rotary_key():
    model = tiny("deepseek_v3")
    given = Candidates.of(model, 300)
    assert {name.split("/")[0] for name in given.value} == {"fp16", "int8"}
    assert "int2/channel/g64/none" in given.key
    policy = given.isolated(1, "value", "int8/token/g64/none")
    assert policy.layers[0][1].latent
    assert "rotary: int8/token/g64/none" in policy.to_yaml()
    feed(model, KVQuantCache.for_model(model, policy), prompt(300))
    assert given.assignment(policy) == given.uncompressed().replaced(1, "value", "int8/token/g64/none")


def test_equal_neighbours_have_one_selector():
    given = made.candidates(layers=6)
    a, b = ("int8/channel/g64/none", "fp16"), ("int2/channel/g64/none",) * 2
    assignment = Assignment(Frame(16, 0), dict(enumerate([a, a, a, ("fp16", "fp16"), b, a])))
    policy = given.policy(assignment, "some")
    assert [selector.text for selector, _ in policy.layers] == ["0-2", "4", "5"]
    assert (policy.name, policy.sink_tokens, policy.recent_tokens) == ("some", 16, 0)
    assert PrecisionPolicy.from_yaml(policy.to_yaml()) == policy
    assert given.assignment(policy) == assignment
    shuffled = Assignment(assignment.frame, dict(reversed(assignment.layers.items())))
    assert given.policy(shuffled, "other").fingerprint() == policy.fingerprint()


def test_hybrid_models_are_numbered_by_themselves():
    model = tiny("gemma3")
    given = Candidates.of(model, 300)
    assert [*given.footprint.shapes] == [1, 3]
    policy = given.policy(
        given.uncompressed().replaced(1, "key", given.key[-1]).replaced(3, "key", given.key[-1]), "x"
    )
    assert [layer.policy.key.name for layer in policy.resolve(model).layers if layer.policy] == [given.key[-1]] * 2


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_presets_are_assignments(family):
    model = tiny(family)
    given = Candidates.of(model, 1000, codecs=codec_names())
    for name in preset_names():
        preset = PrecisionPolicy.load(name)
        assignment = given.assignment(preset)
        resolved = {layer.index: layer.policy for layer in preset.resolve(model).layers if layer.policy}
        assert assignment.layers == {i: (policy.key.name, policy.value.name) for i, policy in resolved.items()}


def test_what_is_no_assignment():
    given = made.candidates()
    plain = {"key": made.FEW[1], "value": made.FEW[2]}
    for settings in (
        {"sink_tokens": 5},
        {"block_tokens": 64},
        {"default": plain | {"key": "nf4"}},
        {"default": plain | {"value": "int4/token/g64/none"}},
        {"layers": {"3": plain}},
        {"default": {"latent": made.FEW[1], "rotary": made.FEW[2]}},
    ):
        assert given.assignment(PrecisionPolicy(**{"name": "x", "default": plain, **settings})) is None
    assert given.assignment(PrecisionPolicy(name="x", default=plain)) is not None


def test_what_no_policy_could_say_is_refused():
    for settings, why in (
        ({"codecs": made.FEW[1:]}, "fp16 among them"),
        ({"codecs": (*made.FEW, made.FEW[1])}, "different codecs"),
        ({"codecs": ("fp16", "int4")}, "'int4' is not a codec's canonical name"),
        ({"codecs": ("fp16", "int5")}, "'int5' is not a codec"),
        ({"frames": ()}, "frames: none given"),
        ({"frames": (Frame(200, 0),)}, "sink_tokens: 200 is more than block_tokens 128"),
        ({"frames": (Frame(0, -1),)}, "recent_tokens"),
    ):
        with pytest.raises((PolicyError, CodecError), match=why) as error:
            made.candidates(**settings)
        assert "\n" not in str(error.value)
