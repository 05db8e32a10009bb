"""`kvquant ppl` from its options to its rows and report."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import kvquant

from . import report
from .errors import InputError
from .models import LoadedModel, load
from .options import format_context, parse_contexts, split_list, text_paths
from .rope import stretch
from .rows import Row
from .sweep import Settings, Sweep, Terms
from .texts import Text, default_text, read_texts
from .tokens import Tokens, check_vocabulary, tokenise

Progress = Callable[[str, Sequence[tuple[int, int]]], AbstractContextManager[Callable[[int, int], None]]]


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
    rope_scaling: str
    out: Path | None
    seed: int


def run(options: Options, arguments: Sequence[str], say: Callable[[str], None], progress: Progress) -> report.Report:
    """Runs the sweep and writes its report if asked to. ``say`` gets lines about long work, ``progress`` a meter.

    Cheap checks come first. Raises `kvquant.KVQuantError` for bad input; what fails inside the sweep is in the
    rows.
    """
    contexts = parse_contexts(options.contexts)
    policies = policies_of(split_list("--policies", options.policies))
    text = read_texts(text_paths(options.text), contexts[-1]) if options.text else default_text()
    if options.out is not None:
        report.prepare(options.out)
    scaled = []
    loaded = load(options.model, options.dtype, say, lambda config: scaled.append(_stretch(config, options, contexts)))
    maps = {policy.name: policy.resolve(loaded.model).describe() for policy in policies}
    tokens = tokens_of(loaded, text, contexts)
    settings = Settings(
        contexts=tuple(contexts),
        protocol=options.protocol,
        chunk=options.chunk,
        score_tokens=options.score_tokens,
        dtype=options.dtype,
        seed=options.seed,
        rope_scaling=scaled[0],
    )
    new = partial(kvquant.KVQuantCache.for_model, loaded.model)
    sweep = Sweep(options.model, loaded.model, tokens.ids, policies, new, settings)
    for description in maps.values():
        say(description)
    began = time.monotonic()
    rows = _collect(sweep, progress)
    say(_spent(sweep.terms, time.monotonic() - began))
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


def _spent(terms: Terms, seconds: float) -> str:
    """Where a sweep's time went; the rest is scoring."""
    parts = [f"uncompressed model {terms.exact:.1f} s"]
    if terms.compression:
        parts.append(f"compressing prefixes {terms.compression:.1f} s")
    parts += [f"policies' forwards {terms.policies:.1f} s", f"all {seconds:.1f} s"]
    return "Time: " + ", ".join(parts)


def _stretch(config: Any, options: Options, contexts: Sequence[int]) -> str:
    return stretch(config, options.rope_scaling, contexts[-1]) if options.rope_scaling else ""


def _collect(sweep: Sweep, progress: Progress) -> list[Row]:
    forwards = sweep.forwards()
    if not forwards:
        rows = list(sweep.rows())
    else:
        longest = format_context(max(end for _, end in forwards))
        with progress(f"{len(sweep.policies)} policies, up to {longest} tokens", forwards) as tick:
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
