"""`BlockCompressor`: one layer's keys and values, block by block, for a decode loop that keeps a history of its own.

    compressor = kvquant.BlockCompressor("int4")
    block = compressor.compress(k, v)                    # [heads, tokens, dim], at most block_tokens of them
    k, v = compressor.decompress(block)
    output = kvquant.streamed_attention(query, [[*compressor.segments([block]), kvquant.Dense(k, v, causal=True)]])

Blocks are sealed by what seals a `KVQuantCache`'s: bit for bit the same, but for key biases, which only a model tells
(`kvquant.keybias`). Nothing here knows transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from .arena import SlotPool
from .blocks import BlockKey, CompressedTensor, KVBlock
from .cache.blocks import Side, Span
from .cache.held import no_autocast
from .cache.layer import History, Layer
from .cache.resident import Resident
from .cache.rows import Row, RowCall, Rows
from .cache.streaming import segments_of
from .codecs import Codec
from .codecs.fit import DTYPES, described, misfit
from .errors import CodecError, FormatError, PolicyError, shown
from .geometry import COMPRESSED_KIND
from .kernels import Segment
from .policy import LayerPolicy, PrecisionPolicy

_ANY_ROW = RowCall(0, (), (), 0, 0, 0, (), 0)  # to decode asks for a row only where biases were removed


class BlockCompressor:
    """Turns keys and values of one layer into `KVBlock`s and back. Holds no tokens: it serves any number of sequences.

    Shapes: ``k`` is ``[heads, tokens, dim]`` and ``v`` ``[heads, tokens, value dim]``, of finite values in float32,
    bfloat16, float16 or float64 (whose codes are those of float32), in any strides, on any device. What is sealed is
    a copy; gradients end there. A block holds up to ``block_tokens`` tokens, and is as large if it holds fewer; the
    sequence's first ``sink_tokens`` are kept as they were beside their codes, where the codec is lossy.
    """

    def __init__(
        self,
        policy: LayerPolicy | Mapping[str, Any] | PrecisionPolicy | str | Path,
        *,
        block_tokens: int | None = None,
        sink_tokens: int | None = None,
    ) -> None:
        """For a layer's codecs, ``{"key": …, "value": …}``, or a policy (a preset, a file) that has the same for all.

        ``block_tokens`` and ``sink_tokens`` are the policy's unless given; of a layer's codecs alone 128 and 4. Raises
        `PolicyError`.
        """
        told = {"block_tokens": block_tokens, "sink_tokens": sink_tokens}
        settings = {name: given for name, given in told.items() if given is not None}
        if isinstance(policy, str | Path):
            policy = PrecisionPolicy.load(policy)
        if isinstance(policy, PrecisionPolicy):
            if policy.layers:
                raise PolicyError(
                    f"policy {shown(policy.name)} has other codecs in some layers; "
                    f"allowed: one that has not, or BlockCompressor.for_layers"
                )
            settings = {"block_tokens": policy.block_tokens, "sink_tokens": policy.sink_tokens} | settings
            policy = policy.default
        try:
            checked = PrecisionPolicy(name="layer", default=policy, **settings)
        except PolicyError as error:
            raise PolicyError(re.sub("^default", "policy", str(error))) from None
        self.policy = checked.default
        self.block_tokens, self.sink_tokens = checked.block_tokens, checked.sink_tokens

    @classmethod
    def for_layers(cls, policy: PrecisionPolicy | str | Path, layers: int) -> list[Self]:
        """One for each of a model's ``layers``. Raises `PolicyError`, `UnsupportedError` where there are none."""
        if not isinstance(policy, PrecisionPolicy):
            policy = PrecisionPolicy.load(policy)
        sizes = {"block_tokens": policy.block_tokens, "sink_tokens": policy.sink_tokens}
        resolved = policy.resolve([COMPRESSED_KIND] * layers).layers
        return [cls(layer.policy, **sizes) for layer in resolved if layer.policy is not None]

    def __repr__(self) -> str:
        names = f"key={self.policy.key.name!r}, value={self.policy.value.name!r}"
        return f"BlockCompressor({names}, block_tokens={self.block_tokens}, sink_tokens={self.sink_tokens})"

    def compress(self, k: Tensor, v: Tensor, start: int = 0) -> KVBlock:
        """Seal the tokens of one block, ``[heads, tokens, dim]``, that follow ``start`` others of their sequence.

        Blocks begin at multiples of ``block_tokens``: tokens may begin and end within one, but not reach into another.
        Raises `CodecError`.
        """
        self._check(k, v, start, "heads, tokens, dim")
        room = self.block_tokens - start % self.block_tokens
        if k.shape[1] > room:
            raise CodecError(
                f"k: {k.shape[1]} tokens from {start} on reach into another block of {self.block_tokens}; "
                f"allowed: up to {room}, or compress_rows"
            )
        ((block,),) = self.compress_rows(k[None], v[None], start)
        return block

    def compress_rows(self, k: Tensor, v: Tensor, start: int = 0) -> list[list[KVBlock]]:
        """Seal any number of tokens of several sequences, ``[rows, heads, tokens, dim]``, that follow ``start`` more.

        Gives the blocks of each row in order; the first and the last may hold fewer tokens than the others. Raises
        `CodecError`.
        """
        self._check(k, v, start, "rows, heads, tokens, dim")
        if (
            start > self.block_tokens
        ):  # which place in a block, and whether there is a first one: no more is asked of it
            start = self.block_tokens + start % self.block_tokens
        padding = -(start + k.shape[2]) % self.block_tokens
        pool = SlotPool()
        table = Rows(pool, self.block_tokens, recent_tokens=0)
        layer = Layer(*self._histories(pool), partial(Resident, pool))
        if start:  # as if what came before were in one span, which nobody reads
            table.rows += [Row(0, start, pool.allocate(1), [start], positions=[torch.arange(start)]) for _ in k]
            table.width = start
        with no_autocast(k.device), torch.no_grad():
            keys, values = (_lengthened(x, padding) for x in (k, v))
            layer.append(keys, values, table.advance([0] * len(k), keys.shape[2]))
            table.crop(padding)
            numbers = range(bool(start), len(table.rows[0].slots))
            return [[layer.block(table, row, number) for number in numbers] for row in table.rows]

    def decompress(self, *blocks: KVBlock) -> tuple[Tensor, Tensor]:
        """The keys and values of blocks, one after another, ``[heads, tokens, dim]``, in the dtype they were given in.

        Raises `CodecError` for blocks that this compressor, or one with its codecs and ``block_tokens``, did not make.
        """
        spans = self._spans(blocks)
        tokens, device = sum(span.stop for span in spans), _device(blocks[0])
        found = []
        with no_autocast(device), torch.no_grad():
            for which, history in enumerate(self._histories(SlotPool())):
                part = (blocks[0].key, blocks[0].value)[which]
                heads, _, dim = part.shape
                states = torch.empty(heads, tokens, dim, dtype=part.dtype, device=device)
                at = 0
                for span in spans:
                    history.decode(span, which, _ANY_ROW, states[:, at : at + span.stop])
                    at += span.stop
                found.append(states)
        return found[0], found[1]

    def segments(self, blocks: Sequence[KVBlock]) -> list[Segment]:
        """What `streamed_attention` reads of blocks, a copy of their codes: to be kept as long as these are the same.

        Raises `CodecError` as `decompress` does.
        """
        spans = self._spans(blocks)
        key, value = blocks[0].key, blocks[0].value
        dims, dtypes = (key.shape[2], value.shape[2]), (key.dtype, value.dtype)
        return [segment for span in spans for segment in segments_of(span, dims, dtypes, self.block_tokens)]

    def to_bytes(self, block: KVBlock, key: BlockKey | bytes) -> bytes:
        """A block as bytes that `from_bytes` takes under the same ``key`` only."""
        return block.to_bytes(_key_bytes(key))

    def from_bytes(
        self, data: bytes | memoryview, key: BlockKey | bytes, device: torch.device | str = "cpu"
    ) -> KVBlock:
        """The block that was stored under ``key``, on ``device``.

        Raises `FormatError` unless every byte is as it was written, and for blocks that `decompress` does not take.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise FormatError(f"block: {shown(data)}; allowed: bytes")
        block = KVBlock.from_bytes(data, _key_bytes(key))
        if misfit := self._misfit(block):
            raise FormatError(f"block: {misfit}")
        return KVBlock(_moved(block.key, device), _moved(block.value, device), block.first, block.tokens)

    def _histories(self, pool: SlotPool) -> tuple[History, History]:
        key, value = (
            History(codec, pool, self.block_tokens, self.sink_tokens) for codec in (self.policy.key, self.policy.value)
        )
        return key, value

    def _check(self, k: Tensor, v: Tensor, start: int, names: str) -> None:
        for name, x in (("k", k), ("v", v)):
            if not isinstance(x, Tensor) or x.dim() != len(names.split()) or x.dtype not in DTYPES or not x.numel():
                raise CodecError(f"{name}: {described(x)}; allowed: floats [{names}] of 16 to 64 bits, none of them 0")
        if k.shape[:-1] != v.shape[:-1] or k.device != v.device:
            raise CodecError(
                f"v: {described(v)}, but k: {described(k)}; allowed: another dim or dtype, all else equal"
            )
        if type(start) is not int or start < 0:
            raise CodecError(f"start: {shown(start)}; allowed: the number of tokens before these, from 0 on")

    def _spans(self, blocks: Sequence[KVBlock]) -> list[Span]:
        """Blocks as spans, each from token 0 on: whole blocks together, the others one by one."""
        if not blocks:
            raise CodecError("no blocks; allowed: one or more")
        runs: list[list[KVBlock]] = []
        for block in blocks:
            if misfit := self._misfit(block):
                raise CodecError(f"block: {misfit}")
            if _kind(block) != _kind(blocks[0]):
                raise CodecError("blocks of several shapes, dtypes or devices; allowed: those of one layer")
            goes_on = block.tokens == self.block_tokens and block.key.sinks is None and block.value.sinks is None
            if runs and goes_on and runs[-1][0].tokens == self.block_tokens:
                runs[-1].append(block)
            else:
                runs.append([block])
        spans = []
        for run in runs:
            keys = _side(self.policy.key, [block.key for block in run])
            values = _side(self.policy.value, [block.value for block in run])
            spans.append(Span(0, sum(block.tokens for block in run), run[0].first, (keys, values)))
        return spans

    def _misfit(self, block: object) -> str:
        """Why a block is none of this compressor's, or nothing."""
        if not isinstance(block, KVBlock):
            return f"{shown(block)}; allowed: a KVBlock"
        key, value = block.key, block.value
        if key.shape[:2] != value.shape[:2] or key.shape[1] != self.block_tokens:
            return f"keys {key.shape}, values {value.shape}; allowed: {self.block_tokens} tokens of as many heads each"
        if block.first < 0 or block.tokens < 1 or block.first + block.tokens > self.block_tokens:
            return f"{block.tokens} tokens from {block.first} on; allowed: up to {self.block_tokens} in all"
        if why := misfit(key, self.policy.key) or misfit(value, self.policy.value):
            return why
        raw = {part.sinks.shape[1] for part in (key, value) if part.sinks is not None}
        return "more keys than values kept raw, or fewer; allowed: as many of each" if len(raw) > 1 else ""


def _side(codec: Codec, parts: Sequence[CompressedTensor]) -> Side:
    """Parts of blocks that follow one another; sinks are the first one's."""
    with no_autocast(next(iter(parts[0].fields.values())).device):
        fields = {name: torch.stack([part.fields[name] for part in parts]) for name in parts[0].fields}
    return Side(codec, fields, parts[0].sinks)


def _kind(block: KVBlock) -> tuple[object, ...]:
    """What blocks of one layer have in common."""
    return block.key.shape, block.value.shape, block.key.dtype, block.value.dtype, _device(block)


def _device(block: KVBlock) -> torch.device:
    return next(iter(block.key.fields.values())).device


def _lengthened(x: Tensor, count: int) -> Tensor:
    """States ``[rows, heads, tokens, dim]`` and ``count`` more like the last, not to widen the range of codes."""
    return torch.cat((x, x[:, :, -1:].expand(-1, -1, count, -1)), dim=2) if count else x


def _moved(part: CompressedTensor, device: torch.device | str) -> CompressedTensor:
    fields = {name: field.to(device) for name, field in part.fields.items()}
    return replace(part, fields=fields, sinks=None if part.sinks is None else part.sinks.to(device))


def _key_bytes(key: BlockKey | bytes) -> bytes:
    if not isinstance(key, BlockKey | bytes):
        raise CodecError(f"key: {shown(key)}; allowed: bytes or a BlockKey")
    return key.to_bytes() if isinstance(key, BlockKey) else key
