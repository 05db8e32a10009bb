"""Which weights an engine serves, told from their files: for engines that do not hand out the model itself."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_PIECES, _PIECE = 256, 4096  # read of each file, evenly spaced


def weights_fingerprint(model: str, revision: str | None = None) -> str | None:
    """Hex digest over name, size and sampled bytes of a model's weight files, or None where there are none.

    ``model`` is a folder, a file, or a name of the Hugging Face hub whose files lie in its cache.
    """
    if os.path.isfile(model):
        files = [Path(model)]
    else:
        folder = Path(model) if os.path.isdir(model) else _cached(model, revision)
        files = [] if folder is None else sorted(each for each in folder.iterdir() if each.suffix in _SUFFIXES)
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}|{size}|".encode())
        with file.open("rb") as opened:
            for piece in range(_PIECES):
                opened.seek(max(0, size - _PIECE) * piece // (_PIECES - 1))
                digest.update(opened.read(_PIECE))
                if size <= _PIECE:
                    break
    return digest.hexdigest()


def _cached(model: str, revision: str | None) -> Path | None:
    """Where the hub's cache keeps a model."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
