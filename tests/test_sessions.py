"""Sessions that outlive a process, and prefixes that caches share."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import kvquant
from kvquant import CacheStateError, KVQuantCache, PrecisionPolicy, StoreError, TieredStore, UnsupportedError
from kvquant.cache import manifests
from kvquant.testing import relative_rms
from tests.models import feed, prompt, tiny

POLICY = """
version: 1
name: small
block_tokens: 16
recent_tokens: 16
when: {when}
default: {{key: {{codec: int4, group: 16}}, value: {{codec: int4, rotate: hadamard}}}}
"""


def policy(when="seal"):
    return PrecisionPolicy.from_yaml(POLICY.format(when=when))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


def opened(folder, device="1MiB", host="4MiB"):
    return TieredStore(device, host, "32MiB", folder, staging="64KiB")


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("when", ["seal", "evict"])
@pytest.mark.parametrize("enabled", [False, True])
def test_a_session_goes_on_exactly_where_it_was(folder, family, when, enabled):
    model, ids = tiny(family), prompt(130, rows=2)
    if enabled:
        kvquant.enable(model)
    with opened(folder, "20KiB") as store:
        cache = KVQuantCache.for_model(model, policy(when), store=store, tenant="a")
        feed(model, cache, ids[:, :90], 70, 20)
        cache.save("chat")
        expected = feed(model, cache, ids[:, 90:], 1, 39)
        assert store.check() == []
    with opened(folder, "20KiB") as store:
        again = KVQuantCache.load(model, "chat", store, tenant="a")
        assert again.get_seq_length() == 90
        assert [layer.tokens for layer in [again.stats()]] == [(90, 90)]
        assert torch.equal(feed(model, again, ids[:, 90:], 1, 39), expected)
        assert store.check() == []


def test_another_process_resumes(folder, tmp_path):
    model, ids = tiny(), prompt(100)
    with opened(folder) as store:
        cache = KVQuantCache.for_model(model, policy(), store=store)
        feed(model, cache, ids[:, :80], 80)
        cache.save("x")
        expected = feed(model, cache, ids[:, 80:], 20)
    torch.save(expected, tmp_path / "expected")
    code = (
        "import sys, torch; from tests.models import *; from tests.test_sessions import *;"
        f"store = opened(Path({str(folder)!r})); cache = KVQuantCache.load(tiny(), 'x', store);"
        f"assert torch.equal(feed(tiny(), cache, prompt(100)[:, 80:], 20), torch.load({str(tmp_path / 'expected')!r}))"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=Path(__file__).parent.parent)


def test_rows_that_were_one_a_moment_ago_are_saved(folder):
    model, ids = tiny(), prompt(40)
    kvquant.enable(model)
    with opened(folder) as store, torch.no_grad():
        cache = KVQuantCache.for_model(model, policy(), store=store)
        model(ids, cache=cache)
        cache.batch_repeat_interleave(2)
        cache.save("both")
        again = KVQuantCache.load(model, "both", store)
        step = ids[:, :1].repeat(2, 1)
        assert torch.equal(model(step, cache=again).logits, model(step, cache=cache).logits)


def test_a_session_replaces_another_and_leaves_nothing_of_it(folder):
    model, ids = tiny(), prompt(200)
    with opened(folder) as store:
        cache = KVQuantCache.for_model(model, policy(), store=store)
        feed(model, cache, ids[:, :100], 100)
        cache.save("x")
        before = len(store)
        cache.save("x")
        assert len(store) == before
        assert manifests.orphans(store) == []
        feed(model, cache, ids[:, 100:], 100)
        cache.save("y")
        assert {(told["name"], *told["tokens"]) for told in manifests.sessions(store)} == {("x", 100), ("y", 200)}
        manifests.delete(store, "y")
        assert [told["name"] for told in manifests.sessions(store)] == ["x"]
        assert manifests.orphans(store) == []


def test_a_save_that_fails_leaves_the_session_there_was(folder, monkeypatch):
    model, ids = tiny(), prompt(200)
    with opened(folder) as store:
        cache = KVQuantCache.for_model(model, policy(), store=store)
        feed(model, cache, ids[:, :100], 100)
        cache.save("x")
        feed(model, cache, ids[:, 100:], 100)
        keep, left = store.keep, iter(range(5))

        def fail(*given):
            if next(left, None) is None:
                raise kvquant.StoreFullError("no room")
            keep(*given)

        monkeypatch.setattr(store, "keep", fail)
        with pytest.raises(kvquant.StoreFullError):
            cache.save("x")
        monkeypatch.undo()
        assert manifests.orphans(store) == []
        assert KVQuantCache.load(model, "x", store).get_seq_length() == 100


def test_a_session_is_its_tenants_and_its_models(folder):
    model, ids = tiny(), prompt(60)
    with opened(folder) as store:
        cache = KVQuantCache.for_model(model, policy(), store=store, tenant="a", adapter="lora")
        feed(model, cache, ids, 60)
        cache.save("x")
        for tenant in ("", "b"):
            with pytest.raises(StoreError, match="no such session"):
                KVQuantCache.load(model, "x", store, tenant=tenant)
        with pytest.raises(StoreError, match="another adapter: 'lora', now ''"):
            KVQuantCache.load(model, "x", store, tenant="a")
        with pytest.raises(StoreError, match="another dtype"):
            KVQuantCache.load(tiny().bfloat16(), "x", store, tenant="a", adapter="lora")
        other = tiny()
        with torch.no_grad():
            next(other.parameters()).add_(1e-3)
        with pytest.raises(StoreError, match="another model"):
            KVQuantCache.load(other, "x", store, tenant="a", adapter="lora")


def test_a_damaged_session_is_refused(folder):
    model, ids = tiny(), prompt(100)
    with opened(folder) as store:
        cache = KVQuantCache.for_model(model, policy(), store=store)
        feed(model, cache, ids, 100)
        cache.save("x")
    slab = next(folder.glob("*.slab"))
    data = bytearray(slab.read_bytes())
    middle = len(bytes(data).rstrip(b"\0")) // 2
    data[middle] ^= 1
    slab.write_bytes(data)
    with opened(folder) as store:
        with pytest.raises(StoreError, match=r"lost|damaged"):
            KVQuantCache.load(model, "x", store)
        assert store.check() == []
        assert sum(store.stats().faults.values()) == 1


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "\x1b[31m", 3, None])
def test_names_are_checked(folder, name):
    with opened(folder) as store:
        cache = KVQuantCache.for_model(tiny(), policy(), store=store)
        with pytest.raises(StoreError, match="session name"):
            cache.save(name)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "ä", ". .", "x" * 200])
def test_any_printable_name_is_just_a_name(folder, name):
    model = tiny()
    with opened(folder) as store:
        cache = KVQuantCache.for_model(model, policy(), store=store)
        feed(model, cache, prompt(50), 50)
        cache.save(name)
        assert KVQuantCache.load(model, name, store).get_seq_length() == 50
    assert {path.name for path in folder.parent.iterdir()} == {"store"}
    assert all("passwd" not in path.name for path in folder.iterdir())


def test_without_a_store_or_a_disk_there_is_nothing_to_save_to():
    model = tiny()
    cache = KVQuantCache.for_model(model, policy())
    for call in (lambda: cache.save("x"), cache.share, lambda: cache.reuse(prompt(50))):
        with pytest.raises(CacheStateError, match="needs a store"):
            call()
    with pytest.raises(StoreError, match="with a disk"):
        KVQuantCache.for_model(model, policy(), store=TieredStore("1MiB")).save("x")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("when", ["seal", "evict"])
@pytest.mark.parametrize("pads", [(0,), (0, 0), (0, 21), (7, 40)])
def test_a_shared_prefix_is_not_read_again(family, when, pads):
    """Restored rows hold what a cache that reads the whole prompt in the same chunks holds."""
    model, ids = tiny(family), prompt(150, rows=len(pads))
    kvquant.enable(model)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    store = TieredStore("64KiB", "4MiB", staging="64KiB")
    first = KVQuantCache.for_model(model, policy("seal"), store=store)
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        model(ids, cache=first, **given)
    shared = first.share()
    assert shared == sum(row.sealed // 16 for row in first.rows.rows) * 4
    assert first.share() == 0
    second = KVQuantCache.for_model(model, policy(when), store=store)
    held = second.reuse(ids, mask)
    assert held == min(pad + (150 - pad - 16) // 16 * 16 for pad in pads)
    assert second.rows.width == held
    for mine, theirs in zip(second.rows.rows, first.rows.rows, strict=True):
        assert (mine.start, mine.length) == (theirs.start, held - theirs.start)
    for layer, other in zip(second.layers, first.layers, strict=True):
        assert torch.equal(layer.keys, other.keys[:, :, :held])
        assert torch.equal(layer.values, other.values[:, :, :held])
    generated = model.generate(ids, attention_mask=mask, cache=second, max_new_tokens=8, do_sample=False)
    assert generated.shape[1] == 158
    whole = (held - pads[0]) // 16
    assert second.content_keys(0)[:whole] == first.content_keys(0)[:whole]
    assert store.check() == []


def test_every_part_of_the_key_counts():
    """Case 34: change one thing, and nothing is found."""
    model, ids = tiny(), prompt(100)
    kvquant.enable(model)
    store = TieredStore("1MiB", "4MiB", staging="64KiB")
    cache = KVQuantCache.for_model(model, policy(), store=store)
    feed(model, cache, ids, 100)
    assert cache.share()

    def found(model=model, ids=ids, given=None, **more):
        return KVQuantCache.for_model(model, given or policy(), store=store, **more).reuse(ids)

    assert found() == 80
    assert found(tenant="b") == found(adapter="lora") == 0
    other = ids.clone()
    other[0, 40] += 1
    assert found(ids=other) == 32
    for change in ("int3", "int8"):
        assert found(given=PrecisionPolicy.from_yaml(POLICY.format(when="seal").replace("int4", change))) == 0
    assert found(given=PrecisionPolicy.from_yaml(POLICY.format(when="seal").replace("group: 16", "group: 8"))) == 0
    changed = tiny()
    with torch.no_grad():
        next(changed.parameters()).mul_(1.01)
    assert found(model=changed) == 0
    assert found(model=tiny().bfloat16()) == 0
    assert found(model=tiny(rope_parameters={"rope_type": "default", "rope_theta": 9e3})) == 0
    assert found(given=policy("evict")) == 80  # when blocks are encoded does not change what they are


def test_a_lost_block_shortens_the_prefix():
    model, ids = tiny(), prompt(100)
    kvquant.enable(model)
    store = TieredStore("1MiB", "4MiB", staging="64KiB")
    cache = KVQuantCache.for_model(model, policy(), store=store)
    feed(model, cache, ids, 100)
    cache.share()
    key = cache.content_keys(0)[2]
    known = store.keys()
    store.delete([found for found in known if isinstance(found, bytes) and key in found][-1:])
    second = KVQuantCache.for_model(model, policy(), store=store)
    assert second.reuse(ids) == 32


def test_prefixes_of_hybrid_models_are_refused():
    store = TieredStore("1MiB", "1MiB")
    cache = KVQuantCache.for_model(tiny("gemma3"), policy(), store=store)
    with pytest.raises(UnsupportedError, match="sliding"):
        cache.share()
    used = KVQuantCache.for_model(model := tiny(), policy(), store=store)
    feed(model, used, prompt(40), 40)
    with pytest.raises(CacheStateError, match="fills an empty cache"):
        used.reuse(prompt(40))


COLD = "cold: {key: {codec: int2, group: 16}, value: {codec: int2, rotate: hadamard}}\n"


@pytest.mark.parametrize("when", ["seal", "evict"])
@pytest.mark.parametrize("host", [None, "8KiB"])
def test_blocks_that_go_to_disk_lose_more_if_the_policy_says_so(folder, when, host):
    """Straight from what they were, or from codes where these have to leave; counted, and measured."""
    model, ids = tiny(head_dim=32), prompt(400)
    kvquant.enable(model)
    cold = PrecisionPolicy.from_yaml(POLICY.format(when=when) + COLD)
    assert cold.fingerprint() == policy().fingerprint()
    read = {}
    for name, given in (("usual", policy(when)), ("cold", cold)):
        with TieredStore(None, host, "32MiB", folder / name, staging="64KiB") as store:
            cache = KVQuantCache.for_model(model, given, store=store)
            with torch.no_grad():
                logits = [feed(model, cache, ids[:, :200], 200), feed(model, cache, ids[:, 200:], 100, 1, 99)]
            read[name] = logits[1]
            stats, tiers = cache.stats(), {tier.name: tier for tier in store.stats().tiers}
            assert tiers["disk"].payloads
            if name == "usual":
                assert stats.recompressed == 0
                usual = tiers["disk"].used / tiers["disk"].payloads
                continue
            assert stats.recompressed == tiers["disk"].payloads
            assert tiers["disk"].used / tiers["disk"].payloads < 0.75 * usual
            assert 0.05 < stats.recompression_error < 0.6
            assert store.check() == []
            layer = cache.layers[0]
            assert layer.keys.isfinite().all()
            cache.save("x")
            keys = layer.keys
            again = KVQuantCache.load(model, "x", store)
            assert torch.equal(again.layers[0].keys, keys)
    error = relative_rms(read["cold"], read["usual"])
    assert 0 < error < 0.3


def test_what_is_cold_is_not_shared(folder):
    model, ids = tiny(head_dim=32), prompt(200)
    kvquant.enable(model)
    with TieredStore(None, None, "32MiB", folder, staging="64KiB") as store:
        cache = KVQuantCache.for_model(
            model, PrecisionPolicy.from_yaml(POLICY.format(when="seal") + COLD), store=store
        )
        feed(model, cache, ids, 200)
        assert cache.share() == 0


def test_budgets_that_hold_no_block_are_refused_before_anything_is_read(folder):
    model = tiny()
    with pytest.raises(StoreError, match=r"host_budget: 512 bytes can't hold one block; the smallest that can is 768"):
        KVQuantCache.for_model(model, policy(), store=TieredStore("1MiB", 512))
    KVQuantCache.for_model(model, policy(), store=TieredStore(768, 768))
    for given in ({"device_budget": 63}, {}, {"disk_budget": "1MiB"}, {"host_budget": "much"}, {"host_budget": -1}):
        with pytest.raises(StoreError):
            TieredStore(**given)


def test_a_dropped_cache_leaves_its_room_at_once():
    """Without help of the garbage collector: nothing of a cache refers to itself."""
    model = tiny()
    gc.disable()
    try:
        store = TieredStore(host_budget="64KiB", staging="64KiB")
        for seed in range(12):
            cache = KVQuantCache.for_model(model, policy(), store=store)
            feed(model, cache, prompt(300, seed=seed), 300)
            assert len(store.streams) <= 2
            kept = weakref.ref(cache.layers[0].held)
            del cache
            assert kept() is None
        plain = KVQuantCache.for_model(model, policy())
        feed(model, plain, prompt(100), 100)
        kept = weakref.ref(plain.layers[0].held)
        del plain
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("shape", [(None, None, "8MiB"), ("4KiB", "8KiB", "8MiB"), (None, "4MiB", None)])
def test_a_block_that_is_looked_at_is_that_block(folder, shape):
    model, ids = tiny(), prompt(300)
    plain = KVQuantCache.for_model(model, policy())
    feed(model, plain, ids, 100, 100, 100)
    path = folder if shape[2] else None
    with TieredStore(*shape, path, staging="8KiB") as store:
        cache = KVQuantCache.for_model(model, policy(), store=store)
        feed(model, cache, ids, 100, 100, 100)
        for layer in range(4):
            for number in range(len(plain.rows.rows[0].slots)):
                one, other = (each.block(layer, 0, number) for each in (cache, plain))
                assert one.to_bytes(b"k") == other.to_bytes(b"k")


def test_a_save_that_fails_at_its_last_step_leaves_a_session(folder, monkeypatch):
    model, ids = tiny(), prompt(200)
    with opened(folder) as store:
        cache = KVQuantCache.for_model(model, policy(), store=store)
        feed(model, cache, ids[:, :100], 100)
        cache.save("x")
        feed(model, cache, ids[:, 100:], 100)
        flush, left = store.flush, iter(range(1))

        def fail():
            if next(left, None) is None:
                raise RuntimeError
            flush()

        monkeypatch.setattr(store, "flush", fail)
        with pytest.raises(RuntimeError):
            cache.save("x")
        monkeypatch.undo()
    with opened(folder) as store:
        assert KVQuantCache.load(model, "x", store).get_seq_length() in (100, 200)


def test_what_interrupted_saves_left_makes_room_for_the_next(folder, monkeypatch):
    model, ids = tiny(), prompt(100)
    with opened(folder) as store:
        cache = KVQuantCache.for_model(model, policy(), store=store)
        feed(model, cache, ids, 100)
        cache.save("x")
        before = len(store)
        cache.save("y")
        store.delete(manifests.keys_from(store, manifests.MANIFEST))
        assert len(manifests.orphans(store)) > before
        cache.save("z")
        assert manifests.orphans(store) == []
        assert len(store) == before


def test_what_is_no_store_is_refused():
    model = tiny()
    for given in ("x", object(), {}):
        with pytest.raises(StoreError, match="allowed: a TieredStore"):
            KVQuantCache.for_model(model, policy(), store=given)
        with pytest.raises(StoreError, match="allowed: a TieredStore"):
            KVQuantCache.load(model, "x", given)
    with pytest.raises(StoreError, match="with room beside the device"):
        KVQuantCache.for_model(model, policy(), store=TieredStore("1MiB")).share()
    for device in ("zzz", 3.5, "meta"):
        with pytest.raises(StoreError, match="device"):
            TieredStore("1MiB", device=device)


def test_settings_that_differ_are_named(folder):
    model = tiny()
    with opened(folder) as store:
        cache = KVQuantCache.for_model(model, policy(), store=store)
        feed(model, cache, prompt(50), 50)
        cache.save("x")
        other = tiny(rope_parameters={"rope_type": "default", "rope_theta": 9e3})
        with pytest.raises(StoreError, match=r"another rope_parameters: .*10000.*, now .*9000"):
            KVQuantCache.load(other, "x", store)
