"""Fixtures of the tests of the command line and the harness."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi

import kvquant_eval.bench.load
import kvquant_eval.bench.machine
import kvquant_eval.hub
from kvquant import register_codec
from kvquant.codecs import unregister_codec

from .tiny import SAMPLE, Stand, small_policy, tiny_gpt2, tiny_llama, tiny_tokenizer


@pytest.fixture(scope="session")
def llama() -> Any:
    return tiny_llama()


@pytest.fixture(scope="session")
def gpt2() -> Any:
    return tiny_gpt2()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(97, (512,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def codec() -> Iterator[Callable[[str, Callable[[torch.Tensor], torch.Tensor]], None]]:
    """Registers a codec that spoils what it stores, for the length of a test."""
    names = []

    def register(name: str, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        register_codec(name, lambda options, role, block_tokens: Stand(name, spoil))
        names.append(name)

    yield register
    for name in names:
        unregister_codec(name)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer, as a user would have one on disk."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(vocab_size=300).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def policy_file(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a policy with small blocks to a file named after its codec."""

    def write(codec: str) -> Path:
        path = tmp_path / f"{codec}-small.yaml"
        path.write_text(small_policy(codec, f"{codec}-small").to_yaml())
        return path

    return write


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(SAMPLE)
    return path


@pytest.fixture
def arguments(model_folder: Path, text_file: Path, policy_file: Callable[[str], Path]) -> dict[str, str]:
    """Options of a `kvquant ppl` of seconds."""
    policies = f"{policy_file('int8')},{policy_file('int4')}"
    return {
        "--model": str(model_folder),
        "--policies": policies,
        "--contexts": "96,128",
        "--text": str(text_file),
        "--chunk": "8",
        "--score-tokens": "64",
    }


@pytest.fixture
def small_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine whose last-level caches hold so many bytes, and that is looked at for no time."""
    cores = {0, 1, 2}
    monkeypatch.setattr(kvquant_eval.bench.machine.os, "sched_getaffinity", lambda pid: cores, raising=False)
    for core in cores:
        for index, (level, size) in enumerate((("1", "8K"), ("3", "16K"))):
            folder = tmp_path / "cpus" / f"cpu{core}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("shared_cpu_list", "0-255"), ("size", size)):
                (folder / name).write_text(text + "\n")
    monkeypatch.setattr(kvquant_eval.bench.machine, "_CPUS", tmp_path / "cpus")
    monkeypatch.setattr(kvquant_eval.bench.load, "_LOOK_SECONDS", 0.0)
    return 16 << 10


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A hub on this machine that answers everything with the ``status`` and the error ``code`` put here."""
    reply: dict[str, Any] = {"status": 404, "code": ""}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(reply["status"])
            if reply["code"]:
                self.send_header("x-error-code", reply["code"])
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(
            kvquant_eval.hub, "HfApi", partial(HfApi, endpoint=f"http://127.0.0.1:{server.server_port}")
        )
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield reply
        server.shutdown()
