"""Metrics are valid Prometheus text, and the page that explains them names the same ones."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvquant.cache.stats import CacheStats, LayerStats
from kvquant.exposition import Metric, by, exposition
from kvquant.integrations.blockwise import BlockTierStats
from kvquant.store.base import StoreStats, TierStats
from kvquant_eval.store import Kind, Stats

NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
PAGE = (Path(__file__).parent.parent / "examples" / "metrics.md").read_text()


def unescaped(text):
    return re.sub(r'\\[\\"n]', lambda found: ESCAPES[found[0]], text)


def parsed(text):
    """By name: its type, its help, and values by labels. Strict: what the format allows in any order has one here."""
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    lines = iter(text.removesuffix("\n").split("\n"))
    found = {}
    name = None
    for line in lines:
        if line.startswith("#"):
            name, told = re.fullmatch(rf"# HELP ({NAME}) (.+)", line).groups()
            kind = re.fullmatch(f"# TYPE {name} (counter|gauge)", next(lines))[1]
            assert name not in found, "told twice"
            assert (kind == "counter") == name.endswith("_total")
            found[name] = kind, unescaped(told), {}
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert match[1] == name, "a sample apart from its metric"
        labels = tuple((label, unescaped(value)) for label, value in re.findall(LABEL, match[2] or ""))
        assert len(dict(labels)) == len(labels)
        assert labels not in found[name][2], "a sample twice"
        found[name][2][labels] = float(match[match.lastindex])
    return found


CACHE = CacheStats((LayerStats(0, "full_attention", "int4", "int4", 5, 6),), (7, 8), 9, 11, 40, 2, 30, 0.25, 1e-7, 3)
STORE = StoreStats(
    (TierStats("device", 100, 50, 2, 3), TierStats('my "tier"\\\n', 1 << 40, 7, 1, 0)),
    misses=1,
    evictions={"device→host": 4, "host→": 1},
    moved={"device→host": 1 << 30},
    stall_seconds=0.5,
    faults={"no space": 2},
)
FOLDER = Stats([Kind("sessions", 2, 300), Kind("prefixes", 0, 0)], 300, {"slab.bin": 512}, 42)
TIER = BlockTierStats(3, 2, 1, 1, 0, 4096, 1024, 0.5, 0.25, STORE)
ALL = {name: told for stats in (CACHE, STORE, FOLDER, TIER) for name, told in parsed(stats.prometheus()).items()}


def test_values_come_back():
    values = {name: samples for name, (_, _, samples) in ALL.items()}
    assert values["kvquant_cache_tokens"] == {(): 15}
    assert values["kvquant_cache_bytes"] == {(("layer", "0"), ("kind", "full_attention")): 11}
    assert values["kvquant_cache_decode_seconds_total"] == {(): 1e-7}
    assert values["kvquant_store_budget_bytes"][("tier", 'my "tier"\\\n'),] == 1 << 40
    assert values["kvquant_store_evictions_total"] == {(("edge", "device→host"),): 4, (("edge", "host→"),): 1}
    assert values["kvquant_folder_payload_bytes"][("kind", "sessions"),] == 300
    assert values["kvquant_folder_written"] == {(): 1}


def test_an_empty_store_names_the_same_metrics():
    assert parsed(StoreStats(()).prometheus()).keys() == parsed(STORE.prometheus()).keys()


def test_nothing_that_is_counted_is_left_out():
    for stats, derived in ((CACHE, {"layers"}), (STORE, {"tiers"}), (TIER, {"store"})):
        text = stats.prometheus()
        for field in {field.name for field in fields(stats)} - derived:
            words = field.replace("kv_bytes", "bytes").replace("other", "passed_through").split("_")
            assert any(set(words) <= set(name.split("_")) for name in parsed(text)), field


def test_odd_numbers_and_help():
    values = by("of", {"a": math.inf, "b": -math.inf, "c": math.nan, "d": 10**30, "e": 0.1})
    text = exposition("x", [Metric("y", "gauge", "One \\ of\nmany.", values)])
    assert [line.rsplit(" ", 1)[1] for line in text.splitlines()[2:]] == ["+Inf", "-Inf", "NaN", str(10**30), "0.1"]
    assert parsed(text)["x_y"][1] == "One \\ of\nmany."


def test_the_page_names_what_there_is():
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]*)\| ([\w ]+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == list(ALL)
    for name, kind, labels, unit, meaning in rows:
        told, help_, samples = ALL[name]
        assert (kind, meaning) == (told, help_)
        for unit_in_name in ("bytes", "seconds"):
            assert (unit == unit_in_name) == (unit_in_name in name.split("_"))
        for sample in samples:
            assert ", ".join(label for label, _ in sample) == labels.strip()


def test_the_pages_queries_name_what_there_is():
    queries = [line for line in PAGE.split("## Panels")[1].splitlines() if line.startswith("|")][2:]
    assert len(queries) >= 7
    for line in queries:
        query = line.split("`")[1]
        for name in re.findall(r"kvquant_\w+", query):
            kind, _, samples = ALL[name]
            assert (kind == "counter") == bool(re.search(rf"(rate|increase)\({name}\[\w+\]\)", query)), query
            for label in re.findall(r"by \((\w+)\) \((?:\w+\()?" + name, query):
                assert all(label in dict(sample) for sample in samples)


@pytest.mark.parametrize(
    "broken", ["", "a 1\n", "# HELP a b\n# TYPE a gauge\nb 1\n", '# HELP a b\n# TYPE a gauge\na{x="\\q"} 1\n']
)
def test_the_parser_is_strict(broken):
    with pytest.raises((AssertionError, AttributeError, StopIteration)):
        parsed(broken)
