"""Budgets as people write them."""

from __future__ import annotations

from pydantic import ByteSize, TypeAdapter, ValidationError

from ..errors import StoreError, shown

_BYTES: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)


def parse_bytes(name: str, given: int | str | None) -> int:
    """Bytes of a budget: a whole number, or text such as ``"2GiB"``, ``"512 MB"``; None is 0. Raises `StoreError`."""
    if given is None:
        return 0
    try:
        if isinstance(given, bool) or not isinstance(given, int | str):
            raise ValueError
        found = int(_BYTES.validate_python(given))
        if not 0 <= found < 1 << 60:
            raise ValueError
    except (ValidationError, ValueError, OverflowError):
        raise StoreError(f'{name}: {shown(given)}; allowed: bytes as a whole number, or text such as "2GiB"') from None
    return found
