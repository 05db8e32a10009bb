"""What lies where on the disk, by key, in SQLite: one row a payload, so that payloads outlive the process.

Nothing here is ever synced (``synchronous=OFF``), nor is the slab, neither at a commit nor at a checkpoint. A killed
process loses nothing by that: what it handed over is with the operating system. Where the machine itself goes down,
rows and payloads may be lost, torn or out of step, and all of that reads as a miss: a row is taken for true only if
its seal, a checksum over all its columns, fits and its payload has the checksum it names; a file SQLite finds damaged
is moved aside. So the worst that can happen is an empty cache.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import struct
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import xxhash

from ..errors import KVQuantWarning, StoreError
from .base import ALIGNMENT, MAX_KEY
from .slab import Entry

NAME = "index.db"
VERSION = 1
KEEP = 3  # damaged indexes that stay for someone to look at
CHECKSUM = 16  # bytes
_SCHEMA = (
    "CREATE TABLE payloads (key BLOB PRIMARY KEY, at INTEGER, nbytes INTEGER, tag INTEGER, turn INTEGER, "
    "checksum BLOB, seal BLOB) WITHOUT ROWID"
)
# Types and lengths are looked at before a value is: whoever wrote the file may have put anything anywhere.
_SELECT = (
    f"SELECT key, at, nbytes, tag, turn, checksum, seal FROM payloads WHERE typeof(key) = 'blob' AND "
    f"length(key) BETWEEN 1 AND {MAX_KEY} AND typeof(at) = 'integer' AND typeof(nbytes) = 'integer' AND "
    f"typeof(tag) = 'integer' AND typeof(turn) = 'integer' AND typeof(checksum) = 'blob' AND "
    f"length(checksum) = {CHECKSUM} AND typeof(seal) = 'blob' AND length(seal) = 8"
)
_LAST_TURN = 1 << 62
_KEPT = 1 << 8  # beside a row's tag: the payload leaves for no other
_NUMBERS = struct.Struct("<QQHQ")
FAILURES = (sqlite3.Error, UnicodeError)  # the latter where SQLite's message quotes a damaged file
# Errors of the machine, not of the file: it may be as good as ever.
_ELSEWHERE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}


class Row(NamedTuple):
    """One payload: where it lies and how long it is, both in bytes, and since which put, counted from 0."""

    key: bytes
    at: int
    nbytes: int
    tagged: int  # the tag, and `_KEPT`
    turn: int
    checksum: bytes

    @property
    def tag(self) -> int:
        """What it was put with."""
        return self.tagged % _KEPT

    @property
    def kept(self) -> bool:
        """Whether it leaves for no other."""
        return self.tagged >= _KEPT

    @classmethod
    def of(cls, key: bytes, entry: Entry) -> Row:
        """What the index has of an entry."""
        return cls(key, entry.at, entry.nbytes, entry.tag + _KEPT * entry.kept, entry.turn, entry.checksum)

    def seal(self) -> bytes:
        """Checksum of the row itself."""
        numbers = _NUMBERS.pack(self.at, self.nbytes, self.tagged, self.turn)
        return xxhash.xxh3_64_digest(numbers + self.checksum + self.key)

    def valid(self) -> bool:
        """Whether its numbers can be a payload's."""
        return (
            0 <= self.at < _LAST_TURN
            and self.at % ALIGNMENT == 0
            and 0 < self.nbytes < _LAST_TURN
            and 0 <= self.tagged < 2 * _KEPT
            and 0 <= self.turn < _LAST_TURN
        )


class Index:
    """The rows. Not for several threads at a time. ``holds`` says that payloads are there, so an empty file is odd.

    Methods raise `FAILURES`; after one of which `damaged` says so, `rebuild` puts an empty file in its place.
    """

    def __init__(self, folder: Path, *, read_only: bool, holds: bool = False) -> None:
        self._folder, self._read_only = folder, read_only
        for name in (NAME, f"{NAME}-wal", f"{NAME}-shm"):
            _refuse_links(folder / name)
        self._moved: str | None = None
        self._loaded: tuple[list[Row], int] | None = None
        try:
            self._db = self._opened(holds)
            self._loaded = self._load()
        except (*FAILURES, _OtherVersionError) as error:
            if read_only or not damaged(error):
                raise StoreError(f"{folder / NAME}: {error}; allowed: an index this release can read") from error
            self._start_empty(error)

    def load(self) -> tuple[list[Row], int]:
        """All rows that can be payloads, least recently put first, and how many others there were."""
        loaded, self._loaded = self._loaded or self._load(), None
        return loaded

    def write(self, rows: Iterable[Row], gone: Iterable[bytes], *, anew: bool = False) -> None:
        """Replace rows by key and drop those of ``gone``, or all if ``anew``; nothing changes where it fails."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if anew:
                self._db.execute("DELETE FROM payloads")
            self._db.executemany("DELETE FROM payloads WHERE key = ?", ((key,) for key in gone))
            self._db.executemany(
                "INSERT OR REPLACE INTO payloads VALUES (?, ?, ?, ?, ?, ?, ?)", ((*row, row.seal()) for row in rows)
            )
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(*FAILURES):
                self._db.execute("ROLLBACK")
            raise

    def version(self) -> int:
        """Changes whenever another process has committed something."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def rebuild(self, error: Exception) -> None:
        """Move the damaged file aside and begin an empty one; `StoreError` if that fails too."""
        with contextlib.suppress(*FAILURES):
            self._db.close()
        self._start_empty(error)

    def warn(self) -> None:
        """Say what was moved aside since the last time, once everything is in order again."""
        if self._moved:
            moved, self._moved = self._moved, None
            warnings.warn(moved, KVQuantWarning, stacklevel=4)

    def shrink(self) -> None:
        """Give free pages back, and remove what was moved aside."""
        for path in self._folder.glob(f"{NAME}.damaged-*"):
            path.unlink(missing_ok=True)
        self._db.execute("VACUUM")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def _opened(self, holds: bool = False) -> sqlite3.Connection:
        path = self._folder / NAME
        if not self._read_only and not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            path.chmod(0o600)  # what SQLite puts beside it gets the same mode
            holds = False
        uri = f"{path.absolute().as_uri()}?mode={'ro' if self._read_only else 'rw'}"
        db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=5)
        try:
            db.text_factory = bytes  # what should be text need not be UTF-8
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 20)
            # A mapped file that is cut short would end the process.
            for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0"):
                db.execute(f"PRAGMA {pragma}")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            schema = db.execute("SELECT sql FROM sqlite_master").fetchall()
            if not self._read_only:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=OFF")
                if version == 0 and not schema and not holds:
                    db.execute("BEGIN IMMEDIATE")
                    db.execute(_SCHEMA)
                    db.execute(f"PRAGMA user_version={VERSION}")
                    db.execute("COMMIT")
                    return db
            if version != VERSION or schema != [(_SCHEMA.encode(),)]:
                raise _OtherVersionError(
                    f"version {version} of the index, or another table; this release has {VERSION}"
                )
        except BaseException:
            db.close()
            raise
        return db

    def _load(self) -> tuple[list[Row], int]:
        rows, count = [], 0
        self._db.execute("BEGIN")  # both see the same rows
        try:
            count = self._db.execute("SELECT count(*) FROM payloads").fetchone()[0]
            for *columns, seal in self._db.execute(_SELECT):
                row = Row(*columns)
                if row.valid() and row.seal() == seal:
                    rows.append(row)
        finally:
            with contextlib.suppress(*FAILURES):
                self._db.execute("COMMIT")
        rows.sort(key=lambda row: row.turn)
        return rows, count - len(rows)

    def _start_empty(self, error: Exception) -> None:
        path = self._folder / NAME
        aside = [self._folder / f"{NAME}.damaged-{n}" for n in range(1, KEEP + 1)]
        free = next((name for name in aside if not name.exists()), None)
        try:
            if path.exists():
                path.replace(free or min(aside, key=lambda name: name.stat().st_mtime))
            for name in (f"{NAME}-wal", f"{NAME}-shm"):
                (self._folder / name).unlink(missing_ok=True)
            self._db = self._opened()
        except (OSError, *FAILURES) as failure:
            raise StoreError(f"{path}: cannot begin a new index ({failure}); allowed: a writable folder") from failure
        self._loaded = None
        self._moved = f"{path}: the index is damaged or of another release ({error}); moved aside, and begun anew"


class _OtherVersionError(Exception):
    """The file is no index of this release."""


def damaged(error: Exception) -> bool:
    """Whether an error says that the file is not what was written, rather than that the machine lacks something."""
    code = getattr(error, "sqlite_errorcode", None) or 0
    return (
        isinstance(error, sqlite3.DatabaseError | UnicodeError | _OtherVersionError) and code & 0xFF not in _ELSEWHERE
    )


def _refuse_links(path: Path) -> None:
    # Looked at, not opened: closing any descriptor of it would drop the locks SQLite holds in this process.
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise StoreError(f"{path}: a link, or no file; allowed: a regular file")
