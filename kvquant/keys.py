"""Content keys: names for blocks that hold the same tokens under the same everything.

A block's key chains BLAKE2b over the token ids up to its end, starting from a digest of all that decides its
bytes: the model's weights and settings, adapter, policy, dtype and tenant. Change one and every key misses.
Equal keys mean equal bytes but for rounding: the same prompt fed in other chunks may differ in its last bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Settings that say where a model comes from, or how it is driven.
_IDLE = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "auto_map"}
SAMPLES = 4096  # values hashed per tensor unless a full fingerprint is asked for


@dataclass(frozen=True)
class Identity:
    """Everything besides the tokens that decides a block's bytes."""

    model: str  # model_fingerprint
    policy: str  # PrecisionPolicy.fingerprint
    dtype: str
    settings: str  # the text decoder's config as JSON, RoPE among it
    adapter: str = ""
    tenant: str = ""

    @classmethod
    def of(
        cls, model: nn.Module, config: Any, policy: str, adapter: str = "", tenant: str = "", full: bool = False
    ) -> Identity:
        """That of what ``model`` caches under ``policy`` (a fingerprint); ``config`` is its text decoder's.

        ``full`` reads every weight, see `model_fingerprint`.
        """
        return cls(
            model=model_fingerprint(model, full),
            policy=policy,
            dtype=str(model.dtype),
            settings=settings_of(config),
            adapter=adapter,
            tenant=tenant,
        )

    def digest(self) -> bytes:
        """32 bytes; the seed of every chain."""
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=32).digest()


def settings_of(config: Any) -> str:
    """What of a config may decide what its model computes, as JSON."""
    settings = {name: value for name, value in config.to_dict().items() if name not in _IDLE}
    return json.dumps(settings, sort_keys=True, default=str)


def content_keys(identity: Identity, ids: Sequence[int] | Tensor, block_tokens: int) -> list[bytes]:
    """32-byte keys of the whole blocks of a sequence that starts with ``ids``."""
    tokens = torch.as_tensor(ids, dtype=torch.int64).cpu().contiguous().numpy()
    link, keys = identity.digest(), []
    for first in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = tokens[first : first + block_tokens].astype("<i8").tobytes()
        link = hashlib.blake2b(link + block, digest_size=32).digest()
        keys.append(link)
    return keys


def model_fingerprint(model: nn.Module, full: bool = False) -> str:
    """Hex digest over name, shape, dtype and evenly spaced values of every parameter and buffer.

    ``full=True`` hashes every byte. Tensors on ``meta`` count by name, shape and dtype alone.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        if tensor.is_meta or not tensor.numel():
            continue
        flat = tensor.detach().reshape(-1)
        if not full and flat.numel() > SAMPLES:
            picks = torch.linspace(0, flat.numel() - 1, SAMPLES, dtype=torch.float64).long()
            flat = flat[picks.to(flat.device)]
        digest.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
