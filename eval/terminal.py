"""What all commands share: exit codes, common options, and what goes to which stream.

Standard output holds the result and nothing else; progress and messages go to standard error.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from logging import ERROR, getLogger
from typing import Any

import typer
from rich.console import Console

from .errors import printable

EXIT_OK, EXIT_ROWS, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
MODEL_HELP = "Hub name, local folder, GGUF file, smollm2-135m or gemma3-270m."
POLICIES_HELP = "Presets and policy files, separated by commas."
JSON_HELP = "Print one JSON document instead of a table."


class DType(StrEnum):
    """What the model computes in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def print_json(context: typer.Context, rows: Sequence[Any], **more: Any) -> None:
    """One JSON document of a command's rows, and of ``more`` beside them, on standard output."""
    from .files import to_json
    from .report import document

    words = context.obj or context.command_path.split()[1:]
    sys.stdout.write(to_json(document(shlex.join(["kvquant", *words]), rows) | more))


@contextlib.contextmanager
def only_our_output(models: bool = True) -> Iterator[tuple[Console, Callable[[str], None]]]:
    """Where a command talks to its user: the console on standard error, and a function that prints a line there.

    Meanwhile libraries' bars, logs and warnings are kept off the terminal, what they print off standard output.
    Without ``models`` the library that serves them, slow to load, is left alone.
    """
    from kvquant import KVQuantWarning

    if models:
        _silence_transformers()
    getLogger("bitsandbytes").setLevel(ERROR)  # misses a package for something else than codecs
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=KVQuantWarning)
        warnings.showwarning = lambda message, *_: print(
            f"kvquant: warning: {printable(str(message))}", file=sys.stderr
        )
        console = Console(stderr=True)

        def say(text: str) -> None:
            for line in text.split("\n"):
                console.print(printable(line), style="dim", markup=False, highlight=False, soft_wrap=True)

        yield console, say


def _silence_transformers() -> None:
    from huggingface_hub.utils.logging import set_verbosity_error
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    set_verbosity_error()  # type: ignore[no-untyped-call]
