"""The README's code runs, and its policy and tables are the real ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvquant
from kvquant import PrecisionPolicy, preset_names
from kvquant_eval.models import load
from tests.models import tiny

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.real_model
def test_the_opening_example_runs():
    code = blocks("python")[0]
    assert len([line for line in code.splitlines() if line]) <= 8
    folder = load("smollm2-135m", "float32").model.config._name_or_path
    code, count = re.subn(r'^name = ".*?"', f"name = {folder!r}", code, flags=re.MULTILINE)
    assert count == 1
    quiet = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=quiet)
    assert re.search(r"\d+ tokens in 1 rows, \d+ sealed blocks: .* \(0\.3\d\d,", done.stdout)
    assert "Traceback" not in done.stderr


def test_packed_rows():
    (code,) = (block for block in blocks("python") if "cu_seqlens" in block)
    model = tiny(vocab_size=4000)
    kvquant.enable(model)
    names = {"kvquant": kvquant, "torch": torch, "model": model}
    with torch.no_grad():
        exec(code, names)
    assert names["cache"].stats().tokens == (5, 5)
    assert names["logits"].shape == (2, 4000)


def test_the_policy_resolves():
    (text,) = blocks("yaml")
    described = PrecisionPolicy.from_yaml(text).resolve(["full_attention"] * 30).describe()
    assert "layer 0: key int8/channel/g64/none, value int8/token/g64/none" in described
    assert "layers 27-29: key int8/channel/g32/none" in described


def test_every_preset_is_in_the_table_with_its_bits():
    rows = dict(re.findall(r"^\| `([\w-]+)` \|.*\| ([\d.]+)[^|]*\|$", README, re.MULTILINE))
    assert set(rows) == set(preset_names())
    for name, bits in rows.items():
        layers = PrecisionPolicy.load(name).resolve(["full_attention"] * 30).layers
        exact = [stored_bits(codec) for layer in layers for codec in (layer.policy.key, layer.policy.value)]
        assert sum(exact) / len(exact) == pytest.approx(float(bits), abs=0.06), name


def stored_bits(codec):
    layout = codec.layout(1, 128, 64, torch.float16)
    return sum(8 * torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout.values()) / (128 * 64)
