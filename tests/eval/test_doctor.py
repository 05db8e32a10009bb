"""`kvquant doctor`: verdicts layer by layer, and the README's table of families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from kvquant import PrecisionPolicy
from kvquant.kernels import means
from kvquant_eval.cli import run
from kvquant_eval.doctor import Diagnosis, diagnose_config
from tests.models import COMMON, FAMILIES

README = (Path(__file__).parents[2] / "README.md").read_text()
INT4 = PrecisionPolicy.load("int4")


def family_row(family: str, diagnosis: Diagnosis) -> str:
    """A family's line of the README: which kinds of layer are compressed, and which pass through."""
    kinds: dict[str, list[str]] = {"compressed": [], "passed through": []}
    for row in diagnosis.rows:
        if row.kind not in kinds[row.status]:
            kinds[row.status].append(row.kind)
    return f"| {family} | {', '.join(kinds['compressed'])} | {', '.join(kinds['passed through']) or '–'} |"


DECODED = {"bloom", "falcon", "deepseek_v2", "deepseek_v3"}  # for attention, which is slower


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_served_and_in_the_readme(family: str) -> None:
    diagnosis = diagnose_config(FAMILIES[family](), INT4)
    assert diagnosis.served
    assert [note for note in diagnosis.notes if "decoded for attention" not in note] == []
    assert bool(diagnosis.notes) == (family in DECODED)
    assert family_row(family, diagnosis) in README.splitlines()


def test_the_readme_lists_no_other_family() -> None:
    table = README.split("| family |")[1].split("\n\n")[0].splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table] == list(FAMILIES)


def test_layers_that_pass_through_say_why() -> None:
    rows = diagnose_config(FAMILIES["gemma3n"](), INT4).rows
    assert [row.status for row in rows] == ["passed through", "compressed"] * 2 + ["passed through"] * 2
    assert rows[0].reason == "holds its window only, whatever the context"
    assert rows[5].reason.startswith("no keys and values of its own")
    assert rows[1].key == "int4/channel/g64/none"
    assert all(row.reason for row in rows if row.status != "compressed")


def refused(config: Any) -> str:
    diagnosis = diagnose_config(config, INT4)
    assert not diagnosis.served
    assert {row.status for row in diagnosis.rows} == {"refused"}
    (note,) = diagnosis.notes
    return note


def test_models_with_nothing_to_compress_are_refused() -> None:
    assert "2 linear_attention" in refused(tf.MambaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2))
    assert "4 sliding_attention" in refused(tf.MistralConfig(**COMMON, sliding_window=8))


def test_models_that_generate_nothing_are_refused() -> None:
    config = tf.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    diagnosis = diagnose_config(config, INT4)
    assert not diagnosis.served
    assert diagnosis.notes == ["vit is no model that writes text, as far as transformers tells"]


def test_models_that_keep_no_cache_say_so_in_every_layer() -> None:
    config = tf.OpenAIGPTConfig(vocab_size=97, n_embd=8, n_layer=2, n_head=2)
    note = refused(config)
    assert note.startswith("OpenAIGPTLMHeadModel.forward takes neither cache nor")
    assert [row.reason for row in diagnose_config(config, INT4).rows] == [note, note]


def test_a_model_without_layers_is_not_served() -> None:
    assert not diagnose_config(tf.LlamaConfig(**{**COMMON, "num_hidden_layers": 0}), INT4).served


@pytest.mark.parametrize(
    "config",
    [
        tf.Gemma3nConfig,  # what checkpoints have: the text model is part of it
        tf.WhisperConfig,
        tf.MoonshineConfig,
        tf.MllamaConfig,
        tf.T5Config,
        tf.Qwen2VLConfig,
        tf.ModernBertDecoderConfig,
    ],
)
def test_composite_models_and_those_that_hear_or_translate_are_served(config: Any) -> None:
    assert diagnose_config(config(), INT4).served


@pytest.mark.parametrize(
    "settings",
    [
        {"hidden_act": "nope"},
        {"vocab_size": 0},
        {"vocab_size": -5},
        {"pad_token_id": 9999},
        {"num_hidden_layers": -1},
        {"attn_implementation": "nope"},
        {"layer_types": ["sliding_attention"] * 4},
        {"rope_parameters": {"rope_type": "nonsense", "rope_theta": 1e4}},
    ],
)
def test_configs_that_make_no_sense_cost_one_line(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tf.LlamaConfig(**COMMON).to_dict() | {"model_type": "llama"} | settings
    (tmp_path / "config.json").write_text(json.dumps(plain))
    code = run(["doctor", str(tmp_path)])
    out, err = capsys.readouterr()
    assert code in (1, 2)
    assert (out + err).count("\n") == 1
    assert "Traceback" not in err


def test_long_rope_is_noted() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = tf.Phi3Config(
        **COMMON, original_max_position_embeddings=32, rope_parameters={**rope, "original_max_position_embeddings": 32}
    )
    diagnosis = diagnose_config(config, INT4)
    assert diagnosis.served
    assert "past 32 tokens" in diagnosis.notes[0]


def test_command(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(model_folder), "--policy", "shallow-fp16-deep-int4"]) == 0
    out, _ = capsys.readouterr()
    assert out.splitlines()[0] == "layer 0: full_attention, compressed: key fp16, value fp16"
    assert f"on cpu: {means()['cpu']}" in out.splitlines()
    assert run(["doctor", str(model_folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["layer"] for row in document["rows"]] == [0, 1, 2, 3]
    assert document["kernels"] == means()
    windowed = tmp_path / "windowed"
    tf.MistralConfig(**COMMON, sliding_window=8).save_pretrained(windowed)
    assert run(["doctor", str(windowed)]) == 1
    out, _ = capsys.readouterr()
    assert "nothing to compress" in out
    assert "on cpu" not in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["/no/such/model"], "no such file or folder"),
        (["MODEL", "--policy", "int7"], "'int7' is neither a file nor a preset"),
        ([], "Missing argument 'model'"),
    ],
)
def test_bad_input(
    model_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert run(["doctor", *(str(model_folder) if word == "MODEL" else word for word in arguments)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert complaint in err
    assert err.count("\n") == 1
