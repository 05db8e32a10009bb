"""GGUF files, converted once to a folder that loads in a second.

transformers reads a GGUF by unpacking it, which takes 15 to 45 s each time, so the result is kept in the user's
cache folder as float32 safetensors with the tokenizer. The folder's name holds the file's size and hash and the
version of transformers; it is written under another name, flushed, and renamed when whole, so an interrupted
conversion is never found, and what it left behind is removed by the next one.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
import xxhash
from filelock import FileLock

from .errors import InputError, one_line
from .options import expanded

_READ_BYTES = 1 << 24


def cache_folder() -> Path:
    """``$KVQUANT_CACHE``, else ``$XDG_CACHE_HOME/kvquant``, else ``~/.cache/kvquant``; it may not exist yet."""
    if own := os.environ.get("KVQUANT_CACHE"):
        return expanded("KVQUANT_CACHE", own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return expanded("XDG_CACHE_HOME", base) / "kvquant"
    return Path.home() / ".cache" / "kvquant"


def converted(gguf: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of a GGUF's weights (float32 safetensors) and tokenizer, made on first use.

    ``say`` is told when a conversion starts. Raises `InputError` if the file can't be converted or the cache
    folder can't be written.
    """
    parent = cache_folder() / "gguf"
    try:
        final = parent / _key(gguf)
        if final.is_dir():
            return final
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(parent / f"{final.name}.lock"):
            if not final.is_dir():
                say(f"Converting {gguf.name}, once")
                with _published(final) as folder:
                    _convert(gguf, folder)
    except OSError as error:
        place = error.filename or parent
        raise InputError(f"model: {gguf.name}: converting it failed at {place}: {error.strerror or error}") from error
    return final


def joined(parts: Sequence[Path]) -> Path:
    """The file whose consecutive ``parts`` are called ``NAME.gguf.part00`` and so on, made on first use.

    Raises `InputError` if the cache folder can't be written.
    """
    size = sum(part.stat().st_size for part in parts)
    whole = cache_folder() / "gguf" / f"{size}-{parts[0].with_suffix('').name}"
    try:
        whole.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(whole.with_name(f"{whole.name}.lock")):
            if not whole.is_file():
                partial = whole.with_name(f"{whole.name}.partial")
                with partial.open("wb") as file:
                    for part in parts:
                        with part.open("rb") as source:
                            shutil.copyfileobj(source, file, _READ_BYTES)
                _flush(partial)
                partial.rename(whole)
    except OSError as error:
        raise InputError(f"model: {whole.name}: joining its parts failed: {error.strerror or error}") from error
    return whole


def _key(gguf: Path) -> str:
    digest = xxhash.xxh3_128()
    with gguf.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    stem = gguf.stem[:60]
    return f"{stem}-{gguf.stat().st_size}-{digest.hexdigest()[:16]}-transformers-{transformers.__version__}"


@contextmanager
def _published(final: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes ``final`` only if the body succeeds. Call with the key's lock held."""
    partial = final.with_name(f"{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that died: nobody else holds the lock
    partial.mkdir()
    try:
        yield partial
        for file in partial.iterdir():
            _flush(file)
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush(file: Path) -> None:
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


def _convert(gguf: Path, folder: Path) -> None:
    for module in ("gguf", "accelerate"):
        if find_spec(module) is None:
            raise InputError(f"model: reading {gguf.name} needs {module}: pip install {module}")
    source, name = str(gguf.parent), gguf.name
    try:
        with redirect_stderr(io.StringIO()):  # a progress bar that can't be turned off
            model = transformers.AutoModelForCausalLM.from_pretrained(
                source,
                gguf_file=name,
                dtype=torch.float32,
                quantization_config=transformers.GgufConfig(dequantize=True),
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=name)
    except Exception as error:  # whatever transformers finds wrong with somebody's file
        raise InputError(f"model: {gguf.name}: transformers can't read it: {one_line(error)}") from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
