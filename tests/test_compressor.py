"""`BlockCompressor`: any shape, dtype and stride, the cache's own codes, and nothing damaged or foreign read."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvquant
from kvquant import BlockCompressor, BlockKey, CodecError, Dense, FormatError, KVQuantCache, PolicyError
from kvquant.attention import reference
from kvquant.blocks import _DTYPES, _PREFIX, _digest
from kvquant.codecs.fit import DTYPES
from kvquant.testing import relative_rms
from tests.models import small, tiny

BLOCK, SINKS, KEY = 32, 4, b"key"
NOISE = {"fp16": 0, "int8": 0.02, "int6": 0.05, "int5": 0.1, "int4": 0.2, "nf4": 0.2, "int3": 0.4, "int2": 0.7}
CODECS = [
    *NOISE,
    {"codec": "int4", "rotate": "hadamard"},
    {"codec": "nf4", "axis": "token"},
    {"codec": "int8", "axis": "token"},
]
LIMITS = settings(max_examples=60, deadline=None)


def of(key="int4", value="int4", **sizes):
    return BlockCompressor({"key": key, "value": value}, **{"block_tokens": BLOCK, "sink_tokens": SINKS, **sizes})


def noise(codec):
    return NOISE[codec if isinstance(codec, str) else codec["codec"]]


def states(heads=2, tokens=BLOCK, dim=16, value_dim=24, dtype=torch.float32, rows=()):
    return (torch.randn(*rows, heads, tokens, width).to(dtype) for width in (dim, value_dim))


def strided(x, how):
    """The same values in memory of another order."""
    if how == "by token":  # as a projection leaves them
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if how == "by channel":
        return x.mT.contiguous().mT
    if how == "apart":
        return torch.stack((x, torch.full_like(x, torch.nan)), dim=-2)[..., 0, :]
    return x


@st.composite
def cases(draw):
    key, value = draw(st.sampled_from(CODECS)), draw(st.sampled_from(CODECS))
    sizes = {
        name: draw(st.integers(1, most))
        for name, most in {"heads": 3, "tokens": 100, "dim": 40, "value_dim": 40}.items()
    }
    how = draw(st.sampled_from(["as it is", "by token", "by channel", "apart"]))
    return of(key, value), (key, value), sizes, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 80)), how


@LIMITS
@given(case=cases(), rows=st.integers(1, 3))
def test_what_goes_in_comes_back(case, rows):
    compressor, codecs, sizes, dtype, start, how = case
    given_states = list(states(**sizes, dtype=dtype, rows=(rows,)))
    before = [x.clone() for x in given_states]
    found = compressor.compress_rows(*(strided(x, how) for x in given_states), start)
    assert all(map(torch.equal, before, given_states))
    stop = start + sizes["tokens"]
    ends = [*range(start // BLOCK * BLOCK + BLOCK, stop, BLOCK), stop]
    for row, blocks in enumerate(found):
        spans = list(zip([start, *ends], ends, strict=False))
        assert [(block.first, block.tokens) for block in blocks] == [
            (first % BLOCK, end - first) for first, end in spans
        ]
        again = compressor.decompress(*blocks)
        for states_in, out, codec in zip(given_states, again, codecs, strict=True):
            mine = states_in[row]
            assert (out.shape, out.dtype) == (mine.shape, dtype)
            raw = max(0, SINKS - start)
            assert torch.equal(out[:, :raw], mine[:, :raw])
            if mine.numel() > 200:
                assert relative_rms(out, mine) <= noise(codec)
        one_by_one = zip(*(compressor.decompress(block) for block in blocks), strict=True)
        assert all(torch.equal(torch.cat(parts, 1), out) for parts, out in zip(one_by_one, again, strict=True))
        for number, (block, (first, end)) in enumerate(zip(blocks, spans, strict=True)):
            alone = compressor.compress(*(x[row, :, first - start : end - start] for x in given_states), first)
            data = block.to_bytes(KEY)
            assert alone.to_bytes(KEY) == data, number  # whatever is sealed with it, and in whatever memory it was
            assert compressor.from_bytes(data, KEY).to_bytes(KEY) == data


@LIMITS
@given(case=cases(), new=st.integers(1, 5))
def test_attention_reads_what_decompress_gives(case, new):
    compressor, _, sizes, dtype, start, _ = case
    heads, dim, value_dim = sizes["heads"], sizes["dim"], sizes["value_dim"]
    (blocks,) = compressor.compress_rows(*states(**sizes, dtype=dtype, rows=(1,)), start)
    newest = Dense(*states(**{**sizes, "tokens": new}, dtype=dtype), causal=True)
    query = torch.randn(1, 2 * heads, new, dim)
    output = kvquant.streamed_attention(query, [[*compressor.segments(blocks), newest]], value_dim)
    segments = [Dense(*compressor.decompress(*blocks)), newest]
    folded = query[0].reshape(heads, 2 * new, dim)
    expected, _ = reference.attend(folded, segments, value_dim, scale=dim**-0.5, news=new)
    assert relative_rms(output[0].reshape(expected.shape), expected) < 0.02


# --- the cache's own codes ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_codes_are_the_caches(codec, dtype):
    policy = small(codec, codec, block_tokens=BLOCK, recent_tokens=0)
    model = tiny()
    cache = KVQuantCache.for_model(model, policy)
    k, v = states(tokens=3 * BLOCK, dtype=dtype, rows=(2,))
    for layer in range(len(cache.layers)):
        cache.update(k, v, layer)
    for row, blocks in enumerate(BlockCompressor(policy).compress_rows(k, v)):
        for number, block in enumerate(blocks):
            assert block.to_bytes(KEY) == cache.block(3, row, number).to_bytes(KEY)


@pytest.mark.parametrize("kept", [2, 10, 40])
def test_codes_are_those_of_a_cache_that_was_cropped(kept):
    policy = small(block_tokens=BLOCK, recent_tokens=0)
    cache = KVQuantCache.for_model(tiny(), policy)
    before, after = list(states(tokens=2 * BLOCK, rows=(1,))), list(states(tokens=3 * BLOCK - kept, rows=(1,)))
    for layer in range(len(cache.layers)):
        cache.update(*before, layer)
    cache.crop(kept - 2 * BLOCK)
    for layer in range(len(cache.layers)):
        cache.update(*after, layer)
    compressor = BlockCompressor(policy)
    (whole,) = compressor.compress_rows(*before)
    (rest,) = compressor.compress_rows(*after, kept)
    cut = kept // BLOCK  # the number of the block that was cut in two
    for number, block in enumerate(rest, cut + 1):
        assert block.to_bytes(KEY) == cache.block(1, 0, number).to_bytes(KEY)
    held = cache.block(1, 0, cut)
    assert held.tokens == kept % BLOCK
    assert held.key.fields["codes"].equal(whole[cut].key.fields["codes"])
    for which, side in enumerate(compressor.decompress(*whole[:cut], held, *rest)):
        assert torch.equal(side, (cache.layers[1].keys, cache.layers[1].values)[which][0])


# --- policies ---


def test_a_policy_serves_all_layers_or_each():
    policy = small("int8", "int4", layers={"0": {"key": "fp16", "value": "int2"}})
    first, *others = BlockCompressor.for_layers(policy, 3)
    assert [first.policy.key.name, first.policy.value.name] == ["fp16", "int2/token/g64/none"]
    assert {other.policy.key.name for other in others} == {"int8/channel/g16/none"}
    assert repr(others[0]) == repr(BlockCompressor(small("int8", "int4")))
    assert BlockCompressor(others[0].policy, block_tokens=16).block_tokens == 16
    assert BlockCompressor("int4").sink_tokens == 4
    assert BlockCompressor("int4", sink_tokens=0).sink_tokens == 0


@pytest.mark.parametrize(
    ("given_policy", "sizes", "said"),
    [
        ("nonsense", {}, "neither a file nor a preset"),
        (
            small(layers={"0": {"key": "int8", "value": "int8"}}),
            {},
            "allowed: one that has not, or BlockCompressor.for_l",
        ),
        ({"key": "int4"}, {}, "policy.value: missing"),
        ({"key": "int7", "value": "int4"}, {}, "policy.key.codec: 'int7' is not a codec"),
        (7, {}, "policy: 7 is not a layer's policy"),
        ({"key": "int4", "value": "int4"}, {"block_tokens": 12}, "block_tokens: Input should be a multiple of 8"),
        ({"key": "int4", "value": "int4"}, {"sink_tokens": 129}, "sink_tokens: 129 is more than block_tokens 128"),
    ],
)
def test_policies_that_will_not_do(given_policy, sizes, said):
    with pytest.raises(PolicyError, match=said) as caught:
        BlockCompressor(given_policy, **sizes)
    assert "\n" not in str(caught.value)


# --- bad input ---


@pytest.mark.parametrize(
    ("k", "v", "start", "said"),
    [
        (
            torch.zeros(2, 33, 8),
            torch.zeros(2, 33, 8),
            0,
            "k: 33 tokens from 0 on .* allowed: up to 32, or compress_rows",
        ),
        (torch.zeros(2, 9, 8), torch.zeros(2, 9, 8), 24, "allowed: up to 8"),
        (torch.zeros(2, 0, 8), torch.zeros(2, 0, 8), 0, r"k: torch.float32 \(2, 0, 8\); allowed"),
        (torch.zeros(2, 8), torch.zeros(2, 8), 0, "allowed: floats .heads, tokens, dim."),
        (torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8, 8), 0, "allowed: floats .heads, tokens, dim."),
        (torch.zeros(2, 8, 8), torch.zeros(2, 8, 8, dtype=torch.int8), 0, "v: torch.int8"),
        (torch.zeros(2, 8, 8), torch.zeros(2, 8, 8, dtype=torch.float8_e5m2), 0, "v: torch.float8"),
        (torch.zeros(2, 8, 8), torch.zeros(3, 8, 8), 0, "all else equal"),
        (torch.zeros(2, 8, 8), torch.zeros(2, 8, 8, device="meta"), 0, "all else equal"),
        (torch.zeros(2, 8, 8), [1, 2], 0, r"v: \[1, 2\]; allowed"),
        (torch.zeros(2, 8, 8), torch.zeros(2, 8, 8), -1, "start: -1"),
        (torch.zeros(2, 8, 8), torch.zeros(2, 8, 8), 1.0, "start: 1.0"),
    ],
)
def test_tokens_that_will_not_do(k, v, start, said):
    with pytest.raises(CodecError, match=said) as caught:
        of().compress(k, v, start)
    assert "\n" not in str(caught.value)


def test_blocks_that_will_not_do():
    block, wider = (of().compress(*states(dim=dim)) for dim in (16, 32))
    for compressor in (of("int8"), of(value="int2"), of(block_tokens=64), BlockCompressor("int4")):
        for read in (compressor.decompress, lambda block, to=compressor: to.segments([block])):
            with pytest.raises(CodecError, match="allowed: "):
                read(block)
        with pytest.raises(FormatError, match="allowed: "):
            compressor.from_bytes(block.to_bytes(KEY), KEY)
    for blocks, said in (
        ((), "no blocks"),
        ((block, wider), "several shapes"),
        ((1,), "block: 1; allowed: a KVBlock"),
    ):
        with pytest.raises(CodecError, match=said):
            of().decompress(*blocks)
    with pytest.raises(CodecError, match="key: 'key'; allowed: bytes or a BlockKey"):
        of().to_bytes(block, "key")


def test_keys():
    block = of().compress(*states())
    for key in (b"", b"key", BlockKey(1, 2, 3)):
        data = of().to_bytes(block, key)
        assert of().from_bytes(memoryview(data), key).nbytes == block.nbytes
        with pytest.raises(FormatError):
            of().from_bytes(data, b"another")


DATA = of().compress(*states()).to_bytes(KEY)
HEAD = _PREFIX.unpack(DATA[: _PREFIX.size])[2]


@LIMITS
@given(position=st.integers(0, len(DATA) - 1), bit=st.integers(0, 7), cut=st.integers(0, len(DATA)))
def test_damaged_bytes_are_refused(position, bit, cut):
    damaged = bytearray(DATA)
    damaged[position] ^= 1 << bit
    for data in (bytes(damaged), DATA[:cut] + b"\0" * (cut == len(DATA))):
        with pytest.raises(FormatError):
            of().from_bytes(data, KEY)


def places(tree, path=()):
    """Where in a header something stands."""
    yield path
    for name, inner in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places(inner, (*path, name))


HEADER = json.loads(DATA[_PREFIX.size : _PREFIX.size + HEAD])
NUMBERS = st.integers(-2, 70) | st.sampled_from([2**31, 2**63, 10**30, float("inf"), float("nan"), 0.5])
WORDS = st.sampled_from(["u8", "i8", "f16", "bf16", "f32", "f64", "int8/channel/g32/none", "fp16", "codes", "../x"])
ANYTHING = st.recursive(
    NUMBERS | WORDS | st.none() | st.booleans(), lambda inner: st.lists(inner, max_size=4), max_leaves=5
)


def forged(place, given_):
    """The block with one thing changed in its header, a checksum that fits, and as many bytes as that asks for."""
    header = json.loads(json.dumps(HEADER))
    target = header
    for name in place[:-1]:
        target = target[name]
    target[place[-1]] = given_
    head, payload = json.dumps(header).encode(), DATA[_PREFIX.size + HEAD :]
    with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, OverflowError):
        tensors = [
            field for role in ("key", "value") for field in (*header[role]["fields"].values(), header[role]["sinks"])
        ]
        size = sum(_DTYPES[tensor[0]].itemsize * math.prod(map(int, tensor[1])) for tensor in tensors if tensor)
        if 0 <= size < 1 << 20:
            payload = payload[:size].ljust(size, b"\7")
    magic, version, _, _ = _PREFIX.unpack(DATA[: _PREFIX.size])
    return _PREFIX.pack(magic, version, len(head), _digest(KEY, head, payload)) + head + payload


@settings(max_examples=500, deadline=None)
@given(place=st.sampled_from([*places(HEADER)][1:]), given_=ANYTHING)
def test_forged_bytes_are_refused_or_harmless(place, given_):
    """A checksum keeps accidents out, not people: whoever makes one that fits has no other memory read."""
    try:
        block = of().from_bytes(forged(place, given_), KEY)
    except FormatError:
        return
    k, v = of().decompress(block)
    assert (k.shape[1], v.shape[1]) == (block.tokens, block.tokens)
    output = kvquant.streamed_attention(torch.randn(1, 2, 1, 16), [of().segments([block])], 24)
    assert output.shape == (1, 2, 1, 24)


@pytest.mark.parametrize(
    ("place", "given_"),
    [
        ("first", float("inf")),
        ("first", -1),
        ("first", 1),
        ("tokens", 0),
        ("tokens", 33),
        ("key/codec", "int8/channel/g32/none"),
        ("key/codec", "nothing"),
        ("key/dtype", "u8"),
        ("key/dtype", "f16"),  # whose sinks are of another
        ("key/shape", [2, 32, 1 << 40]),
        ("key/shape", [2, 64, 16]),
        ("key/shape", [1, 32, 16]),
        ("key/shape", [0, 32, 16]),
        ("key/shape", [-2, 32, 16]),
        ("key/fields/codes", ["u8", [2, 8, 32]]),
        ("key/fields/codes", ["i8", [2, 32, 8]]),
        ("key/fields/codes", ["u8", [2, 32, 7]]),
        ("key/fields/codes", ["u8", [512]]),
        ("key/fields/scale", ["bf16", [2, 1, 16]]),
        ("key/fields/scale", ["f64", [2, 1, 16]]),
        ("key/fields/scale", ["f16", [2, 0, 16]]),
        ("key/fields/more", ["u8", [1]]),
        ("key/fields", {"codes": ["u8", [2, 32, 8]]}),
        ("key/sinks", ["f32", [4, 2, 16]]),
        ("key/sinks", ["f32", [2, 5, 16]]),
        ("key/sinks", ["f32", [2, 0, 16]]),
        ("key/sinks", ["f32", [2, 33, 16]]),
        ("key/sinks", ["f16", [2, 4, 16]]),
        ("key/sinks", ["f32", [128]]),
    ],
)
def test_forgeries(place, given_):
    with pytest.raises(FormatError, match="^[^\n]+$"):
        of().from_bytes(forged(place.split("/"), given_), KEY)


# --- where it is used ---


def test_blocks_are_copies_that_nothing_else_keeps_alive():
    for codec in ("fp16", "int4"):
        k, v = states(tokens=4 * BLOCK, rows=(2,))
        blocks = [block for row in of(codec, codec).compress_rows(k, v) for block in row]
        tensors = [x for block in blocks for part in (block.key, block.value) for x in part.fields.values()]
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in tensors)
        assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)
        assert blocks[0].nbytes == sum(part.nbytes for part in (blocks[0].key, blocks[0].value))
        data = [block.to_bytes(KEY) for block in blocks]
        k.zero_()
        v.zero_()
        assert [block.to_bytes(KEY) for block in blocks] == data


@pytest.mark.parametrize("dtype", DTYPES)
def test_modes_of_torch_change_nothing(dtype):
    k, v = states(tokens=20, dtype=dtype)
    block = of().compress(k, v)
    expected = of().decompress(block)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with mode:
            assert of().compress(k, v).to_bytes(KEY) == block.to_bytes(KEY)
            assert all(map(torch.equal, of().decompress(block), expected))
    with torch.inference_mode():
        made = of().compress(k, v)
    assert all(map(torch.equal, of().decompress(made), expected))
    learning = of().compress(k.requires_grad_(), v.requires_grad_())
    assert learning.to_bytes(KEY) == block.to_bytes(KEY)
    assert not any(x.requires_grad for x in of().decompress(learning))


def test_ranges_beyond_float16():
    k, v = states(tokens=3 * BLOCK)
    k[:, BLOCK : 2 * BLOCK] *= 1e6
    (blocks,) = of().compress_rows(k[None], v[None])
    for whole, x in zip(of().decompress(*blocks), (k, v), strict=True):
        assert relative_rms(whole, x) < 0.2
    assert all(
        map(torch.equal, of().decompress(of().from_bytes(blocks[1].to_bytes(KEY), KEY)), of().decompress(blocks[1]))
    )
    mixed = [of().compress(k[:, first : first + BLOCK], v[:, first : first + BLOCK], first) for first in (0, 32, 64)]
    assert {block.key.fields["scale"].dtype for block in mixed} == {torch.float16, torch.float32}
    assert all(map(torch.equal, of().decompress(*mixed), of().decompress(*blocks)))


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_blocks_are_where_tokens_were(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    block = of().compress(*(x.to(device) for x in states()))
    tensors = [block.key.sinks, *block.key.fields.values(), *of().decompress(block)]
    assert {x.device.type for x in tensors} == {device}
    moved = of().from_bytes(DATA, KEY, device)
    assert {x.device.type for x in (moved.value.sinks, *moved.value.fields.values())} == {device}


def test_transformers_is_not_needed():
    code = (
        "import sys, torch, kvquant; c = kvquant.BlockCompressor({'key': 'int4', 'value': 'int4'});"
        "c.decompress(c.compress(torch.ones(1, 9, 8), torch.ones(1, 9, 8))); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_a_start_far_on_takes_no_memory():
    k, v = states(tokens=4)
    near, far = (of().compress(k, v, start).to_bytes(KEY) for start in (2 * BLOCK + 3, 2**62 * BLOCK + 3))
    assert near == far
    assert of().compress(k, v, BLOCK).to_bytes(KEY) == of().compress(k, v, 2 * BLOCK).to_bytes(KEY)


@pytest.mark.parametrize("data", ["abc", None, [1], torch.zeros(3)])
def test_what_is_no_bytes_is_no_block(data):
    with pytest.raises(FormatError, match="^block: .*; allowed: bytes$"):
        of().from_bytes(data, KEY)


def a(*shape):
    return torch.randn(shape)


@pytest.mark.parametrize(
    ("query", "newest"),
    [
        (a(1, 4, 1, 16), Dense(a(2, 50, 16), a(2, 2, 24))),  # more keys than values
        (a(1, 4, 1, 16), Dense(a(2, 2, 16), a(2, 3, 24))),
        (a(1, 4, 1, 16), Dense(a(3, 2, 16), a(3, 2, 24))),  # other heads than those of blocks
        (a(1, 4, 1, 16), Dense(a(1, 2, 16), a(1, 2, 24))),
        (a(1, 4, 1, 16), Dense(a(2, 2, 8), a(2, 2, 24))),
        (a(1, 4, 1, 16), Dense(a(2, 2, 16), a(2, 2, 16))),
        (a(1, 4, 1, 16), Dense(a(2, 0, 16), a(2, 0, 24))),
        (a(1, 4, 1, 16), Dense(a(2, 16), a(2, 24))),
        (a(1, 4, 1, 16), Dense(a(2, 2, 16).long(), a(2, 2, 24).long())),
        (a(1, 4, 1, 16), None),
        (a(1, 4, 1, 8), Dense(a(2, 2, 16), a(2, 2, 24))),  # query of another dim
        (a(1, 4, 1, 4096), Dense(a(2, 2, 16), a(2, 2, 24))),
        (a(1, 3, 1, 16), Dense(a(2, 2, 16), a(2, 2, 24))),  # heads that do not divide
        (a(2, 4, 1, 16), Dense(a(2, 2, 16), a(2, 2, 24))),  # fewer rows of segments
        (a(4, 1, 16), Dense(a(2, 2, 16), a(2, 2, 24))),
        (a(1, 4, 0, 16), Dense(a(2, 2, 16), a(2, 2, 24))),
        (a(1, 4, 1, 16).long(), Dense(a(2, 2, 16), a(2, 2, 24))),
        ("query", Dense(a(2, 2, 16), a(2, 2, 24))),
    ],
)
def test_attention_to_what_does_not_fit_is_refused(query, newest):
    k, v = states()
    segments = of().segments([of().compress(k[:, :BLOCK], v[:, :BLOCK])])
    with pytest.raises(CodecError, match="^[^\n]+$"):
        kvquant.streamed_attention(query, [[*segments, newest]])


def test_the_dim_of_values_is_that_of_the_segments():
    k, v = states()
    block = of().compress(k[:, :BLOCK], v[:, :BLOCK])
    query, segments = a(1, 2, 1, k.shape[2]), [of().segments([block])]
    output = kvquant.streamed_attention(query, segments)
    assert output.shape == (1, 2, 1, v.shape[2]) != query.shape
    assert torch.equal(output, kvquant.streamed_attention(query, segments, v.shape[2]))
    with pytest.raises(CodecError, match=f"^dim: 7; allowed: {v.shape[2]}, "):
        kvquant.streamed_attention(query, segments, 7)
    for nothing in ([], [[]]):
        with pytest.raises(CodecError, match="^segments of "):
            kvquant.streamed_attention(query, nothing)
