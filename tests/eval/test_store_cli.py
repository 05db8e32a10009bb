"""`kvquant store`: what is in a store, what is wrong with it, and what goes; and folders that are none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvquant
from kvquant import KVQuantCache, StoreError, TieredStore
from kvquant.cache import manifests
from kvquant.cache.prefix import PREFIX, block_of
from kvquant.store.disk import DiskStore
from kvquant.store.files import writer
from kvquant.store.index import Index, Row
from kvquant.store.slab import NAME as SLAB
from kvquant_eval.cli import run
from tests.models import feed, prompt, small, tiny

COMMANDS = ["ls", "stats", "verify", "gc"]
Capture = pytest.CaptureFixture[str]


def opened(folder: Path) -> TieredStore:
    return TieredStore(None, "4MiB", "32MiB", folder, staging="64KiB")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two sessions, a shared prefix of 4 blocks, and another payload."""
    folder = tmp_path_factory.mktemp("saved") / "store"
    model = tiny()
    kvquant.enable(model)
    with opened(folder) as store:
        for name, tenant, rows in (("chat", "a", 1), ("x[red]y", "", 2)):
            cache = KVQuantCache.for_model(model, small(), store=store, tenant=tenant)
            feed(model, cache, prompt(90, rows), 70, 20)
            cache.save(name)
        cache = KVQuantCache.for_model(model, small(), store=store)
        feed(model, cache, prompt(90), 90)
        assert cache.share()
        store.put(b"mine", torch.ones(100, dtype=torch.uint8))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "store"))


@pytest.fixture
def asked(capsys: Capture) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs a command with --json; its exit code, and what it printed."""

    def ask(command: str, folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = run(["store", command, str(folder), *more, "--json"])
        return code, json.loads(capsys.readouterr().out, parse_constant=pytest.fail)

    return ask


Asked = Callable[..., tuple[int, dict[str, Any]]]


def flip(folder: Path, wanted: Callable[[bytes], bool]) -> bytes:
    """Changes a byte of the first payload whose key is ``wanted``; the key."""
    with DiskStore(folder, 1 << 40, read_only=True) as store:
        key = next(key for key in store.keys() if isinstance(key, bytes) and wanted(key))  # noqa: SIM118
        at = store._table.entries[key].at
    with (folder / SLAB).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    return key


def part_of(folder: Path, name: str, which: str) -> Callable[[bytes], bool]:
    with DiskStore(folder, 1 << 40, read_only=True) as store:
        (generation,) = [each.generation for each in manifests.found(store) if each.told and each.told["name"] == name]
    assert generation is not None
    start = manifests.PARTS + generation
    return lambda key: key.startswith(start) and manifests.part_in_words(key) == which


def drop(folder: Path, wanted: Callable[[bytes], bool]) -> None:
    with DiskStore(folder, 1 << 40) as store:
        assert store.delete([key for key in store.keys() if isinstance(key, bytes) and wanted(key)])  # noqa: SIM118


@pytest.fixture
def held(folder: Path) -> Iterator[int]:
    """The folder is another process's to write; its number."""
    code = (
        "import sys; from kvquant.store.disk import DiskStore; store = DiskStore(sys.argv[1], 1 << 30);"
        "print(flush=True); sys.stdin.read(); store.close()"
    )
    words = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate()


def test_ls(folder: Path, capsys: Capture, asked: Asked) -> None:
    assert run(["store", "ls", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "x[red]y" in out
    assert "shared prefixes: 4 blocks" in out
    assert "other: 1 payload, 0.1 KiB" in out
    code, document = asked("ls", folder)
    assert code == 0
    assert [(row["name"], row["tenant"], row["tokens"]) for row in document["rows"]] == [
        ("x[red]y", "", [90, 90]),
        ("chat", "a", [90]),
    ]
    one, other = (row["bytes"] for row in document["rows"])
    assert one > other > 0
    assert [row["blocks"] for row in document["rows"]] == [8, 4]
    assert document["prefixes"]["blocks"] == 4
    assert document["prefixes"]["payloads"] == 4 * 4 + 1
    assert document["other"] == {"payloads": 1, "bytes": 100}
    assert document["unreadable"] == []
    assert document["command"] == f"kvquant store ls {folder} --json"


def test_stats(folder: Path, capsys: Capture, asked: Asked) -> None:
    code, document = asked("stats", folder)
    assert code == 0
    kinds = {row["kind"]: (row["payloads"], row["bytes"]) for row in document["rows"]}
    assert kinds["other"] == (1, 100)
    assert kinds["prefixes"][0] == 17
    _, listed = asked("ls", folder)
    assert kinds["sessions"][1] == sum(row["bytes"] for row in listed["rows"])
    assert document["slab"]["bytes"] == document["files"][SLAB] == (folder / SLAB).stat().st_size
    assert sum(size for _, size in kinds.values()) <= document["slab"]["used"] < document["slab"]["bytes"]
    assert document["writer"] is None
    assert document["index"]["set_aside"] == 0
    (folder / "index.db.damaged-1").write_bytes(bytes(1000))
    assert asked("stats", folder)[1]["index"]["set_aside"] == 1000
    assert run(["store", "stats", str(folder)]) == 0
    assert "nobody writes to it now" in capsys.readouterr().out
    assert run(["store", "stats", str(folder), "--prometheus"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "# TYPE kvquant_folder_payloads gauge" in lines
    assert 'kvquant_folder_payloads{kind="prefixes"} 17' in lines
    assert f"kvquant_folder_used_bytes {document['slab']['used']}" in lines
    assert "kvquant_folder_written 0" in lines
    assert run(["store", "stats", str(folder), "--prometheus", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_all_is_well(folder: Path, capsys: Capture, asked: Asked) -> None:
    assert run(["store", "verify", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert "all is well" in out
    assert "100 %" in err
    assert "s left" in err
    code, document = asked("verify", folder)
    assert (code, document["rows"]) == (0, [])
    code, document = asked("gc", folder)
    assert (code, document["rows"], document["left"]) == (0, [], [])
    assert document["freed_bytes"] > 15 << 20  # the room that was set aside
    assert document["freed_room_bytes"] == 0
    assert asked("verify", folder)[0] == 0
    with opened(folder) as store:
        assert KVQuantCache.load(tiny(), "chat", store, tenant="a").get_seq_length() == 90
        assert store.check() == []


def test_a_flipped_byte_of_a_session(folder: Path, capsys: Capture, asked: Asked) -> None:
    flip(folder, part_of(folder, "chat", "block 1 of layer 2"))
    before = (folder / SLAB).read_bytes()
    assert run(["store", "verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "damaged: session 'chat' of tenant 'a': block 1 of layer 2, 1 payload" in out
    code, document = asked("verify", folder)
    assert code == 1
    (row,) = document["rows"]
    assert (row["problem"], row["name"], row["parts"]) == ("damaged", "chat", ["block 1 of layer 2"])
    assert (folder / SLAB).read_bytes() == before
    assert run(["store", "gc", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "dropped: damaged: session 'chat' of tenant 'a'" in out
    assert "left: incomplete: session 'chat' of tenant 'a': parts missing: 1 of" in out
    assert "--sessions drops it" in out
    code, document = asked("verify", folder)
    assert code == 1
    assert [row["problem"] for row in document["rows"]] == ["incomplete"]
    assert run(["store", "ls", str(folder)]) == 0
    assert "session 'chat' of tenant 'a' can't be loaded: 1 part missing" in capsys.readouterr().out
    code, document = asked("gc", folder, "--sessions")
    assert code == 0
    assert document["freed_room_bytes"] > 0
    assert [row["name"] for row in document["rows"]] == ["chat"]
    assert asked("verify", folder)[0] == 0
    assert [row["name"] for row in asked("ls", folder)[1]["rows"]] == ["x[red]y"]


@pytest.mark.parametrize(
    ("wanted", "of", "named"),
    [
        (lambda key: key.startswith(PREFIX) and block_of(key) is not None, "prefix", "of layer"),
        (lambda key: key.startswith(PREFIX) and block_of(key) is None, "prefix", "shapes of layers"),
        (lambda key: key == b"mine", "other", b"mine".hex()),
    ],
)
def test_a_flipped_byte_elsewhere(
    folder: Path, asked: Asked, wanted: Callable[[bytes], bool], of: str, named: str
) -> None:
    flip(folder, wanted)
    code, document = asked("verify", folder)
    (row,) = document["rows"]
    assert (code, row["of"], row["payloads"]) == (1, of, 1)
    assert named in row["parts"][0]
    assert asked("gc", folder)[0] == 0
    assert asked("verify", folder)[0] == 0


def test_a_flipped_byte_of_a_manifest_costs_its_session(folder: Path, asked: Asked) -> None:
    flip(folder, lambda key: key.startswith(manifests.MANIFEST))
    code, document = asked("ls", folder)
    assert code == 0
    assert len(document["rows"]) == 1
    assert document["unreadable"] == [{"reason": "its manifest is damaged"}]
    code, document = asked("verify", folder)
    assert code == 1
    assert {(row["problem"], *row["parts"]) for row in document["rows"]} == {("damaged", "manifest"), ("orphaned",)}
    assert asked("gc", folder)[0] == 0
    assert asked("verify", folder) == (0, asked("verify", folder)[1])
    assert asked("ls", folder)[1]["orphaned"] == {"payloads": 0, "bytes": 0}


def test_orphans_are_collected(folder: Path, capsys: Capture, asked: Asked) -> None:
    with DiskStore(folder, 1 << 40) as store:
        (key,) = [each.key for each in manifests.found(store) if each.told and each.told["name"] == "chat"]
        store.delete([key])
        lost = len(manifests.orphans(store))
    code, document = asked("verify", folder)
    (row,) = document["rows"]
    assert (code, row["problem"], row["payloads"]) == (1, "orphaned", lost)
    assert run(["store", "ls", str(folder)]) == 0
    assert f"parts that no session has: {lost}" in capsys.readouterr().out
    code, document = asked("gc", folder)
    assert code == 0
    assert document["freed_room_bytes"] >= row["bytes"]
    with DiskStore(folder, 1 << 40) as store:
        assert manifests.orphans(store) == []
        assert [told["name"] for told in manifests.sessions(store)] == ["x[red]y"]


def test_whole_layers_that_are_gone_are_missed(folder: Path, asked: Asked) -> None:
    wanted = [part_of(folder, "chat", f"block {n} of layer 3") for n in range(4)]
    wanted.append(part_of(folder, "chat", "state of layer 3"))
    drop(folder, lambda key: any(each(key) for each in wanted))
    code, document = asked("verify", folder)
    (row,) = document["rows"]
    assert (code, row["problem"], row["name"]) == (1, "incomplete", "chat")
    assert row["detail"].startswith("parts missing: 5 of ")


def test_beside_a_writer(folder: Path, held: int, capsys: Capture, asked: Asked) -> None:
    assert asked("stats", folder)[1]["writer"] == {"pid": held}
    assert writer(folder) == held
    assert len(asked("ls", folder)[1]["rows"]) == 2
    assert asked("verify", folder)[0] == 0
    before = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert run(["store", "gc", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert f"process {held} writes to it" in err
    assert err.count("\n") == 1
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == before
    (folder / "lock").write_bytes(b"\x1b[31m")
    assert asked("stats", folder)[1]["writer"] == {"pid": None}
    assert run(["store", "gc", str(folder)]) == 2
    assert "another process writes to it" in capsys.readouterr().err


def test_damage_beside_a_writer_is_looked_at_again(folder: Path, held: int, capsys: Capture) -> None:
    flip(folder, part_of(folder, "chat", "rows"))
    assert run(["store", "verify", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert "damaged: session 'chat' of tenant 'a': rows" in out
    assert "looking again" in err


def test_a_save_under_way_is_no_damage(folder: Path) -> None:
    with DiskStore(folder, 1 << 40) as store:
        store.put(manifests.PARTS + bytes(16) + bytes(6), torch.ones(64, dtype=torch.uint8))
        store.flush()
        assert run(["store", "verify", str(folder)]) == 0
    assert run(["store", "verify", str(folder)]) == 1


def manifest(**changes: object) -> bytes:
    told = {"version": 1, "name": "n", "tenant": "", "saved": "", "tokens": [1], "blocks": 0, "parts": 0}
    return json.dumps(told | {"generation": "ab" * 16} | changes).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"7",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        manifest(generation=""),
        manifest(generation="ab"),
        manifest(generation=None),
        manifest(name=["\x1b[31m"]),
        manifest(tokens=["\x1b[31m"]),
        manifest(blocks="\x1b[31m"),
        manifest(saved=None),
        manifest(tenant=None),
        manifest(parts=1.5),
        manifest(parts=float("nan")),
    ],
)
def test_manifests_of_nonsense(folder: Path, capsys: Capture, asked: Asked, text: bytes) -> None:
    with DiskStore(folder, 1 << 40) as store:
        payload = torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)
        store.write([manifests.MANIFEST + b"strange"], payload[None], kept=True)
    for command in COMMANDS:
        assert run(["store", command, str(folder)]) == (command in ("verify", "gc"))
        assert "\x1b" not in "".join(capsys.readouterr())
    assert len(asked("ls", folder)[1]["rows"]) == 2
    (row,) = asked("verify", folder)[1]["rows"]
    assert row["problem"] == "unreadable"
    assert asked("gc", folder, "--sessions")[0] == 0
    assert asked("verify", folder)[0] == 0
    assert len(asked("ls", folder)[1]["rows"]) == 2


def test_names_do_not_command_the_terminal(folder: Path, capsys: Capture, asked: Asked) -> None:
    name = "a\x1b[31m\nb\x9b\ud800[red]\u202e"
    text = manifest(name=name, tenant=name, saved=name, parts=10**12, blocks=10**30, tokens=[10**30] * 99)
    with DiskStore(folder, 1 << 40) as store:
        store.put(manifests.MANIFEST + b"strange", torch.frombuffer(bytearray(text), dtype=torch.uint8))
    for command in COMMANDS:
        run(["store", command, str(folder)])
        said = "".join(capsys.readouterr())
        assert not {"\x1b", "\x9b", "\u202e", "\ud800"} & {*said}
    assert asked("ls", folder)[1]["rows"][-1]["missing"] == 10**12
    assert asked("gc", folder, "--sessions")[0] == 0
    assert len(asked("ls", folder)[1]["rows"]) == 2


def test_sessions_of_another_release_are_left_alone(folder: Path, capsys: Capture, asked: Asked) -> None:
    with DiskStore(folder, 1 << 40) as store:
        text = manifest(version=2, parts=None)
        store.put(manifests.MANIFEST + b"newer", torch.frombuffer(bytearray(text), dtype=torch.uint8))
        store.put(manifests.PARTS + b"\xab" * 16 + bytes(6), torch.ones(64, dtype=torch.uint8))
        count = len(store)
    assert asked("verify", folder)[0] == 0
    assert asked("gc", folder, "--sessions")[0] == 0
    assert run(["store", "ls", str(folder)]) == 0
    assert "1 more session that can't be loaded: a session of version 2" in capsys.readouterr().out
    with DiskStore(folder, 1 << 40) as store:
        assert len(store) == count


def test_rows_that_name_no_payload(folder: Path, asked: Asked) -> None:
    os.truncate(folder / SLAB, 64 << 10)
    code, document = asked("verify", folder)
    assert code == 1
    assert "index" in {row["problem"] for row in document["rows"]}
    assert asked("gc", folder, "--sessions")[0] == 0
    code, document = asked("verify", folder)
    assert (code, document["rows"]) == (0, [])


@pytest.mark.parametrize("key", [b"y", manifests.MANIFEST + b"y"])
def test_a_payload_larger_than_memory(folder: Path, capsys: Capture, key: bytes) -> None:
    os.truncate(folder / SLAB, 1 << 43)  # a hole
    index = Index(folder, read_only=False)
    index.write([Row(key, 1 << 30, 1 << 42, 0, 1, bytes(16))], [])
    index.close()
    for command in ("verify", "gc"):
        assert run(["store", command, str(folder)]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("kvquant: PATH: a payload there is larger")


def test_gc_drops_indexes_set_aside(folder: Path, asked: Asked) -> None:
    (folder / "index.db.damaged-1").write_bytes(bytes(5000))
    assert asked("gc", folder)[1]["freed_bytes"] >= 5000
    assert not [*folder.glob("*.damaged-*")]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_index_that_cannot_be_read_is_left(folder: Path, capsys: Capture, command: str) -> None:
    (folder / "index.db").write_bytes(b"no index" * 1000)
    code = run(["store", command, str(folder)])
    out, err = capsys.readouterr()
    assert code == (1 if command == "verify" else 2)
    assert "index.db" in out + err
    assert (out + err).count("\n") <= 2
    assert (folder / "index.db").read_bytes() == b"no index" * 1000
    assert not [*folder.glob("*.damaged-*")]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "kind", ["absent", "empty", "other", "file", "link", "pipe", "nothing", "nul", "long", "home"]
)
def test_paths_that_are_no_store(folder: Path, tmp_path: Path, capsys: Capture, command: str, kind: str) -> None:
    place = tmp_path / f"p\x1b[31m\n{kind}"
    match kind:
        case "empty":
            place.mkdir()
        case "other":
            place.mkdir()
            (place / "mine.txt").write_text("x")
        case "file":
            place.write_text("x")
        case "link":
            place.symlink_to(folder)
        case "pipe":
            os.mkfifo(place)
    path = {"nothing": "", "nul": "a\0b", "long": "x" * 5000, "home": "~nobody-of-that-name/x"}.get(kind, str(place))
    before = sorted(tmp_path.rglob("*"))
    assert run(["store", command, path]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert err.startswith("kvquant: ")
    assert "\x1b" not in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["lock", SLAB, "index.db"])
@pytest.mark.parametrize("command", COMMANDS)
def test_parts_of_a_store_that_are_no_files(folder: Path, capsys: Capture, command: str, name: str) -> None:
    (folder / name).rename(folder.parent / name)
    (folder / name).symlink_to(folder.parent / name)
    code = run(["store", command, str(folder)])
    err = capsys.readouterr().err
    assert code == 2 or name == "lock"
    assert code != 2 or err.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_may_not_be_read(folder: Path, capsys: Capture, command: str) -> None:
    run(["store", command, str(folder)])  # imports what it needs while it may
    capsys.readouterr()
    me = os.geteuid()
    folder.chmod(0)
    try:
        if me == 0:  # who may read everything
            os.seteuid(65534)
        assert run(["store", command, str(folder)]) == 2
    finally:
        os.seteuid(me)
        folder.chmod(0o700)
    assert "Permission denied" in capsys.readouterr().err


def test_help_has_examples(capsys: Capture) -> None:
    for command in COMMANDS:
        assert run(["store", command, "--help"]) == 0
        assert f"kvquant store {command} /mnt" in capsys.readouterr().out


def test_sessions_are_listed_from_a_disk_store_as_well(folder: Path) -> None:
    with DiskStore(folder, 1 << 40) as store:
        assert {told["name"] for told in manifests.sessions(store)} == {"chat", "x[red]y"}
        manifests.delete(store, "chat", "a")
        assert manifests.orphans(store) == []
        with pytest.raises(StoreError, match="no such session"):
            manifests.delete(store, "chat", "a")
