"""How codecs are named and set: what a policy may say of one, and the complaint about what it may not."""

from __future__ import annotations

import re

import pytest

from kvquant.codecs import Raw, codec_names, get_codec, register_codec, unregister_codec
from kvquant.errors import CodecError


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("int7", "codec: 'int7' is not a codec; allowed: fp16, int8, int6, int5, int4, int3, int2, nf4"),
        ("int4 ", "codec: 'int4 ' is not a codec"),
        ("int4/channel", "codec: 'int4/channel' is not a codec"),
        (4, "codec: 4 is not a codec"),
        (None, "codec: None is not a codec"),
        ({}, "codec: None is not a codec"),
        ({"codec": ["int4"]}, "codec: ['int4'] is not a codec"),
        ({"codec": "int4", "bits": 3}, "bits: unknown option of int4; allowed: axis, group, rotate"),
        ({"codec": "int4", "axis": "tensor"}, "axis: 'tensor'; allowed: channel, token"),
        ({"codec": "int4", "group": 0}, "group: 0; allowed: an integer from 8"),
        ({"codec": "int4", "group": 1}, "group: 1; allowed"),
        ({"codec": "int4", "group": True}, "group: True; allowed"),
        ({"codec": "int4", "group": 48}, "group: 48 does not divide block_tokens 128"),
        ({"codec": "int4", "rotate": "yes"}, "rotate: 'yes'; allowed: none, hadamard"),
        ({"codec": "fp16", "group": 64}, "group: fp16 stores values as they are and takes no options"),
    ],
)
def test_bad_settings_are_named(spec, complaint):
    with pytest.raises(CodecError) as caught:
        get_codec(spec)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_role_picks_the_axis_and_must_be_known():
    assert get_codec("int4", "key").axis == "channel"
    assert get_codec("int4", "value").axis == "token"
    with pytest.raises(CodecError, match="role: 'both'"):
        get_codec("int4", "both")


def test_registering_a_codec():
    register_codec("mine", lambda options, role, block_tokens: Raw(name="mine"))
    try:
        assert "mine" in codec_names()
        assert get_codec("mine").name == "mine"
        with pytest.raises(CodecError, match="registered already"):
            register_codec("mine", lambda options, role, block_tokens: Raw())
    finally:
        unregister_codec("mine")
    assert "mine" not in codec_names()


@pytest.mark.parametrize(
    ("spec", "block_tokens", "complaint"),
    [
        ({"codec": "nf4", "group": 64.0}, 128, "group: 64.0; allowed: 32, 64, 128"),
        ({"codec": "dynamic8", "group": True}, 128, "group: True; allowed"),
        ("int4/token/g\u00b2/none", 128, "is not a codec"),
        ("int4/token/g" + "9" * 5000 + "/none", 128, "is not a codec"),
        ("int4", 0, "block_tokens: 0; allowed: a positive integer"),
        ("int4", 64.0, "block_tokens: 64.0; allowed"),
    ],
)
def test_what_only_looks_like_a_number_is_refused(spec, block_tokens, complaint):
    with pytest.raises(CodecError, match=re.escape(complaint)) as caught:
        get_codec(spec, "key", block_tokens)
    assert len(str(caught.value)) < 300
