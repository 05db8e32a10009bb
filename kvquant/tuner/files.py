"""The file of a `Sensitivity`: JSON, strict, and with a digest of what it says."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..errors import CodecError, PolicyError, shown
from .candidates import RAW, Candidates, Frame
from .footprint import Footprint
from .sensitivity import Cell, Sensitivity

FORMAT = 1
Count = Field(ge=1, le=1 << 22)  # of tokens, layers, channels: more would take long, and nobody has it
MOST_LAYERS, MOST_FRAMES = 1 << 12, 1 << 6
LEAST, MOST = 1e-30, 1e9  # of numbers that are not 0: products of these are numbers


def _of_use(number: float) -> float:
    if number and not LEAST <= number <= MOST:
        raise ValueError(f"allowed: 0, or {LEAST:g} to {MOST:g}")
    return number


def _kept(number: float | None) -> float | None:
    """A number as `_of_use` takes it: what is smaller is nothing."""
    return number if number is None else 0.0 if number < LEAST else min(number, MOST)


Amount = Annotated[float, AfterValidator(_of_use)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Layer(_Part):
    layer: int = Field(ge=0, le=1 << 16)
    heads: int = Count
    key_channels: int = Count
    value_channels: int = Count


class _Frame(_Part):
    sink_tokens: int = Field(ge=0, le=1 << 20)
    recent_tokens: int = Field(ge=0, le=1 << 20)
    key_bias: Literal["remove", "keep"]
    factor: Amount | None


class _Correction(_Part):
    layer: int
    role: Literal["key", "value"]
    factor: Amount


class _Cell(_Part):
    layer: int
    role: Literal["key", "value"]
    codec: str = Field(max_length=100)
    estimate: Amount | None
    measured: Amount | None
    nbytes: int


class _File(_Part):
    format: int
    fingerprint: str
    facts: dict[str, str]
    context: int = Count
    block_tokens: int = Field(ge=8, le=4096)
    depth: int = Count
    latent: bool
    shapes: list[_Layer] = Field(min_length=1, max_length=MOST_LAYERS)
    key: list[str]
    value: list[str]
    frames: list[_Frame] = Field(max_length=MOST_FRAMES)
    corrections: list[_Correction]
    cells: list[_Cell]


def written(sensitivity: Sensitivity) -> str:
    """See `Sensitivity.to_json`. Every cell tells its bytes, in the first of the frames."""
    candidates, footprint = sensitivity.candidates, sensitivity.candidates.footprint
    first = candidates.frames[0]
    content = {
        "format": FORMAT,
        "fingerprint": sensitivity.fingerprint,
        "facts": dict(sensitivity.facts),
        "context": footprint.context,
        "block_tokens": footprint.block_tokens,
        "depth": footprint.depth,
        "latent": candidates.latent,
        "shapes": [
            {"layer": layer, "heads": heads, "key_channels": key, "value_channels": value}
            for layer, (heads, key, value) in footprint.shapes.items()
        ],
        "key": list(candidates.key),
        "value": list(candidates.value),
        "frames": [
            vars(frame) | {"factor": _kept(sensitivity.frame_factors.get(frame))} for frame in candidates.frames
        ],
        "corrections": [
            {"layer": layer, "role": role, "factor": _kept(factor)}
            for (layer, role), factor in sensitivity.corrections.items()
        ],
        "cells": [
            vars(cell)
            | {"estimate": _kept(cell.estimate), "measured": _kept(cell.measured)}
            | {"nbytes": footprint.side_bytes(cell.layer, cell.role, cell.codec, first)}
            for cell in sensitivity.cells
        ],
    }
    return "{\n" + ",\n".join(map(_line, ({"digest": _digest(content)} | content).items())) + "\n}\n"


def read(text: str, source: str) -> Sensitivity:
    """See `Sensitivity.from_json`."""
    try:
        return _read(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise PolicyError(f"{source}: {place}: {first['msg']}, not {shown(first['input'])}") from None
    except (CodecError, PolicyError) as error:
        raise PolicyError(f"{source}: {error}") from None


def _read(text: str) -> Sensitivity:
    try:
        content = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise PolicyError("not a sensitivity file, which is a JSON object")
    if type(version := content.get("format")) is not int or version != FORMAT:
        raise PolicyError(f"format: {shown(version)}; this release reads format {FORMAT}")
    told = content.pop("digest", None)
    file = _File.model_validate(content)
    if told != _digest(content):
        raise PolicyError("digest: the file is damaged, or was changed by hand")
    footprint = Footprint(
        {part.layer: (part.heads, part.key_channels, part.value_channels) for part in file.shapes},
        file.context,
        file.block_tokens,
        file.depth,
    )
    frames = {Frame(part.sink_tokens, part.recent_tokens, part.key_bias): part.factor for part in file.frames}
    candidates = Candidates(footprint, tuple(file.key), tuple(file.value), tuple(frames), file.latent)
    for what, given, kept in (
        ("shapes", file.shapes, footprint.shapes),
        ("frames", file.frames, frames),
        ("cells", file.cells, {(cell.layer, cell.role, cell.codec) for cell in file.cells}),
        ("corrections", file.corrections, {(part.layer, part.role) for part in file.corrections}),
    ):
        if len(given) != len(kept):
            raise PolicyError(f"{what}: one is told twice")
    if all(factor is None for factor in frames.values()):
        raise PolicyError("frames: none has a factor")
    for number, cell in enumerate(file.cells):
        _check_cell(candidates, f"cells.{number}", cell)
    for number, correction in enumerate(file.corrections):
        _check_layer(candidates, f"corrections.{number}", correction.layer)
    return Sensitivity(
        candidates,
        tuple(Cell(cell.layer, cell.role, cell.codec, cell.estimate, cell.measured) for cell in file.cells),
        {frame: factor for frame, factor in frames.items() if factor is not None},
        file.fingerprint,
        file.facts,
        {(part.layer, part.role): part.factor for part in file.corrections},
    )


def _unique(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(entries)
    if len(found) < len(entries):
        names = [name for name, _ in entries]
        raise ValueError(f"{shown(next(name for name in names if names.count(name) > 1))} is told twice")
    return found


def _check_cell(candidates: Candidates, place: str, cell: _Cell) -> None:
    _check_layer(candidates, place, cell.layer)
    if cell.codec == RAW or cell.codec not in candidates.codecs(cell.role):
        raise PolicyError(f"{place}.codec: {shown(cell.codec)} is none of the {cell.role} codecs that lose anything")
    if cell.estimate is None and cell.measured is None:
        raise PolicyError(f"{place}: neither estimate nor measured is told")
    nbytes = candidates.footprint.side_bytes(cell.layer, cell.role, cell.codec, candidates.frames[0])
    if cell.nbytes != nbytes:
        raise PolicyError(f"{place}.nbytes: {cell.nbytes}, but in this release it is {nbytes}: measure again")


def _check_layer(candidates: Candidates, place: str, layer: int) -> None:
    if layer not in candidates.footprint.shapes:
        raise PolicyError(f"{place}.layer: {layer} is none of the layers that shapes tell of")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.blake2b(_dumped(content).encode(), digest_size=16).hexdigest()


def _line(entry: tuple[str, Any]) -> str:
    """An entry of an object as JSON; of a list, one line each."""
    name, value = entry
    told = "[\n  " + ",\n  ".join(map(_dumped, value)) + "\n]" if isinstance(value, list) else _dumped(value)
    return f"{_dumped(name)}: {told}"


def _dumped(content: Any) -> str:
    return json.dumps(content, allow_nan=False)  # in ASCII, since names of files may hold half a character
