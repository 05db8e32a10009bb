"""The serde ``kvquant`` of LMCache 0.5.6's server (multi-process mode), which encodes what an L2 adapter stores.

LMCache loads a class for an adapter of type ``plugin`` but none for a serde, so `KVQuantAdapter` registers it and then
is the adapter that its parameters describe; see `lmcache`, where all of it is found. An adapter's files are not named
by policy: give each policy a folder, or what another has left there fails to load until it is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..errors import CodecError, KVQuantError, StoreError, UnsupportedError, shown
from ..policy import PrecisionPolicy
from .chunks import DTYPES, ChunkCodec, ChunkShape
from .settings import CodecSettings, require

SERVED = ("0.5.6",)
CLASSES = ("KVQuantAdapter", "KVQuantDeserializer", "KVQuantSerializer")
_LAYOUTS = {  # of LMCache's memory formats: what their dimensions are, before the last, which is heads × channels
    "KV_2LTD": ("side", "layer", "token"),
    "KV_2TD": ("side", "token"),
    "KV_T2D": ("token", "side"),
}


def sides(tensor: Tensor, layout: str, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a chunk of LMCache's, views ``[layers, heads, tokens, dim]``. Raises `UnsupportedError`."""
    places = _LAYOUTS.get(layout)
    if places is None or tensor.dim() != 3 + (layout == "KV_2LTD") or tensor.shape[places.index("side")] != 2:
        raise UnsupportedError(f"chunk {layout} {tuple(tensor.shape)}; allowed: both sides in {', '.join(_LAYOUTS)}")
    if tensor.shape[-1] != heads * dim or tensor.dtype not in DTYPES:
        raise UnsupportedError(
            f"chunk {tensor.dtype} of width {tensor.shape[-1]}; allowed: {heads} heads × {dim} channels, "
            f"{', '.join(map(str, DTYPES))}"
        )
    whole = tensor.view(*tensor.shape[:-1], heads, dim)
    if "layer" not in places:
        whole, places = whole.unsqueeze(0), ("layer", *places)
    side, layer, token = (places.index(name) for name in ("side", "layer", "token"))
    keys, values = whole.permute(side, layer, 3, token, 4)
    return keys, values


def only_tensor(obj: Any) -> Tensor:
    """The tensor of a memory object that has one. Raises `UnsupportedError`."""
    if len(shapes := obj.get_shapes()) != 1:
        raise UnsupportedError(f"{len(shapes)} groups of layers in a chunk; allowed: one, all layers alike")
    tensor: Tensor | None = obj.tensor
    if tensor is None:
        raise UnsupportedError("a chunk that is no tensor; allowed: those in the CPU's memory")
    return tensor


@dataclass(frozen=True)
class SerdeSettings(CodecSettings):
    """Of the serde: LMCache does not tell it the channels of a head, ``head_dim``; ``workers`` are its threads."""

    head_dim: int = 0
    workers: int = 1


class Serde:
    """Both directions. A key is part of every checksum, so that another chunk's bytes read as damage."""

    def __init__(self, policy: PrecisionPolicy, head_dim: int) -> None:
        self.policy, self.head_dim = policy, head_dim
        self._codecs: dict[int, ChunkCodec] = {}

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Bytes of a chunk encoded, exactly: some of LMCache's adapters read a file of no other size.

        Those it has as it is where it can't be encoded, as `serialize` will say.
        """
        shapes, dtypes = layout_desc.shapes, layout_desc.dtypes
        if len(shapes) == 1:
            with suppress(KVQuantError, IndexError):
                return self._size(torch.empty(shapes[0], dtype=dtypes[0], device="meta"))
        return sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Encode a chunk into ``dst``; how many bytes it took. Raises `KVQuantError`: LMCache then stores nothing."""
        tensor = only_tensor(src)
        if key.object_group_id and self.policy.layers:
            raise UnsupportedError(
                f"object group {key.object_group_id} with policy {shown(self.policy.name)}; "
                f"allowed: a policy with the same codecs in all layers"
            )
        data = self._codec(tensor.shape).encode(*self._sides(tensor), self._name(key))
        if len(data) > self._size(tensor):
            raise CodecError(
                "values beyond float16's range; allowed: up to 65504, rotated, since a chunk's size is fixed"
            )
        _bytes_of(dst)[: len(data)].copy_(data)
        return len(data)

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """Decode into ``dst``. Raises `FormatError` unless intact: LMCache then has the tokens computed anew."""
        tensor = only_tensor(dst)
        self._codec(tensor.shape).decode(_bytes_of(src), self._name(key), *self._sides(tensor))

    def _size(self, tensor: Tensor) -> int:
        return self._codec(tensor.shape).size(ChunkShape.of(*self._sides(tensor)))

    def _sides(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        return sides(tensor, "KV_2LTD", tensor.shape[-1] // self.head_dim, self.head_dim)

    def _codec(self, shape: Sequence[int]) -> ChunkCodec:
        layers = shape[1]
        if layers not in self._codecs:
            self._codecs[layers] = ChunkCodec(self.policy, layers)
        return self._codecs[layers]

    def _name(self, key: Any) -> bytes:
        parts = (key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, self.policy.fingerprint())
        return bytes(key.chunk_hash) + repr(parts).encode()


def register() -> None:
    """Make the serde ``kvquant`` known to LMCache; calling it again is harmless."""
    require("lmcache", *SERVED)
    from lmcache.v1.distributed.serde import get_registered_serde_types, register_serde_factory

    if "kvquant" not in get_registered_serde_types():
        register_serde_factory("kvquant", create_serde)


def create_serde(options: Mapping[str, Any]) -> Any:
    """LMCache's processor of the serde, of the options in its configuration. Raises `KVQuantError`."""
    require("lmcache", *SERVED)
    from lmcache.v1.distributed.serde import AsyncSerdeProcessor

    settings = SerdeSettings.read(options, "serde.")
    if settings.head_dim < 1 or settings.workers < 1:
        raise StoreError(
            f"serde.head_dim: {settings.head_dim}, serde.workers: {settings.workers}; allowed: 1 or more; "
            f"head_dim, the channels of a head, must be given"
        )
    given = settings.load_policy("serde."), settings.head_dim
    both = (made(name)(*given) for name in ("KVQuantSerializer", "KVQuantDeserializer"))
    return AsyncSerdeProcessor(*both, max_workers=settings.workers)


def create_adapter(cls: type, params: Mapping[str, Any], l1_memory_desc: Any = None) -> Any:
    """The L2 adapter that ``params`` describe, once the serde is registered."""
    register()
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
    from lmcache.v1.distributed.l2_adapters.factory import ensure_adapter_loaded

    if not isinstance(params.get("type"), str):
        raise StoreError(f"adapter_params.type: {shown(params.get('type'))}; allowed: the type of an L2 adapter")
    ensure_adapter_loaded(params["type"])
    return create_l2_adapter(get_l2_adapter_config_class(params["type"]).from_dict(dict(params)), l1_memory_desc)


def _bytes_of(obj: Any) -> Tensor:
    return only_tensor(obj).flatten().view(torch.uint8)


@cache
def made(name: str) -> Any:
    """One of ``CLASSES``, over LMCache's base. Raises `UnsupportedError` for other releases."""
    require("lmcache", *SERVED)
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.distributed.serde import Deserializer, Serializer

    body: dict[str, Any] = {"__module__": __name__, "__doc__": Serde.__doc__}
    if name == "KVQuantAdapter":
        body = {"__module__": __name__, "__doc__": create_adapter.__doc__, "__new__": create_adapter}
        return type(L2AdapterInterface)(name, (L2AdapterInterface,), body)
    base = {"KVQuantSerializer": Serializer, "KVQuantDeserializer": Deserializer}[name]
    return type(base)(name, (Serde, base), body)
