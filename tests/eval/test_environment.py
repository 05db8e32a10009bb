from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from kvquant_eval import environment
from kvquant_eval.environment import commit, machine, versions


def test_versions_and_machine_are_plain_data() -> None:
    assert json.loads(json.dumps(versions())) == versions()
    described = machine()
    assert described["cpu"]
    assert isinstance(described["cores"], int)
    assert described["cores"] >= 1


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@y.z", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_our_own_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "environment.py"
    source.write_text("one")
    monkeypatch.setattr(environment, "__file__", str(source))
    assert commit() is None  # no repository
    git(tmp_path, "init", "-q")
    assert commit() is None  # somebody else's
    git(tmp_path, "add", "environment.py")
    assert commit() is None  # nothing committed yet
    git(tmp_path, "commit", "-qm", "x")
    revision = git(tmp_path, "rev-parse", "HEAD")
    assert commit() == revision
    source.write_text("two")
    assert commit() == f"{revision}+"


def test_machines_without_git_proc_or_sysconf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() is None

    def missing(*args: object) -> None:
        raise OSError

    monkeypatch.setattr(environment.Path, "read_text", missing)
    monkeypatch.setattr(environment.os, "sysconf", missing)
    described = machine()
    assert described["cpu"] is not None
    assert described["memory_gib"] is None
