"""Tests of an engine's adapter run where that engine is installed, by the target made for it: `make test-<engine>`."""

from __future__ import annotations

import importlib.util
import warnings

MISSING = [engine for engine in ("lmcache", "sglang", "vllm") if importlib.util.find_spec(engine) is None]
collect_ignore_glob = [f"test_{engine}*.py" for engine in MISSING]
WARNINGS = [
    "ignore:`LoggingHandler` in `opentelemetry-sdk` is deprecated:DeprecationWarning",
]

if "vllm" not in MISSING:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM loads; all other warnings stay errors
        import kvquant.integrations.vllm  # noqa: F401


def pytest_configure(config):
    """Warnings of engines, and of what they import, that are none of ours."""
    for line in WARNINGS:
        config.addinivalue_line("filterwarnings", line)
