"""Which weights an engine serves, told from their files: for engines that do not hand out the model itself."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_PIECE = 16 << 20  # bytes read at a time


def weights_fingerprint(model: str, revision: str | None = None) -> str | None:
    """Hex digest over name, size and bytes of a model's weight files, or None where there are none.

    Every byte is read, at the pace of the disk or of memory that holds them already: of fine-tuned weights few may
    differ. ``model`` is a folder, a file, or a name of the Hugging Face hub whose files lie in its cache.
    """
    if os.path.isfile(model):
        files = [Path(model)]
    else:
        folder = Path(model) if os.path.isdir(model) else _cached(model, revision)
        files = [] if folder is None else sorted(each for each in folder.iterdir() if each.suffix in _SUFFIXES)
    if not files:
        return None
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(f"{file.name}|{file.stat().st_size}|".encode())
        with file.open("rb") as opened:
            while piece := opened.read(_PIECE):
                digest.update(piece)
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
