"""The uncompressed cache that everything is compared with.

It takes its memory once, for as many tokens as are to come, and a copy of it shares what it holds already.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def exact_cache(model: Any, tokens: int) -> DynamicCache:
    """An empty cache of full precision for at most ``tokens`` tokens of each row."""
    cache = DynamicCache(config=model.config)
    cache.layers = [_Buffered(tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def branch(exact: DynamicCache) -> DynamicCache:
    """A copy that grows by itself, while what the cache holds now is kept once."""
    twin = copy.copy(exact)
    twin.layers = [
        _Branch(layer) if isinstance(layer, _Buffered) and layer.get_seq_length() else copy.deepcopy(layer)
        for layer in exact.layers
    ]
    return twin


def rewound(exact: DynamicCache, tokens: int) -> DynamicCache:
    """A copy that holds only the first ``tokens`` where layers grow, and writes over what follows them there.

    So of several such copies one is good at a time. Layers of other kinds (windows, …) are copied as they are.
    """
    twin = copy.copy(exact)
    twin.layers = [
        layer.rewound(tokens) if isinstance(layer, _Buffered) else copy.deepcopy(layer) for layer in exact.layers
    ]
    return twin


class _Buffered(DynamicLayer):  # type: ignore[misc]  # untyped there
    """A growing layer that writes into memory it has: appending copies nothing, and leaves no holes behind."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self.buffers = [
            states.new_empty((*states.shape[:2], self.capacity, states.shape[3]))
            for states in (key_states, value_states)
        ]
        self.keys, self.values = (buffer[:, :, :0] for buffer in self.buffers)
        self.is_initialized = True

    def rewound(self, tokens: int) -> _Buffered:
        """The same memory, of which only the first ``tokens`` are held."""
        twin = copy.copy(self)
        if self.is_initialized:
            twin.keys, twin.values = (buffer[:, :, :tokens] for buffer in self.buffers)
        return twin

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        stop = start + key_states.shape[2]
        if stop > self.capacity:
            raise ValueError(f"{stop} tokens in an exact cache for {self.capacity}")
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = states
        self.keys, self.values = (buffer[:, :, :stop] for buffer in self.buffers)
        return self.keys, self.values


class _Branch(DynamicLayer):  # type: ignore[misc]
    """What follows the tokens that another layer held when this one was made."""

    def __init__(self, trunk: DynamicLayer) -> None:
        super().__init__()
        self.device = trunk.device
        self.trunk = trunk.keys, trunk.values
        self.keys, self.values = (states[:, :, :0] for states in self.trunk)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = super().update(key_states, value_states)
        keys, values = (
            torch.cat((states, own), dim=2) for states, own in zip(self.trunk, (self.keys, self.values), strict=True)
        )
        return keys, values

    def get_seq_length(self) -> int:
        return int(self.trunk[0].shape[2] + self.keys.shape[2])
