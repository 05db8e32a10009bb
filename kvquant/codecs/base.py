"""The `Codec` protocol and the registry that turns a policy's words into a codec."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import CodecError, shown

FP16_MAX = 65504.0

Fields = dict[str, Tensor]
"""What a codec stores of n blocks: named tensors whose first dimension is the block."""

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape (without the block dimension) and dtype of each field of one block."""


@runtime_checkable
class Codec(Protocol):
    """Turns blocks of keys or values into codes and back. Immutable and stateless.

    Shapes: a batch of blocks is ``[n, heads, tokens, dim]``; fields carry the same leading ``n``.
    """

    @property
    def name(self) -> str:
        """Canonical text, e.g. ``int4/channel/g64/none``; ``get_codec(name)`` gives the codec back."""

    @property
    def lossless(self) -> bool:
        """Whether decoding returns the input bit for bit."""

    def layout(self, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Layout:
        """Fields of one block. A field may come back from `encode` in a wider dtype (see there)."""

    def encode(self, blocks: Tensor) -> Fields:
        """Encode ``[n, heads, tokens, dim]`` of any float dtype.

        A block's codes depend on that block alone, bit for bit. Fields follow `layout`, except that float16
        parameters come as float32 where float16 would overflow.
        """

    def decode(self, fields: Fields, dim: int, dtype: torch.dtype) -> Tensor:
        """Decode fields of n blocks to ``[n, heads, tokens, dim]`` of ``dtype``.

        Fields may be views, in which the blocks lie apart in memory.
        """


Factory = Callable[[Mapping[str, Any], str, int], Codec]
"""Builds a codec from its options, its role (``"key"`` or ``"value"``) and the tokens of a block."""

_REGISTRY: dict[str, Factory] = {}


def register_codec(name: str, factory: Factory) -> None:
    """Make ``name`` usable in policies.

    ``factory(options, role, block_tokens)`` raises `CodecError` on an option it does not know.
    """
    if name in _REGISTRY:
        raise CodecError(f"codec {shown(name)} is registered already")
    _REGISTRY[name] = factory


def unregister_codec(name: str) -> None:
    """Forget a codec registered with `register_codec`."""
    _REGISTRY.pop(name, None)


def codec_names() -> list[str]:
    """The names a policy may use."""
    return list(_REGISTRY)


def get_codec(spec: str | Mapping[str, Any], role: str = "key", block_tokens: int = 128) -> Codec:
    """The codec a policy names.

    ``spec`` is a name (``"int4"``), a canonical name (``"int4/channel/g64/hadamard"``) or a mapping
    ``{"codec": "int4", "axis": "token", …}``. ``role`` picks the default axis: keys per channel, values per token.

    Raises `CodecError` naming the option, what was given and what is allowed.
    """
    if role not in ("key", "value"):
        raise CodecError(f"role: {shown(role)}; allowed: 'key', 'value'")
    if isinstance(spec, str):
        spec = _from_name(spec)
    elif not isinstance(spec, Mapping):
        raise CodecError(f"codec: {shown(spec)} is not a codec; allowed: {', '.join(_REGISTRY)}, or a mapping")
    if type(block_tokens) is not int or block_tokens < 1:
        raise CodecError(f"block_tokens: {shown(block_tokens)}; allowed: a positive integer")
    options = dict(spec)
    name = options.pop("codec", None)
    if not isinstance(name, str) or name not in _REGISTRY:
        raise CodecError(f"codec: {shown(name)} is not a codec; allowed: {', '.join(_REGISTRY)}")
    return _REGISTRY[name](options, role, block_tokens)


def _from_name(name: str) -> dict[str, Any]:
    codec, *rest = name.split("/")
    options: dict[str, Any] = {"codec": codec}
    if len(rest) == 3 and (match := re.fullmatch("g([0-9]{1,9})", rest[1])):
        options |= {"axis": rest[0], "group": int(match[1]), "rotate": rest[2]}
    elif rest:
        options["codec"] = name  # not a canonical name: refused as a whole
    return options


def to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Decoded float32 values, which may be changed, in ``dtype``.

    Float16 would be infinite half a step beyond its largest value.
    """
    if dtype == torch.float16:
        x = x.clamp_(-FP16_MAX, FP16_MAX)
    return x.to(dtype)
