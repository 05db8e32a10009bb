"""What `pyproject.toml` lists by name is all there is."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def names(paths):
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def test_every_file_of_the_library():
    (extension,) = SETUPTOOLS["ext-modules"]
    assert sorted(extension["sources"] + extension["depends"]) == names((ROOT / "kvquant/kernels/csrc").iterdir())
    assert {Path(name).suffix for name in extension["sources"]} == {".cpp"}


def test_every_package():
    def folder(package):
        for name, place in SETUPTOOLS["package-dir"].items():
            if f"{package}.".startswith(f"{name}."):
                package = place + package.removeprefix(name)
        return package.replace(".", "/")

    found = [file.parent for top in ("kvquant", "eval", "configs") for file in (ROOT / top).rglob("__init__.py")]
    assert sorted(map(folder, SETUPTOOLS["packages"])) == names(found)
