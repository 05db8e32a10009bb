"""One compressed layer as transformers sees it."""

from __future__ import annotations

from functools import partial
from typing import Any, Self

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..errors import UnsupportedError
from .calls import Calls
from .held import decoded
from .layer import Layer
from .offload import Offload
from .streaming import HeldStates, Segments, Watch


class KVQuantLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """A `Layer`, and the calls that reach it."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, index: int, calls: Calls, held: Layer, watch: Watch, streams: bool) -> None:
        """``watch`` of all layers; ``streams`` is False where the model's attention needs what is held decoded."""
        self.index = index
        self.watch = watch
        self.segments = Segments(held, watch) if streams else None
        self.calls = calls
        self.held = held
        calls.taken.setdefault(index, 0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the first `update` does."""

    @property
    def columns(self) -> int:
        """Columns held, padding included."""
        return self.calls.columns(self.index)

    @property
    def is_initialized(self) -> bool:
        """Whether the layer holds anything."""
        return self.columns > 0

    @property
    def keys(self) -> Tensor | None:
        """All keys decoded, ``[rows, heads, columns, dim]``; for inspection."""
        return self._dense(0)

    @property
    def values(self) -> Tensor | None:
        """All values decoded, like `keys`."""
        return self._dense(1)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``[lines, heads, new, dim]`` and return all columns, history decoded, new ones as given."""
        positions = (kwargs.get("kwargs") or {}).get("position_ids")  # the arguments of the model's attention
        self.held.key.check(key_states)
        self.held.value.check(value_states)
        call = self.calls.take(self.index, key_states.shape[0], key_states.shape[2], positions)
        keys, values = self.held.append(key_states, value_states, call)
        if self.segments is not None and self.calls.streamed and (call.past or call.packed):
            if not self.calls.weights:
                return HeldStates(keys, self.segments), HeldStates(values, self.segments)
            for _ in (keys, values):
                self.watch.decoded("attention weights are wanted (output_attentions)")
        elif self.calls.streamed is not None and call.past:
            self.watch.fallbacks += 2  # of such a model at every step, which is no news: see `hooks.why_decoded`
        dense = decoded(keys, values)
        return dense[0], dense[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns attended by a call of ``query_length``, 0)."""
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Columns held, padding included."""
        return self.columns

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def fork(self, calls: Calls, watch: Watch, offload: Offload | None) -> KVQuantLayer:
        """A copy that belongs to ``calls`` and shares every block."""
        held = self.held.fork(self.held.blocks.fork if offload is None else partial(offload.blocks, self.index))
        return KVQuantLayer(self.index, calls, held, watch, self.segments is not None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise UnsupportedError("a layer of a KVQuantCache shares its rows with the others: copy the cache")

    def _dense(self, which: int) -> Tensor | None:
        call = self.calls.view(self.index)
        return None if call is None else self.held.dense(which, call)
