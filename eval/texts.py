"""Texts to score: files, plain or compressed, datasets, or the standard library's own sources."""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import lzma
import sys
import sysconfig
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .dataset_text import names_dataset, read_dataset
from .errors import InputError
from .options import expanded, text_names

_OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
_PIECE_BYTES = 16 << 20
_LEAST_BYTES = 64 << 20  # of a file
_LEAST_CHARACTERS = 1 << 20  # of a dataset, whose rows may come over the network
_PER_TOKEN = 64  # bytes or characters; tokenizers put 3 to 5 into one


@dataclass(frozen=True)
class Text:
    """A text, where it came from, and the SHA-256 of its UTF-8 bytes."""

    name: str
    content: str
    sha256: str


def find_text(values: Sequence[str], tokens: int = 0) -> Text:
    """The text that the values of ``--text`` name, joined in the order given; the default where there are none.

    A value names a file of UTF-8 text (``.xz``, ``.gz`` and ``.bz2`` are unpacked) or a dataset (see
    `dataset_text`). Of a text far longer than ``tokens`` need, only the beginning is read. Raises `InputError` for
    one that is missing, empty, damaged, or no text.
    """
    if not values:
        return default_text()
    texts = [_find(name, tokens) for name in text_names(values)]
    return _text(", ".join(name for name, _ in texts), "".join(content for _, content in texts))


def default_text() -> Text:
    """The top-level ``.py`` files of Python's standard library, by name: the same wherever this Python version is.

    Raises `InputError` where the sources are not installed.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    names = sorted(name for name in sys.stdlib_module_names if (folder / f"{name}.py").is_file())
    if not names:
        raise InputError(f"--text: the default needs Python's own sources, and {folder} has none; give a file")
    content = "".join(_read(folder / f"{name}.py", _LEAST_BYTES) for name in names)
    version = ".".join(map(str, sys.version_info[:3]))
    return _text(f"the sources of Python {version}'s standard library ({len(names)} files)", content)


def _find(value: str, tokens: int) -> tuple[str, str]:
    """The name and the content of one text."""
    needed = _PER_TOKEN * tokens
    if names_dataset(value):
        name, content = read_dataset(value, max(_LEAST_CHARACTERS, needed))
        return name, _checked(value, content)
    path = expanded("--text", value)
    return str(path), _read(path, max(_LEAST_BYTES, needed))


def _text(name: str, content: str) -> Text:
    return Text(name, content, hashlib.sha256(content.encode()).hexdigest())


def _read(path: Path, limit: int) -> str:
    suffix = path.suffix.lower()
    try:
        with _OPENERS.get(suffix, open)(path, "rb") as file:
            data = _at_most(file, limit)
            whole = not file.read(1)
    except (EOFError, ValueError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"--text: {path}: not a whole {suffix} file: {error}") from error
    except OSError as error:
        if error.errno is None:  # bz2 says so of damaged data
            raise InputError(f"--text: {path}: not a whole {suffix} file: {error}") from error
        raise InputError(
            f"--text: {path}: {error.strerror or error}; allowed: text files (UTF-8) and datasets"
        ) from error
    try:
        # A character may be cut in two at the limit.
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        content = str(decoder.decode(data, final=whole))
    except UnicodeDecodeError as error:
        at = error.start + (len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0)
        where = f"byte 0x{data[at]:02x} at offset {at}"
        raise InputError(f"--text: {path}: not UTF-8 text ({where})") from error
    return _checked(path, content)


def _at_most(file: IO[bytes], limit: int) -> bytes:
    """Up to ``limit`` bytes; asked for all at once, memory for them would be taken whether they are there or not."""
    pieces = []
    while limit > 0 and (piece := file.read(min(limit, _PIECE_BYTES))):
        pieces.append(piece)
        limit -= len(piece)
    return b"".join(pieces)


def _checked(place: str | Path, content: str) -> str:
    if "\0" in content:
        raise InputError(f"--text: {place}: a binary file (NUL at character {content.index(chr(0))}), not text")
    if not content.strip():
        raise InputError(f"--text: {place}: empty; a text with at least a few thousand tokens is needed")
    return content
