"""What a result was made with: versions, commit, machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

_PACKAGES = ("kvquant", "torch", "transformers", "bitsandbytes", "numpy")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide the numbers, and kvquant's `commit`."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found | {"commit": commit()}


def machine() -> dict[str, str | int | float | None]:
    """CPU name, cores this process may use, memory in GiB, torch threads and operating system."""
    return {
        "cpu": _cpu_name(),
        "cores": _cores(),
        "memory_gib": _memory_gib(),
        "torch_threads": torch.get_num_threads(),
        "os": platform.platform(),
    }


def commit() -> str | None:
    """The git commit of kvquant's checkout, with ``+`` if files differ from it; None outside one."""
    folder = Path(__file__).resolve().parent
    # A package installed inside somebody else's repository is not tracked there.
    if _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None:
        return None
    return revision + ("" if _git(folder, "diff-index", "--quiet", "HEAD") is not None else "+")


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int | None:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
