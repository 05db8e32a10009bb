"""Reading the options codecs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CodecError, shown

AXES = ("channel", "token")
ROTATIONS = ("none", "hadamard")
KNOWN = ("axis", "group", "rotate")


def read_axis_and_rotation(codec: str, options: Mapping[str, Any], role: str) -> tuple[Any, Any]:
    """``axis`` (by default: keys per channel, values per token) and ``rotate``; refuses options nobody knows."""
    for option in options:
        if option not in KNOWN:
            raise CodecError(f"{option}: unknown option of {codec}; allowed: {', '.join(KNOWN)}")
    axis = options.get("axis", "channel" if role == "key" else "token")
    rotate = options.get("rotate", "none")
    if axis not in AXES:
        raise CodecError(f"axis: {shown(axis)}; allowed: {', '.join(AXES)}")
    if rotate not in ROTATIONS:
        raise CodecError(f"rotate: {shown(rotate)}; allowed: {', '.join(ROTATIONS)}")
    return axis, rotate
