"""Texts to score: files, plain or compressed, or the standard library's own sources."""

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
from typing import Any

from .errors import InputError

_OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
_LEAST_BYTES = 64 << 20
_BYTES_PER_TOKEN = 64


@dataclass(frozen=True)
class Text:
    """A text, where it came from, and the SHA-256 of its UTF-8 bytes."""

    name: str
    content: str
    sha256: str


def read_texts(paths: Sequence[Path], tokens: int = 0) -> Text:
    """One text from UTF-8 files joined in the order given; ``.xz``, ``.gz`` and ``.bz2`` are unpacked.

    Of a file far longer than ``tokens`` need, only the beginning is read. Raises `InputError` for a file that is
    missing, empty, damaged, or not UTF-8 text.
    """
    limit = max(_LEAST_BYTES, _BYTES_PER_TOKEN * tokens)
    content = "".join(_read(path, limit) for path in paths)
    return _text(", ".join(str(path) for path in paths), content)


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


def _text(name: str, content: str) -> Text:
    return Text(name, content, hashlib.sha256(content.encode()).hexdigest())


def _read(path: Path, limit: int) -> str:
    suffix = path.suffix.lower()
    try:
        with _OPENERS.get(suffix, open)(path, "rb") as file:
            data = file.read(limit)
            whole = not file.read(1)
    except (EOFError, ValueError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"--text: {path}: not a whole {suffix} file: {error}") from error
    except OSError as error:
        if error.errno is None:  # bz2 says so of damaged data
            raise InputError(f"--text: {path}: not a whole {suffix} file: {error}") from error
        raise InputError(f"--text: {path}: {error.strerror or error}; allowed: text files (UTF-8)") from error
    try:
        # A character may be cut in two at the limit.
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        content = str(decoder.decode(data, final=whole))
    except UnicodeDecodeError as error:
        where = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise InputError(f"--text: {path}: not UTF-8 text ({where})") from error
    if "\0" in content:
        raise InputError(f"--text: {path}: a binary file (NUL at character {content.index(chr(0))}), not text")
    if not content.strip():
        raise InputError(f"--text: {path}: empty; a text with at least a few thousand tokens is needed")
    return content
