"""Mixed-precision KV-cache compression for long-context inference.

    import kvquant
    cache = kvquant.KVQuantCache.for_model(model, "int4")
    out = model.generate(**inputs, cache=cache)
    print(cache.stats())

Names resolve on first use, so importing the package loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention.streamed import streamed_attention
    from .blocks import BlockKey, CompressedTensor, KVBlock
    from .cache.hf import KVQuantCache
    from .cache.hooks import disable, enable
    from .codecs import Codec, get_codec, register_codec
    from .compressor import BlockCompressor
    from .errors import (
        BudgetError,
        CacheStateError,
        CodecError,
        FormatError,
        KVQuantError,
        KVQuantWarning,
        PolicyError,
        StoreError,
        StoreFullError,
        UnsupportedError,
    )
    from .kernels import Dense
    from .keys import model_fingerprint
    from .policy import LayerPolicy, PrecisionPolicy, preset_names, tuned_names
    from .store.base import BlockStore
    from .store.disk import DiskStore
    from .store.tiered import TieredStore
    from .tuner.candidates import Candidates
    from .tuner.sensitivity import Sensitivity
    from .tuner.tune import tune_policy

__version__ = "0.1.0"

_HOME = {
    "BlockCompressor": "compressor",
    "BlockKey": "blocks",
    "BlockStore": "store.base",
    "BudgetError": "errors",
    "CacheStateError": "errors",
    "Candidates": "tuner.candidates",
    "Codec": "codecs",
    "CodecError": "errors",
    "CompressedTensor": "blocks",
    "Dense": "kernels",
    "DiskStore": "store.disk",
    "FormatError": "errors",
    "KVBlock": "blocks",
    "KVQuantCache": "cache.hf",
    "KVQuantError": "errors",
    "KVQuantWarning": "errors",
    "LayerPolicy": "policy",
    "PolicyError": "errors",
    "PrecisionPolicy": "policy",
    "Sensitivity": "tuner.sensitivity",
    "StoreError": "errors",
    "StoreFullError": "errors",
    "TieredStore": "store.tiered",
    "UnsupportedError": "errors",
    "disable": "cache.hooks",
    "enable": "cache.hooks",
    "get_codec": "codecs",
    "model_fingerprint": "keys",
    "preset_names": "policy",
    "register_codec": "codecs",
    "streamed_attention": "attention.streamed",
    "tune_policy": "tuner.tune",
    "tuned_names": "policy",
}

__all__ = [
    "BlockCompressor",
    "BlockKey",
    "BlockStore",
    "BudgetError",
    "CacheStateError",
    "Candidates",
    "Codec",
    "CodecError",
    "CompressedTensor",
    "Dense",
    "DiskStore",
    "FormatError",
    "KVBlock",
    "KVQuantCache",
    "KVQuantError",
    "KVQuantWarning",
    "LayerPolicy",
    "PolicyError",
    "PrecisionPolicy",
    "Sensitivity",
    "StoreError",
    "StoreFullError",
    "TieredStore",
    "UnsupportedError",
    "disable",
    "enable",
    "get_codec",
    "model_fingerprint",
    "preset_names",
    "register_codec",
    "streamed_attention",
    "tune_policy",
    "tuned_names",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
