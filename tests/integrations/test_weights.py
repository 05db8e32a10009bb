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


def test_a_single_byte_tells_weights_apart(tmp_path):
    file, known = tmp_path / "a" / "model.safetensors", save(tmp_path / "a", rows=20000)
    size = file.stat().st_size
    for place in (size // 3, size // 2 + 4097, size - 1):
        with file.open("r+b") as opened:
            opened.seek(place)
            byte = opened.read(1)[0]
            opened.seek(place)
            opened.write(bytes([byte ^ 1]))
        assert weights_fingerprint(str(file.parent)) != known
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(bytes([byte]))
    assert weights_fingerprint(str(file.parent)) == known


def test_no_weights(tmp_path):
    for model in (str(tmp_path), "nobody/has-this-model", "no name: " + "x" * 300, "", "../.."):
        assert weights_fingerprint(model) is None
    (tmp_path / "empty.bin").touch()
    assert weights_fingerprint(str(tmp_path)) is not None
