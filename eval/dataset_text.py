"""Texts out of Hugging Face datasets: from the hub, the cache, or local data files, streamed only as far as needed."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub.errors import GatedRepoError

from .errors import InputError, one_line
from .hub import DENIALS, HUB_SECONDS, ask
from .options import expanded

GRAMMAR = "name[@revision][:config][:split][:column]"

_BUILDERS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".arrow": "arrow",
    ".txt": "text",
}
_PACKED = {".xz", ".gz", ".bz2"}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@.+)?", re.ASCII)
_SPLITS = ("test", "validation", "train")
_LONGEST_LIST = 20
# Arrow's threads read ahead in Parquet files; one that still does while Python ends aborts the process
# (apache/arrow#45214), and nothing says when they are done.
_SETTLING_SECONDS = 0.1
_PARQUET_HINT = "its Parquet version, where the hub made one, is {name}@refs/convert/parquet"


@dataclass(frozen=True)
class Reference:
    """What `GRAMMAR` names; parts that were not given are empty. ``local``: a file or folder on this machine."""

    name: str
    revision: str
    config: str
    split: str
    column: str
    local: bool


def names_dataset(value: str) -> bool:
    """Whether a value of ``--text`` is a dataset and not a text file.

    Of what exists, folders and files with the suffix of a data format are; of what does not, what has a colon or
    could be the hub's ``owner/name``.
    """
    path = expanded("--text", value)
    if os.path.exists(path):
        return os.path.isdir(path) or _builder_of(path) not in {None, "text"}
    return ":" in value or (_HUB_NAME.fullmatch(value) is not None and not _looks_like_path(value))


def read_dataset(value: str, characters: int) -> tuple[str, str]:
    """A description of the dataset that ``value`` names, and its text up to about ``characters``.

    The text is the column's rows in order, each followed by a newline unless it ends with one. A dataset of any
    size costs the memory of its largest piece: a row group of Parquet, 10 MB of JSON lines or text. No code of the
    dataset's is run. Raises `InputError` for whatever is wrong with it.
    """
    reference = parse(value)
    builder = _builder(_library(), reference)
    with _explaining(reference):
        splits = builder.as_streaming_dataset()
    split = _choose_split(reference, list(splits))
    rows = splits[split]
    column = _choose_column(reference, _types(rows.features.arrow_schema)) if rows.features else ""
    try:
        # A row each: to fill a larger batch, the library would read on into the next file.
        with contextlib.closing(rows.with_format("arrow").iter(batch_size=1)) as tables:
            column, content = _read(reference, tables, column, characters)
    finally:
        time.sleep(_SETTLING_SECONDS)
    return _describe(reference, builder, split, column), content


def parse(value: str) -> Reference:
    """The parts of ``value``; one that exists on this machine is local, whole. Raises `InputError` for other forms."""
    whole = os.path.exists(expanded("--text", value))
    name, *parts = [value] if whole else [part.strip() for part in value.split(":")]
    if "://" in value and not whole:
        _refuse(value, f"addresses are not read; allowed: files, folders, and the hub's datasets as {GRAMMAR}")
    if not name or len(parts) > 3:
        _refuse(value, f"names no dataset; allowed: {GRAMMAR}, where empty parts mean the default")
    local = os.path.exists(expanded("--text", name))
    revision = ""
    if not local:
        if _looks_like_path(name):
            _refuse(name, "no such file or folder")
        name, _, revision = name.partition("@")
    config, split, column = (*parts, "", "", "")[:3]
    return Reference(name, revision, config, split, column, local)


def _looks_like_path(name: str) -> bool:
    bare = name.partition("@")[0]
    return (
        bare.startswith((".", "~", os.sep))
        or bare.count("/") > 1
        or Path(bare).suffix.lower() in _BUILDERS.keys() | _PACKED
    )


def _builder_of(path: Path) -> str | None:
    """The name of what reads the file in the library, by suffix; None if it is no data file."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
    return _BUILDERS.get(suffixes[-1]) if suffixes else None


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError("--text: datasets need their library: pip install 'kvquant[eval]'") from error
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs as errors what it raises
    return datasets


def _builder(datasets: Any, reference: Reference) -> Any:
    if reference.local:
        return _local_builder(datasets, reference)
    try:
        revision = reference.revision or None
        info = ask(lambda hub: hub.dataset_info(reference.name, revision=revision, timeout=HUB_SECONDS))
    except GatedRepoError as error:
        raise _gated(reference) from error
    except DENIALS as error:
        what = f"revision {reference.revision!r} of such a dataset" if reference.revision else "such dataset"
        _refuse(
            reference.name, f"no file here, and the hub has no {what}, or shows you none; allowed: {GRAMMAR}", error
        )
    if info is None or datasets.config.HF_HUB_OFFLINE:
        return _cached_builder(reference)
    return _load(datasets, reference, info.id, revision=info.sha)


def _local_builder(datasets: Any, reference: Reference) -> Any:
    path = expanded("--text", reference.name).absolute()
    if path.is_dir():
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            _refuse(reference.name, "written by save_to_disk, which is no format of data files; give its .arrow files")
        return _load(datasets, reference, str(path))
    builder = _builder_of(path)
    if builder is None or not path.is_file():
        suffixes = " ".join(_BUILDERS)
        _refuse(reference.name, f"not a file of data; allowed: folders, and files that end in {suffixes}, also packed")
    if reference.config:
        _refuse(reference.name, f"config {reference.config!r}: a single file has no configs; leave that part empty")
    return _load(datasets, reference, builder, data_files=glob.escape(str(path)))


def _load(datasets: Any, reference: Reference, path: str, **options: Any) -> Any:
    try:
        with _explaining(reference):
            return datasets.load_dataset_builder(path, reference.config or None, **options)
    except InputError as error:
        configs: list[str] = []
        if isinstance(error.__cause__, ValueError):
            with contextlib.suppress(Exception):  # whatever it is then, it is not the config
                configs = datasets.get_dataset_config_names(path, **options)
        if reference.config and configs and reference.config not in configs:
            _complain_of_choice(reference, f"no config {reference.config!r}", configs)
        if not reference.config and len(configs) > 1:
            _complain_of_choice(reference, "a config is needed", configs)
        raise


def _cached_builder(reference: Reference) -> Any:
    """The dataset as ``datasets.load_dataset`` left it on this machine; nothing is asked of the hub."""
    from datasets.packaged_modules.cache.cache import Cache

    name = reference.name
    try:
        builder = Cache(
            repo_id=name,
            dataset_name=name.split("/")[-1],
            config_name=reference.config or None,
            version="auto",
            hash="auto",
        )
    except Exception as error:
        _refuse(
            name,
            f"no file here, the hub can't be reached, and the local cache has no such dataset: {one_line(error)}; "
            "give a file or folder, or fill the cache where there is a connection with datasets.load_dataset",
            error,
        )
    if reference.revision and builder.hash != reference.revision:
        _refuse(name, f"the hub can't be reached, and the local cache has revision {builder.hash} only")
    return builder


@contextlib.contextmanager
def _explaining(reference: Reference) -> Iterator[None]:
    """Turns what the library raises, whatever it is, into an `InputError` that says what to do."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        name = reference.name
        if isinstance(error, GatedRepoError) or "gated dataset" in str(error):
            raise _gated(reference) from error
        if isinstance(error, RuntimeError) and "scripts are no longer supported" in str(error):
            hint = "" if reference.local else f"; {_PARQUET_HINT.format(name=name)}"
            _refuse(name, f"it is a program, which is never run; allowed: data files{hint}", error)
        # Without a row, the library's reader of JSON stops so, the one of Parquet so.
        if isinstance(error, StopIteration) or "BatchSize must be greater than 0" in str(error):
            _refuse(name, "empty; a dataset with at least a few thousand tokens is needed", error)
        if isinstance(error, FileNotFoundError):
            suffixes = " ".join(_BUILDERS)
            _refuse(name, f"no data files there ({one_line(error)}); allowed: {suffixes}, also packed", error)
        _refuse(name, f"can't be read: {one_line(error)}", error)


def _gated(reference: Reference) -> InputError:
    return InputError(
        f"--text: {reference.name}: a gated dataset; accept its terms on its page of the hub, then hf auth login"
    )


def _choose_split(reference: Reference, splits: Sequence[str]) -> str:
    if reference.split:
        if reference.split not in splits:
            _complain_of_choice(reference, f"no split {reference.split!r}", splits)
        return reference.split
    usual = [split for split in _SPLITS if split in splits]
    if not usual and len(splits) != 1:
        _complain_of_choice(reference, "a split is needed", splits)
    return (usual or splits)[0]


def _choose_column(reference: Reference, types: Mapping[str, Any]) -> str:
    strings = [column for column, kind in types.items() if _is_string(kind)]
    if reference.column:
        if reference.column not in strings:
            kind = types.get(reference.column)
            what = f"holds {kind}, not strings" if kind is not None else "is not there"
            _complain_of_choice(reference, f"column {reference.column!r} {what}", strings)
        return reference.column
    if not strings:
        held = ", ".join(f"{column} ({kind})" for column, kind in types.items())
        _refuse(reference.name, f"no column holds strings; there are: {held}")
    if "text" not in strings and len(strings) > 1:
        _complain_of_choice(reference, "a column is needed", strings)
    return "text" if "text" in strings else strings[0]


def _read(reference: Reference, tables: Iterable[Any], column: str, characters: int) -> tuple[str, str]:
    """The column, chosen here if it is not yet, and its rows as one text; ``tables`` hold a row each."""
    pieces: list[str] = []
    length = 0
    with _explaining(reference):
        for table in tables:
            types = _types(table.schema)
            column = column or _choose_column(reference, types)
            kind = types.get(column)
            row = table.column(column)[0].as_py() if _is_string(kind) else None
            if row is None:
                held = "is null" if _is_string(kind) else f"holds {kind or 'nothing'}"
                _refuse(reference.name, f"column {column!r} {held} in row {len(pieces)}; allowed: strings")
            pieces.append(row if row.endswith("\n") else row + "\n")
            length += len(pieces[-1])
            if length >= characters:
                break
    return column, "".join(pieces)[:characters]


def _types(schema: Any) -> dict[str, Any]:
    """The Arrow types of columns by name."""
    return dict(zip(schema.names, schema.types, strict=True))


def _is_string(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))


def _describe(reference: Reference, builder: Any, split: str, column: str) -> str:
    name = reference.name if reference.local else f"{reference.name}@{builder.hash}"
    config = "" if os.path.isfile(expanded("--text", reference.name)) else f"config {builder.config.name}, "
    return f"{name} ({config}split {split}, column {column}; each row ends with a newline)"


def _complain_of_choice(reference: Reference, given: str, allowed: Sequence[str]) -> NoReturn:
    shown = ", ".join(allowed[:_LONGEST_LIST]) or "none"
    more = f" and {len(allowed) - _LONGEST_LIST} more" if len(allowed) > _LONGEST_LIST else ""
    _refuse(reference.name, f"{given}; allowed: {shown}{more}")


def _refuse(place: str, message: str, cause: BaseException | None = None) -> NoReturn:
    raise InputError(f"--text: {place}: {message}") from cause
