"""vLLM's tests run where vLLM is, in an environment of their own: `make test-vllm`."""

from __future__ import annotations

import importlib.util
import warnings

collect_ignore_glob = ["test_vllm*.py"]

if importlib.util.find_spec("vllm"):
    collect_ignore_glob.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM loads; all other warnings stay errors
        import kvquant.integrations.vllm  # noqa: F401
