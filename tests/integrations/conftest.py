"""Tests of an engine's adapter run where that engine is installed, by the target made for it: `make test-<engine>`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if importlib.util.find_spec(path.stem.split("_")[1]) is None
]
WARNINGS = [
    "ignore:`LoggingHandler` in `opentelemetry-sdk` is deprecated:DeprecationWarning",
]


def pytest_configure(config):
    """Warnings of engines, and of what they import, that are none of ours."""
    for line in WARNINGS:
        config.addinivalue_line("filterwarnings", line)
