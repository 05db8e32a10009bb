"""What a user may set in an engine's configuration, and which releases of the engine are served."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch

from ..codecs import Codec
from ..errors import KVQuantError, PolicyError, StoreError, UnsupportedError, shown
from ..policy import LayerPolicy, PrecisionPolicy
from ..store.sizes import parse_bytes
from ..store.tiered import TieredStore

_KINDS: dict[str, tuple[type, ...]] = {
    "policy": (str, Mapping),
    "head_dim": (int,),
    "workers": (int,),
    "host_budget": (int, str),
    "disk_budget": (int, str),
}  # all others are text
_WORDS = {str: "text", int: "a whole number", Mapping: "a mapping"}


def require(package: str, *served: str) -> None:
    """Raises `UnsupportedError` unless one of these releases of ``package`` is installed."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = "is not installed"
    if found.split("+")[0] not in served:
        raise UnsupportedError(f"{package} {found}; kvquant works with {package} {', '.join(served)}")


@dataclass(frozen=True)
class CodecSettings:
    """How chunks are encoded: ``policy`` is a preset's name, a file's path, or a mapping of a policy's settings."""

    policy: str | Mapping[str, Any] = "int4"

    @classmethod
    def read(cls, given: Mapping[str, Any], place: str = "") -> Self:
        """Of what a user wrote, whose names begin with ``place``. Raises `StoreError` for what is not allowed."""
        allowed = {field.name: field.default is MISSING for field in fields(cls)}
        for name, value in given.items():
            if name not in allowed:
                raise StoreError(f"{place}{name}: unknown option; allowed: {', '.join(allowed)}")
            kinds = _KINDS.get(name, (str,))
            if isinstance(value, bool) or not isinstance(value, kinds):
                words = " or ".join(_WORDS[kind] for kind in kinds)
                raise StoreError(f"{place}{name}: {shown(value)}; allowed: {words}")
        for name, needed in allowed.items():
            if needed and name not in given:
                raise StoreError(f"{place}{name}: missing; allowed: {', '.join(allowed)}")
        return cls(**given)

    def load_policy(self, place: str = "") -> PrecisionPolicy:
        """The policy. Raises `PolicyError`, and `UnsupportedError` for codecs that cannot be used here."""
        try:
            policy = (
                PrecisionPolicy.load(self.policy) if isinstance(self.policy, str) else PrecisionPolicy(**self.policy)
            )
        except (PolicyError, TypeError) as error:
            raise PolicyError(f"{place}policy: {error}") from error
        for codec in {side: None for codecs in _all_codecs(policy) for side in (codecs.key, codecs.value)}:
            _try(codec, policy.block_tokens, f"{place}policy: {shown(policy.name)}")
        return policy


@dataclass(frozen=True)
class StoreSettings(CodecSettings):
    """And where they lie; ``tenant`` and ``revision`` (of the model: weights, adapter) keep equal tokens apart."""

    host_budget: int | str | None = None
    disk_budget: int | str | None = None
    disk_path: str | None = None
    tenant: str = ""
    revision: str = ""

    def open_store(self, *folders: str, place: str = "") -> TieredStore:
        """A store within these budgets, whose disk lies in ``disk_path`` / ``folders``. Raises `StoreError`.

        In ``disk_path`` a leading ``~`` is the user's home.
        """
        given = {"host_budget": self.host_budget, "disk_budget": self.disk_budget}
        try:
            host, disk = (parse_bytes(name, value) for name, value in given.items())
            path = None if self.disk_path is None else _expanded(self.disk_path).joinpath(*folders)
        except StoreError as error:
            raise StoreError(f"{place}{error}") from error
        whole = f"{place.removesuffix('.')}: " if place else ""
        if not host and not disk:
            raise StoreError(f"{whole}no tier: give host_budget, or disk_budget and disk_path")
        if (path is None) != (not disk):
            raise StoreError(f"{whole}disk_budget and disk_path go together: give both, or neither")
        try:
            return TieredStore(None, host, disk, path, device="cpu")
        except KVQuantError as error:
            named = str(error).startswith(tuple(given))
            raise StoreError(f"{place}{error}" if named else f"{place}disk_path: {error}") from error


def _all_codecs(policy: PrecisionPolicy) -> list[LayerPolicy]:
    return [policy.default, *(codecs for _, codecs in policy.layers)]


def _try(codec: Codec, tokens: int, place: str) -> None:
    """Raises `UnsupportedError` for a codec that fails at zeros: a library that it needs is missing, say."""
    try:
        codec.encode(torch.zeros(1, 1, tokens, 128))
    except KVQuantError:
        pass  # it may take others: that depends on the model's shape
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedError(f"{place}: {codec.name}: {why}; allowed: codecs that can be used here") from error


def _expanded(path: str) -> Path:
    if not path.strip():
        raise StoreError(f"disk_path: {path!r}; allowed: a folder")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # nobody's home
        raise StoreError(f"disk_path: {shown(path)}: {error}; allowed: a folder") from error
