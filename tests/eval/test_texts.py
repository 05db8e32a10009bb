from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvquant_eval import texts
from kvquant_eval.errors import InputError
from kvquant_eval.texts import default_text, find_text

CONTENT = "One line.\r\nAnother: é, 日本.\n"


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [("", bytes), (".xz", lzma.compress), (".gz", gzip.compress), (".bz2", bz2.compress), (".XZ", lzma.compress)],
)
def test_files_are_unpacked_and_kept_to_the_character(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"text.txt{suffix}"
    path.write_bytes(pack(CONTENT.encode()))
    text = find_text([str(path)])
    assert text.content == CONTENT
    assert text.sha256 == hashlib.sha256(CONTENT.encode()).hexdigest()
    assert text.name == str(path)


def test_several_files_are_joined_in_the_order_given(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.write_text("b")
    second.write_text("a")
    assert find_text([str(first), str(second)]).content == "ba"


def test_the_default_is_the_same_every_time_and_is_source_code() -> None:
    text = default_text()
    assert text == default_text() == find_text([])
    assert len(text.content) > 1_000_000
    assert "class ABCMeta" in text.content[:100_000]  # abc comes early in the fixed order


TRUNCATED_XZ = lzma.compress(CONTENT.encode() * 1000)[:-20]
DAMAGED_GZ = gzip.compress(CONTENT.encode(), mtime=0)[:10] + b"\xff\xff\xff"


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("empty.txt", b"", "empty"),
        ("blank.txt", b" \n\t\n", "empty"),
        ("empty.xz", b"", "empty"),
        ("image.png", b"\x89PNG\r\n\x1a\n\0\0", "not UTF-8 text (byte 0x89 at offset 0)"),
        ("latin.txt", "naïve".encode("latin-1"), "not UTF-8 text (byte 0xef at offset 2)"),
        ("nul.txt", b"ab\0cd", "binary file (NUL at character 2)"),
        ("text.xz", b"plain text", "not a whole .xz file"),
        ("cut.xz", TRUNCATED_XZ, "not a whole .xz file"),
        ("text.gz", b"plain text", "not a whole .gz file"),
        ("bad.gz", DAMAGED_GZ, "not a whole .gz file"),
        ("text.bz2", b"plain text", "not a whole .bz2 file"),
        ("zlib.gz", zlib.compress(b"plain text"), "not a whole .gz file"),
    ],
)
def test_what_is_no_text_is_refused_in_one_line(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    _refused(path, says)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    _refused(tmp_path / "none.txt", "No such file")
    _refused(tmp_path, "no data files there")


def _refused(path: Path, says: str) -> None:
    with pytest.raises(InputError) as caught:
        find_text([str(path)])
    message = str(caught.value)
    assert message.startswith(f"--text: {path}: ")
    assert says in message
    assert "\n" not in message


def test_only_the_beginning_of_a_huge_text_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_LEAST_BYTES", 11)
    for suffix, opener in ((".txt", open), (".xz", lzma.open), (".gz", gzip.open), (".bz2", bz2.open)):
        path = tmp_path / f"long{suffix}"
        with opener(path, "wb") as file:
            file.write(("né" * 1000).encode())
        assert find_text([str(path)]).content == "nénénén"  # eleven bytes end within an é
        assert find_text([str(path)], tokens=1).content == ("né" * 1000).encode()[:64].decode(errors="ignore")


def test_a_device_without_end_is_refused_at_once() -> None:
    with pytest.raises(InputError, match="a binary file"):
        find_text(["/dev/zero"])
