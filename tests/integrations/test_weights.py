"""`weights_fingerprint`: other weights, another fingerprint."""

from __future__ import annotations

import torch
from safetensors.torch import save_file

from kvquant.integrations.weights import weights_fingerprint


def save(folder, name="model.safetensors", change=0.0, rows=600):
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    weights = {f"layer.{n}": torch.randn(rows, 64) for n in range(4)}
    weights["layer.2"] += change
    save_file(weights, folder / name)
    return weights_fingerprint(str(folder))


def test_what_tells_weights_apart(tmp_path):
    known = save(tmp_path / "a")
    assert save(tmp_path / "copy") == known
    assert save(tmp_path / "tuned", change=0.01) != known
    assert save(tmp_path / "longer", rows=601) != known
    assert save(tmp_path / "renamed", name="other.safetensors") != known
    assert save(tmp_path / "a", name="second.safetensors") != known
    assert weights_fingerprint(str(tmp_path / "copy" / "model.safetensors")) == known
    (tmp_path / "copy" / "config.json").write_text("{}")
    assert weights_fingerprint(str(tmp_path / "copy")) == known


def test_no_weights(tmp_path):
    for model in (str(tmp_path), "nobody/has-this-model", "no name: " + "x" * 300, "", "../.."):
        assert weights_fingerprint(model) is None
    (tmp_path / "empty.bin").touch()
    assert weights_fingerprint(str(tmp_path)) is not None
