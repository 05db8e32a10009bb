"""Rows of a packed cache, each beside a cache of its own that is given the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import kvquant
from kvquant import KVQuantCache
from tests.models import VOCAB, small, tiny

POLICIES = {"fp16": small("fp16", "fp16"), "int4": small("int4", {"codec": "int4", "rotate": "hadamard"})}
WINDOWED = ["cohere2", "gemma2", "gemma3", "gemma3n", "gpt_oss"]


class Pair:
    """A packed cache, and the same rows alone; every step checks one against the other."""

    def __init__(self, model, policy, store=None) -> None:
        self.model, self.policy = model, policy
        # Products of other shapes round otherwise, so that now and then a value falls to the next code.
        self.limit = 2e-5 if policy.default.key.lossless else 2e-3
        self.cache = KVQuantCache.for_model(model, policy, store=store)
        self.exact = store is None  # whether bytes are those of the rows alone
        self.alone: list[KVQuantCache] = []
        self.tokens = torch.Generator().manual_seed(1)

    def ids(self, count: int) -> Tensor:
        return torch.randint(3, VOCAB, (count,), generator=self.tokens)

    @torch.no_grad()
    def step(self, counts: Sequence[int], rows: Sequence[int | None] | None = None, tell=None) -> list[Tensor]:
        """Give so many tokens to each of ``rows``; the logits of each."""
        parts = [self.ids(count) for count in counts]
        logits = packed(self.model, self.cache, parts, rows if tell is None else tell)
        for part, row, found in zip(parts, range(len(parts)) if rows is None else rows, logits, strict=True):
            if row is None or row == len(self.alone):
                self.alone.append(KVQuantCache.for_model(self.model, self.policy))
                row = len(self.alone) - 1
            expected = self.model(part[None], cache=self.alone[row]).logits[0]
            assert (found - expected).norm() <= self.limit * expected.norm()
        self.check()
        return logits

    def check(self) -> None:
        """Lengths, blocks, bytes and where rows stand."""
        rows = self.cache.rows.rows
        lengths = [one.rows.rows[0].length for one in self.alone]
        assert [row.length for row in rows] == lengths
        assert [row.ends for row in rows] == [one.rows.rows[0].ends for one in self.alone]
        assert all(row.start + row.length == self.cache.rows.width for row in rows)
        if self.exact:
            assert self.cache.stats().kv_bytes == sum(one.stats().kv_bytes for one in self.alone)

    def keep(self, rows: Sequence[int]) -> None:
        self.cache.batch_select_indices(rows)
        self.alone = [self.alone[row] for row in rows]
        self.check()

    def off_codes(self) -> float:
        """The share of bytes of blocks that are not those of the rows alone."""
        off = total = 0
        for layer in self.cache.compressed():
            for row, one in enumerate(self.alone):
                for number in range(len(one.rows.rows[0].slots)):
                    mine, theirs = self.cache.block(layer.index, row, number), one.block(layer.index, 0, number)
                    for a, b in ((mine.key, theirs.key), (mine.value, theirs.value)):
                        for name, field in a.fields.items():
                            off += int((field.view(torch.uint8) != b.fields[name].view(torch.uint8)).sum())
                            total += field.nbytes
        assert total
        return off / total


def packed(model, cache, parts: Sequence[Tensor], rows=None, **given) -> list[Tensor]:
    """A packed call: the logits ``[tokens, vocabulary]`` of each part."""
    bounds = [0, *torch.tensor([len(part) for part in parts]).cumsum(0).tolist()]
    cache.begin(cu_seqlens=bounds, rows=rows)
    logits = model(torch.cat(list(parts))[None], cache=cache, **given).logits[0]
    return list(logits.split([len(part) for part in parts]))


def enabled(family="llama", **changes):
    """A tiny model with the hook; key biases, if it has any, are large."""
    model = tiny(family, **changes)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            torch.nn.init.normal_(parameter, std=3.0)
    kvquant.enable(model)
    return model
