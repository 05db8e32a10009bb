"""What a compressed layer hands to attention in place of decoded keys and values, and the attention that reads it.

`HeldStates` look like the tensor of all columns. The attention registered by `kvquant.enable` takes them apart into
segments; anything else that is done with them decodes them, which is counted and warned of once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..attention.streamed import attend_in_portions
from ..errors import KVQuantWarning
from ..kernels import Dense, Memo, Sealed, Segment, decoding_pays
from ..keybias import BiasScores, KeyBias
from .blocks import Side, Span
from .layer import Held, Layer, decoded
from .rows import Call, RowCall

Attention = Callable[..., tuple[Tensor, Tensor | None]]


class Segments:
    """What attention reads of a layer: the segments of its spans, which are made once a span."""

    def __init__(self, layer: Layer, watch: Watch) -> None:
        self.layer = layer
        self.watch = watch
        offset = layer.key.offset
        self.bias = BiasScores(offset, layer.key.block_tokens) if isinstance(offset, KeyBias) else None
        self.memo = Memo()

    def clear(self) -> None:
        """Let go of all blocks."""
        self.memo = Memo()

    def of(
        self, read: Iterable[Sequence[Sequence[Span]]], keys: Held, values: Held, query: Tensor
    ) -> Iterator[list[list[Segment]]]:
        """What each row's new tokens attend to, in as many portions as their blocks are ``read``; tails come first.

        ``query`` is ``[rows, query heads, new, dim]``.
        """
        tails = [[Dense(*pair, causal=True)] for pair in zip(keys.tails, values.tails, strict=True)]
        for portion in read:
            found = []
            for index, (spans, row, tail) in enumerate(zip(portion, keys.call.rows, tails, strict=True)):
                blocks = [segment for span in spans for segment in self._of(span)]
                if self.bias is not None:
                    folded = query[index].reshape(keys.fresh.shape[1], -1, query.shape[3])
                    blocks = [self._with_bias(segment, row, folded, keys.fresh) for segment in blocks]
                found.append([*blocks, *tail])
            yield found
            tails = [[] for _ in tails]

    def _with_bias(self, segment: Segment, row: RowCall, query: Tensor, like: Tensor) -> Segment:
        if isinstance(segment, Dense) or self.bias is None or segment.key.lossless:
            return segment
        count = len(next(iter(segment.keys.values())))
        starts = row.positions[segment.start :: segment.block_tokens][:count]
        return replace(segment, extra=self.bias(query, starts, like))

    def _of(self, span: Span) -> list[Segment]:
        if "segments" not in span.memo:
            key, value = self.layer.sides
            dtypes = key.tails[0].tokens.dtype, value.tails[0].tokens.dtype
            span.memo["segments"] = segments_of(span, (key.dim, value.dim), dtypes, key.block_tokens)
        found: list[Segment] = span.memo["segments"]
        return found


def segments_of(
    span: Span, dims: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], block_tokens: int
) -> list[Segment]:
    """What attention reads of a span: first tokens that were kept raw, and blocks.

    ``dims`` and ``dtypes`` are those of its keys and values.
    """
    key, value = span.sides
    found: list[Segment] = []
    most = max(0 if side.raw is None else side.raw.shape[1] for side in span.sides)
    raw = min(most, span.stop - span.first)
    if raw:
        keys, values = (
            _first_tokens(side, dim, dtype, span.offset, raw)
            for side, dim, dtype in zip(span.sides, dims, dtypes, strict=True)
        )
        found.append(Dense(keys, values))
    begin, stop = span.offset + raw, span.offset + span.stop - span.first
    if begin < stop:
        start = span.first - span.offset
        found.append(Sealed(key.codec, value.codec, key.fields, value.fields, dims, block_tokens, begin, stop, start))
    return found


def _first_tokens(side: Side, dim: int, dtype: torch.dtype, offset: int, count: int) -> Tensor:
    """The first tokens of a span as they were: ``[heads, count, dim]``."""
    if side.raw is not None:
        return side.raw[:, :count]
    first = {name: field[:1] for name, field in side.fields.items()}  # of a codec that is lossless
    blocks = side.codec.decode(first, dim, dtype)
    return blocks[0, :, offset : offset + count]


class HeldStates(Tensor):
    """All columns of a layer's keys, or values, as a tensor that is not there."""

    held: Held
    segments: Segments

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Held, segments: Segments) -> HeldStates:  # noqa: D102  # a tensor has no __init__
        rows, heads, new, dim = held.fresh.shape
        shape = rows, heads, held.call.past + new, dim
        states: HeldStates = Tensor._make_wrapper_subclass(
            cls, shape, dtype=held.fresh.dtype, device=held.fresh.device
        )
        states.held, states.segments = held, segments
        return states

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def decoded(x: Any) -> Any:
            return x.decode(f"{func} was called") if isinstance(x, HeldStates) else x

        return func(*tree_map(decoded, args), **tree_map(decoded, kwargs or {}))

    def decode(self, why: str) -> Tensor:
        """All columns, which is counted; see `Watch.decoded`."""
        self.segments.watch.decoded(why)
        return decoded(self.held)[0]


def attend(plain: Attention, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
    """What transformers calls as a layer's attention: streamed where it can be, else ``plain`` on decoded states."""
    if not (isinstance(key, HeldStates) and isinstance(value, HeldStates)):
        return plain(module, query, key, value, mask, **given)
    if why := _obstacle(query, key, value, mask, given):
        return plain(module, query, key.decode(why), value.decode(why), mask, **given)
    segments = key.segments
    if segments.bias and decoding_pays(query.shape[1] // key.shape[1] * query.shape[2]):
        # What biases add to the scores of so many queries takes more memory than keys do.
        return plain(module, query, *decoded(key.held, value.held), mask, **given)
    several, read = segments.layer.blocks.read(key.held.call)
    output = attend_in_portions(
        query,
        segments.of(read, key.held, value.held, query),
        several,
        key.shape[1],
        value.shape[-1],
        scale=given.get("scaling"),
        softcap=given.get("softcap") or 0.0,
        sinks=given.get("s_aux"),
        memo=segments.memo,
    )
    return output.transpose(1, 2).contiguous(), None


def _obstacle(query: Tensor, key: HeldStates, value: HeldStates, mask: Any, given: dict[str, Any]) -> str:
    """Why a layer's attention can't be streamed, or nothing."""
    call = key.held.call
    learning = query, key.held.fresh, value.held.fresh, given.get("s_aux")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in learning):
        return "gradients are wanted"
    if given.get("dropout"):
        return "attention weights are dropped out"
    if given.get("output_attentions"):
        return "attention weights are wanted (output_attentions)"
    if given.get("position_bias") is not None:
        return "the model adds a bias by position to its scores"
    if key.segments.bias and not all(row.in_order for row in call.rows):
        return "key biases were removed at positions with gaps"
    return "" if key.segments.watch.fits(mask, call) else "its mask is not the causal one of these rows"


class Watch:
    """What a cache's layers share: whether a pass's mask is the usual one, and how often something was decoded."""

    def __init__(self) -> None:
        self.fallbacks = 0
        self._seen: tuple[Any, Any, bool] = (lambda: None, None, False)

    def fork(self) -> Watch:
        """One that goes on from here, for a copy of the cache."""
        twin = Watch()
        twin.fallbacks = self.fallbacks
        return twin

    def decoded(self, why: str) -> None:
        """Count that a layer's keys or values had to be decoded; the first time is told as a warning."""
        self.fallbacks += 1
        if self.fallbacks == 1:
            warnings.warn(
                f"attention over decoded keys and values, which is slower: {why}", KVQuantWarning, stacklevel=2
            )

    def fits(self, mask: Any, call: Call) -> bool:
        """See `shows_all`."""
        if mask is None:
            return shows_all(mask, call)
        seen, known, answer = self._seen
        if seen() is not mask or known is not call:
            answer = shows_all(mask, call)
            self._seen = weakref.ref(mask), call, answer  # a mask takes as much memory as a layer
        return answer


_CHECKED = 1 << 20  # of a mask's numbers that are looked at at once: bounds what that takes beside the mask


def visible(call: Call, device: torch.device, first: int = 0, stop: int | None = None) -> Tensor:
    """What new columns ``first ≤ c < stop`` of a call see, ``[rows, 1, new, columns]``: tokens up to their own."""
    columns = torch.arange(call.past + call.new, device=device)
    starts = torch.tensor([row.start for row in call.rows], device=device)
    own = columns[call.past :][first:stop]
    return (columns >= starts[:, None, None, None]) & (columns <= own[:, None])


def shows_all(mask: Any, call: Call) -> bool:
    """Whether a mask, bool or to be added, is `visible`; of columns that are padding any will do."""
    if mask is None:
        return call.new == 1 and not any(row.start for row in call.rows)
    columns, rows = call.past + call.new, len(call.rows)
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[2:] != (call.new, columns):
        return False
    if mask.shape[0] not in (1, rows) or mask.shape[1] != 1:
        return False
    if call.new == 1 and mask.shape[0] == rows and mask.dtype == torch.bool:  # at every step: takes no memory
        each = zip(call.rows, mask[:, 0, 0], strict=True)
        return all(bool(shown[row.start :].all()) and not bool(shown[: row.start].any()) for row, shown in each)
    padding = torch.tensor([call.new - row.fresh for row in call.rows], device=mask.device)[:, None, None, None]
    step = max(1, _CHECKED // (rows * columns))
    for first in range(0, call.new, step):
        part = mask[:, :, first : first + step]
        shown = part if part.dtype == torch.bool else part == 0
        if shown is not part and not bool((shown | (part <= -1e4)).all()):
            return False
        as_usual = shown == visible(call, mask.device, first, first + step)
        own = torch.arange(first, first + part.shape[2], device=mask.device)[:, None]
        if not bool((as_usual | (own < padding)).all()):
            return False
    return True
