"""A folder to measure in, and what the system's cache of files has of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import InputError
from ..memory import in_words
from ..options import expanded

_PROBES = 16  # places of a file at which it is looked whether it is cached


@contextmanager
def scratch(option: str, path: str, needed: int) -> Iterator[Path]:
    """A folder within the one that a user gave, removed in the end with all that is in it.

    Raises `InputError` where nothing can be written, or ``needed`` bytes are not free.
    """
    folder = expanded(option, path)
    try:
        free = shutil.disk_usage(folder).free
        temporary = tempfile.TemporaryDirectory(prefix="kvquant-bench-", dir=folder)
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"{option}: {folder}: {why}; allowed: an existing folder I can write to") from error
    with temporary as name:
        if needed > free:
            raise InputError(
                f"{option}: {folder}: {in_words(needed)} are needed, {in_words(free)} are free; allowed: a folder on "
                "a disk with room for more"
            )
        yield Path(name)


def payload_files(folder: Path) -> list[Path]:
    """What a store's payloads are in.

    No other file of it may be opened: to close its index again would take SQLite's lock on it away.
    """
    return sorted(folder.glob("*.slab"))


def forget(file: Path, nbytes: int) -> bool:
    """Have the system write a file to its disk and drop it from memory; whether it did, of the first ``nbytes``."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
        if not hasattr(os, "posix_fadvise"):
            return False
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        places = reversed(range(_PROBES))  # a probe may have the system read what follows
        return not any(is_cached(handle, nbytes * place // _PROBES) for place in places)
    finally:
        os.close(handle)


def is_cached(handle: int, at: int) -> bool:
    """Whether the system has the byte at a place of a file in memory; also where it can't tell."""
    try:
        return os.preadv(handle, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except (AttributeError, OSError):
        return True
