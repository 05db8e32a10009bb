"""README's table of model families: every cell is run, and says what happens."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path

import pytest
import torch

import kvquant
from kvquant import KVQuantCache, PrecisionPolicy, TieredStore
from kvquant.cache.hooks import why_decoded
from tests.models import FAMILIES, feed, prompt, stock, tiny

README = (Path(__file__).parent.parent / "README.md").read_text()
WIDTH, NEW = 44, 12
SETTINGS = {"block_tokens": 8, "recent_tokens": 8, "when": "seal"}
EXACT = PrecisionPolicy(name="exact", default={"key": "fp16", "value": "fp16"}, **SETTINGS)
INT4 = PrecisionPolicy(
    name="int4", default={"key": "int4", "value": {"codec": "int4", "rotate": "hadamard"}}, **SETTINGS
)
ROUNDING = 5e-3  # streamed attention rounds queries and weights to 16 bits
WAYS = {
    "one sequence": {},
    "left-padded batch": {},
    "sampling": {"do_sample": True, "temperature": 1.2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "assisted": {"prompt_lookup_num_tokens": 3},
    "`store=`": {},
}


def table():
    """By family its cells, by column."""
    (text,) = re.findall(r"\n(\| models \| .*?)\n\n", README, re.DOTALL)
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
    return {
        family: dict(zip(head[1:], cells, strict=True))
        for names, *cells in rows
        for family in re.findall(r"`(\w+)`", names)
    }


TABLE = table()


@lru_cache(maxsize=3)
def model_of(family, kind):
    """``plain``: with transformers' attention; ``enabled``; ``dense``: enabled, but decoding all that is held."""
    model = tiny(family)
    usual = model.config._attn_implementation
    if kind != "plain":
        kvquant.enable(model)
    if kind == "dense":
        model.set_attn_implementation(usual)
    return model


@cache
def inputs(way):
    """Token ids, and the mask: a prompt that repeats itself, so that looking things up in it finds something."""
    ids = torch.cat([prompt(11)] * (WIDTH // 11), dim=1)
    if way != "left-padded batch":
        return ids, torch.ones_like(ids)
    ids, mask = torch.cat([ids, prompt(WIDTH)]), torch.ones(2, WIDTH, dtype=torch.long)
    ids[1, :19] = mask[1, :19] = 0
    return ids, mask


def write(model, held, way):
    """What `generate` returns: sequences, scores and the logits of every step."""
    ids, mask = inputs(way)
    torch.manual_seed(11)
    return model.generate(
        ids,
        attention_mask=mask,
        cache=held,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        **{"do_sample": False, **WAYS[way]},
    )


def cached(model, policy, way="one sequence"):
    """An empty cache; the store has room on the device for a quarter of the blocks."""
    if way != "`store=`":
        return KVQuantCache.for_model(model, policy)
    told = KVQuantCache.for_model(model, policy)
    feed(model, told, inputs(way)[0])
    slabs = [slab for layer in told.compressed() for slab in layer.held.blocks.tensors()]  # [blocks, bytes]
    largest, quarter = max(slab[0].nbytes for slab in slabs), sum(slab.nbytes for slab in slabs) // 4
    store = TieredStore(device_budget=max(largest, quarter), host_budget="4MiB", staging=8 * largest)
    return KVQuantCache.for_model(model, policy, store=store)


def same_text(mine, reference):
    """Whether logits agree up to rounding, of each row for as long as it goes on with the same tokens.

    Rows part where the two best tokens are as close as rounding makes them.
    """
    rows = torch.arange(len(mine.sequences))
    for step, (logits, expected) in enumerate(zip(mine.logits, reference.logits, strict=True)):
        if (logits[rows] - expected[rows]).norm() > ROUNDING * expected[rows].norm():
            return False
        at = WIDTH + step
        rows = rows[mine.sequences[rows, at] == reference.sequences[rows, at]]
    return True


def counted(held):
    """Fallbacks, as a share of what a model makes that decodes at every call but the first."""
    return held.stats().fallbacks / (2 * len(held.compressed()) * (NEW - 1))


def test_every_family_is_in_the_table():
    assert sorted(TABLE) == sorted(FAMILIES)
    assert all(list(cells) == ["compressed", "attention", *WAYS] for cells in TABLE.values())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_is_compressed_and_how_it_is_attended_to(family):
    model, told = model_of(family, "enabled"), TABLE[family]
    held = KVQuantCache.for_model(model, EXACT)
    whole = len(held.compressed()) == len(held.layers)
    assert told["compressed"] == ("all layers" if whole else "full-attention layers")
    why = re.sub(r"^\w+Model ", "the model ", why_decoded(model))
    assert told["attention"] == (f"decoded: {why}" if why else "reads codes")
    write(model, held, "one sequence")
    assert counted(held) == bool(why)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_cell(family, way):
    plain, model, dense = (model_of(family, kind) for kind in ("plain", "enabled", "dense"))
    if (told := TABLE[family][way]) != "yes":
        for each, held in ((plain, stock(plain)), (model, KVQuantCache.for_model(model, EXACT))):
            with pytest.raises(ValueError, match=told.removeprefix("no: ")):
                write(each, held, way)
        return
    held = cached(model, EXACT, way)
    assert torch.equal(write(model, held, way).sequences, write(plain, stock(plain), way).sequences)
    decodes = TABLE[family]["attention"] != "reads codes"
    assert (held.stats().fallbacks > 0) == decodes
    if way == "`store=`":
        device, host = held.store.stats().tiers
        assert device.payloads
        assert host.hits
    held = cached(model, INT4, way)
    mine, reference = write(model, held, way), write(dense, KVQuantCache.for_model(dense, INT4), way)
    assert (held.stats().fallbacks > 0) == decodes
    if way == "beams":
        assert torch.allclose(mine.sequences_scores, reference.sequences_scores, atol=ROUNDING)
    else:
        assert same_text(mine, reference)
    assert held.stats().blocks >= 4
