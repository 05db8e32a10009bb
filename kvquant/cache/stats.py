"""What a cache holds and has done, as plain data, and how it is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..exposition import Labels, Metric, by, exposition
from ..policy import ResolvedLayer
from .layer import Layer
from .rows import Row
from .shared import Recompressed


@dataclass(frozen=True)
class LayerStats:
    """One layer. Bytes are measured from what is allocated; values at model precision count 2 bytes each."""

    index: int
    kind: str
    key_codec: str | None  # None where the layer passes through
    value_codec: str | None
    block_bytes: int  # slots of sealed blocks, used or not
    raw_bytes: int  # tail and sinks

    @property
    def kv_bytes(self) -> int:
        """All bytes of the layer."""
        return self.block_bytes + self.raw_bytes


@dataclass(frozen=True)
class CacheStats:
    """A snapshot of a cache.

    ``kv_bytes`` are those of the compressed (full-attention) layers and ``kv_bytes_baseline`` what an
    uncompressed 16-bit cache of the same tokens takes there, padding excluded, whatever dtype the model runs in.
    ``row_bytes`` are what each row holds of ``kv_bytes``: its blocks, its tail with the room it has to grow, and its
    sinks. What rows share, as beams do, counts in full for each of them, and slots nobody uses for none: the sum may
    be more or less than ``kv_bytes``.
    ``other_bytes`` are those of layers that pass through (sliding windows, …). ``peak_kv_bytes`` adds the one
    layer that is decoded for attention at a time. ``fallbacks`` is how often a layer's keys, or values, were decoded
    though `kvquant.enable` is on, since the cache, or the one it copies, was built: at every step for the models that
    attend in no other way. With a store ``kv_bytes`` are
    those on the device, ``recompressed`` how many blocks of layers got the codecs of `PrecisionPolicy.cold`, and
    ``recompression_error`` what that cost them on average: the relative root mean square error.
    """

    layers: tuple[LayerStats, ...]
    tokens: tuple[int, ...]  # per row, padding excluded
    blocks: int  # sealed spans, over all rows
    kv_bytes: int
    kv_bytes_baseline: int
    other_bytes: int
    peak_kv_bytes: int
    encode_seconds: float
    decode_seconds: float
    fallbacks: int = 0
    recompressed: int = 0
    recompression_error: float = 0.0
    row_bytes: tuple[int, ...] = ()

    @property
    def kv_ratio(self) -> float:
        """``kv_bytes / kv_bytes_baseline``; 0 for an empty cache."""
        return self.kv_bytes / self.kv_bytes_baseline if self.kv_bytes_baseline else 0.0

    @property
    def bits_per_element(self) -> float:
        """Average bits that a key or value element takes, everything counted."""
        return 16 * self.kv_ratio

    def __str__(self) -> str:
        each = decoded = ""
        if len(self.row_bytes) > 1:
            least, most = (f"{pick(self.row_bytes) / 2**20:.2f}" for pick in (min, max))
            each = f", {least if least == most else f'{least} to {most}'} MiB a row"
        if self.fallbacks:
            decoded = f"; keys or values were decoded for attention {self.fallbacks} times"
        return (
            f"{sum(self.tokens)} tokens in {len(self.tokens)} rows, {self.blocks} sealed blocks: "
            f"{self.kv_bytes / 2**20:.2f} MiB of {self.kv_bytes_baseline / 2**20:.2f} MiB at 16 bits "
            f"({self.kv_ratio:.3f}, {self.bits_per_element:.2f} bits per element){each}{decoded}"
        )

    def prometheus(self, prefix: str = "kvquant_cache") -> str:
        """The snapshot in Prometheus' text format; ``examples/metrics.md`` tells the names."""
        by_layer: dict[Labels, float] = {
            (("layer", str(layer.index)), ("kind", layer.kind)): layer.kv_bytes for layer in self.layers
        }
        by_row = by("row", {str(index): nbytes for index, nbytes in enumerate(self.row_bytes)})
        return exposition(
            prefix,
            [
                Metric("tokens", "gauge", "Tokens held, over all rows, padding excluded.", sum(self.tokens)),
                Metric("rows", "gauge", "Sequences held.", len(self.tokens)),
                Metric("blocks", "gauge", "Sealed spans, over all rows.", self.blocks),
                Metric("bytes", "gauge", "Bytes on the device, by layer; 0 where it is not compressed.", by_layer),
                Metric("row_bytes", "gauge", "Bytes on the device, by row; shared ones in each.", by_row),
                Metric("baseline_bytes", "gauge", "Bytes of the same tokens at 16 bits.", self.kv_bytes_baseline),
                Metric("passed_through_bytes", "gauge", "Bytes of layers not compressed.", self.other_bytes),
                Metric("peak_bytes", "gauge", "Most bytes held, decoded layers included.", self.peak_kv_bytes),
                Metric("fallbacks_total", "counter", "Keys or values decoded for attention.", self.fallbacks),
                Metric("recompressed_total", "counter", "Blocks given the codecs for disk.", self.recompressed),
                Metric("recompression_error", "gauge", "What that cost, relative RMS.", self.recompression_error),
                Metric("encode_seconds_total", "counter", "Time spent encoding.", self.encode_seconds),
                Metric("decode_seconds_total", "counter", "Time spent decoding.", self.decode_seconds),
            ],
        )


def take_stats(
    resolved: Sequence[ResolvedLayer],
    layers: Sequence[Any],
    rows: Sequence[Row],
    peak: int,
    fallbacks: int,
    recompressed: Recompressed,
) -> CacheStats:
    """A snapshot of ``layers``: whose ``held`` is a `Layer` where compressed, else any cache layer."""
    taken, elements, other = [], 0, 0
    encode = decode = 0.0
    for told, layer in zip(resolved, layers, strict=True):
        if told.policy is None:
            other += _other_bytes(layer)
            taken.append(LayerStats(told.index, told.kind, None, None, 0, 0))
            continue
        held: Layer = layer.held
        key, value = (side.codec.name for side in held.sides)
        taken.append(LayerStats(told.index, told.kind, key, value, *held.nbytes()))
        elements += sum(side.token_elements for side in held.sides)
        encode += sum(side.encode_seconds for side in held.sides)
        decode += sum(side.decode_seconds for side in held.sides)
    tokens = tuple(row.length for row in rows)
    compressed = [layer.held for told, layer in zip(resolved, layers, strict=True) if told.policy is not None]
    return CacheStats(
        layers=tuple(taken),
        tokens=tokens,
        blocks=sum(len(row.slots) for row in rows),
        kv_bytes=sum(layer.kv_bytes for layer in taken),
        kv_bytes_baseline=2 * elements * sum(tokens),
        other_bytes=other,
        peak_kv_bytes=peak,
        encode_seconds=encode,
        decode_seconds=decode,
        fallbacks=fallbacks,
        recompressed=recompressed.blocks,
        recompression_error=recompressed.errors / max(1, recompressed.blocks),
        row_bytes=_row_bytes(compressed, rows),
    )


def _row_bytes(layers: Sequence[Layer], rows: Sequence[Row]) -> tuple[int, ...]:
    """What each row holds in all ``layers``; see `CacheStats`."""
    slots = list(dict.fromkeys(slot for row in rows for slot in row.slots))
    taken = [0] * len(rows)
    for layer in layers:
        blocks = layer.blocks.slot_nbytes(slots)
        for index, row in enumerate(rows):
            raw = sum(side.sinks[slot].numel() for side in layer.sides for slot in row.slots if slot in side.sinks)
            raw += sum(tail.room.numel() for side in layer.sides for tail in side.tails[index : index + 1])
            taken[index] += 2 * raw + sum(blocks[slot] for slot in row.slots)
    return tuple(taken)


def _other_bytes(layer: Any) -> int:
    """Bytes of the tensors of a layer that passes through, floats at 2 bytes each."""
    parts = layer.parts() if hasattr(layer, "parts") else [layer]
    found = [value for part in parts for value in vars(part).values()]
    tensors = [value for value in found if isinstance(value, Tensor) and value.dim() > 1]
    return sum(tensor.numel() * (2 if tensor.is_floating_point() else tensor.itemsize) for tensor in tensors)
