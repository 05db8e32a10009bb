"""vLLM's tests run where vLLM is, in an environment of their own: `make test-vllm`."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_vllm*.py"]
