"""The commands of `kvquant store`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .errors import InputError, printable
from .terminal import EXIT_OK, EXIT_ROWS, JSON_HELP, only_our_output, print_json

if TYPE_CHECKING:
    from .store import Contents, Finding, Stats

app = typer.Typer(help="Look after the folder in which a store keeps sessions and shared prefixes.")

_MOST_PARTS = 3  # that a line names
_MOST_ROWS = 4
_Path = Annotated[str, typer.Argument(metavar="PATH", help="The store's folder: the disk_path of a TieredStore.")]
_Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]

_LS_HELP = """Saved sessions, and what else is there; also while another process writes to the store.

[bold]Example[/bold]

  kvquant store ls /mnt/ssd/store
"""


@app.command("ls", help=_LS_HELP)
def ls(context: typer.Context, path: _Path, json: _Json = False) -> int:
    """See `_LS_HELP`."""
    from .store import listed

    with _reading():
        contents = listed(path)
    _, prefixes, other = contents.kinds()
    blocks = contents.shared_blocks()
    if json:
        orphaned = {"payloads": len(contents.orphans), "bytes": contents.bytes_of(contents.orphans)}
        shared = {"blocks": blocks, "payloads": prefixes.payloads, "bytes": prefixes.bytes}
        print_json(
            context,
            contents.sessions,
            unreadable=[{"reason": found.why} for found in contents.others],
            orphaned=orphaned,
            prefixes=shared,
            other={"payloads": other.payloads, "bytes": other.bytes},
        )
    else:
        _print_sessions(Console(), contents)
        _say(f"shared prefixes: {_count(blocks, 'block')}, {_bytes(prefixes.bytes)}")
        _say(f"other: {_count(other.payloads, 'payload')}, {_bytes(other.bytes)}")
    return EXIT_OK


_STATS_HELP = """How large a store is, by kind and by file, and whether a process writes to it now.

[bold]Examples[/bold]

  kvquant store stats /mnt/ssd/store

  kvquant store stats /mnt/ssd/store --prometheus > /var/lib/node_exporter/kvquant.prom
"""


@app.command("stats", help=_STATS_HELP)
def stats(
    context: typer.Context,
    path: _Path,
    json: _Json = False,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="Print Prometheus' text format instead.")] = False,
) -> int:
    """See `_STATS_HELP`."""
    from .store import measured

    if json and prometheus:
        raise InputError("--prometheus: given with --json; allowed: one of them")
    with _reading():
        found = measured(path)
    if prometheus:
        sys.stdout.write(found.prometheus())
    elif json:
        print_json(
            context,
            found.kinds,
            slab={"bytes": found.slab, "used": found.used},
            index={"bytes": found.index, "set_aside": found.set_aside},
            files=found.files,
            writer=None if found.writer is None else {"pid": found.writer or None},
        )
    else:
        _print_stats(Console(), found)
    return EXIT_OK


_VERIFY_HELP = """Read every payload, and tell what is damaged and whose that is, sessions that have parts missing, and
parts that no session has. Changes nothing. Exit status 1 if there is any.

[bold]Example[/bold]

  kvquant store verify /mnt/ssd/store
"""


@app.command("verify", help=_VERIFY_HELP)
def verify(context: typer.Context, path: _Path, json: _Json = False) -> int:
    """See `_VERIFY_HELP`."""
    from .display import progress
    from .store import verified

    with _reading() as (console, say):
        findings, payloads = verified(path, partial(progress, console), say)
    if json:
        print_json(context, findings, payloads=payloads)
    else:
        _print_findings(findings)
        _say(f"{_count(payloads, 'payload')} read: {'all is well' if not findings else 'see above'}")
    return EXIT_ROWS if findings else EXIT_OK


_GC_HELP = """Drop what is damaged, parts that no session has and damaged indexes, and shrink the files. No other
process may write to the store meanwhile. Exit status 1 if sessions are left that can't be loaded.

[bold]Examples[/bold]

  kvquant store gc /mnt/ssd/store

  kvquant store gc /mnt/ssd/store --sessions
"""


@app.command("gc", help=_GC_HELP)
def gc(
    context: typer.Context,
    path: _Path,
    drop_sessions: Annotated[
        bool, typer.Option("--sessions", help="Drop sessions too that can't be loaded, for parts of theirs are gone.")
    ] = False,
    json: _Json = False,
) -> int:
    """See `_GC_HELP`."""
    from .display import progress
    from .store import collect

    with _reading() as (console, _):
        done = collect(path, partial(progress, console), unloadable=drop_sessions)
    if json:
        left = [found.as_dict() for found in done.left]
        print_json(context, done.dropped, left=left, freed_bytes=done.freed, freed_room_bytes=done.freed_room)
    else:
        _print_findings(done.dropped, "dropped: ")
        _print_findings(done.left, "left: ")
        if done.left:
            _say("what is left can't be loaded: --sessions drops it", "yellow")
        _say(f"{_bytes(done.freed)} of the files freed, {_bytes(done.freed_room)} of payloads dropped")
    return EXIT_ROWS if done.left else EXIT_OK


@contextmanager
def _reading() -> Iterator[tuple[Console, Callable[[str], None]]]:
    """As `only_our_output`; a payload that memory has no room for, which a strange file may claim, is an error."""
    with only_our_output() as both:
        try:
            yield both
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
                raise
            raise InputError("PATH: a payload there is larger than memory; allowed: what can be read") from error


def _print_sessions(console: Console, contents: Contents) -> None:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    tenants = any(row.tenant for row in contents.sessions)
    table.add_column("session", overflow="fold")
    if tenants:
        table.add_column("tenant", overflow="fold")
    table.add_column("saved", overflow="fold")
    for heading in ("tokens", "blocks", "bytes"):
        table.add_column(heading, justify="right", overflow="fold")
    for row in contents.sessions:
        words = [row.name, *([row.tenant] if tenants else []), row.saved, _rows(row.tokens), str(row.blocks)]
        table.add_row(*(Text(printable(word)) for word in words), _bytes(row.bytes))
    if contents.sessions:
        console.print(table)
    else:
        _say("no sessions")
    for row in contents.sessions:
        if row.missing:
            _say(f"{_session(row.name, row.tenant)} can't be loaded: {_count(row.missing, 'part')} missing", "yellow")
    for why, times in Counter(found.why for found in contents.others).items():
        _say(f"{_count(times, 'more session')} that can't be loaded: {why}", "yellow")
    if contents.orphans:
        size = _bytes(contents.bytes_of(contents.orphans))
        _say(f"parts that no session has: {len(contents.orphans)}, {size}", "yellow")


def _print_stats(console: Console, found: Stats) -> None:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("kind")
    for heading in ("payloads", "bytes"):
        table.add_column(heading, justify="right")
    for kind in found.kinds:
        table.add_row(kind.kind, str(kind.payloads), _bytes(kind.bytes))
    console.print(table)
    _say(f"slab: {_bytes(found.slab)}, of which {_bytes(found.used)} used")
    aside = f", and {_bytes(found.set_aside)} of damaged ones" if found.set_aside else ""
    _say(f"index: {_bytes(found.index)}{aside}")
    _say(f"all files: {_bytes(sum(found.files.values()))}")
    who = f"process {found.writer}" if found.writer else "a process"
    _say("nobody writes to it now" if found.writer is None else f"{who} writes to it now")


def _print_findings(findings: Sequence[Finding], lead: str = "") -> None:
    for found in findings:
        whose = {"session": _session(found.name, found.tenant), "prefix": "shared prefixes"}.get(found.of, found.of)
        parts = ", ".join(found.parts[:_MOST_PARTS])
        if (more := len(found.parts) - _MOST_PARTS) > 0:
            parts += f" and {more} more"
        told = found.detail or parts
        _say(f"{lead}{found.problem}: {whose}: {told}, {_count(found.payloads, 'payload')}, {_bytes(found.bytes)}")


def _session(name: str, tenant: str) -> str:
    """A session as a line names it; one whose manifest is lost has no name."""
    if not name:
        return "a session without a name"
    return f"session {name!r}" + (f" of tenant {tenant!r}" if tenant else "")


def _rows(tokens: Sequence[int]) -> str:
    """Tokens of each row, of the first ones if there are many."""
    told = ", ".join(map(str, tokens[:_MOST_ROWS]))
    return told + (f" … ({len(tokens)} rows)" if len(tokens) > _MOST_ROWS else "")


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _bytes(size: int) -> str:
    from .memory import in_words

    return in_words(size)


def _say(text: str, style: str | None = None) -> None:
    """A line of the result."""
    Console().print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)
