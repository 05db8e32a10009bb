"""Texts to score: files, plain or compressed, or the standard library's own sources."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import sys
import sysconfig
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import InputError

_DECOMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".xz": lzma.decompress,
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
}


@dataclass(frozen=True)
class Text:
    """A text, where it came from, and the SHA-256 of its UTF-8 bytes."""

    name: str
    content: str
    sha256: str


def read_texts(paths: Sequence[Path]) -> Text:
    """One text from UTF-8 files joined in the order given; ``.xz``, ``.gz`` and ``.bz2`` are unpacked.

    Raises `InputError` for a file that is missing, empty, damaged, or not UTF-8 text.
    """
    content = "".join(_read(path) for path in paths)
    return _text(", ".join(str(path) for path in paths), content)


def default_text() -> Text:
    """The top-level ``.py`` files of Python's standard library, by name: the same wherever this Python version is.

    Raises `InputError` where the sources are not installed.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    names = sorted(name for name in sys.stdlib_module_names if (folder / f"{name}.py").is_file())
    if not names:
        raise InputError(f"--text: the default needs Python's own sources, and {folder} has none; give a file")
    content = "".join(_read(folder / f"{name}.py") for name in names)
    version = ".".join(map(str, sys.version_info[:3]))
    return _text(f"the sources of Python {version}'s standard library ({len(names)} files)", content)


def _text(name: str, content: str) -> Text:
    return Text(name, content, hashlib.sha256(content.encode()).hexdigest())


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"--text: {path}: {error.strerror or error}; allowed: text files (UTF-8)") from error
    unpack = _DECOMPRESSORS.get(path.suffix.lower())
    if unpack is not None and data:
        try:
            data = unpack(data)
        except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
            raise InputError(f"--text: {path}: not a whole {path.suffix} file: {error}") from error
    try:
        content = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise InputError(f"--text: {path}: not UTF-8 text ({where})") from error
    if "\0" in content:
        raise InputError(f"--text: {path}: a binary file (NUL at character {content.index(chr(0))}), not text")
    if not content.strip():
        raise InputError(f"--text: {path}: empty; a text with at least a few thousand tokens is needed")
    return content
