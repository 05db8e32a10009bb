"""The examples run, without a warning, and tell what they promise."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from kvquant_eval.models import load

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))


def test_decode_loop():
    command = [sys.executable, "-W", "error", EXAMPLES / "decode_loop.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert not done.stderr
    saved, error = re.fullmatch(
        r"\d+ tokens in \d+ bytes of \d+: (\d+)% saved\nlogits off by up to ([\d.]+)%\n", done.stdout
    ).groups()
    assert int(saved) >= 65
    assert 0 < float(error) < 2


@pytest.fixture(scope="module")
def smollm2():
    """A folder with the real model, as the hub would give it."""
    return load("smollm2-135m", "float32").model.config._name_or_path


@pytest.fixture
def run(smollm2, monkeypatch, capfd, tmp_path):
    """Runs an example as `python` does, in this process, and gives what it and processes of its own print."""

    def run(name, *options):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), "--model", smollm2, *options])
        runpy.run_path(sys.argv[0], run_name="__main__")
        return capfd.readouterr().out

    return run


@pytest.mark.real_model
def test_long_document(run):
    told = run("long_document.py", "--tokens", "900", "--new", "12")
    found = re.search(
        r"^-- DynamicCache: ([\d.]+) MiB, ([\d.]+) tokens/s\n(?s:.*)"
        r"^-- kvquant int4: ([\d.]+) MiB, ([\d.]+) tokens/s\n(\d+) bytes saved, (\d+)% of the cache\n\Z",
        told,
        re.MULTILINE,
    )
    assert found, told
    plain, plain_rate, taken, rate, saved, share = map(float, found.groups())
    assert plain - taken == pytest.approx(saved / 2**20, abs=0.1)
    assert share >= 50
    assert min(plain_rate, rate) > 0


@pytest.mark.real_model
def test_offload(run):
    told = run("offload.py", "--tokens", "640", "--new", "10")
    blocks = int(re.search(r"(\d+) bytes are blocks", told)[1])
    tiers = re.findall(r"^(\w+): (\d+) of (\d+) bytes, (\d+) blocks, (\d+) hits$", told, re.MULTILINE)
    assert [name for name, *_ in tiers] == ["device", "host", "disk"]
    used, budgets, counts, hits = zip(*(map(int, numbers) for _, *numbers in tiers), strict=True)
    assert budgets[0] == blocks // 4
    assert sum(used) >= 0.9 * blocks
    assert sum(counts) == 4 * 30
    assert all(hits)
    assert "\nthe same text: '" in told


@pytest.mark.real_model
def test_resume(run, tmp_path):
    first, unbroken, resumed = run("resume.py", "--tokens", "400", "--new", "12").splitlines()
    read, said = re.match(r"(\d+) tokens are read, of (\d+): '", first).groups()
    assert read == said
    assert unbroken == resumed
    read, said = re.match(r"(\d+) tokens are read, of (\d+): '.+'$", resumed).groups()
    assert int(read) < 20 < 400 < int(said)
    assert (tmp_path / "chats" / "store").is_dir()


@pytest.mark.real_model
def test_tune_and_serve(run):
    options = ["--context", "640", "--budget", "0.5", "--codecs", "int8,int4", "--minutes", "0.03", "--new", "8"]
    told = run("tune_and_serve.py", *options)
    lines = re.findall(
        r"^(\w+): ([\d.]+) of the bytes, KL (\S+), ([\d.]+)% the same next token: '", told, re.MULTILINE
    )
    assert [name for name, *_ in lines] == ["fp16", "int4", "tuned"]
    (_, exact, same), (_, loss, _), (share, tuned, top) = (map(float, numbers) for _, *numbers in lines)
    assert (exact, same) == (0, 100)
    assert share <= 0.5
    assert 0 < tuned < 0.01
    assert 0 < loss < 0.01
    assert top >= 95


def test_the_folders_page_names_them_and_they_are_short():
    page = (EXAMPLES / "README.md").read_text()
    assert sorted(re.findall(r"^\| \[`(\w+\.py)`\]\(\1\) \|", page, re.MULTILINE)) == SCRIPTS
    for name in SCRIPTS:
        lines = len((EXAMPLES / name).read_text().splitlines())
        assert lines <= 90 or name == "vllm_offload.py", name  # which measures in processes of its own
    for name in re.findall(r"\]\(([\w.]+)\)", page):
        assert (EXAMPLES / name).is_file(), name


def test_continuous_batching():
    command = [sys.executable, "-W", "error", EXAMPLES / "continuous_batching.py", "--rows", "4", "--longest", "300"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert not done.stderr
    texts, same, least, most = re.fullmatch(
        r"(\d+) texts of 9 to 300 tokens, 4 at a time: (\d+) are what they are alone\n"
        r"bytes over the sum of those of the rows alone: ([\d.]+) to ([\d.]+)\n"
        r"\d+ tokens per second, \d+ one text at a time\n",
        done.stdout,
    ).groups()
    assert texts == same == "8"
    assert 0.97 <= float(least) <= float(most) <= 1.03
