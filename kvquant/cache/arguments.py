"""Arguments of a decoder's forward: what they tell a cache, and what a cache has to add to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import CacheStateError
from .hf_window import set_apart
from .packing import PackedMask

if TYPE_CHECKING:
    from .hf import KVQuantCache


def repeats(cache: KVQuantCache, input_ids: Tensor, attention_mask: Any, position_ids: Any) -> bool:
    """Whether a call brings, at their own positions, just the tokens the cache holds, and one can be taken back.

    ``input_ids`` ``[rows, columns]``, padding included. Equal tokens that go on at the next position are new;
    where no positions are given, a mask that leaves no room for more tells.
    """
    rows, width = cache.rows.rows, cache.rows.width
    if not rows or input_ids.shape != (len(rows), width):
        return False
    if isinstance(position_ids, Tensor):
        if position_ids.dim() != 2:
            return False
        last = position_ids[:, -1].expand(len(rows)).tolist()
        at_home = all(end in (row.length - 1, width - 1) for end, row in zip(last, rows, strict=True))
    else:
        at_home = isinstance(attention_mask, Tensor) and attention_mask.shape == (len(rows), width)
    return (
        at_home
        and all(_can_crop(layer) for layer in cache.foreign())
        and all(
            row.ids and torch.equal(torch.cat(row.ids), given[row.start :].to(row.ids[0].device))
            for row, given in zip(rows, input_ids, strict=True)
        )
    )


def of_packed_call(
    cache: KVQuantCache, given: dict[str, Any], ids: Tensor | None, shaped: Any, streamed: bool, mask: torch.dtype
) -> dict[str, Tensor]:
    """What a packed call that was announced has beside what is ``given``: positions, and a mask of dtype ``mask``.

    ``shaped`` are its ids, or embeddings; ``ids`` are those that content keys are made of. Raises `CacheStateError`
    where it is not the call that was announced.
    """
    packing = cache.calls.packing
    assert packing is not None
    packing.check(shaped.shape[:2] if isinstance(shaped, Tensor) else ())
    shown, positions = given.get("attention_mask"), given.get("position_ids")
    all_shown = isinstance(shown, Tensor) and shown.shape == (1, packing.total) and bool((shown != 0).all())
    if shown is not None and not all_shown:
        raise CacheStateError("attention_mask: a packed call takes none; cu_seqlens and rows tell what sees what")
    set_apart(cache.layers, cache.calls)
    lengths = [row.length for row in cache.rows.rows]
    sizes = [(lengths[row] if row < len(lengths) else 0, stop - first) for row, first, stop in packing.segments]
    positions = cache.calls.complete(ids, positions, streamed)
    return {
        "position_ids": positions.to(shaped.device),
        "attention_mask": PackedMask(sizes, mask, shaped.device),
    }


def next_positions(cache: KVQuantCache, given: dict[str, Any], shaped: Any) -> dict[str, Tensor]:
    """The positions of a call that brings as many columns of each row, if rows were packed and the call has none.

    A model would count from the width of the batch then.
    """
    rows = cache.rows
    if not rows.packed or given.get("position_ids") is not None or not isinstance(shaped, Tensor):
        return {}
    if len(shaped) != len(rows.rows):
        return {}  # which is refused
    return {"position_ids": cache.calls.next_columns(shaped.shape[1]).to(shaped.device)}


def _can_crop(layer: Any) -> bool:
    """Whether a layer of transformers' own can forget a token: a full sliding window has dropped what came before."""
    window = getattr(layer, "sliding_window", None)
    full = window is not None and layer.get_seq_length() >= window and not layer.record_past
    return bool(layer.is_croppable) and not full
