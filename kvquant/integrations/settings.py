"""What a user may set in an engine's configuration, and which releases of the engine are served."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self

from ..errors import KVQuantError, PolicyError, StoreError, UnsupportedError, shown
from ..policy import PrecisionPolicy
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
        """The policy. Raises `PolicyError`."""
        try:
            if isinstance(self.policy, str):
                return PrecisionPolicy.load(self.policy)
            return PrecisionPolicy(**self.policy)
        except (PolicyError, TypeError) as error:
            raise PolicyError(f"{place}policy: {error}") from error


@dataclass(frozen=True)
class StoreSettings(CodecSettings):
    """And where they lie; ``tenant`` and ``revision`` (of the model: weights, adapter) keep equal tokens apart."""

    host_budget: int | str | None = None
    disk_budget: int | str | None = None
    disk_path: str | None = None
    tenant: str = ""
    revision: str = ""

    def open_store(self, *folders: str, place: str = "") -> TieredStore:
        """A store within these budgets, whose disk lies in ``disk_path`` / ``folders``. Raises `StoreError`."""
        path = None if self.disk_path is None else "/".join((self.disk_path, *folders))
        try:
            return TieredStore(
                host_budget=self.host_budget, disk_budget=self.disk_budget, disk_path=path, device="cpu"
            )
        except KVQuantError as error:
            raise StoreError(f"{place}{error}") from error
