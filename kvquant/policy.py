"""Per-layer precision policies: validated, frozen, read from and written to YAML, resolved against a model.

A policy names layers by index (``3``), inclusive range (``0-7``), percentage of depth (``25%-60%``: layers i of n
with 25 ≤ 100·i/n < 60) or a comma-separated list of these. Layers nobody names get ``default``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from torch import nn

from .codecs import Codec, get_codec
from .errors import CodecError, PolicyError, UnsupportedError, shown
from .geometry import COMPRESSED_KIND, caches_latents, layer_kinds
from .keybias import KeyBias, key_biases
from .selectors import Selector


@dataclass(frozen=True)
class LayerPolicy:
    """The codecs of one layer's keys and values.

    On a model with multi-head latent attention, which caches a latent and a rotary key, ``key`` is for the latent and
    ``value`` for the rotary key. A policy may call them ``latent`` and ``rotary`` (then ``latent`` is True); where it
    does not, the rotary key is given 8 bits at least, since all heads share it.
    """

    key: Codec
    value: Codec
    latent: bool = False

    @classmethod
    def parse(cls, given: Any, block_tokens: int = 128) -> LayerPolicy:
        """Build from ``{"key": codec, "value": codec}`` as `get_codec` takes them, or check a built one."""
        if isinstance(given, LayerPolicy):
            given = _plain_layer(given)
        if not isinstance(given, Mapping):
            raise ValueError(f": {shown(given)} is not a layer's policy; allowed: {{key: CODEC, value: CODEC}}")
        latent = "latent" in given or "rotary" in given
        names = ("latent", "rotary") if latent else ("key", "value")
        if unknown := [name for name in given if name not in names]:
            raise ValueError(f".{unknown[0]}: unknown setting; allowed: {names[0]}, {names[1]}")
        codecs = []
        for name, role in zip(names, ("key", "value"), strict=True):
            if name not in given:
                raise ValueError(f".{name}: missing; a layer's policy names both {names[0]} and {names[1]}")
            try:
                codecs.append(get_codec(given[name], role, block_tokens))
            except CodecError as error:
                raise ValueError(f".{name}.{error}") from error
        key, value = codecs
        return cls(key, value, latent)

    def for_latents(self, block_tokens: int) -> LayerPolicy:
        """The same for a layer that caches latents: see the class."""
        if self.latent or self.value.lossless or _bits(self.value, block_tokens) >= 8:
            return self
        return replace(self, value=get_codec("int8", "value", block_tokens))


def _parse_default(given: Any, info: ValidationInfo) -> LayerPolicy:
    return LayerPolicy.parse(given, info.data.get("block_tokens", 128))


def _parse_cold(given: Any, info: ValidationInfo) -> LayerPolicy | None:
    return None if given is None else _parse_default(given, info)


def _parse_layers(given: Any, info: ValidationInfo) -> tuple[tuple[Selector, LayerPolicy], ...]:
    if not isinstance(given, Mapping | tuple):
        raise ValueError(f": {shown(given)} is not a mapping of layer selectors to policies")
    parsed: dict[Selector, LayerPolicy] = {}
    for text, entry in given.items() if isinstance(given, Mapping) else given:
        try:
            selector = Selector.parse(text)
            selector.refuse_overlap(parsed)
            parsed[selector] = LayerPolicy.parse(entry, info.data.get("block_tokens", 128))
        except ValueError as error:
            place = str(error) if str(error).startswith((".", ":")) else f": {error}"
            raise ValueError(f'["{text}"]{place}') from error
    return tuple(parsed.items())


class PrecisionPolicy(BaseModel):
    """What is stored at which precision.

    Attributes:
        block_tokens: tokens sealed and compressed together, a multiple of 8.
        sink_tokens: first tokens of a sequence kept as they are, beside their codes.
        recent_tokens: last tokens that always stay at model precision.
        when: with a store, ``evict`` keeps sealed blocks as they are while the device has room, and encodes them once
            it is short; ``seal`` encodes them at once. Without a store they are encoded at once.
        cold: codecs that blocks get which go to a store's disk, if any: they lose more there. What is stored as it was
            stays so.
        key_bias: ``remove`` takes the bias of a key projection, turned to each key's position, away before encoding
            and gives it back after decoding, wherever the model has one (see `kvquant.keybias`).
        default: codecs of layers that no entry of ``layers`` names.
        layers: (selector, codecs) pairs, given as a mapping; see the module docstring.

    Building or loading one raises `PolicyError` in one line that names the place.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = 1
    name: str = Field(min_length=1, max_length=100)
    block_tokens: int = Field(default=128, ge=8, le=4096, multiple_of=8)
    sink_tokens: int = Field(default=4, ge=0)
    recent_tokens: int = Field(default=128, ge=0, le=1 << 20)
    when: Literal["evict", "seal"] = "evict"
    key_bias: Literal["remove", "keep"] = "remove"
    default: Annotated[LayerPolicy, PlainValidator(_parse_default)]
    cold: Annotated[LayerPolicy | None, PlainValidator(_parse_cold)] = None
    layers: Annotated[tuple[tuple[Selector, LayerPolicy], ...], PlainValidator(_parse_layers)] = ()

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise PolicyError(_one_line(error)) from None

    @field_validator("name")
    @classmethod
    def _name_prints(cls, name: str) -> str:
        if not name.isprintable() or name != name.strip():
            raise ValueError(f"{shown(name)}; allowed: printable characters, none blank at either end")
        return name

    @field_validator("sink_tokens")
    @classmethod
    def _sinks_fit(cls, sinks: int, info: ValidationInfo) -> int:
        if sinks > info.data.get("block_tokens", sinks):
            raise ValueError(f"{sinks} is more than block_tokens {info.data['block_tokens']}")
        return sinks

    @classmethod
    def load(cls, source: str | Path) -> PrecisionPolicy:
        """Read a preset by name or a YAML file by path."""
        text = str(source)
        if text in (shipped := {**_shipped(), **_shipped("tuned")}):
            return cls.from_yaml(shipped[text].read_text(encoding="utf-8"), text)
        path = Path(text)
        if not os.path.isfile(path):  # whatever its name: one too long is no file either
            raise PolicyError(f"policy {shown(text)} is neither a file nor a preset ({', '.join(preset_names())})")
        try:
            return cls.from_yaml(path.read_text(encoding="utf-8"), text)
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError(f"{text}: cannot be read as a policy: {error}") from error

    @classmethod
    def from_yaml(cls, text: str, source: str = "policy") -> PrecisionPolicy:
        """Parse YAML; errors begin with ``source``."""
        try:
            settings = yaml.load(text, Loader=_UniqueKeyLoader)
        except RecursionError:
            raise PolicyError(f"{source}: not a policy: nested too deeply") from None
        except (yaml.YAMLError, ValueError) as error:  # ValueError: a number of thousands of digits
            raise PolicyError(f"{source}: not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(settings, dict):
            raise PolicyError(f"{source}: a policy is a mapping with at least 'name' and 'default'")
        if "version" not in settings:
            raise PolicyError(f"{source}: version: missing; this release reads version 1")
        if isinstance(settings["version"], bool | float):
            raise PolicyError(f"{source}: version: Input should be 1, not {shown(settings['version'])}")
        if not all(isinstance(name, str) for name in settings):
            raise PolicyError(f"{source}: setting names must be text, not {shown([*settings])}")
        try:
            return cls(**settings)
        except PolicyError as error:
            raise PolicyError(f"{source}: {error}") from None

    def to_yaml(self) -> str:
        """The policy as YAML, every codec by its canonical name; `from_yaml` gives an equal policy back."""
        return yaml.safe_dump(self._plain(), sort_keys=False, allow_unicode=True, width=100)

    def fingerprint(self) -> str:
        """Hex digest of everything that decides stored bytes (the name does not, nor where they lie)."""
        plain = self._plain()
        for name in ("name", "when", "cold"):
            plain.pop(name, None)
        return hashlib.blake2b(json.dumps(plain).encode(), digest_size=16).hexdigest()

    def resolve(self, model: Any) -> ResolvedPolicy:
        """The exact map for a transformers model.

        A config does as well, or a sequence of layer kinds, but neither holds key biases.

        Raises `PolicyError` where a selector does not fit the model's layers, `UnsupportedError` where the model
        has no layer to compress.
        """
        config = getattr(model, "config", model)
        kinds = list(config) if isinstance(config, Sequence) else layer_kinds(config)
        latents = not isinstance(config, Sequence) and caches_latents(config)
        compressed = [index for index, kind in enumerate(kinds) if kind == COMPRESSED_KIND]
        if not compressed:
            raise UnsupportedError(
                f"nothing to compress: the model has {_count_kinds(kinds)}; kvquant compresses {COMPRESSED_KIND}"
            )
        chosen: dict[int, tuple[Selector, LayerPolicy]] = {}
        idle: list[str] = []
        for selector, policy in self.layers:
            try:
                indices = selector.indices(len(kinds))
                if selector.names_indices and not set(indices) & set(compressed):
                    raise ValueError(
                        f"selects no {COMPRESSED_KIND} layer, it would do nothing; the model's are {compressed}"
                    )
                if not set(indices) & set(compressed):
                    idle.append(selector.text)
                for index in indices:
                    if index in chosen:
                        raise ValueError(f"layer {index} is selected by {shown(chosen[index][0].text)} as well")
                    chosen[index] = (selector, policy)
            except ValueError as error:
                raise PolicyError(f'policy {shown(self.name)}: layers["{selector.text}"]: {error}') from error
        biases = {}
        if self.key_bias == "remove" and isinstance(model, nn.Module):
            biases = key_biases(model, compressed)
        layers = []
        for index, kind in enumerate(kinds):
            policy = chosen[index][1] if index in chosen else self.default
            if policy.latent and not latents:
                raise PolicyError(f"{self.name}: names latent and rotary, but the model caches keys and values")
            if latents:
                policy = policy.for_latents(self.block_tokens)
            if kind != COMPRESSED_KIND:
                layers.append(ResolvedLayer(index, kind, None))
            else:
                layers.append(ResolvedLayer(index, kind, policy, None if policy.key.lossless else biases.get(index)))
        cold = self.cold.for_latents(self.block_tokens) if latents and self.cold else self.cold
        return ResolvedPolicy(self, tuple(layers), tuple(idle), cold)

    def _plain(self) -> dict[str, Any]:
        cold = {} if self.cold is None else {"cold": _plain_layer(self.cold)}
        return cold | {
            "version": self.version,
            "name": self.name,
            "block_tokens": self.block_tokens,
            "sink_tokens": self.sink_tokens,
            "recent_tokens": self.recent_tokens,
            "when": self.when,
            "key_bias": self.key_bias,
            "default": _plain_layer(self.default),
            "layers": {selector.text: _plain_layer(policy) for selector, policy in self.layers},
        }


@dataclass(frozen=True)
class ResolvedLayer:
    """One layer of a model: its kind, and its codecs, or None where the layer passes through untouched.

    ``key_bias`` is what is removed from its keys before they are encoded, if anything.
    """

    index: int
    kind: str
    policy: LayerPolicy | None
    key_bias: KeyBias | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        if self.policy is None:
            return f"{self.kind}, not compressed"
        bias = " less its bias" if self.key_bias else ""
        return f"key {self.policy.key.name}{bias}, value {self.policy.value.name}"


@dataclass(frozen=True)
class ResolvedPolicy:
    """A policy and the exact map it gives for one model; ``idle`` are selectors by depth that hit no layer of it.

    ``cold`` are the codecs of what goes to a store's disk, where they are others.
    """

    policy: PrecisionPolicy
    layers: tuple[ResolvedLayer, ...]
    idle: tuple[str, ...] = ()
    cold: LayerPolicy | None = None

    def describe(self) -> str:
        """The map as text, equal neighbours on one line."""
        policy = self.policy
        lines = [
            f"{policy.name}: blocks of {policy.block_tokens} tokens, first {policy.sink_tokens} "
            f"and last {policy.recent_tokens} at model precision"
        ]
        first = 0
        for last, layer in enumerate(self.layers):
            following = self.layers[last + 1] if last + 1 < len(self.layers) else None
            if str(following) == str(layer):
                continue
            span = f"layer {first}" if first == last else f"layers {first}-{last}"
            lines.append(f"  {span}: {layer}")
            first = last + 1
        if self.cold is not None:
            lines.append(f"  on disk: key {self.cold.key.name}, value {self.cold.value.name}, where that is smaller")
        lines += [f"  {text} selects no layer of this model that is compressed" for text in self.idle]
        return "\n".join(lines)


def preset_names() -> list[str]:
    """Names of the policies shipped with kvquant that fit any model."""
    return sorted(_shipped())


def tuned_names() -> list[str]:
    """Names of the policies shipped with kvquant that were tuned for one model: ``smollm2-135m-0.28``."""
    return sorted(_shipped("tuned"))


def _shipped(*folder: str) -> dict[str, Traversable]:
    entries = resources.files("kvquant.presets").joinpath(*folder).iterdir()
    return {entry.name.removesuffix(".yaml"): entry for entry in entries if entry.name.endswith(".yaml")}


def _plain_layer(policy: LayerPolicy) -> dict[str, str]:
    names = ("latent", "rotary") if policy.latent else ("key", "value")
    return dict(zip(names, (policy.key.name, policy.value.name), strict=True))


def _bits(codec: Codec, block_tokens: int) -> float:
    """Bits an element takes with a usual head size, parameters included."""
    layout = codec.layout(1, block_tokens, 64, torch.float16)
    return sum(8 * math.prod(shape) * dtype.itemsize for shape, dtype in layout.values()) / (block_tokens * 64)


def _count_kinds(kinds: Sequence[str]) -> str:
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) or "no layers"


def _one_line(error: ValidationError) -> str:
    """The first complaint as ``place: what was given; what is allowed``."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return f"{place}: unknown setting; allowed: {', '.join(PrecisionPolicy.model_fields)}"
    if first["type"] == "missing":
        return f"{place}: missing"
    if first["type"] == "value_error":
        # Our own validators begin with the rest of the place, if there is one.
        return f"{place}{message}" if message.startswith((".", ":", "[")) else f"{place}: {message}"
    return f"{place}: {message}, not {shown(first['input'])}"


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's rule that keys are unique, which PyYAML does not enforce."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key is not text", key_node.start_mark)
            if str(key) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{shown(str(key))} is given twice", key_node.start_mark
                )
            seen.add(str(key))
        return super().construct_mapping(node, deep)
