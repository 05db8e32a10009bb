"""`kvquant ppl` from its options to its rows and report."""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import kvquant
from kvquant.keys import Identity

from . import report, results
from .errors import InputError, one_line
from .memory import estimate, groups, in_words, parse_size, peak_memory, resident_memory
from .models import LoadedModel, check_causal, load
from .needle import Probe, plant, summary
from .options import format_context, parse_contexts, split_list
from .prefix import Prefix, exact_identity
from .protocols import NewCache
from .rope import frequencies_of, prefixes_nest, stretch
from .rows import Row
from .sweep import Settings, Sweep, Terms
from .texts import Text, find_text
from .tokens import Tokens, check_vocabulary, tokenise

_WRITE_SECONDS = 20  # between two writings of a report that grows
_PROTOCOL_WORDS = {
    "streaming": "streaming, in chunks of {chunk} tokens that attend to the compressed past",
    "prefill": "prefill, each prefix read once uncompressed and then compressed, its tail in chunks of {chunk} tokens "
    "that attend to it",
}

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
    needle: bool
    max_memory: str
    reuse_prefix: Path | None
    out: Path | None
    resume: bool
    seed: int


def run(options: Options, arguments: Sequence[str], say: Callable[[str], None], progress: Progress) -> report.Report:
    """Runs the sweep and writes its report if asked to. ``say`` gets lines about long work, ``progress`` a meter.

    Cheap checks come first. Raises `kvquant.KVQuantError` for bad input; what fails inside the sweep is in the
    rows. With ``out``, the report is written anew whenever a context is done, so that ``resume`` can go on from it.
    """
    contexts = parse_contexts(options.contexts)
    policies = policies_of(split_list("--policies", options.policies))
    limit = parse_size(options.max_memory) if options.max_memory else None
    text = find_text(options.text, contexts[-1])
    if options.resume and options.out is None:
        raise InputError("--resume: goes on with the report of --out, which is missing")
    if options.out is not None:
        report.prepare(options.out)
    scaled = []
    loaded = load(options.model, options.dtype, say, lambda config: scaled.append(_stretch(config, options, contexts)))
    if options.rope_scaling and not scaled[0]:
        say("--rope-scaling: not needed, the model serves these contexts by itself")
    check_causal(loaded)
    tokens = tokens_of(loaded, text, contexts)
    identity = exact_identity(loaded.model)
    settings = Settings(
        contexts=tuple(contexts),
        protocol=options.protocol,
        chunk=options.chunk,
        score_tokens=options.score_tokens,
        dtype=options.dtype,
        seed=options.seed,
        rope_scaling=scaled[0],
    )
    blank = report.Report(
        command=shlex.join(["kvquant", *arguments]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        rows=(),
        facts=_facts(loaded, identity, text, tokens, settings) | {"cells": _cells(contexts, policies)},
        policies={policy.name: policy.resolve(loaded.model).describe() for policy in policies},
    )
    done = _earlier(options, blank) if options.resume and options.out is not None else []
    new = partial(kvquant.KVQuantCache.for_model, loaded.model)
    cells = frozenset((row.policy, row.context) for row in done)
    sweep = Sweep(options.model, loaded.model, tokens.ids, policies, new, settings, cells)
    if options.reuse_prefix is not None:
        sweep.prefix = _prefix(options, loaded, identity, tokens, say)
    if limit is not None:
        sweep.groups = _fitting(sweep, limit, say)
    for description in blank.policies.values():
        say(description)
    if done:
        say(f"{len(done)} of {len(contexts) * len(policies)} rows are done already")
    loaded_memory = resident_memory()
    kept = _Kept(blank, options.out, [policy.name for policy in policies], list(done))
    began = time.monotonic()
    probe = _needles(loaded, tokens, policies, new, settings) if options.needle else None
    forwards = sweep.forwards()
    longest = format_context(max([end for _, end in forwards], default=0))
    title = f"{len(policies)} {'policies' if len(policies) > 1 else 'policy'}, up to {longest} tokens"
    with progress(title, forwards) if forwards else nullcontext(_no_tick) as tick:
        for row in sweep.rows(tick):
            kept.add(row)
    spent = _spent(sweep.terms, time.monotonic() - began)
    if probe is not None:
        began = time.monotonic()
        for row in probe(kept.result().rows, progress):
            kept.add(row)
        spent["time"] += f"; needles {time.monotonic() - began:.1f} s"
    spent |= {"memory": f"{in_words(loaded_memory)} with the model loaded, {in_words(peak_memory())} at most"}
    for name, words in spent.items():
        say(f"{name.capitalize()}: {words}")
    return kept.finish(spent)


@dataclass
class _Kept:
    """The rows so far, and their report in a folder, written when a context is done, and now and then."""

    blank: report.Report
    folder: Path | None
    policies: list[str]
    rows: list[Row]
    written: float = field(default_factory=time.monotonic)

    def add(self, row: Row) -> None:
        """Take a row in place of an earlier one of its cell."""
        self.rows = [kept for kept in self.rows if (kept.policy, kept.context) != (row.policy, row.context)]
        self.rows.append(row)
        complete = {kept.policy for kept in self.rows if kept.context == row.context} >= {*self.policies}
        if row.status != "skipped" and (complete or time.monotonic() - self.written > _WRITE_SECONDS):
            self._write(self.result())

    def result(self) -> report.Report:
        """All rows, by context, then policy."""
        rows = sorted(self.rows, key=lambda row: (row.context, self.policies.index(row.policy)))
        return replace(self.blank, rows=rows)

    def finish(self, spent: Mapping[str, str]) -> report.Report:
        """The same with what it took, written."""
        result = self.result()
        result = replace(result, facts={**result.facts, **spent})
        self._write(result)
        return result

    def _write(self, result: report.Report) -> None:
        if self.folder is not None:
            report.write(self.folder, result)
            self.written = time.monotonic()


def _earlier(options: Options, now: report.Report) -> list[Row]:
    """The rows of an interrupted run that need not be computed again. Raises `InputError` if it was another sweep."""
    assert options.out is not None
    if not (options.out / "rows.json").exists():
        return []
    before = results.read(options.out)
    _same_makers(options.out, before, now)
    for name, fact in now.facts.items():
        if before.facts.get(name) != fact:
            was = before.facts.get(name, "not recorded")
            raise InputError(f"--resume: {options.out} is of another sweep: {name}: {was!r} there, {fact!r} now")
    if before.policies != now.policies:
        raise InputError(f"--resume: {options.out} is of another sweep: its policies are others")
    return [row for row in before.rows if row.status == "ok"]


def _same_makers(folder: Path, before: report.Report, now: report.Report) -> None:
    """`InputError` where a report's rows were made by other releases, or on another machine: a report names one."""
    for kind, there, here in (
        ("version of", before.versions, now.versions),
        ("machine's", before.machine, now.machine),
    ):
        for name, value in here.items():
            if there.get(name) != value:
                raise InputError(f"--resume: {folder}: the {kind} {name} was {there.get(name)!r}, now it is {value!r}")


def _needles(
    loaded: LoadedModel, tokens: Tokens, policies: Sequence[Any], new: NewCache, settings: Settings
) -> Callable[[Sequence[Row], Progress], Iterator[Row]]:
    """What adds the needle probe to rows that lack it."""

    def probe(rows: Sequence[Row], progress: Progress) -> Iterator[Row]:
        for context in sorted({row.context for row in rows if row.status == "ok" and not row.by_depth}):
            cells = {row.policy: row for row in rows if row.context == context and row.status == "ok"}
            asked = [policy for policy in policies if policy.name in cells]
            try:
                haystack = plant(loaded.tokenizer, tokens.ids, context, settings.seed)
            except ValueError as error:
                for row in cells.values():
                    yield replace(row, reason=f"no needles: {error}")
                continue
            asking = Probe(loaded.model, asked, new, settings.protocol, settings.chunk)
            with progress(f"needles at {format_context(context)}", asking.forwards(haystack)) as tick:
                asking.tick = tick
                try:
                    with frequencies_of(loaded.model, context):
                        for policy, found in asking.run(haystack):
                            cell = cells.pop(policy)
                            yield replace(cell, **summary(found, cell.reason))
                except Exception as error:  # the rows stand, with all else they hold
                    for row in cells.values():
                        yield replace(row, reason=f"no needles: {one_line(error)}")

    return probe


def _prefix(
    options: Options, loaded: LoadedModel, identity: Identity, tokens: Tokens, say: Callable[[str], None]
) -> Prefix:
    """What is kept of the text's exact history. Raises `InputError` where that would be wrong."""
    assert options.reuse_prefix is not None
    if options.protocol != "prefill":
        raise InputError("--reuse-prefix: only --protocol prefill has an exact prefix")
    if not prefixes_nest(loaded.model.config):
        raise InputError("--reuse-prefix: the model's positions depend on the context, so prefixes do not nest")
    prefix = Prefix(loaded.model, identity, tokens.ids, options.reuse_prefix, say)
    prefix.open()
    return prefix


def _fitting(sweep: Sweep, limit: int, say: Callable[[str], None]) -> list[list[str]]:
    """Groups of policies that fit into memory; says the estimate."""
    longest = max((end for _, end in sweep.forwards()), default=0)
    if not longest:
        return []
    copied = longest if sweep.prefix else min(sweep.settings.contexts) if sweep.settings.protocol == "streaming" else 0
    found = estimate(sweep.model, sweep.policies, sweep.new, longest, sweep.settings.chunk, copied)
    parts = groups(found, limit)
    peak = max(found.total(part) for part in parts)
    say(f"Memory: about {in_words(peak)} of {in_words(limit)}, {len(parts)} reading(s) of the text")
    return parts


def _fingerprint(identity: Identity) -> str:
    """Of every weight and every setting."""
    return hashlib.blake2b((identity.model + identity.settings).encode(), digest_size=16).hexdigest()


def _cells(contexts: Sequence[int], policies: Sequence[Any]) -> str:
    names = ", ".join(policy.name for policy in policies)
    return f"{names} at {', '.join(map(format_context, contexts))} tokens"


def _no_tick(start: int, end: int) -> None:
    pass


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


def _spent(terms: Terms, seconds: float) -> dict[str, str]:
    """Where a sweep's time went, and how much more it was than what could not be spared."""
    parts = {
        "uncompressed model": terms.exact,
        "compressing prefixes": terms.compression,
        "policies' forwards": terms.policies,
        "their scores": terms.scoring,
    }
    needed = sum(parts.values())
    ratio = f", {seconds / needed:.2f} × their sum" if needed else ""
    words = ", ".join(f"{name} {part:.1f} s" for name, part in parts.items() if part)
    return {"time": f"{words}; all {seconds:.1f} s{ratio} (noise floor {terms.floor:.1f} s)"}


def _stretch(config: Any, options: Options, contexts: Sequence[int]) -> str:
    return stretch(config, options.rope_scaling, contexts[-1]) if options.rope_scaling else ""


def _facts(loaded: LoadedModel, identity: Identity, text: Text, tokens: Tokens, settings: Settings) -> dict[str, str]:
    return {
        "model": f"{loaded.name} ({loaded.weights}), {settings.dtype}",
        "text": f"{text.name}, {len(text.content)} characters, SHA-256 `{text.sha256}`, read from its start",
        "tokens": f"tokenised as a whole; {tokens.bos}",
        "weights": f"fingerprint `{_fingerprint(identity)}`",
        "protocol": _PROTOCOL_WORDS[settings.protocol].format(chunk=settings.chunk)
        + f"; scored are the last {settings.score_tokens} tokens of a context, less those of whose past less than "
        "half was sealed before their chunk (the column *tokens* counts them), so contexts score different tokens",
        "positions": settings.rope_scaling or "the model's own",
        "seed": str(settings.seed),
    }
