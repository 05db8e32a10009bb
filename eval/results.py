"""Reads back what `kvquant ppl --out` wrote, whichever release wrote it, and tells what of it may be compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ConfigDict, TypeAdapter, ValidationError

from .errors import InputError, one_line
from .report import PAGE, Report
from .rows import Row

# What folders of earlier releases lack. Without these a `Report` would tell of this process instead.
_NOT_RECORDED: dict[str, Any] = {"date": "", "versions": {}, "machine": {}, "facts": {}, "policies": {}}
_LONGEST_CONTEXT = 10**18  # tokens
_LEAST = 1e30  # nats: float32 gives no more
_COMMAND = ["kvquant", "ppl"]
_REPORTS = TypeAdapter(list[Report], config=ConfigDict(allow_inf_nan=False))  # a list, because it takes a config


def read(folder: Path) -> Report:
    """The report in a folder; what it does not hold is empty, or None in a row, and what is unknown is ignored.

    Raises `InputError` if there is no ``rows.json``, or it is damaged, or of another command.
    """
    path = folder / "rows.json"
    try:
        document = _without_nulls(json.loads(path.read_bytes(), parse_constant=_refuse))
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror or error}; allowed: folders that `kvquant ppl --out` wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {one_line(error)}") from error
    if not isinstance(document, dict) or not isinstance(document.get("command"), str):
        raise InputError(f"{path}: holds no results; allowed: what `kvquant ppl --out` wrote")
    if document["command"].split()[:2] != _COMMAND:
        raise InputError(f"{path}: of `{document['command'][:60]}`; allowed: of `kvquant ppl`")
    try:
        (report,) = _REPORTS.validate_python([_NOT_RECORDED | document])
    except ValidationError as error:
        raise InputError(f"{path}: {_complaint(error)}") from None
    if not report.rows:
        raise InputError(f"{path}: no rows")
    for index, row in enumerate(report.rows):
        if complaint := _nonsense(row):
            raise InputError(f"{path}: rows[{index}].{complaint}")
    return report


def _nonsense(row: Row) -> str:
    """What of a row cannot be, or nothing."""
    if not 1 <= row.context <= _LONGEST_CONTEXT:
        return f"context: {str(row.context)[:20]} is not a number of tokens"
    if any(not 0 <= bucket.first < bucket.stop <= row.context for bucket in row.by_position):
        return "by_position: not between 0 and the context"
    if any(not 0 <= needle.depth <= 1 for needle in row.by_depth):
        return "by_depth: not a share of the context"
    if any(
        not -_LEAST <= told <= 1e-3 for needle in row.by_depth for told in (needle.logprob, needle.logprob_baseline)
    ):
        return "by_depth: not the log of a probability"
    return ""


def read_all(folders: Sequence[Path]) -> dict[str, Report]:
    """The reports of folders by the folders' names, or their whole paths where two have the same name.

    Raises `InputError` as `read` does.
    """
    places = {folder.resolve(): folder for folder in folders}
    names = Counter(place.name for place in places)
    return {place.name if names[place.name] == 1 else str(place): read(folder) for place, folder in places.items()}


def default_page(folders: Sequence[Path]) -> Path:
    """Where the page of a folder goes if nothing else is said; raises `InputError` if there are several."""
    if len({folder.resolve() for folder in folders}) > 1:
        raise InputError("--out: missing; allowed: the name of a page for several folders")
    return folders[0] / PAGE


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _without_nulls(value: Any) -> Any:
    """The value less what is null in its objects, so that defaults stand for it."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _complaint(error: ValidationError) -> str:
    """The first complaint as ``place: what is wrong, what was found``."""
    first = error.errors()[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"][1:]).lstrip(".")
    if first["type"] == "missing":
        return f"{place}: missing"
    found = repr(first["input"])
    return f"{place}: {first['msg'].removeprefix('Input should be ')} expected, found {found[:60]}"


@dataclass(frozen=True)
class Group:
    """Rows that may be compared: of the same model on the same tokens, computed alike.

    ``text`` is empty where it was not recorded. ``rows`` ascend by context; ``folders`` names where they come from.
    """

    model: str
    text: str
    protocol: str
    dtype: str
    rows: Sequence[Row]
    folders: Sequence[str]


def group(reports: Mapping[str, Report]) -> list[Group]:
    """The reports of several folders (by name) in groups, each in the order in which they are met.

    Policies measured at the same context in two folders are told apart by the folder's name. A report that does not
    say what its text was is compared with no other.
    """
    found: dict[tuple[str, ...], list[tuple[str, Row]]] = {}
    for folder, report in reports.items():
        text = report.facts.get("text", "")
        scored = report.facts.get("protocol", "")
        for row in report.rows:
            key = (row.model, text, scored, row.protocol, row.dtype, "" if text else folder)
            found.setdefault(key, []).append((folder, row))
    return [
        Group(model, text, protocol, dtype, _told_apart(members), list(dict.fromkeys(folder for folder, _ in members)))
        for (model, text, _, protocol, dtype, _), members in found.items()
    ]


def _told_apart(members: Sequence[tuple[str, Row]]) -> list[Row]:
    origins: dict[tuple[str, int], set[str]] = {}
    for folder, row in members:
        origins.setdefault((row.policy, row.context), set()).add(folder)
    twice = {policy for (policy, _), folders in origins.items() if len(folders) > 1}
    rows = [replace(row, policy=f"{row.policy} ({folder})") if row.policy in twice else row for folder, row in members]
    return sorted(rows, key=lambda row: row.context)
