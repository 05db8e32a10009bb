"""Writing results: each file is replaced as a whole, so a reader never meets half of one."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .errors import InputError
from .options import make_writable


def to_json(document: Mapping[str, Any]) -> str:
    """Strict JSON: raises ValueError rather than writing NaN or Infinity."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode(errors="backslashreplace").decode()  # a file name may hold half a character


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, in place of the one there is if any."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)  # mkstemp makes private files
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def prepare_folder(folder: Path, names: Collection[str], command: str) -> None:
    """Makes the folder and proves that it can be written, before hours are spent.

    Raises `InputError`, also where writing ``names`` would replace somebody's files rather than what an earlier
    ``command`` (``kvquant ppl``, say) wrote.
    """
    make_writable("--out", folder)
    foreign = [name for name in names if (folder / name).exists() and not is_report(folder, command)]
    if foreign:
        raise InputError(
            f"--out: {folder}: its {foreign[0]} is not an earlier report's and would be replaced; "
            f"allowed: a new folder, or one with a report of `{command}`"
        )


def is_report(folder: Path, command: str) -> bool:
    """Whether a folder holds what a ``command`` wrote."""
    try:
        written = str(json.loads((folder / "rows.json").read_bytes())["command"])
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return written.split()[:2] == command.split()
