"""`PageLayout`: ways of keeping keys and values are learned, or refused; what is written is read, nothing beside."""

from __future__ import annotations

import pytest
import torch

from kvquant import UnsupportedError
from kvquant.integrations.pages import PageLayout

HEADS, TOKENS, DIM = 2, 32, 48
COUNT = HEADS * TOKENS * DIM


def by_head(keys, values, page):
    """Keys, then values, of each head."""
    page[: 2 * COUNT] = torch.cat((keys, values), dim=1).flatten()


def beside(keys, values, page):
    """Each token's key and value side by side, tokens of a head together."""
    page[: 2 * COUNT] = torch.cat((keys, values), dim=2).flatten()


def by_token(keys, values, page):
    page[:COUNT] = keys.transpose(0, 1).flatten()
    page[COUNT : 2 * COUNT] = values.transpose(0, 1).flatten()


def transposed(keys, values, page):
    page[: 2 * COUNT] = torch.cat((keys.mT.reshape(HEADS, -1), values.flatten(1)), dim=1).flatten()


def tiled(keys, values, page):
    """Keys by pairs of channels of 16 tokens, as tiles of matrix units have them."""
    tiles = keys.view(HEADS, TOKENS // 16, 16, DIM // 2, 2).transpose(2, 3)
    page[: 2 * COUNT] = torch.cat((tiles.flatten(), values.flip(1).flatten()))


LAYOUTS = [by_head, beside, by_token, transposed, tiled]


def learned(write, dtype=torch.float32, values=2 * COUNT):
    return PageLayout.learn(write, values, (HEADS, TOKENS, DIM), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("write", LAYOUTS)
def test_pages_are_read_as_they_were_written(write, dtype):
    layout = learned(write, dtype)
    keys, values = (torch.randn(5, HEADS, TOKENS, DIM).to(dtype) for _ in range(2))
    pages = torch.full((5, 2 * COUNT), torch.nan, dtype=dtype)
    for page, k, v in zip(pages, keys, values, strict=True):
        write(k, v, page)
    ids = torch.tensor([3, 0, 4])
    found = layout.read(pages, ids)
    assert torch.equal(found[0], keys[ids])
    assert torch.equal(found[1], values[ids])
    copy = torch.full_like(pages, torch.nan)
    layout.write(copy, ids, *found)
    assert torch.equal(copy[ids], pages[ids])
    assert copy[[1, 2]].isnan().all()


@pytest.mark.parametrize("write", LAYOUTS)
def test_padding_of_pages_is_left_alone(write):
    layout = learned(write, values=2 * COUNT + 100)
    storage = torch.full((4, 2 * COUNT + 130), 7.0)
    pages = storage[1:, 10 : 2 * COUNT + 110]  # not from the start of a storage, further apart than they are long
    keys, values = (torch.randn(2, HEADS, TOKENS, DIM) for _ in range(2))
    layout.write(pages, torch.tensor([2, 0]), keys, values)
    found = layout.read(pages, torch.tensor([2, 0]))
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)
    assert (storage == 7.0).sum() == storage.numel() - 4 * COUNT


def test_what_lies_in_even_steps_is_read_by_strides():
    assert [learned(write).key.strides is not None for write in LAYOUTS] == [True, True, True, True, False]
    assert [learned(write).value.strides is not None for write in LAYOUTS] == [True, True, True, True, False]


def scaled(keys, values, page):
    by_head(keys / 2, values, page)


def twice(keys, values, page):
    by_head(keys, keys, page)


def half(keys, values, page):
    page[:COUNT] = keys.flatten()


def rounded(keys, values, page):
    by_head((keys / 8).round() * 8, values, page)


def copied(keys, values, page):
    by_head(keys, values, page)
    page[2 * COUNT :] = 1


@pytest.mark.parametrize("write", [scaled, twice, half, rounded, copied])
def test_anything_else_is_refused(write):
    with pytest.raises(
        UnsupportedError, match="not found as they were written; allowed: a cache that keeps each in one"
    ):
        learned(write, values=2 * COUNT + 10)
