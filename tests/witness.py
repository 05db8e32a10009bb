"""A cache that keeps what it compressed, and small policies to compress with."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicCache

from kvquant import KVQuantCache, PrecisionPolicy
from tests.models import generate, prompt

SMALL = {"block_tokens": 8, "recent_tokens": 8}
FP16 = PrecisionPolicy(name="fp16", default={"key": "fp16", "value": "fp16"}, **SMALL)
LOSSY = PrecisionPolicy(
    name="lossy", default={"key": "int4", "value": {"codec": "int3", "rotate": "hadamard"}}, key_bias="keep", **SMALL
)
SINKS = 4

# Of tests whose masks are for attention over decoded keys and values only.
DECODES = pytest.mark.filterwarnings("ignore:attention over decoded keys and values:kvquant.KVQuantWarning")

# A prompt that repeats itself, so that looking things up in it finds something.
ECHO = torch.cat([prompt(9)] * 4, dim=1)


class Witness(KVQuantCache):
    """Keeps the uncompressed history beside the compressed one, under the same operations."""

    def __init__(self, *args):
        super().__init__(*args)
        self.truth = DynamicCache()
        self.shortest = 10**9  # a crop below what is sealed cuts blocks; the test of that is in test_history.py

    def update(self, keys, values, layer, *args, **kwargs):
        if layer in self.checked:
            self.truth.update(keys, values, layer)
        return super().update(keys, values, layer, *args, **kwargs)

    @property
    def checked(self):
        return [layer.index for layer in self.resolved.layers if layer.policy]

    def _follow(self, operation, argument):
        for layer in self.truth.layers:
            if layer.is_initialized:
                getattr(layer, operation)(argument)

    def crop(self, tokens):
        super().crop(tokens)
        self._follow("crop", tokens)

    def reorder_cache(self, rows):
        super().reorder_cache(rows)
        self._follow("reorder_cache", rows)

    def batch_repeat_interleave(self, repeats):
        super().batch_repeat_interleave(repeats)
        self._follow("batch_repeat_interleave", repeats)

    def batch_select_indices(self, rows):
        super().batch_select_indices(rows)
        self._follow("batch_select_indices", rows)

    def check(self):
        """Every layer decodes to the true history, its sealed blocks encoded once."""
        assert any(row.slots for row in self.rows.rows)
        for index in self.checked:
            truth, layer = self.truth.layers[index], self.layers[index]
            for which, exact in enumerate((truth.keys, truth.values)):
                codec = layer.held.sides[which].codec
                expected = exact.clone()
                for row, held in zip(expected, self.rows.rows, strict=True):
                    row[:, : held.start] = 0
                    compress(codec, row[:, held.start :], held.sealed)
                assert torch.equal(layer.held.dense(which, self.rows.view()), expected)


def compress(codec, tokens, sealed):
    """Replace the first ``sealed`` of ``tokens`` ``[heads, tokens, dim]`` by what their blocks decode to."""
    for first in range(0, sealed, SMALL["block_tokens"]):
        block = tokens[:, first : first + SMALL["block_tokens"]]
        given = block.clone()
        if not first and not codec.lossless:
            given[:, :SINKS] = given[:, SINKS, None]
        decoded = codec.decode(codec.encode(given[None]), block.shape[2], block.dtype)[0]
        kept = 0 if first or codec.lossless else SINKS
        block[:, kept:] = decoded[:, kept:]


def attempt(model, cache, ids, **kwargs):
    """The text, or what kind of error there was."""
    try:
        torch.manual_seed(11)
        return generate(model, cache, ids, **kwargs)
    except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:
        return type(error)


def same(mine, theirs):
    return torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs
