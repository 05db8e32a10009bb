"""The examples run, without a warning, and tell what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *arguments):
    command = [sys.executable, "-W", "error", EXAMPLES / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)


def test_decode_loop():
    done = run("decode_loop.py")
    assert not done.stderr
    saved, error = re.fullmatch(
        r"\d+ tokens in \d+ bytes of \d+: (\d+)% saved\nlogits off by up to ([\d.]+)%\n", done.stdout
    ).groups()
    assert int(saved) >= 65
    assert 0 < float(error) < 2


def test_continuous_batching():
    done = run("continuous_batching.py", "4", "300")
    assert not done.stderr
    texts, same, least, most = re.fullmatch(
        r"(\d+) texts of 9 to 300 tokens, 4 at a time: (\d+) are what they are alone\n"
        r"bytes over the sum of those of the rows alone: ([\d.]+) to ([\d.]+)\n"
        r"\d+ tokens per second, \d+ one text at a time\n",
        done.stdout,
    ).groups()
    assert texts == same == "8"
    assert 0.97 <= float(least) <= float(most) <= 1.03
