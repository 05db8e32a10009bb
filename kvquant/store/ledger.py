"""Keeps the index in step with the table, in batches, and puts a new one in its place once it is found damaged."""

from __future__ import annotations

import threading
from collections import Counter

from ..errors import StoreError
from .index import FAILURES, Index, Row, damaged
from .slab import Entry
from .table import Table

ROWS = 1024  # rows that are written at once, if not before, ...
SECONDS = 0.5  # ... this long after the first of them has changed


class Ledger:
    """Writes what has changed in ``table`` to ``index``, on a thread of its own once there is something.

    ``lock`` is the table's; it is not held while writing. A damaged index is moved aside, for all that is known is in
    memory; other failures are counted, and tried again.
    """

    def __init__(self, index: Index, table: Table, lock: threading.RLock, faults: Counter[str]) -> None:
        self._index, self._table, self._faults = index, table, faults
        self._lock = lock
        self._own = threading.RLock()  # the index's; taken before the table's, never within it
        self._changed, self._many = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def nudge(self) -> None:
        """Take note that something has changed; the table's lock is held."""
        if not self._changed.is_set() and self._table.changed:
            self._changed.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvquant-index", daemon=True)
                self._thread.start()
        if len(self._table.changed) >= ROWS:
            self._many.set()

    def commit(self, *, anew: bool = False) -> str | None:
        """Write what has changed, or if ``anew`` all there is in place of what is in the index; why not, if it failed.

        What was put before is written when it returns, whoever wrote it.
        """
        with self._own:
            with self._lock:
                if anew:
                    entries = self._table.entries.items()
                    self._table.changed = {key: entry for key, entry in entries if isinstance(key, bytes)}
                changed, self._table.changed = self._table.changed, {}
                rows = [row_of(entry) for entry in changed.values() if entry]
            try:
                if changed or anew:
                    self._index.write(rows, [key for key, entry in changed.items() if entry is None], anew=anew)
            except BaseException as error:
                with self._lock:
                    self._table.changed = {**changed, **self._table.changed}
                    self._faults["index"] += 1
                if not isinstance(error, FAILURES):
                    raise
                if anew or not damaged(error):
                    return str(error)
                return self._rebuild(error)
            return None

    def stop(self) -> str | None:
        """Commit for the last time."""
        self._stopped = True
        self._changed.set()
        self._many.set()
        if self._thread is not None:
            self._thread.join()
        return self.commit()

    def _run(self) -> None:
        while not self._stopped:
            self._changed.wait()
            self._many.wait(SECONDS)
            self._many.clear()
            self._changed.clear()  # the word to stop may be what is cleared: it is looked for after
            if not self._stopped:
                self.commit()

    def check(self) -> list[str]:
        """Where rows and payloads differ, a line each."""
        with self._own:
            if failed := self.commit():
                return [f"index: {failed}"]
            with self._lock:
                expected = {row_of(entry) for key, entry in self._table.entries.items() if isinstance(key, bytes)}
                expected -= {row_of(entry) for entry in self._table.changed.values() if entry}
                try:
                    rows, others = self._index.load()
                except FAILURES as error:
                    return [f"index: {error}"]
                gone = {key for key, entry in self._table.changed.items() if entry is None}
        found = {row for row in rows if row.key not in gone}
        lines = []
        if missing := len(expected - found):
            lines.append(f"index: {missing} payloads have no row")
        if odd := others + len(found - expected):
            lines.append(f"index: {odd} rows have no payload")
        return lines

    def shrink(self) -> None:
        """Give the index's free pages back, and remove damaged ones. Raises `FAILURES` or `OSError`."""
        with self._own:
            self._index.shrink()

    def _rebuild(self, error: Exception) -> str | None:
        try:
            self._index.rebuild(error)
        except StoreError as failure:
            return str(failure)
        return self.commit(anew=True)


def row_of(entry: Entry) -> Row:
    """What the index has of an entry whose key is bytes."""
    assert isinstance(entry.key, bytes)
    return Row.of(entry.key, entry)
