"""Codecs: how a block of keys or values becomes bytes. One file a method; `base` has the protocol."""

from __future__ import annotations

from functools import partial

from .affine import BITS, Affine, make_affine
from .base import Codec, Fields, Layout, codec_names, get_codec, register_codec, unregister_codec
from .bnb import BitsAndBytes, make_bnb
from .raw import Raw, make_raw

register_codec("fp16", make_raw)
for _bits in BITS:
    register_codec(f"int{_bits}", partial(make_affine, _bits))
for _format in ("nf4", "fp4", "dynamic8"):
    register_codec(_format, partial(make_bnb, _format))

__all__ = [
    "Affine",
    "BitsAndBytes",
    "Codec",
    "Fields",
    "Layout",
    "Raw",
    "codec_names",
    "get_codec",
    "register_codec",
    "unregister_codec",
]
