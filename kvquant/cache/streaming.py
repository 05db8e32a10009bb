"""What a compressed layer hands to attention in place of decoded keys and values, and the attention that reads it.

`HeldStates` look like the tensor of all columns. The attention registered by `kvquant.enable` takes them apart into
segments; anything else that is done with them decodes them, which is counted and warned of once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..attention.streamed import InPortions
from ..errors import KVQuantWarning
from ..kernels import Dense, Memo, Sealed, Segment, decoding_pays
from ..keybias import BiasScores, KeyBias
from .blocks import Side, Span
from .held import Held, decoded
from .layer import Layer
from .packing import PackedMask, Plain, solid_mask
from .rows import Call, RowCall
from .windows import WindowStates, attend_windows


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
        self, read: Iterable[Sequence[Sequence[Span]]], keys: Held, values: Held, queries: Sequence[Tensor]
    ) -> Iterator[list[list[Segment]]]:
        """What each row's new tokens attend to, in as many portions as their blocks are ``read``; tails come first.

        ``queries`` are those of each row, ``[query heads, new, dim]``.
        """
        rows = range(len(queries))
        for number, portion in enumerate(read):
            yield [self.of_row(row, portion[row], keys, values, queries[row], not number) for row in rows]

    def of_row(
        self, number: int, spans: Sequence[Span], keys: Held, values: Held, query: Tensor, tail: bool
    ) -> list[Segment]:
        """What new tokens of the call's row ``number`` attend to of its ``spans``, and of its tail where asked."""
        row = keys.call.rows[number]
        found = [segment for span in spans for segment in self._of(span)]
        if self.bias is not None:
            folded = query.reshape(keys.fresh.shape[1], -1, query.shape[2])
            found = [self._with_bias(segment, row, folded, keys.fresh) for segment in found]
        if tail:
            found.append(Dense(keys.tails[number], values.tails[number], causal=True))
        return found

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
        states: HeldStates = Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.fresh.dtype, device=held.fresh.device
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


def attend(
    plain: Plain, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **given: Any
) -> Any:
    """What transformers calls as a layer's attention: streamed where it can be, else ``plain`` on decoded states.

    Named as there, since some models give the mask by its name.
    """
    if isinstance(key, WindowStates) and isinstance(value, WindowStates):
        return attend_windows(plain, module, query, key, value, given), None
    if not (isinstance(key, HeldStates) and isinstance(value, HeldStates)):
        return plain.attend(module, query, key, value, solid_mask(attention_mask), **given)
    if why := _obstacle(query, key, value, attention_mask, given):
        return plain.attend(module, query, key.decode(why), value.decode(why), solid_mask(attention_mask), **given)
    segments, keys, values = key.segments, key.held, value.held
    if keys.call.packed:
        return attend_packed(plain, module, query, segments, keys, values, given), None
    if segments.bias and decoding_pays(query.shape[1] // key.shape[1] * query.shape[2]):
        # What biases add to the scores of so many queries takes more memory than keys do.
        return plain.attend(module, query, *decoded(keys, values), attention_mask, **given)
    several, read = segments.layer.blocks.read(keys.call)
    portions = segments.of(read, keys, values, [*query])
    output = InPortions(query, several, memo=segments.memo, **_how(segments, keys, values, given)).over(portions)
    return output.transpose(1, 2).contiguous(), None


def attend_packed(
    plain: Plain, module: Any, query: Tensor, segments: Segments, keys: Held, values: Held, given: dict[str, Any]
) -> Tensor:
    """The attention of a packed call, ``[1, tokens, query heads, dim]``: of rows with as many new tokens together.

    Rows that had nothing before are left to ``plain``, each by itself, and so are those with key biases and many
    queries, decoded. Nothing is as large as tokens by tokens.
    """
    rows = keys.call.rows
    several, read = segments.layer.blocks.read(keys.call)
    how = _how(segments, keys, values, given)
    queries = [row.of(query) for row in rows]
    folds = query.shape[1] // how["kv_heads"]
    groups: dict[int, list[int]] = {}
    alone: dict[int, list[Tensor]] = {}  # decoded keys and values of rows that are left to ``plain``
    for number, row in enumerate(rows):
        many = segments.bias is not None and decoding_pays(folds * row.fresh)
        if row.fresh > 1 and (many or not row.before):
            alone[number] = [side.room(number) if row.before else row.of(side.fresh) for side in (keys, values)]
        else:
            groups.setdefault(row.fresh, []).append(number)
    together = {}
    for new, members in groups.items():
        memo = segments.memo if new == 1 else None
        together[new] = InPortions(torch.stack([queries[number] for number in members]), several, **how, memo=memo)
    for index, portion in enumerate(read):
        for new, members in groups.items():
            together[new].add(
                [segments.of_row(each, portion[each], keys, values, queries[each], not index) for each in members]
            )
        for number, room in alone.items():
            for side, out in zip((keys, values), room, strict=True):
                side.decode(number, portion[number], out)
    output = query.new_empty(1, query.shape[2], query.shape[1], values.shape[3])
    for new, members in groups.items():
        for number, found in zip(members, together[new].result(), strict=True):
            output[0, rows[number].at : rows[number].at + new] = found.transpose(0, 1)
    for number, states in alone.items():
        row = rows[number]
        given_keys, given_values = (state[None] for state in states)
        mask = plain.mask(row.before, row.fresh, query)
        found, _ = plain.attend(module, queries[number][None], given_keys, given_values, mask, **given)
        output[:, row.at : row.at + row.fresh] = found
    return output


def _how(segments: Segments, keys: Held, values: Held, given: dict[str, Any]) -> dict[str, Any]:
    """What attention in portions is to know."""
    return {
        "kv_heads": keys.shape[1],
        "dim": values.shape[3],
        "scale": given.get("scaling"),
        "softcap": given.get("softcap") or 0.0,
        "sinks": given.get("s_aux"),
    }


def _obstacle(query: Tensor, key: HeldStates, value: HeldStates, mask: Any, given: dict[str, Any]) -> str:
    """Why a layer's attention can't be streamed, or nothing."""
    call = key.held.call
    learning = query, key.held.fresh, value.held.fresh, given.get("s_aux")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in learning):
        return "gradients are wanted"
    if given.get("dropout"):
        return "attention weights are dropped out"
    if given.get("position_bias") is not None:
        return "the model adds a bias by position to its scores"
    if key.segments.bias and not all(row.in_order for row in call.rows):
        return "key biases were removed at positions with gaps"
    usual = isinstance(mask, PackedMask) if call.packed else key.segments.watch.fits(mask, call)
    return "" if usual else "its mask is not the causal one of these rows"


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
