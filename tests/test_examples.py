"""The examples run, without a warning, and tell what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name):
    command = [sys.executable, "-W", "error", EXAMPLES / name]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)


def test_decode_loop():
    done = run("decode_loop.py")
    assert not done.stderr
    saved, error = re.fullmatch(
        r"\d+ tokens in \d+ bytes of \d+: (\d+)% saved\nlogits off by up to ([\d.]+)%\n", done.stdout
    ).groups()
    assert int(saved) >= 65
    assert 0 < float(error) < 2
