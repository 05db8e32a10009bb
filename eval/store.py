"""What `kvquant store` finds in a store's folder: saved sessions, shared prefixes, damage, and what is of no use."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvquant import StoreError
from kvquant.cache import manifests, prefix
from kvquant.cache.manifests import Found
from kvquant.exposition import Metric, by, exposition
from kvquant.store.disk import DiskStore
from kvquant.store.files import LOCK, writer
from kvquant.store.index import NAME as INDEX
from kvquant.store.index import damaged as damaged_index
from kvquant.store.ledger import SECONDS
from kvquant.store.slab import NAME as SLAB

from .errors import InputError, one_line, printable
from .options import expanded
from .ppl import Progress

Problem = Literal["damaged", "incomplete", "unreadable", "orphaned", "index"]
_NO_BUDGET = 1 << 61  # bytes: a folder is opened whole, whatever its budget is, and nothing leaves it
_Key = bytes  # by a name that no field has
_LOOKS = 3  # how often what seems wrong beside a writer is looked at again


@dataclass(frozen=True)
class SessionRow:
    """A saved session. ``tokens`` are those of each row, ``bytes`` all that it takes, ``missing`` parts not there."""

    name: str
    tenant: str
    saved: str
    tokens: list[int]
    blocks: int
    bytes: int
    missing: int
    manifest: _Key
    parts: list[_Key]

    def as_dict(self) -> dict[str, Any]:
        """The row with JSON's own types only."""
        return {name: value for name, value in vars(self).items() if name not in ("manifest", "parts")}


@dataclass(frozen=True)
class Kind:
    """Payloads of one kind, and their bytes."""

    kind: str
    payloads: int
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        """The row with JSON's own types only."""
        return asdict(self)


@dataclass(frozen=True)
class Finding:
    """Something wrong: of a session (``of`` it, if it can be told), of shared prefixes, or of other payloads.

    ``parts`` says which, where it concerns some of them; ``bytes`` are what those take.
    """

    problem: Problem
    of: str
    name: str = ""
    tenant: str = ""
    payloads: int = 0
    bytes: int = 0
    detail: str = ""
    parts: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The row with JSON's own types only."""
        return asdict(self)


@dataclass(frozen=True)
class Contents:
    """What is in a store, at one look. ``lost_rows`` are rows of the index that name no payload."""

    sizes: dict[bytes, int]
    sessions: list[SessionRow]
    others: list[Found]  # sessions that can't be loaded by this release
    orphans: list[bytes]
    lost_rows: int = 0

    def kinds(self) -> list[Kind]:
        """Payloads by what they are of."""
        own = {"sessions": (manifests.MANIFEST, manifests.PARTS), "prefixes": (prefix.PREFIX,), "other": (b"",)}
        counts: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for key, size in self.sizes.items():
            kind = next(kind for kind, starts in own.items() if key.startswith(starts))
            counts[kind] += 1
            nbytes[kind] += size
        return [Kind(kind, counts[kind], nbytes[kind]) for kind in own]

    def shared_blocks(self) -> int:
        """How many blocks of tokens are shared, each of which is a payload in every layer."""
        return len({block[0] for key in self._prefixes() if (block := prefix.block_of(key))})

    def bytes_of(self, keys: Iterable[bytes]) -> int:
        """What payloads take."""
        return sum(self.sizes.get(key, 0) for key in keys)

    def _prefixes(self) -> list[bytes]:
        return [key for key in self.sizes if key.startswith(prefix.PREFIX)]


@dataclass(frozen=True)
class Stats:
    """A store's folder. ``files`` are sizes in bytes by name, ``used`` those of the slab that are taken."""

    kinds: list[Kind]
    used: int
    files: dict[str, int]
    writer: int | None

    @property
    def slab(self) -> int:
        """Bytes of the slab."""
        return self.files.get(SLAB, 0)

    @property
    def index(self) -> int:
        """Bytes of the index and what SQLite keeps beside it."""
        return sum(size for name, size in self.files.items() if name.startswith(INDEX)) - self.set_aside

    @property
    def set_aside(self) -> int:
        """Bytes of damaged indexes."""
        return sum(size for name, size in self.files.items() if name.startswith(f"{INDEX}.damaged-"))

    def prometheus(self) -> str:
        """All of it in Prometheus' text format; ``examples/metrics.md`` tells the names."""
        payloads = by("kind", {kind.kind: kind.payloads for kind in self.kinds})
        payload_bytes = by("kind", {kind.kind: kind.bytes for kind in self.kinds})
        files = by("part", {"slab": self.slab, "index": self.index, "set aside": self.set_aside})
        return exposition(
            "kvquant_folder",
            [
                Metric("payloads", "gauge", "Payloads in a store's folder.", payloads),
                Metric("payload_bytes", "gauge", "Bytes of those payloads.", payload_bytes),
                Metric("file_bytes", "gauge", "Bytes of a store's files.", files),
                Metric("used_bytes", "gauge", "Bytes of the slab that are taken.", self.used),
                Metric(
                    "written", "gauge", "Whether a process writes to it now, 1 or 0.", int(self.writer is not None)
                ),
            ],
        )


@dataclass(frozen=True)
class Collected:
    """What `collect` dropped, what it left that can't be loaded, and bytes: of files, and of the slab, that freed."""

    dropped: list[Finding]
    left: list[Finding]
    freed: int
    freed_room: int


def listed(path: str) -> Contents:
    """What is in the store of a folder. Raises `InputError` or `StoreError` where it is none."""
    with _opened(path) as store:
        return look(store)


def measured(path: str) -> Stats:
    """How large it is; raises as `listed` does."""
    with _opened(path) as store:
        kinds, used = look(store).kinds(), store.stats().used
        return Stats(kinds, used, _files(store.path), writer(store.path))


def verified(path: str, progress: Progress, say: Callable[[str], None]) -> tuple[list[Finding], int]:
    """What is wrong in a store, every payload of which is read, and how many there are; raises as `listed` does.

    Beside a writer, whose changes come to the index a moment later, what seems wrong is looked at again.
    """
    try:
        opened = _opened(path)
    except StoreError as error:
        if not isinstance(error.__cause__, Exception) or not damaged_index(error.__cause__):
            raise
        return [Finding("index", "index", detail=one_line(error))], 0
    with opened as store:
        place, contents = store.path, look(store)
        damaged = _unreadable(store, contents.sizes, progress)
    findings = _findings(contents, damaged)
    for _ in range(_LOOKS):
        if not findings or writer(place) is None:
            break
        say("what seems wrong may be the writer's latest changes: looking again")
        time.sleep(2 * SECONDS)
        with _opened(path) as store:
            again = look(store)
            damaged = [key for key in damaged if key in again.sizes and store.get(key) is None]
        findings = [found for found in _findings(again, damaged) if found.problem != "orphaned"]  # of a save under way
    return findings, len(contents.sizes)


def collect(path: str, progress: Progress, *, unloadable: bool) -> Collected:
    """Drop what is damaged or orphaned and, if asked for, sessions that are ``unloadable``, and shrink the files.

    Raises as `listed` does, also where another process writes to the store.
    """
    with _opened(path) as store:  # an index that can't be read would be put aside by whoever opens it to write
        place = store.path
    if (holder := writer(place)) is not None:
        who = f"process {holder}" if holder else "another process"
        raise InputError(f"PATH: {place}: {who} writes to it; allowed: gc once that one has closed it")
    before = sum(_files(place).values())
    with DiskStore(place, _NO_BUDGET) as store:
        used = store.stats().used
        contents = look(store)
        damaged = _unreadable(store, contents.sizes, progress)  # which a store forgets
        dropped = [found for found in _findings(contents, damaged) if found.problem in ("damaged", "index")]
        after = look(store)
        if orphaned := _orphaned(after):
            dropped.append(orphaned)
            store.delete(after.orphans)
        left = _broken(after)
        if unloadable:
            dropped, left = dropped + left, []
            for row in after.sessions:
                if row.missing:
                    store.delete([row.manifest, *row.parts])
            for other in after.others:
                if not other.foreign:
                    store.delete([other.key, *_parts(other.generation, after.sizes)])
        freed_room = used - store.stats().used
        store.shrink()
    return Collected(dropped, left, max(before - sum(_files(place).values()), 0), freed_room)


def look(store: DiskStore) -> Contents:
    """What is in a store, of which only manifests are read."""
    known = store.keys()
    sizes = {key: place[0] for key in known if isinstance(key, bytes) and (place := store.locate(key))}
    sessions = manifests.found(store)
    parts: dict[bytes | None, list[bytes]] = {}
    for key in sizes:
        if key.startswith(manifests.PARTS):
            parts.setdefault(manifests.generation_of(key), []).append(key)
    rows = []
    for found in sessions:
        if (told := found.told) is not None:
            own = parts.get(found.generation, [])
            takes = sum(sizes[key] for key in own) + sizes.get(found.key, 0)
            shown = {name: told[name] for name in ("name", "tenant", "saved", "tokens", "blocks")}
            missing = max(told["parts"] - len(own), 0)
            rows.append(SessionRow(**shown, bytes=takes, missing=missing, manifest=found.key, parts=own))
    rows.sort(key=lambda row: (row.tenant, row.name))
    others = [found for found in sessions if found.told is None]
    orphans = manifests.orphans_of(sessions, [key for each in parts.values() for key in each])
    return Contents(sizes, rows, others, orphans, store.stats().faults.get("row", 0))


def _opened(path: str) -> DiskStore:
    """The store of a folder, to be read."""
    place = expanded("PATH", path)
    try:
        names = os.listdir(place)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"PATH: {place}: {why}; allowed: the folder of a store") from error
    if absent := [name for name in (LOCK, SLAB, INDEX) if name not in names]:
        raise InputError(f"PATH: {place}: no store's, it has no {absent[0]}; allowed: the folder of a store")
    return DiskStore(place, _NO_BUDGET, read_only=True)


def _files(place: Path) -> dict[str, int]:
    try:
        with os.scandir(place) as entries:
            return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}
    except FileNotFoundError:  # SQLite has removed one meanwhile
        return _files(place)
    except OSError as error:
        raise StoreError(f"{place}: {one_line(error)}; allowed: a folder that can be read") from error


def _unreadable(store: DiskStore, keys: Iterable[bytes], progress: Progress) -> list[bytes]:
    """Those of ``keys`` whose payloads are not what was put."""
    keys, damaged = list(keys), []
    if keys:
        with progress("reading payloads", [(0, 1)] * len(keys)) as tick:
            for key in keys:
                if store.get(key) is None:
                    damaged.append(key)
                tick(0, 1)
    return damaged


def _findings(contents: Contents, damaged: Sequence[bytes]) -> list[Finding]:
    findings = _damage(contents, damaged) + _broken(contents, damaged)
    if orphaned := _orphaned(contents):
        findings.append(orphaned)
    if contents.lost_rows:
        detail = f"rows that name no payload: {contents.lost_rows}"
        findings.append(Finding("index", "index", payloads=contents.lost_rows, detail=detail))
    return findings


def _damage(contents: Contents, damaged: Sequence[bytes]) -> list[Finding]:
    """A finding for each session that has damaged payloads, one for prefixes, and one for all else."""
    owners = {key: row for row in contents.sessions for key in (row.manifest, *row.parts)}
    groups: dict[tuple[str, str, str, bytes], list[bytes]] = {}
    for key in damaged:
        if (row := owners.get(key)) is not None:
            groups.setdefault(("session", row.name, row.tenant, row.manifest), []).append(key)
        else:
            of = {manifests.MANIFEST: "session", manifests.PARTS: "session", prefix.PREFIX: "prefix"}
            kind = next((kind for start, kind in of.items() if key.startswith(start)), "other")
            groups.setdefault((kind, "", "", b""), []).append(key)
    return [
        Finding(
            "damaged", of, name, tenant, len(keys), contents.bytes_of(keys), parts=[_in_words(key) for key in keys]
        )
        for (of, name, tenant, _), keys in groups.items()
    ]


def _broken(contents: Contents, damaged: Iterable[bytes] = ()) -> list[Finding]:
    """Sessions that can't be loaded for what is not there, or for a manifest that says nothing."""
    told = set(damaged)
    findings = [
        Finding(
            "incomplete",
            "session",
            row.name,
            row.tenant,
            len(row.parts) + 1,
            row.bytes,
            f"parts missing: {row.missing} of {row.missing + len(row.parts)}",
        )
        for row in contents.sessions
        if row.missing
    ]
    for other in contents.others:
        if other.key not in told and not other.foreign:
            keys = [other.key, *_parts(other.generation, contents.sizes)]
            findings.append(
                Finding("unreadable", "session", "", "", len(keys), contents.bytes_of(keys), printable(other.why))
            )
    return findings


def _orphaned(contents: Contents) -> Finding | None:
    keys = contents.orphans
    detail = "parts of sessions that no manifest names"
    return Finding("orphaned", "session", "", "", len(keys), contents.bytes_of(keys), detail) if keys else None


def _parts(generation: bytes | None, keys: Iterable[bytes]) -> list[bytes]:
    return [] if generation is None else [key for key in keys if key.startswith(manifests.PARTS + generation)]


def _in_words(key: bytes) -> str:
    if key.startswith(manifests.MANIFEST):
        return "manifest"
    if key.startswith(manifests.PARTS):
        return manifests.part_in_words(key)
    if key.startswith(prefix.PREFIX):
        block = prefix.block_of(key)
        return f"block {block[0].hex()[:12]} of layer {block[1]}" if block else "shapes of layers"
    return key.hex()
