"""Turns the words of the command line into values."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .errors import InputError

_UNITS = {"": 1, "k": 1024, "m": 1024**2}
_SIZE_UNITS = _UNITS | {"g": 1024**3}
_SIZE = re.compile(r"(\d{1,15})([kmg]?)", re.IGNORECASE | re.ASCII)
_TOKENS = re.compile(r"(\d{1,12})([km]?)", re.IGNORECASE | re.ASCII)


def split_list(option: str, text: str) -> list[str]:
    """The comma-separated items of an option, in order, each once. Raises `InputError` if there are none."""
    items = [item.strip() for item in text.split(",")]
    found = list(dict.fromkeys(item for item in items if item))
    if not found:
        raise InputError(f"{option}: {text!r} names nothing; allowed: one or more, separated by commas")
    return found


def parse_contexts(text: str, option: str = "--contexts") -> list[int]:
    """Context lengths in tokens, ascending and without duplicates; ``2K`` is 2048 and ``1M`` is 1048576.

    Raises `InputError`, which names ``option``, for anything else than positive whole numbers.
    """
    return sorted({parse_tokens(option, item, ", separated by commas") for item in split_list(option, text)})


def parse_tokens(option: str, text: str, more: str = "") -> int:
    """A number of tokens, as in `parse_contexts`; raises `InputError`, which ends in ``more``."""
    match = _TOKENS.fullmatch(text)
    tokens = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if tokens < 1:
        raise InputError(
            f"{option}: {text!r} is not a number of tokens; allowed: whole numbers from 1, also with K (1024) or "
            f"M (1048576){more}"
        )
    return tokens


def parse_size(option: str, text: str) -> int:
    """A number of bytes; ``140K`` is 143360, M and G follow. Raises `InputError`."""
    match = _SIZE.fullmatch(text)
    size = int(match[1]) * _SIZE_UNITS[match[2].lower()] if match else 0
    if not 0 < size < 1 << 60:
        raise InputError(
            f"{option}: {text!r} is not a number of bytes; allowed: whole numbers from 1, also with K (1024), M or G"
        )
    return size


def expanded(option: str, path: str | Path) -> Path:
    """A path with its ``~`` filled in. Raises `InputError` for the home of nobody, and for nothing."""
    if not str(path).strip():
        raise InputError(f"{option}: '' names nothing; allowed: a path")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{option}: {path}: {error}") from error


def make_writable(option: str, folder: Path) -> None:
    """Makes a folder and proves that files can be written there. Raises `InputError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{option}: {folder}: {error.strerror or error}; allowed: a folder I can write to") from error


def format_context(tokens: int) -> str:
    """A context the way people write it: 4096 becomes ``4K``, 1000 stays ``1000``."""
    for letter, unit in (("M", 1024**2), ("K", 1024)):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return str(tokens)


def text_names(values: Sequence[str]) -> list[str]:
    """The texts of ``--text``: it may be repeated, and list several; a file with commas in its name is one."""
    names: list[str] = []
    for value in values:
        names += [value] if os.path.exists(expanded("--text", value)) else split_list("--text", value)
    return names
