"""Policies: round trip, selectors against the model's own numbering, and one-line complaints."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3Config

from kvquant import LayerPolicy, PolicyError, PrecisionPolicy, UnsupportedError, preset_names
from kvquant.selectors import Selector
from tests.models import FAMILIES

FULL, SLIDING = "full_attention", "sliding_attention"
INT8 = {"key": "int8", "value": "int8"}
BASE = "version: 1\nname: a\ndefault: {key: int8, value: int8}\n"


def policy(**settings):
    return PrecisionPolicy(**{"name": "p", "default": {"key": "int4", "value": "int4"}, **settings})


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_resolve_and_round_trip(name):
    preset = PrecisionPolicy.load(name)
    assert preset.name == name
    assert PrecisionPolicy.from_yaml(preset.to_yaml()) == preset
    for depth in (1, 2, 4, 30, 126):
        assert len(preset.resolve([FULL] * depth).layers) == depth


def test_the_presets_the_project_promises_are_there():
    assert set(preset_names()) >= {"fp16", "int8", "int4", "k8v4", "k6v5", "shallow-fp16-deep-int4", "balanced"}


def test_shallow_fp16_deep_int4_is_the_layout_it_is_named_for():
    layers = PrecisionPolicy.load("shallow-fp16-deep-int4").resolve([FULL] * 30).layers
    assert [layer.policy.key.name.split("/")[0] for layer in layers] == ["fp16"] * 8 + ["int8"] * 10 + ["int4"] * 12


def test_int4_is_keys_per_channel_and_values_rotated_per_token():
    default = PrecisionPolicy.load("int4").default
    assert default.key.name == "int4/channel/g64/none"
    assert default.value.name == "int4/token/g64/hadamard"


codec_specs = st.one_of(
    st.just("fp16"),
    st.sampled_from(["int8", "int6", "int4"]),
    st.fixed_dictionaries(
        {"codec": st.sampled_from(["int8", "int5", "int4"]), "axis": st.sampled_from(["channel", "token"])},
        optional={"group": st.sampled_from([8, 16, 32]), "rotate": st.sampled_from(["none", "hadamard"])},
    ),
)
layer_policies = st.fixed_dictionaries({"key": codec_specs, "value": codec_specs})


@st.composite
def policies(draw):
    cuts = sorted(draw(st.sets(st.integers(0, 20), max_size=5)))
    by_index = draw(st.booleans())
    spans = [f"{a}-{b - 1}" if by_index else f"{5 * a}%-{5 * b}%" for a, b in pairwise(cuts)]
    return PrecisionPolicy(
        name=draw(st.text(min_size=1, max_size=20).filter(lambda n: n.isprintable() and n == n.strip())),
        block_tokens=draw(st.sampled_from([32, 64, 96, 128, 512])),
        sink_tokens=draw(st.integers(0, 32)),
        recent_tokens=draw(st.integers(0, 1000)),
        default=draw(layer_policies),
        layers={span: draw(layer_policies) for span in spans},
    )


@settings(deadline=None, max_examples=80)
@given(policies())
def test_yaml_round_trip_is_identity(given_policy):
    again = PrecisionPolicy.from_yaml(given_policy.to_yaml())
    assert again == given_policy
    assert hash(again) == hash(given_policy)
    assert again.fingerprint() == given_policy.fingerprint()
    assert again.resolve([FULL] * 20) == given_policy.resolve([FULL] * 20)


def test_fingerprint_changes_with_every_setting_that_decides_bytes():
    variants = [
        policy(),
        policy(block_tokens=64),
        policy(sink_tokens=0),
        policy(recent_tokens=64),
        policy(default={"key": "int8", "value": "int4"}),
        policy(default={"key": "int4", "value": "int8"}),
        policy(default={"key": {"codec": "int4", "group": 32}, "value": "int4"}),
        policy(default={"key": {"codec": "int4", "rotate": "hadamard"}, "value": "int4"}),
        policy(layers={"0": INT8}),
        policy(layers={"1": INT8}),
    ]
    assert len({variant.fingerprint() for variant in variants}) == len(variants)
    assert policy(name="other").fingerprint() == policy().fingerprint()


def test_shorthand_takes_a_group_that_fits_the_block():
    assert policy(block_tokens=32).default.key.group == 32
    assert policy(block_tokens=96).default.key.group == 48
    assert policy(block_tokens=32).default.value.group == 64


def test_policies_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        policy().block_tokens = 64


def test_built_layer_policies_are_checked_against_the_block():
    built = LayerPolicy.parse(INT8)
    assert policy(default=built).default == built
    with pytest.raises(PolicyError, match="default.key.group: 64 does not divide block_tokens 32"):
        policy(block_tokens=32, default=built)


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ("3", 30, [3]),
        ("0-7", 30, list(range(8))),
        ("0,5, 9-11", 30, [0, 5, 9, 10, 11]),
        ("0%-25%", 30, list(range(8))),
        ("25%-60%", 30, list(range(8, 18))),
        ("60%-100%", 30, list(range(18, 30))),
        ("0%-50%", 1, [0]),
        ("50%-100%", 1, []),
        ("33.3%-66.6%", 3, [1]),
    ],
)
def test_selectors(text, count, expected):
    assert Selector.parse(text).indices(count) == expected


@given(st.integers(1, 200), st.lists(st.integers(1, 99), unique=True, max_size=5))
def test_adjacent_percentages_cover_every_layer_once(count, cuts):
    edges = [0, *sorted(cuts), 100]
    covered = [i for a, b in pairwise(edges) for i in Selector.parse(f"{a}%-{b}%").indices(count)]
    assert covered == list(range(count))


def test_selecting_layers_of_a_hybrid_uses_the_models_own_numbering():
    config = FAMILIES["gemma3"]()
    resolved = policy(layers={"1": INT8}).resolve(config)
    assert [layer.kind for layer in resolved.layers] == [SLIDING, FULL] * 2
    assert [layer.policy and layer.policy.key.bits for layer in resolved.layers] == [None, 8, None, 4]
    assert "layer 0: sliding_attention, not compressed" in resolved.describe()
    assert "layer 1: key int8/channel/g64/none" in resolved.describe()


def test_a_multimodal_wrapper_resolves_to_its_text_decoder():
    config = Gemma3Config(text_config=FAMILIES["gemma3"]().to_dict())
    assert len(policy().resolve(config).layers) == 4


@pytest.mark.parametrize(
    ("layers", "kinds", "complaint"),
    [
        ({"99": INT8}, [FULL] * 4, 'layers["99"]: layer 99 does not exist; the model has layers 0-3'),
        ({"2-4": INT8}, [FULL] * 4, 'layers["2-4"]: layer 4 does not exist; the model has layers 0-3'),
        ({"0": INT8}, [SLIDING, FULL], 'layers["0"]: selects no full_attention layer'),
        ({"0%-50%": INT8, "1": INT8}, [FULL] * 4, "layer 1 is selected by '0%-50%' as well"),
        ({"0%-50%,1": INT8}, [FULL] * 4, "a layer is selected twice"),
    ],
)
def test_selectors_that_do_not_fit_the_model(layers, kinds, complaint):
    with pytest.raises(PolicyError) as caught:
        policy(layers=layers).resolve(kinds)
    assert complaint in str(caught.value)


def test_a_model_with_nothing_to_compress_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="2 mamba, 1 sliding_attention; kvquant compresses full_attention"):
        policy().resolve(["mamba", "mamba", SLIDING])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "a policy is a mapping"),
        ("- 1", "a policy is a mapping"),
        ("a: [", "not YAML"),
        ("\tx: 1", "not YAML"),
        ("name: a", "version: missing"),
        ("version: 1\nname: a", "default: missing"),
        ("version: 2\nname: a\ndefault: {key: int8, value: int8}", "version: Input should be 1, not 2"),
        ("version: '1'\nname: a\ndefault: {key: int8, value: int8}", "version: Input should be 1, not '1'"),
        (BASE + "bits: 4", "bits: unknown setting; allowed: version, name, block_tokens"),
        (BASE + "block_tokens: 100", "block_tokens: Input should be a multiple of 8, not 100"),
        (BASE + "block_tokens: 0", "block_tokens: Input should be greater than or equal to 8, not 0"),
        (BASE + "block_tokens: '64'", "block_tokens: Input should be a valid integer, not '64'"),
        (BASE + "sink_tokens: -1", "sink_tokens: Input should be greater than or equal to 0, not -1"),
        (BASE + "sink_tokens: 300", "sink_tokens: 300 is more than block_tokens 128"),
        (BASE + "recent_tokens: 1.5", "recent_tokens: Input should be a valid integer"),
        (BASE + "layers: [1]", "layers: [1] is not a mapping"),
        (
            BASE + "layers: {-1: {key: int8, value: int8}}",
            "layers[\"-1\"]: '-1' is not a layer selector; allowed: an index",
        ),
        (BASE + "layers: {7-3: {key: int8, value: int8}}", "selects nothing"),
        (BASE + "layers: {50%-101%: {key: int8, value: int8}}", "goes beyond 100%"),
        (BASE + "layers: {'': {key: int8, value: int8}}", "is not a layer selector"),
        (BASE + "layers: {true: {key: int8, value: int8}}", "True is not a layer selector"),
        (BASE + "layers: {'1,1': {key: int8, value: int8}}", "selected already"),
        (
            BASE + "layers: {0-3: {key: int8, value: int8}, 3: {key: int8, value: int8}}",
            "layers[\"3\"]: overlaps with '0-3'",
        ),
        (BASE + "layers: {3: {key: int8, value: int8}, '3': {key: int8, value: int8}}", "'3' is given twice"),
        (BASE + "name: b", "'name' is given twice"),
        (BASE + "layers: {0: int8}", "layers[\"0\"]: 'int8' is not a layer's policy"),
        (BASE + "layers: {0: {key: int8}}", 'layers["0"].value: missing'),
        (
            BASE + "layers: {0: {key: int8, value: int8, bits: 4}}",
            'layers["0"].bits: unknown setting; allowed: key, value',
        ),
        (BASE + "layers: {0: {key: {codec: int7}, value: int8}}", "layers[\"0\"].key.codec: 'int7' is not a codec"),
        ("version: 1\nname: a\ndefault: {key: 'int4 ', value: int8}", "default.key.codec: 'int4 ' is not a codec"),
        ("version: 1\nname: a\ndefault: {key: int0, value: int8}", "default.key.codec: 'int0' is not a codec"),
        (
            "version: 1\nname: a\ndefault: {key: int8, value: {codec: int4, group: 3}}",
            "default.value.group: 3; allowed",
        ),
        ("version: 1\nname: a\ndefault: {key: 4, value: int8}", "default.key.codec: 4 is not a codec"),
        ("version: 1\nname: ''\ndefault: {key: int8, value: int8}", "name: String should have at least 1 character"),
        ('version: 1\nname: "a\\nb"\ndefault: {key: int8, value: int8}', "name: 'a\\nb'; allowed: printable"),
        ("version: 1\nname: a\ndefault: !!python/object:os.system {}", "not YAML"),
        ("1: 2\nversion: 1", "setting names must be text"),
        ("version: true\nname: a\ndefault: {key: int8, value: int8}", "version: Input should be 1, not True"),
        ("version: 1.0\nname: a\ndefault: {key: int8, value: int8}", "version: Input should be 1, not 1.0"),
        ("[" * 5000, "nested too deeply"),
        ("a: " + "[" * 900 + "]" * 900, "nested too deeply"),
        ("{a: " * 3000, "nested too deeply"),
        (BASE + "recent_tokens: " + "9" * 5000, "not YAML"),
        (BASE + "recent_tokens: " + "9" * 50, "recent_tokens: Input should be less than or equal to"),
        (BASE + "layers: {\u0663: {key: int8, value: int8}}", "is not a layer selector"),
    ],
)
def test_bad_files_get_one_line_that_names_the_place(text, complaint):
    with pytest.raises(PolicyError) as caught:
        PrecisionPolicy.from_yaml(text, "p.yaml")
    message = str(caught.value)
    assert message.startswith("p.yaml: ")
    assert complaint in message
    assert "\n" not in message


def test_loading_what_is_not_there(tmp_path):
    with pytest.raises(PolicyError, match="'int7' is neither a file nor a preset \\(balanced, "):
        PrecisionPolicy.load("int7")
    with pytest.raises(PolicyError, match="neither a file nor a preset"):
        PrecisionPolicy.load(tmp_path)
    binary = tmp_path / "p.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyError, match="cannot be read as a policy"):
        PrecisionPolicy.load(binary)


def test_loading_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(policy(layers={"0-1": INT8}).to_yaml())
    assert PrecisionPolicy.load(path) == policy(layers={"0-1": INT8})
    assert PrecisionPolicy.load(str(path)).layers[0][0].text == "0-1"


def test_a_share_of_depth_that_hits_no_compressed_layer_is_told():
    resolved = policy(layers={"0%-1%": INT8, "50%-60%": INT8}).resolve([SLIDING, SLIDING, FULL, SLIDING])
    assert "0%-1% selects no layer of this model that is compressed" in resolved.describe()
    assert resolved.idle == ("0%-1%",)
    assert resolved.layers[2].policy.key.bits == 8


def test_latents_are_named_so_and_the_rotary_key_keeps_eight_bits_by_default():
    config = FAMILIES["deepseek_v3"]()
    for chosen, value in (
        (PrecisionPolicy.load("int4"), "int8/token/g64/none"),
        (PrecisionPolicy.load("int8"), "int8/token/g64/none"),
        (PrecisionPolicy.load("fp16"), "fp16"),
        (policy(default={"latent": "int4", "rotary": "int4"}), "int4/token/g64/none"),
    ):
        assert {layer.policy.value.name for layer in chosen.resolve(config).layers} == {value}
        assert PrecisionPolicy.from_yaml(chosen.to_yaml()) == chosen
    with pytest.raises(PolicyError, match="names latent and rotary, but the model caches keys and values"):
        policy(default={"latent": "int4", "rotary": "int8"}).resolve(FAMILIES["llama"]())
    with pytest.raises(PolicyError, match="default.rotary: missing; a layer's policy names both latent and rotary"):
        policy(default={"latent": "int4"})
    with pytest.raises(PolicyError, match="default.key: unknown setting; allowed: latent, rotary"):
        policy(default={"latent": "int4", "key": "int8"})


def test_yaml_anchors_and_merge_keys_are_understood():
    text = """
version: 1
name: a
default: &base {key: int8, value: int4}
layers:
  "1": {<<: *base, key: fp16}
  "2": *base
"""
    layers = PrecisionPolicy.from_yaml(text).resolve([FULL] * 3).layers
    assert [layer.policy.key.name.split("/")[0] for layer in layers] == ["int8", "fp16", "int8"]


@pytest.mark.parametrize(
    "place", ["name: *h", "default: *h", "layers: *h", "block_tokens: *h", "default: {key: *h, value: int8}"]
)
def test_a_bomb_of_aliases_costs_one_line(place):
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in pairwise("abcdefgh")]
    with pytest.raises(PolicyError) as caught:
        PrecisionPolicy.from_yaml("version: 1\n" + "\n".join(lines) + f"\n{place}\n")
    assert len(str(caught.value)) < 500
    plain = {"version": 1, "name": "a", "default": INT8}
    bomb = "x"
    for _ in range(12):
        bomb = [bomb] * 9
    for name in ("name", "default", "layers", "block_tokens"):
        with pytest.raises(PolicyError) as caught:
            PrecisionPolicy(**{**plain, name: bomb})
        assert len(str(caught.value)) < 500


def test_a_name_too_long_for_a_file_is_no_preset_either():
    with pytest.raises(PolicyError, match="is neither a file nor a preset") as caught:
        PrecisionPolicy.load("x" * 3000)
    assert len(str(caught.value)) < 500


def test_a_stray_setting_makes_no_latents():
    config = FAMILIES["llama"]()
    config.kv_lora_rank = 32
    assert policy().resolve(config).layers[0].policy.value.name.startswith("int4")
