"""The compiled library where it is missing: why, and that this is said once, where it would have been used."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash._xxhash

from kvquant import get_codec
from kvquant.kernels import Dense, attend, encode, loading, means, native, serving

ROOT = Path(__file__).parent.parent
built = pytest.mark.skipif(bool(loading.missing()), reason="the library is not built here: no compiler")


@pytest.fixture
def anew():
    """What is known of the library is found out anew, here and afterwards."""
    known = loading._found, loading._tell, loading.isa
    for each in known:
        each.cache_clear()
    yield
    for each in known:
        each.cache_clear()


@pytest.fixture
def folder(anew, tmp_path, monkeypatch):
    """Where the library is looked for, empty."""
    monkeypatch.setattr(loading, "_FOLDER", tmp_path)
    return tmp_path


def one_token():
    states = torch.randn(2, 1, 16)
    return states, [Dense(states, states)], 16


def test_not_built(folder):
    assert loading.library() is None
    assert loading.missing().startswith("no compiled library (it was not built); to have it, install kvquant")


def test_not_a_library(folder):
    (folder / "_native.so").write_bytes(b"not a library")
    assert "(_native.so does not load: " in loading.missing()


def test_another_library(folder):
    shutil.copy(xxhash._xxhash.__file__, folder / "_native.so")
    assert "(_native.so is of another release)" in loading.missing()


@built
def test_another_release(monkeypatch, anew):
    monkeypatch.setattr(loading, "VERSION", -1)
    assert "is of another release)" in loading.missing()


def test_it_is_missed_once(folder, caplog):
    for _ in range(2):
        output, _ = attend(*one_token(), scale=1.0)
        assert output.shape == (2, 1, 16)
        encode(get_codec("int4", "key", 64), torch.randn(1, 2, 64, 16))
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("kvquant", logging.WARNING)
    assert record.getMessage().startswith("kvquant attends and encodes in plain torch, which is slower: no compiled ")
    assert "\n" not in record.getMessage()


def test_it_is_not_missed_elsewhere(folder, caplog):
    query, segments, _ = one_token()
    assert not native.serves(query.to("meta"), segments)
    encode(get_codec("fp16", "key", 64), torch.randn(1, 2, 64, 16))
    assert not caplog.records


@built
def test_it_is_not_missed_where_it_is(caplog):
    attend(*one_token(), scale=1.0)
    assert not caplog.records


def test_it_is_seen_unless_told_otherwise(tmp_path):
    code = (
        "import sys, pathlib, torch; from kvquant.kernels import Dense, attend, loading;"
        f"loading._FOLDER = pathlib.Path({str(tmp_path)!r});"
        "states = torch.randn(2, 1, 16); print('imported', file=sys.stderr, flush=True);"
        "[attend(states, [Dense(states, states)], 16, scale=1.0) for _ in range(2)]"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    imported, told = done.stderr.splitlines()
    assert imported == "imported"
    assert told.startswith("kvquant attends and encodes in plain torch, which is slower: ")


def test_what_serves_is_named(folder):
    assert serving(*one_token()) == "plain torch"
    assert means()["cpu"] == f"plain torch, which is slower: {loading.missing()}"


@built
def test_what_serves_is_named_with_the_library():
    best = loading.ISAS[loading.isa()]
    query, segments, dim = one_token()
    assert serving(query, segments, dim) == f"compiled kernel ({best})"
    assert serving(query.expand(2, 64, dim), segments, dim) == "decoded piece by piece into torch's fused kernel"
    assert means()["cpu"] == f"compiled kernels of integer codecs ({best}), 1 thread"


@built
def test_what_wheels_are_tested_with():
    done = subprocess.run([sys.executable, "-m", "tests.smoke"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.startswith("compiled kernels of integer codecs (")


@pytest.mark.parametrize(
    ("triton", "capability", "words"),
    [
        (True, (9, 0), "Triton kernels of integer codecs on a GPU"),
        (True, (7, 5), "plain torch on a GPU: it does not multiply bfloat16"),
        (False, (9, 0), "plain torch on a GPU: there is no Triton; pip install triton"),
    ],
)
def test_gpus_are_named(monkeypatch, triton, capability, words):
    from kvquant.kernels import gpu

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(gpu, "installed", lambda: triton)
    gpu._recent_enough.cache_clear()
    assert means()["cuda:0"] == words
    gpu._recent_enough.cache_clear()
