"""The uncompressed cache: the same as transformers' own, in less memory."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from kvquant_eval.exact import branch, exact_cache

from ..models import FAMILIES, feed, prompt, tiny


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_it_and_its_branches_give_the_logits_of_a_dynamic_cache(family: str) -> None:
    model, ids, others = tiny(family), prompt(60), prompt(60, seed=8)
    plain, exact = DynamicCache(config=model.config), exact_cache(model, 60)
    assert torch.equal(feed(model, exact, ids[:, :33], 20, 13), feed(model, plain, ids[:, :33], 20, 13))
    fork, twin = copy.deepcopy(plain), branch(exact)
    assert twin.get_seq_length() == exact.get_seq_length() == 33
    for start, end in ((33, 34), (34, 60)):  # in turns: neither writes where the other reads
        assert torch.equal(feed(model, twin, others[:, start:end]), feed(model, fork, others[:, start:end]))
        assert torch.equal(feed(model, exact, ids[:, start:end]), feed(model, plain, ids[:, start:end]))


def test_what_it_holds_is_held_once() -> None:
    model, ids = tiny(), prompt(101)
    exact = exact_cache(model, 100)
    feed(model, exact, ids[:, :60])
    twin = branch(exact)
    feed(model, twin, ids[:, 60:70])
    feed(model, exact, ids[:, 60:80])
    for layer, copied in zip(exact.layers, twin.layers, strict=True):
        assert layer.keys.untyped_storage().nbytes() == layer.keys[:, :, :1].nbytes * 100
        assert copied.trunk[0].data_ptr() == layer.keys.data_ptr()
        assert copied.keys.untyped_storage().nbytes() <= copied.keys[:, :, :1].nbytes * 10
    with pytest.raises(ValueError, match="101 tokens in an exact cache for 100"):
        feed(model, exact, ids[:, 80:101])
