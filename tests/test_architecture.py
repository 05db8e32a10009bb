"""Dependencies go one way, importing does nothing, and the public names are the ones promised."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvquant

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvquant"

# Each part may import those before it, and itself.
LAYERS = [
    ["errors"],
    ["blocks", "exposition", "geometry", "keys", "selectors"],
    ["codecs", "keybias"],
    ["records"],
    ["policy", "arena", "kernels"],
    ["attention", "store"],
    ["cache"],
    ["compressor", "tuner"],
    ["integrations"],
    ["testing"],
    ["__init__"],
]
TRANSFORMERS_ALLOWED = {"geometry.py", "cache/hf.py", "cache/hf_layer.py", "cache/hooks.py"}


def imports(path: Path) -> set[str]:
    """Absolute names of everything a file imports, relative imports resolved."""
    package = ("kvquant", *path.relative_to(PACKAGE).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            found.add(".".join([*base, *([node.module] if node.module else [])]))
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_dependencies_go_one_way(path):
    order = {name: level for level, names in enumerate(LAYERS) for name in names}
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert part in order, f"{part} has no place in the architecture yet"
    for name in imports(path):
        if name.split(".")[0] == "kvquant_eval":
            pytest.fail(f"{path} imports the evaluation package")
        if name.startswith("kvquant."):
            other = name.split(".")[1]
            assert other == part or order[other] < order[part], f"{part} must not import {other}"


def test_only_these_files_know_transformers():
    knowing = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(name.split(".")[0] == "transformers" for name in imports(path))
    }
    assert knowing == TRANSFORMERS_ALLOWED


def test_files_stay_readable():
    long = {str(path): n for path in FILES if (n := len(path.read_text().splitlines())) > 400}
    assert not long


def test_importing_does_no_work_and_patches_nothing():
    code = (
        "import sys, kvquant; heavy = {'torch', 'transformers', 'bitsandbytes', 'pydantic'} & set(sys.modules);"
        "assert not heavy, heavy; assert 'KVQuantCache' in dir(kvquant)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    code = (
        "import transformers, transformers.cache_utils as c, torch;"
        "before = {n: id(v) for m in (c, torch, torch.nn.Module) for n, v in vars(m).items()};"
        "import kvquant; kvquant.KVQuantCache, kvquant.enable;"
        "after = {n: id(v) for m in (c, torch, torch.nn.Module) for n, v in vars(m).items()};"
        "changed = {n for n in before if before[n] != after.get(n)}; assert not changed, changed"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names():
    assert sorted(kvquant.__all__) == kvquant.__all__
    assert set(kvquant.__all__) == set(kvquant._HOME)
    for name in kvquant.__all__:
        assert getattr(kvquant, name).__name__ == name or name == "Codec"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        kvquant.nothing  # noqa: B018


def test_every_error_is_in_the_tree_the_docstring_draws():
    from kvquant import errors

    drawn = errors.__doc__
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert name in drawn
            assert issubclass(value, errors.KVQuantError | errors.KVQuantWarning)


def test_no_module_named_eval_is_installed():
    code = "import importlib.util as u, sys; sys.path.pop(0); sys.exit(u.find_spec('eval') is not None)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
