"""What a sweep will take, against what caches really take; splitting and refusing."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from transformers import DynamicCache

from kvquant import KVQuantCache
from kvquant_eval.errors import InputError
from kvquant_eval.memory import Estimate, estimate, groups, in_words, parse_size, peak_memory
from kvquant_eval.protocols import take_over
from kvquant_eval.sweep import Settings, Sweep
from tests.models import FAMILIES, feed, prompt, tiny

from .test_ppl_cli import ppl
from .tiny import small_policy


def storage_bytes(cache: Any) -> int:
    total = 0
    for layer in cache.layers:
        if hasattr(layer, "held"):
            total += sum(tensor.nbytes for tensor in layer.held.tensors())
        elif isinstance(getattr(layer, "keys", None), torch.Tensor):
            total += layer.keys.nbytes + layer.values.nbytes
    return total


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_told_are_those_allocated(family: str) -> None:
    model = tiny(family)
    policies = [small_policy("fp16"), small_policy("int4"), small_policy("int2")]
    found = estimate(model, policies, partial(KVQuantCache.for_model, model), 300, 16)
    exact = DynamicCache(config=model.config)
    feed(model, exact, prompt(300))
    assert found.exact == pytest.approx(storage_bytes(exact), rel=0.02)  # a window keeps one token less
    for policy in policies:
        cache = take_over(KVQuantCache.for_model(model, policy), exact)
        assert found.policies[policy.name] == pytest.approx(storage_bytes(cache), rel=0.02)
    assert found.held == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


def test_groups_fit_and_keep_their_order() -> None:
    found = Estimate(100, 50, {"a": 10, "b": 20, "c": 5, "d": 30}, 20)
    assert groups(found, 1000) == [["a", "b", "c", "d"]]
    assert groups(found, 205) == [["a", "b", "c"], ["d"]]
    assert groups(found, 200) == [["a", "b"], ["c"], ["d"]]
    assert all(found.total(part) <= 205 for part in groups(found, 205))
    with pytest.raises(InputError, match=r"--max-memory: 0.2 KiB, but d alone needs .* exact history"):
        groups(found, 199)


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("2K", 2048), ("1.5g", 3 << 29), ("2 GiB", 2 << 30)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "many", "4X", "1e9", "\u0663G", "G"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match="--max-memory: .* is not an amount of memory"):
        parse_size(text)


def test_the_peak_is_at_least_what_is_held_now() -> None:
    block = torch.ones(50_000_000)
    assert peak_memory() >= psutil.Process().memory_info().rss * 0.98 > block.nbytes


def test_amounts_in_words() -> None:
    assert [in_words(size) for size in (3 << 19, 3 << 29)] == ["2 MiB", "1.5 GiB"]
    assert in_words(1536) == "1.5 KiB"


@pytest.mark.parametrize("protocol", ["streaming", "prefill"])
def test_a_split_sweep_gives_the_same_rows(llama: Any, ids: torch.Tensor, protocol: str) -> None:
    policies = [small_policy(codec) for codec in ("int8", "int4", "int2")]
    new = partial(KVQuantCache.for_model, llama)
    rows = {}
    for split in ((), (("int8", "int4"), ("int2",)), (("int8",), ("int4",), ("int2",))):
        sweep = Sweep("tiny", llama, ids, policies, new, Settings((96, 200), protocol, 16, 48), groups=split)
        found = sorted(sweep.rows(), key=lambda row: (row.context, row.policy))
        rows[split] = [(row.policy, row.context, row.kl_mean, row.ppl, row.kv_bytes, row.status) for row in found]
    assert len({tuple(found) for found in rows.values()}) == 1
    assert len(rows[()]) == 6


def test_the_command_splits_or_refuses_before_it_starts(
    arguments: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ppl(arguments, "--json", "--max-memory", "64G") == 0
    out, err = capsys.readouterr()
    assert "1 reading(s) of the text" in err
    whole = json.loads(out)["rows"]
    assert [row["status"] for row in whole] == ["ok"] * 4
    assert ppl(arguments, "--max-memory", "1M") == 2
    err = capsys.readouterr().err
    assert "alone needs" in err
    assert "%" not in err  # nothing had begun
    assert ppl(arguments, "--max-memory", "lots") == 2
    assert "is not an amount of memory" in capsys.readouterr().err
