"""Conversion happens once, is found only when whole, and gives the file's own weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvquant_eval import gguf_cache
from kvquant_eval.errors import InputError
from kvquant_eval.gguf_cache import cache_folder, converted
from kvquant_eval.models import load

from .tiny import SAMPLE, tiny_llama, tiny_tokenizer

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEADS = {"self_attn.q_proj": ("attn_q", 4), "self_attn.k_proj": ("attn_k", 2)}


def write_gguf(path: Path) -> Any:
    """A tiny Llama as a GGUF; returns the model that was written."""
    model, tokenizer = tiny_llama(vocab_size=300, num_hidden_layers=2), tiny_tokenizer()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(300)
    writer.add_tokenizer_model("gpt2")
    ordered = tokenizer.convert_ids_to_tokens(list(range(300)))
    writer.add_token_list(ordered)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 298)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(*_as_gguf(name, tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _as_gguf(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    base, _, kind = name.removesuffix(".weight").partition("model.layers.")
    if not kind:
        return f"{NAMES[base]}.weight", array
    number, _, part = kind.partition(".")
    if part in HEADS:  # llama.cpp interleaves the two halves of a rotary head
        part, heads = HEADS[part]
        rows = array.reshape(heads, 2, array.shape[0] // heads // 2, -1).swapaxes(1, 2)
        return f"blk.{number}.{part}.weight", np.ascontiguousarray(rows.reshape(array.shape))
    return f"blk.{number}.{NAMES[part]}.weight", array


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVQUANT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVQUANT_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("KVQUANT_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "kvquant"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "kvquant"


def test_a_gguf_becomes_the_same_model_and_tokenizer(
    tmp_path: Path, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.gguf"
    written = write_gguf(path)
    loaded = load(str(path), "float32")
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, written.state_dict()[name]), name
    assert loaded.model.dtype == torch.float32
    assert loaded.tokenizer(SAMPLE)["input_ids"] == tiny_tokenizer()(SAMPLE)["input_ids"]
    assert loaded.weights == "tiny.gguf, unpacked to float32"
    assert home in converted(path).parents
    assert "de-quantizing" not in "".join(capfd.readouterr())


def test_it_is_converted_once_and_again_only_for_other_content(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def convert(source: Path, folder: Path) -> None:
        made.append(source)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(gguf_cache, "_convert", convert)
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF one")
    said: list[str] = []
    first = converted(path, said.append)
    assert converted(path, said.append) == first
    assert (len(made), said) == (1, ["Converting a.gguf, once"])
    os.utime(path, (0, 0))
    assert converted(path) == first
    path.write_bytes(b"GGUF two")  # as long, newer or not
    assert converted(path) != first
    monkeypatch.setattr(gguf_cache.transformers, "__version__", "0.0.0")
    converted(path)
    assert len(made) == 3


def test_an_interrupted_conversion_is_never_used(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF one")

    def interrupted(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_cache, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        converted(path)
    assert [entry.suffix for entry in (home / "gguf").iterdir()] == [".lock"]

    def whole(source: Path, folder: Path) -> None:
        assert not list(folder.iterdir())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(gguf_cache, "_convert", whole)
    assert [file.name for file in converted(path).iterdir()] == ["config.json"]


KILLED = """
import sys, time
from pathlib import Path
from kvquant_eval import gguf_cache
def slow(source, folder):
    (folder / "config.json").write_text("{}")
    print("writing", flush=True)
    time.sleep(60)
gguf_cache._convert = slow
gguf_cache.converted(Path(sys.argv[1]))
"""


def test_what_a_killed_process_left_is_replaced(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF one")
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
    (left,) = (entry for entry in (home / "gguf").iterdir() if entry.is_dir())
    assert left.suffix == ".partial"
    monkeypatch.setattr(gguf_cache, "_convert", lambda source, folder: (folder / "whole").touch())
    started = time.monotonic()
    assert [file.name for file in converted(path).iterdir()] == ["whole"]
    assert time.monotonic() - started < 5  # its lock died with it
    assert not left.exists()


def test_files_and_folders_that_do_not_serve_are_told_in_one_line(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0 and then nothing of use")
    with pytest.raises(InputError, match=r"^model: a\.gguf: transformers can't read it: .+$"):
        converted(path)
    home.rename(tmp_path / "elsewhere")
    home.write_text("a file where the folder should be")
    with pytest.raises(InputError, match=r"^model: a\.gguf: converting it failed at .*cache"):
        converted(path)
    monkeypatch.setattr(gguf_cache, "find_spec", lambda module: None)
    home.unlink()
    with pytest.raises(InputError, match="needs gguf: pip install gguf"):
        converted(path)


@pytest.mark.real_model
def test_the_packaged_model_converts_and_loads_in_no_time() -> None:
    loaded = load("smollm2-135m", "float32")
    started = time.monotonic()
    load("smollm2-135m", "bfloat16")
    assert time.monotonic() - started < 5
    assert loaded.model.config.max_position_embeddings == 8192
    source = gguf_cache.cache_folder()
    folder = next(path for path in (source / "gguf").iterdir() if path.is_dir() and path.suffix != ".partial")
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again.lm_head.weight, loaded.model.lm_head.weight)
    text = "In 1605, “the king” gave £20 to\n\nhis\tmen."
    assert AutoTokenizer.from_pretrained(folder).decode(loaded.tokenizer(text)["input_ids"]) == text
