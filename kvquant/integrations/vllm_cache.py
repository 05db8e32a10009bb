"""vLLM's cache as keys and values: which of its layers can be served, and how their pages are read and written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_offload.base import CanonicalKVCaches

from ..errors import UnsupportedError, shown
from .blockwise import LayerShape
from .pages import PageLayout


class Layers:
    """The layers' pages in the model's order, with the ``shapes`` and ``dtype`` of what they hold.

    Raises `UnsupportedError` for layers that are not plain keys and values in the model's dtype.
    """

    def __init__(self, vllm_config: Any, names: Sequence[str], caches: CanonicalKVCaches, tokens: int) -> None:
        numbers = [extract_layer_index(name) for name in names]
        draft = " with a draft model's" if vllm_config.speculative_config is not None else ""
        if draft or sorted(numbers) != list(range(len(names))):
            raise UnsupportedError(
                f"cache layers {shown(sorted(numbers))}{draft}; allowed: one in every layer, and no draft model"
            )
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self.tokens = tokens
        self.pages: list[Tensor] = []
        self.layouts: list[PageLayout] = []
        self.shapes: list[LayerShape] = []
        refs = caches.group_data_refs[0]
        if len(refs) != len(names):
            raise UnsupportedError(f"{len(refs)} caches of {len(names)} layers; allowed: one a layer")
        learned: dict[tuple[object, ...], PageLayout] = {}
        for _, name, ref in sorted(zip(numbers, names, refs, strict=True), key=lambda each: each[0]):
            module = vllm_config.compilation_config.static_forward_context[name]
            self._check(name, module)
            pages = caches.tensors[ref.tensor_idx].tensor.view(self.dtype)  # [blocks, values]
            kind = (type(module.impl), tuple(module.kv_cache.shape), module.kv_cache.stride(), pages.shape[1])
            if kind not in learned:
                learned[kind] = _learned(name, module, pages, tokens)
            self.pages.append(pages)
            self.layouts.append(learned[kind])
            self.shapes.append(LayerShape(module.num_kv_heads, module.head_size, module.head_size))

    def read(self, layer: int, ids: Tensor, per: int) -> tuple[Tensor, Tensor]:
        """Copies of keys and values of pages, each ``per`` of them as one: ``[ids / per, heads, tokens, dim]``."""
        pages = self.pages[layer]
        keys, values = self.layouts[layer].read(pages, ids.to(pages.device))
        return _joined(keys, per), _joined(values, per)

    def write(self, layer: int, states: tuple[Tensor, Tensor], ids: Tensor, skip: int) -> None:
        """Write keys and values ``[heads, tokens, dim]`` to pages ``ids``, but for the first ``skip`` pages' worth."""
        pages = self.pages[layer]
        first, last = skip * self.tokens, (skip + len(ids)) * self.tokens
        parts = [
            side[:, first:last].reshape(len(side), len(ids), self.tokens, -1).transpose(0, 1).to(pages.device)
            for side in states
        ]
        self.layouts[layer].write(pages, ids.to(pages.device), *parts)

    def _check(self, name: str, module: Any) -> None:
        if not isinstance(module, Attention) or not hasattr(module.impl, "do_kv_cache_update"):
            raise UnsupportedError(f"{name}: {type(module).__name__}; allowed: attention that caches keys and values")
        backend = module.attn_backend.get_name()
        if module.kv_cache.dtype != self.dtype or module.head_size_v != module.head_size:
            raise UnsupportedError(
                f"{name}: {backend} caches {module.kv_cache.dtype}, heads of {module.head_size} and "
                f"{module.head_size_v}; allowed: the model's dtype, {self.dtype}, and keys as wide as values"
            )


def _learned(name: str, module: Any, pages: Tensor, tokens: int) -> PageLayout:
    """The layout of a layer's pages, from what its backend writes to one."""
    kernel_blocks, odd = divmod(len(module.kv_cache), len(pages))  # kernels may see blocks smaller than vLLM's
    if odd or kernel_blocks < 1:
        raise UnsupportedError(f"{name}: {len(module.kv_cache)} blocks in {len(pages)} pages; allowed: whole ones")
    slots = torch.arange(tokens, dtype=torch.int64, device=pages.device)
    shape, strides = (kernel_blocks, *module.kv_cache.shape[1:]), module.kv_cache.stride()

    def write(keys: Tensor, values: Tensor, page: Tensor) -> None:
        rows = (side.transpose(0, 1).contiguous() for side in (keys, values))  # [tokens, heads, dim]
        module.impl.do_kv_cache_update(module, *rows, page.as_strided(shape, strides), slots)

    try:
        return PageLayout.learn(
            write, pages.shape[1], (module.num_kv_heads, tokens, module.head_size), pages.dtype, pages.device
        )
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {module.attn_backend.get_name()} has {error}") from None


def _joined(states: Tensor, per: int) -> Tensor:
    """Pages ``[pages, heads, tokens, dim]``, each ``per`` as one: ``[pages / per, heads, per * tokens, dim]``."""
    pages, heads, tokens, dim = states.shape
    return states.view(-1, per, heads, tokens, dim).transpose(1, 2).reshape(pages // per, heads, per * tokens, dim)
