"""Metrics are valid Prometheus text, and the page that explains them names the same ones."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import kvquant
from kvquant import KVQuantCache, TieredStore
from kvquant.cache.stats import CacheStats, LayerStats
from kvquant.exposition import Metric, by, exposition
from kvquant.integrations.blockwise import BlockTierStats
from kvquant.store.base import StoreStats, TierStats
from kvquant_eval.store import Kind, Stats
from tests.models import generate, prompt, small, tiny

NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
EXAMPLES = Path(__file__).parent.parent / "examples"
PAGE = (EXAMPLES / "metrics.md").read_text()


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
CACHE = replace(CACHE, row_bytes=(6, 5))
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
    assert values["kvquant_cache_row_bytes"] == {(("row", "0"),): 6, (("row", "1"),): 5}
    assert values["kvquant_cache_decode_seconds_total"] == {(): 1e-7}
    assert values["kvquant_store_budget_bytes"][("tier", 'my "tier"\\\n'),] == 1 << 40
    assert values["kvquant_store_evictions_total"] == {(("edge", "device→host"),): 4, (("edge", "host→"),): 1}
    assert values["kvquant_folder_payload_bytes"][("kind", "sessions"),] == 300
    assert values["kvquant_folder_written"] == {(): 1}


def test_a_cache_and_its_store_after_generate():
    model = tiny()
    kvquant.enable(model)
    store = TieredStore(device_budget="16KiB", host_budget="1MiB", staging="64KiB")
    cache = KVQuantCache.for_model(model, small(when="seal"), store=store)
    generate(model, cache, prompt(120, rows=2))
    page = cache.stats().prometheus() + store.stats().prometheus()
    found = {sample.name: [] for family in text_string_to_metric_families(page) for sample in family.samples}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            assert sample.labels.keys() == dict(next(iter(ALL[sample.name][2]))).keys()
            found[sample.name].append(sample.value)
    assert found["kvquant_cache_row_bytes"] == list(cache.stats().row_bytes)
    assert len(found["kvquant_cache_row_bytes"]) == found["kvquant_cache_rows"][0] == 2
    assert found["kvquant_cache_fallbacks_total"] == [0]
    assert all(found["kvquant_store_hits_total"])
    assert min(found["kvquant_store_used_bytes"]) > 0


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


# --- queries ---


DASHBOARD = json.loads((EXAMPLES / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = [
    rule
    for group in yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])["groups"]
    for rule in group["rules"]
]
ROWS = [line for line in PAGE.split("## Questions")[1].split("## Alerts")[0].splitlines() if line.startswith("|")][2:]
QUERIES = [
    *(line.split("`")[1] for line in ROWS),
    *(rule["expr"] for rule in ALERTS),
    *(target["expr"] for panel in PANELS for target in panel["targets"]),
]
ADDED = {"instance"}  # by Prometheus


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_what_there_is(query):
    assert all(query.count(opening) == query.count(closing) for opening, closing in ("()", "[]", "{}"))
    names = re.findall(r"kvquant_\w+", query)
    assert names
    for name in names:
        kind, _, samples = ALL[name]
        changes = rf"(rate|increase)\({name}(\{{[^}}]*\}})?\[(\w+|\$__rate_interval)\]\)"
        if kind == "gauge":
            assert not re.search(changes, query)
        elif not re.search(changes, query):  # a total only where a panel says since when, or beside what it was
            assert "faults" in name
        known = ADDED.union(*({label for label, _ in sample} for sample in samples))
        for told in re.findall(name + r"\{([^}]*)\}", query):
            assert {part.split("=")[0] for part in told.split(",")} <= known
        for told in re.findall(rf"by \((\w+)\) \((?:\w+\()?{name}", query):
            assert told in known


def test_the_dashboard_can_be_imported_and_has_a_panel_for_all_that_matters():
    shown = set(re.findall(r"kvquant_\w+", json.dumps(PANELS)))
    totals = ["hits", "misses", "evictions", "prefetch_late", "prefetch_unused", "stall_seconds"]
    assert {"kvquant_store_used_bytes", *(f"kvquant_store_{name}_total" for name in totals)} <= shown
    assert {f"kvquant_cache_{name}" for name in ("fallbacks_total", "encode_seconds_total", "row_bytes")} <= shown
    idents = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(idents)) == len(idents)
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS))) - {"__rate_interval"} == variables
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert {target["refId"] for target in panel["targets"]}.issubset("ABC")


def test_alerts_say_what_is_wrong_and_where():
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS) >= 5
    assert all("$labels.instance" in rule["annotations"]["summary"] for rule in ALERTS)


# --- the parser everyone has ---


@pytest.mark.parametrize(
    "text", [CACHE.prometheus(), STORE.prometheus(), FOLDER.prometheus(), StoreStats(()).prometheus()]
)
def test_prometheus_own_parser_reads_the_same(text):
    families = list(text_string_to_metric_families(text))
    read = {
        family.name + "_total" * (family.type == "counter"): (
            family.type,
            family.documentation,
            {tuple(sample.labels.items()): sample.value for sample in family.samples},
        )
        for family in families
    }
    assert read == parsed(text)
    assert all(sample.name in read for family in families for sample in family.samples)


@pytest.mark.parametrize(
    "broken", ["", "a 1\n", "# HELP a b\n# TYPE a gauge\nb 1\n", '# HELP a b\n# TYPE a gauge\na{x="\\q"} 1\n']
)
def test_the_parser_is_strict(broken):
    with pytest.raises((AssertionError, AttributeError, StopIteration)):
        parsed(broken)
