"""The exact history of a text, kept on disk for the next sweep over it.

Full-attention layers are kept whole, since any beginning of them serves a shorter context. Layers with a window keep
only its end, so their state is kept at every place where a context's tail began. A file belongs to one model (its
weights, dtype and positions) and one text; it is verified when opened, and of it only equal tokens count.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvquant.geometry import decoder_config
from kvquant.keys import Identity, content_keys

from .errors import InputError, one_line
from .exact import exact_cache
from .options import make_writable

PARTS = ("keys", "values")
STEP = 256  # tokens that are compared together
_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
_PARTIAL = "kvquant-"
_ABANDONED_SECONDS = 3600
LIMIT = 32 << 30  # bytes of all files in a folder


def exact_identity(model: Any) -> Identity:
    """What decides the exact history of a text under ``model``; reads every weight."""
    return Identity.of(model, decoder_config(model.config), "exact", full=True)


@dataclass
class Prefix:
    """The exact history of ``ids`` (int64 ``[n]``) under ``model``, in ``folder``; ``say`` is told what becomes of it.

    Call `open` first. A walk asks `restore` for what is there, tells `note` where tails begin, and `save` at its end.
    """

    model: Any
    identity: Identity  # `exact_identity` of the model
    ids: Tensor
    folder: Path
    say: Callable[[str], None] = lambda line: None
    length: int = 0  # tokens that are in the file and fit
    _names: set[str] = field(default_factory=set)  # of the tensors in the file
    _noted: dict[str, Tensor] = field(default_factory=dict)
    _told: bool = False

    def open(self) -> None:
        """Make the folder and read what fits; raises `InputError` if that is not possible."""
        kinds = {type(layer) for layer in DynamicCache(config=self.model.config).layers}
        if kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
            raise InputError("--reuse-prefix: this model has layers whose state cannot be kept")
        make_writable("--reuse-prefix", self.folder)
        for file in self.folder.glob(f"{_PARTIAL}*.partial"):  # of a run that was killed while it wrote
            if time.time() - file.stat().st_mtime > _ABANDONED_SECONDS:
                file.unlink(missing_ok=True)
        if self._path.exists():
            self._read()

    def restore(self, tokens: int, room: int) -> DynamicCache | None:
        """A cache for ``room`` tokens that holds the first ``tokens`` of the text, None if that is not there."""
        if not self._has(tokens):
            return None
        cache = exact_cache(self.model, room)
        with safe_open(self._path, "pt") as file:
            for index, layer in enumerate(cache.layers):
                if isinstance(layer, DynamicSlidingWindowLayer):
                    layer.update(*(file.get_tensor(_name(tokens, index, part)) for part in PARTS))
                    layer.cumulative_length = tokens
                elif _name("all", index, "keys") in self._names:
                    layer.update(*(file.get_slice(_name("all", index, part))[:, :, :tokens] for part in PARTS))
        if not self._told:
            self._told = True
            self.say(f"Reusing the exact history of {self.length} tokens in {self.folder}")
        return cache

    def _has(self, tokens: int) -> bool:
        """Whether the file has the first ``tokens`` of the text, windows and all."""
        if not 0 < tokens <= self.length:
            return False
        return all(_name(tokens, index, "keys") in self._names for index in self._windows)

    @cached_property
    def _windows(self) -> list[int]:
        """The layers that keep a window."""
        layers = DynamicCache(config=self.model.config).layers
        return [index for index, layer in enumerate(layers) if isinstance(layer, DynamicSlidingWindowLayer)]

    def note(self, tokens: int, cache: DynamicCache) -> None:
        """Remember the windows of a cache that holds exactly ``tokens``."""
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, DynamicSlidingWindowLayer) and layer.get_seq_length():
                self._noted |= {_name(tokens, index, part): getattr(layer, part).clone() for part in PARTS}

    def save(self, cache: DynamicCache) -> None:
        """Write what a cache holds, unless all of it is there already, and keep the folder within `LIMIT`."""
        held = cache.get_seq_length() // STEP * STEP
        if held <= self.length and not {*self._noted} - self._names:
            return
        tensors = self._of_the_file(everything=held <= self.length) | self._noted
        if held > self.length:
            for index, layer in enumerate(cache.layers):
                if not isinstance(layer, DynamicSlidingWindowLayer) and layer.get_seq_length():
                    tensors |= {_name("all", index, part): getattr(layer, part)[:, :, :held] for part in PARTS}
        held = max(held, self.length)
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size > LIMIT:
            self.say(f"The exact history is not kept: its {size >> 20} MiB are more than {LIMIT >> 20}")
            return
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        facts = {"keys": self._keys[: held // STEP], "sums": {name: _sum(tensor) for name, tensor in tensors.items()}}
        handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=_PARTIAL, suffix=".partial")
        os.close(handle)
        try:
            save_file(tensors, temporary, metadata={"kvquant": json.dumps(facts)})
            os.replace(temporary, self._path)
        except (OSError, SafetensorError) as error:
            Path(temporary).unlink(missing_ok=True)
            self.say(f"The exact history is not kept: {error}")
            return
        self.length, self._names = held, {*tensors}
        self._forget_oldest()
        self.say(f"Kept the exact history of {held} tokens in {self.folder}")

    def _of_the_file(self, everything: bool) -> dict[str, Tensor]:
        """What the file has of this text: the windows, or all."""
        if not self.length:
            return {}
        with safe_open(self._path, "pt") as file:
            found = {}
            for name in self._names:
                place = name.split(".")[0]
                if place == "all":
                    if everything:
                        found[name] = file.get_slice(name)[:, :, : self.length]
                elif int(place) <= self.length:
                    found[name] = file.get_tensor(name)
            return found

    @cached_property
    def _keys(self) -> list[str]:
        return [key.hex() for key in content_keys(self.identity, self.ids, STEP)]

    @property
    def _path(self) -> Path:
        return self.folder / f"{self._keys[0][:32] if self._keys else 'empty'}.safetensors"

    def _read(self) -> None:
        """Verify the file, tensor by tensor, and see how much of it is of the same text."""
        try:
            with safe_open(self._path, "pt") as file:
                facts = json.loads(file.metadata()["kvquant"])
                for name, expected in facts["sums"].items():
                    if _sum(file.get_tensor(name)) != expected:
                        raise ValueError(f"{name} is damaged")
                equal = [mine == kept for mine, kept in zip(self._keys, facts["keys"], strict=False)]
        except Exception as error:  # whatever is wrong with the file, the history is computed again
            self.say(f"The exact history in {self._path.name} is of no use and will be replaced: {one_line(error)}")
            return
        self.length = STEP * (equal.index(False) if False in equal else len(equal))
        self._names = {*facts["sums"]}
        os.utime(self._path)

    def _forget_oldest(self) -> None:
        files = [file for file in self.folder.glob("*.safetensors") if _NAME.fullmatch(file.name) and _is_ours(file)]
        total = 0
        for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
            total += file.stat().st_size
            if total > LIMIT and file != self._path:
                file.unlink()
                self.say(f"Deleted the oldest exact history, {file}: all are more than {LIMIT >> 20} MiB")


def _is_ours(file: Path) -> bool:
    try:
        with safe_open(file, "pt") as opened:
            return "kvquant" in (opened.metadata() or {})
    except (OSError, SafetensorError):
        return False


def _name(place: int | str, layer: int, part: str) -> str:
    """Of a tensor in the file; ``place`` is ``all``, or the tokens before a window's state."""
    return f"{place}.{layer}.{part}"


def _sum(tensor: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy().data)
