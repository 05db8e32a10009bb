"""Asks the Hugging Face hub, once and briefly."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

HUB_SECONDS = 10
DENIALS = (HfHubHTTPError, HFValidationError)
"""What `ask` raises where the hub says no."""

Answer = TypeVar("Answer")


def ask(question: Callable[[HfApi], Answer]) -> Answer | None:
    """The hub's answer; None if it can't be reached, or ``HF_HUB_OFFLINE`` forbids to, and only a cache may serve.

    Asked once and to be given `HUB_SECONDS`: the libraries would try for half a minute. Raises one of `DENIALS`.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return None
    try:
        return question(HfApi())
    except DENIALS as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None and status >= 500:
            return None
        raise
    except Exception:  # the connection, of which each HTTP library has its own errors
        return None
