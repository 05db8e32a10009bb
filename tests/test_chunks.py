"""Chunks of keys and values as engines move them: their bytes, a store of them, and what an engine's user may set."""

from __future__ import annotations

import importlib.metadata
import sys
import threading

import pytest
import torch

from kvquant import PrecisionPolicy, TieredStore, get_codec, preset_names
from kvquant.errors import CodecError, FormatError, KVQuantWarning, PolicyError, StoreError, UnsupportedError
from kvquant.integrations import lmcache, sglang
from kvquant.integrations.chunks import ChunkCodec, ChunkShape, fitted
from kvquant.integrations.chunkstore import ChunkStore
from kvquant.integrations.lmcache_serde import sides
from kvquant.integrations.settings import StoreSettings, require
from kvquant.testing import relative_rms

NAME = b"name"


def states(layers=4, heads=2, tokens=128, dim=64, value_dim=None, dtype=torch.bfloat16):
    keys = torch.randn(layers, heads, tokens, dim, dtype=dtype)
    return keys, torch.randn(layers, heads, tokens, value_dim or dim, dtype=dtype)


def codec_of(policy="int4", layers=4):
    return ChunkCodec(PrecisionPolicy.load(policy) if isinstance(policy, str) else policy, layers)


def restored(codec, data, like, name=NAME, **others):
    found = [torch.empty_like(x) for x in like]
    codec.decode(data, name, *found, **others)
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 8, 60, 64, 128, 200, 256])
def test_fp16_is_bit_for_bit_of_any_length(tokens, dtype):
    given = states(tokens=tokens, value_dim=32, dtype=dtype)
    given[0][0, 0, 0, 0] = float("nan")  # whatever it is
    codec = codec_of("fp16")
    data = codec.encode(*given, NAME)
    for found, was in zip(restored(codec, data, given), given, strict=True):
        assert torch.equal(found.view(torch.uint8), was.view(torch.uint8))
    assert len(data) == codec.size(ChunkShape.of(*given))


@pytest.mark.parametrize("policy", preset_names())
@pytest.mark.parametrize("tokens", [24, 64, 200])
def test_presets_keep_the_error_of_their_codecs_in_any_length(policy, tokens):
    """No more than whole blocks have; sinks are as they were, where the chunk may begin a sequence, and only there."""
    given, whole = states(tokens=tokens), states(tokens=256)
    codec = codec_of(policy)
    for first in (True, False):
        found = restored(codec, codec.encode(*given, NAME, first=first), given)
        usual = restored(codec, codec.encode(*whole, NAME, first=first), whole)
        for layer in range(4):
            for side in range(2):
                limit = 1.1 * relative_rms(usual[side][layer], whole[side][layer])
                assert relative_rms(found[side][layer], given[side][layer]) <= limit
                raw = torch.equal(found[side][layer, :, :4], given[side][layer, :, :4])
                assert raw == (first or limit == 0)


def test_whole_blocks_are_those_of_the_compressor():
    from kvquant import BlockCompressor

    given = states(layers=1, tokens=256)
    codec, compressor = codec_of(layers=1), BlockCompressor("int4")
    (blocks,) = compressor.compress_rows(*given)
    for found, was in zip(
        restored(codec, codec.encode(*given, NAME), given), compressor.decompress(*blocks), strict=True
    ):
        assert torch.equal(found[0], was)


def test_sizes_do_not_depend_on_values():
    """Some engines set a chunk's room aside before it is encoded, and read back as much."""
    codec = codec_of("balanced")
    sizes = {len(codec.encode(*(x * scale for x in states(tokens=200)), NAME)) for scale in (0, 1e-7, 1, 1000)}
    assert sizes == {codec.size(ChunkShape(4, 2, 200, 64, 64, torch.bfloat16))}


@pytest.mark.parametrize(("tokens", "heads", "dim", "first"), [(256, 8, 128, True), (64, 3, 64, False)])
def test_int4_takes_less_than_a_third(tokens, heads, dim, first):
    given = states(heads=heads, tokens=tokens, dim=dim)
    data = codec_of().encode(*given, NAME, first=first)
    assert 3.3 * len(data) < sum(x.nbytes for x in given)


def test_strides_and_places_of_layers():
    policy = PrecisionPolicy(
        name="mixed", default={"key": "int4", "value": "int4"}, layers={"2": {"key": "fp16", "value": "fp16"}}
    )
    codec = codec_of(policy)
    wide = torch.randn(64, 2, 3, 2, 64)  # tokens, sides, layers, heads, dim
    keys, values = wide.permute(1, 2, 3, 0, 4)
    data = codec.encode(keys, values, NAME, first_layer=1)
    target = torch.zeros_like(wide)
    codec.decode(data, NAME, *target.permute(1, 2, 3, 0, 4), first_layer=1)
    assert torch.equal(target[:, :, 1], wide[:, :, 1])  # layer 2 of the model
    assert 0 < relative_rms(target, wide) < 0.1
    with pytest.raises(FormatError, match="first_layer=1"):
        codec.decode(data, NAME, keys, values)
    with pytest.raises(CodecError, match=r"^layers 2 to 4; allowed: 0 to 3$"):
        codec.encode(keys, values, NAME, first_layer=2)


@pytest.mark.parametrize("policy", ["fp16", "int4"])
def test_every_byte_counts(policy):
    given = states(layers=2, heads=1, tokens=16, dim=16)
    codec = codec_of(policy, layers=2)
    data = codec.encode(*given, NAME)
    found = [torch.zeros_like(x) for x in given]
    for at in range(len(data)):
        damaged = data.clone()
        damaged[at] ^= 1 << at % 8
        with pytest.raises(FormatError):
            codec.decode(damaged, NAME, *found)
    for end in range(0, len(data), 7):
        with pytest.raises(FormatError):
            codec.decode(data[:end], NAME, *found)
    with pytest.raises(FormatError, match="another key's"):
        codec.decode(data, b"other", *found)
    assert not any(x.any() for x in found)
    codec.decode(torch.cat((data, data.new_ones(99))), NAME, *found)  # room beyond its end
    assert all(x.any() for x in found)


def test_chunks_of_other_policies_and_shapes_are_refused():
    given = states()
    data = codec_of().encode(*given, NAME)
    with pytest.raises(FormatError, match="codes of 'int4/"):
        restored(codec_of("int8"), data, given)
    for other in (states(tokens=127), states(heads=1), states(dim=32), states(layers=3), states(dtype=torch.float32)):
        with pytest.raises(FormatError, match="allowed: ChunkShape"):
            restored(codec_of(), data, other)
    assert ChunkShape.read(data) == ChunkShape.of(*given)


def test_a_header_that_claims_a_thousand_billion_elements_allocates_nothing():
    head = ChunkShape(1 << 30, 1 << 30, 1 << 30, 64, 64, torch.float16).to_bytes((1 << 32) - 1)
    shape = ChunkShape.read(head)
    assert shape.nbytes > 1 << 90
    with pytest.raises(FormatError):
        restored(codec_of(), head, states())
    with pytest.raises(FormatError, match="too short"):
        ChunkShape.read(b"KVQC")
    with pytest.raises(FormatError, match="not a kvquant chunk"):
        ChunkShape.read(b"\x80\x04pickle" + bytes(99))


def test_what_cannot_be_encoded_is_refused():
    keys, values = states()
    infinite = values.clone()
    infinite[1, 1, 7, 3] = float("inf")
    with pytest.raises(CodecError, match=r"^values: infinite or NaN; allowed with int4/token/g64/hadamard: finite"):
        codec_of().encode(keys, infinite, NAME)
    with pytest.raises(CodecError, match=r"^keys \(4, 2, 0, 64\)"):
        codec_of().encode(keys[:, :, :0], values[:, :, :0], NAME)
    with pytest.raises(CodecError, match="allowed: both of torch.float16"):
        codec_of().encode(keys, values.float(), NAME)
    cold = PrecisionPolicy(name="c", default={"key": "int8", "value": "int8"}, cold={"key": "int4", "value": "int4"})
    with pytest.raises(PolicyError, match=r"^policy 'c': cold: set; allowed: none"):
        codec_of(cold)
    with pytest.raises(PolicyError, match="layers"):
        codec_of(PrecisionPolicy(name="x", default=cold.default, layers={"9": cold.default}))


@pytest.mark.parametrize("policy", preset_names())
def test_blocks_fit_what_is_left(policy):
    given = PrecisionPolicy.load(policy)
    for tokens in (1, 8, 9, 64, 72, 127, 128, 999):
        found = fitted(given, tokens)
        assert min(tokens, given.block_tokens) <= found.block_tokens <= given.block_tokens
        assert policy == "nf4" or found.block_tokens - tokens < 8  # its groups are of 32 or 64 tokens
        assert get_codec(found.default.key.name, "key", found.block_tokens) == found.default.key
    assert fitted(given, 128) == given


IDENTITY = {"engine": "none", "model": "m"}


@pytest.fixture
def store():
    with TieredStore(host_budget="1MiB", device="cpu") as made:
        yield made


def test_a_store_of_chunks_counts_what_it_does(store):
    chunks, given = ChunkStore(store, codec_of(), IDENTITY), states()
    assert chunks.put("a", *given)
    assert chunks.put("a", *given)  # it is there
    assert not chunks.put("b", given[0], given[1] * float("nan"))
    assert chunks.load("b") is None
    found = [torch.zeros_like(x) for x in given]
    assert chunks.load("a").shape == ChunkShape.of(*given)
    assert chunks.load("a").decode(*found)
    assert relative_rms(found[0], given[0]) < 0.1
    assert ("a" in chunks, "b" in chunks, chunks.prefix(["a", "b", "a"])) == (True, False, 1)
    name = chunks.name("a")
    store.put_below(name, store.get(name)[:-1])
    assert not chunks.load("a").decode(*found)
    stats = chunks.stats()
    assert (stats.stored, stats.restored, stats.misses, stats.damaged, stats.refused) == (1, 1, 2, 1, 1)
    assert stats.raw_bytes == sum(x.nbytes for x in given)
    assert str(stats).startswith(f"1 chunks stored: {stats.raw_bytes} bytes in {stats.stored_bytes} (0.3")
    store.put_below(name, torch.zeros(5, dtype=torch.uint8))
    assert chunks.load("a") is None
    assert chunks.stats().damaged == 2


def test_identities_keep_chunks_apart(store):
    given = states()
    first = ChunkStore(store, codec_of(), IDENTITY)
    first.put("a", *given)
    group = PrecisionPolicy(name="int4", default={"key": {"codec": "int4", "group": 32}, "value": "int4"})
    others = [
        ChunkStore(store, codec_of(), IDENTITY | {"model": "n"}),
        ChunkStore(store, codec_of(), IDENTITY | {"more": 1}),
        ChunkStore(store, codec_of("int8"), IDENTITY),
        ChunkStore(store, codec_of(group), IDENTITY),
        ChunkStore(store, codec_of(layers=5), IDENTITY),
    ]
    assert not any("a" in other for other in others)
    assert "a" in ChunkStore(store, codec_of(), dict(reversed(IDENTITY.items())))


def test_pins_are_counted_and_a_closed_store_has_nothing(store):
    chunks = ChunkStore(store, codec_of("fp16"), IDENTITY)
    given = states(tokens=256)  # 1 MiB has room for one
    chunks.put("a", *given)
    assert chunks.pin("a")
    assert chunks.pin("a")
    assert not chunks.pin("b")
    assert not chunks.put("b", *given)
    assert chunks.unpin("a")
    assert not chunks.put("b", *given)
    assert chunks.unpin("a")
    assert not chunks.unpin("a")
    assert chunks.put("b", *given)
    assert "a" not in chunks
    chunks.pin("b")
    assert chunks.remove("b")
    assert store.stats().pinned == 0
    chunks.put("c", *given)
    chunks.pin("c")
    assert chunks.clear() == 1
    chunks.put("d", *given)
    chunks.close()
    chunks.close()
    assert "d" not in chunks
    assert chunks.load("d") is None
    assert not chunks.pin("d")
    assert not chunks.put("e", *given)


def test_threads_share_a_store_of_chunks():
    """Each finds what was put under its key, whole, while others make it leave."""
    failed: list[str] = []
    with TieredStore(host_budget="256KiB", device="cpu") as store:
        chunks = ChunkStore(store, codec_of("fp16", layers=2), IDENTITY)

        def work(number):
            keys, values = (torch.full((2, 1, 64, 64), number, dtype=torch.float16) for _ in range(2))
            for turn in range(20):
                chunks.put(f"{number}-{turn % 3}", keys, values)
                other = (number + turn) % 4
                chunk = chunks.load(f"{other}-{turn % 3}")
                found = torch.zeros(2, 2, 1, 64, 64, dtype=torch.float16)
                if chunk is not None and not (chunk.decode(*found) and bool((found == other).all())):
                    failed.append(f"{number}: {other} in turn {turn}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert chunks.stats().restored > 0
        assert chunks.stats().damaged == 0
        assert store.check() == []
    assert not failed


def test_settings_name_what_is_allowed():
    settings = StoreSettings.read(
        {"policy": {"name": "x", "default": {"key": "int8", "value": "int8"}}, "tenant": "t"}
    )
    assert settings.load_policy().default.key.name.startswith("int8")
    assert StoreSettings.read({}).load_policy().name == "int4"
    for given, message in (
        ({"a": 1}, r"^at\.a: unknown option; allowed: policy, host_budget, disk_budget, disk_path, tenant, revision$"),
        ({"policy": 1}, r"^at\.policy: 1; allowed: text or a mapping$"),
        ({"host_budget": True}, r"^at\.host_budget: True; allowed: a whole number or text$"),
        ({"disk_path": 1}, r"^at\.disk_path: 1; allowed: text$"),
    ):
        with pytest.raises(StoreError, match=message):
            StoreSettings.read(given, "at.")
    with pytest.raises(PolicyError, match=r"^at\.policy: policy 'nope' is neither a file nor a preset"):
        StoreSettings.read({"policy": "nope"}).load_policy("at.")
    with pytest.raises(PolicyError, match=r"^at\.policy: "):
        StoreSettings.read({"policy": {1: 2}}).load_policy("at.")
    tier = r"no tier: give host_budget, or disk_budget and disk_path$"
    both = r"disk_budget and disk_path go together: give both, or neither$"
    for given, message in (
        ({}, tier),
        ({"host_budget": 0, "disk_path": "x"}, tier),
        ({"disk_budget": "1MiB"}, both),
        ({"host_budget": "1MiB", "disk_path": "x"}, both),
    ):
        with pytest.raises(StoreError, match=f"^at: {message}"):
            StoreSettings.read(given).open_store(place="at.")
        with pytest.raises(StoreError, match=f"^{message}"):
            StoreSettings.read(given).open_store()
    with pytest.raises(StoreError, match=r"^at\.disk_path: '/dev/null': no folder for a store "):
        StoreSettings.read({"disk_budget": "1MiB", "disk_path": "/dev/null"}).open_store(place="at.")
    with pytest.raises(StoreError, match=r"^at\.host_budget: 3 bytes hold nothing"):
        StoreSettings.read({"host_budget": 3}).open_store(place="at.")
    for path in ("", " ", "~nobody-of-this-name/kv"):
        with pytest.raises(StoreError, match=r"^at\.disk_path: '.*'.*; allowed: a folder$"):
            StoreSettings.read({"disk_budget": "1MiB", "disk_path": path}).open_store("rank0", place="at.")


def test_a_disk_path_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    StoreSettings(disk_budget="1MiB", disk_path="~/kv").open_store("rank0").close()
    assert (tmp_path / "kv" / "rank0" / "lock").exists()


def test_a_codec_whose_library_is_missing_is_refused_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    with pytest.raises(UnsupportedError, match=r"^at\.policy: 'nf4': nf4/.*: ModuleNotFoundError: .*; allowed: "):
        StoreSettings(policy="nf4").load_policy("at.")


def test_unforeseen_failures_are_counted_and_told_once(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no\nluck")

    chunks = ChunkStore(TieredStore(host_budget="1MiB"), codec_of(layers=1), {})
    with chunks.store:
        monkeypatch.setattr(chunks.codec, "encode", fail)
        keys = torch.zeros(1, 1, 128, 64)
        with pytest.warns(KVQuantWarning, match="^kvquant: chunks are not stored: RuntimeError: no luck$"):
            assert not chunks.put("a", keys, keys)
        assert not chunks.put("b", keys, keys)
        assert chunks.stats().refused == 2


@pytest.mark.parametrize(
    ("ask", "package", "served"),
    [
        (lambda: lmcache.KVQuantBackend, "lmcache", "0.5.6"),
        (lambda: lmcache.KVQuantAdapter, "lmcache", "0.5.6"),
        (lmcache.register, "lmcache", "0.5.6"),
        (lambda: lmcache.create_serde({}), "lmcache", "0.5.6"),
        (lambda: sglang.KVQuantStorage, "sglang", "0.5.23"),
    ],
)
def test_an_engine_that_is_missing_or_another_release_is_said_in_a_line(monkeypatch, ask, package, served):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    works = rf"; kvquant works with {package} {served}$".replace(".", r"\.")
    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UnsupportedError, match=f"^{package} is not installed{works}"):
        ask()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.0")
    with pytest.raises(UnsupportedError, match=rf"^{package} 0\.6\.0{works}"):
        ask()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{served}+cpu")
    require(package, served)
    for module in (lmcache, sglang):
        with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
            _ = module.Nothing


@pytest.mark.parametrize(
    ("layout", "shape", "order"),
    [("KV_2LTD", (2, 3, 5, 8), "sltd"), ("KV_2TD", (2, 5, 8), "std"), ("KV_T2D", (5, 2, 8), "tsd")],
)
def test_sides_of_lmcaches_layouts(layout, shape, order):
    chunk = torch.arange(torch.Size(shape).numel()).reshape(shape).float()
    keys, values = sides(chunk, layout, 2, 4)
    layers = 3 if "l" in order else 1
    assert keys.shape == values.shape == (layers, 2, 5, 4)
    for layer, head, token, dim in ((0, 0, 0, 0), (layers - 1, 1, 4, 3), (0, 1, 2, 0)):
        for side, found in enumerate((keys, values)):
            place = {"s": side, "l": layer, "t": token, "d": head * 4 + dim}
            assert found[layer, head, token, dim] == chunk[tuple(place[name] for name in order)]
    keys.zero_()
    assert chunk.flatten()[0] == 0  # they are views
    with pytest.raises(UnsupportedError, match="of width 8; allowed: 3 heads × 4 channels"):
        sides(chunk, layout, 3, 4)
    with pytest.raises(UnsupportedError, match=r"^chunk KV_MLA_FMT .*; allowed: both sides in KV_2LTD, "):
        sides(chunk, "KV_MLA_FMT", 2, 4)
