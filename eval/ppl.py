"""`kvquant ppl` from its options to its rows and report."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kvquant

from . import report
from .errors import InputError
from .models import LoadedModel, load
from .options import parse_contexts, split_list
from .rows import Row
from .sweep import Settings, Sweep
from .texts import Text, find_text
from .tokens import Tokens, check_vocabulary, tokenise

Progress = Callable[[Sequence[int], int, int], AbstractContextManager[Callable[[int, int], None]]]


@dataclass(frozen=True)
class Options:
    """The command's options as typed; see its ``--help``."""

    model: str
    policies: str
    contexts: str
    text: tuple[str, ...]
    protocol: str
    chunk: int
    score_tokens: int
    dtype: str
    out: Path | None
    seed: int


def run(options: Options, arguments: Sequence[str], say: Callable[[str], None], progress: Progress) -> report.Report:
    """Runs the sweep and writes its report if asked to. ``say`` gets lines about long work, ``progress`` a meter.

    Cheap checks come first. Raises `kvquant.KVQuantError` for bad input; what fails inside the sweep is in the
    rows.
    """
    contexts = parse_contexts(options.contexts)
    policies = policies_of(split_list("--policies", options.policies))
    text = find_text(options.text, contexts[-1])
    if options.out is not None:
        report.prepare(options.out)
    loaded = load(options.model, options.dtype, say)
    maps = {policy.name: policy.resolve(loaded.model).describe() for policy in policies}
    tokens = tokens_of(loaded, text, contexts)
    settings = Settings(
        tuple(contexts), options.protocol, options.chunk, options.score_tokens, options.dtype, options.seed
    )
    caches = [kvquant.KVQuantCache.for_model(loaded.model, policy) for policy in policies]
    sweep = Sweep(options.model, loaded.model, tokens.ids, policies, caches, settings)
    for description in maps.values():
        say(description)
    rows = _collect(sweep, progress)
    result = report.Report(
        command=shlex.join(["kvquant", *arguments]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        rows=rows,
        facts=_facts(loaded, text, tokens, settings),
        policies=maps,
    )
    if options.out is not None:
        report.write(options.out, result)
    return result


def policies_of(specs: Sequence[str]) -> list[Any]:
    """Policies by preset name or file. Raises `kvquant.KVQuantError`, also where two have the same name."""
    policies: dict[str, Any] = {}
    for spec in specs:
        policy = kvquant.PrecisionPolicy.load(spec)
        if policy.name in policies:
            raise InputError(
                f"--policies: two are called {policy.name!r}; allowed: different names, to tell rows apart"
            )
        policies[policy.name] = policy
    return list(policies.values())


def tokens_of(loaded: LoadedModel, text: Text, contexts: Sequence[int]) -> Tokens:
    """As many ids of the text as the longest context needs; raises `InputError` if the model does not know them."""
    tokens = tokenise(loaded.tokenizer, text.content, contexts[-1])
    check_vocabulary(tokens, loaded.model)
    return tokens


def _collect(sweep: Sweep, progress: Progress) -> list[Row]:
    settings = sweep.settings
    runnable = sweep.runnable()
    if not runnable:
        rows = list(sweep.rows())
    else:
        with progress(runnable, settings.chunk, 1 + len(sweep.policies)) as tick:
            rows = list(sweep.rows(tick))
    return sorted(rows, key=lambda row: row.context)  # stable: policies keep their order


def _facts(loaded: LoadedModel, text: Text, tokens: Tokens, settings: Settings) -> dict[str, str]:
    return {
        "model": f"{loaded.name} ({loaded.weights}), {settings.dtype}",
        "text": f"{text.name}, {len(text.content)} characters, SHA-256 `{text.sha256}`, read from its start",
        "tokens": f"tokenised as a whole; {tokens.bos}",
        "protocol": f"{settings.protocol}, in chunks of {settings.chunk} tokens that attend to the compressed "
        f"past; scored are the last {settings.score_tokens} tokens of a context, less "
        "those of whose past less than half was sealed before their chunk (the column *tokens* counts them)",
        "seed": str(settings.seed),
    }
