"""The `kvquant` command line: options, and what is done with them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from importlib import metadata
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.console import Console

from kvquant import KVQuantError

from .bench.command import app as bench_app
from .errors import printable
from .store_command import app as store_app
from .terminal import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_ROWS,
    EXIT_USAGE,
    JSON_HELP,
    MODEL_HELP,
    POLICIES_HELP,
    DType,
    only_our_output,
    print_json,
)
from .tune_command import TUNE_HELP, tune

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Compress a transformer's KV cache, and know what it costs.",
)
app.add_typer(bench_app, name="bench")
app.add_typer(store_app, name="store")
app.command(help=TUNE_HELP)(tune)


class Protocol(StrEnum):
    """How the compressed cache is read while scoring."""

    streaming = "streaming"
    prefill = "prefill"


class RopeScaling(StrEnum):
    """How positions are stretched beyond the model's own."""

    yarn = "yarn"
    linear = "linear"
    dynamic = "dynamic"


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"kvquant {metadata.version('kvquant')}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_USAGE)


_PPL_HELP = """Perplexity and KL of each precision policy against the uncompressed cache, and the bytes it takes.

[bold]Examples[/bold]

  kvquant ppl --model smollm2-135m --policies int8,int4 --contexts 2K,4K

  kvquant ppl --model ./my-model --policies fp16,my.yaml --contexts 8K --text book.txt.xz --out results

  kvquant ppl --model org/name --policies k8v4 --contexts 4K --text Salesforce/wikitext:wikitext-103-raw-v1:test

  kvquant ppl --model org/name --policies k8v4 --contexts 4096 --json > rows.json
"""


@app.command(help=_PPL_HELP)
def ppl(
    context: typer.Context,
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    policies: Annotated[str, typer.Option(help=POLICIES_HELP)],
    contexts: Annotated[str, typer.Option(help="Context lengths in tokens, e.g. 2K,4096,1M (K = 1024).")] = "2K,4K",
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="UTF-8 text, also .xz .gz .bz2, or a dataset as name@revision:config:split:column, of which all "
            "but the name (on the hub, of a folder or a data file) may be empty or left out. Several are joined. "
            "Default: Python's library sources."
        ),
    ] = None,
    protocol: Annotated[
        Protocol,
        typer.Option(help="streaming: every chunk reads a compressed past. prefill: exact past, then compressed."),
    ] = Protocol.streaming,
    chunk: Annotated[str, typer.Option(metavar="TOKENS", help="Tokens per forward.")] = "128",
    score_tokens: Annotated[
        str, typer.Option(metavar="TOKENS", help="How many are scored at the end of each context.")
    ] = "2K",
    dtype: Annotated[DType, typer.Option(help="What the model computes in.")] = DType.float32,
    rope_scaling: Annotated[
        RopeScaling | None, typer.Option(help="Stretch positions to the longest context, and mark every row.")
    ] = None,
    needle: Annotated[bool, typer.Option("--needle", help="Also plant facts in the text and ask for them.")] = False,
    reuse_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Folder in which the exact history is kept for the next sweep over the text."
        ),
    ] = None,
    max_memory: Annotated[
        str, typer.Option(help="Memory to stay below, e.g. 8G: read the text once for every few policies, or refuse.")
    ] = "",
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder for rows.json, rows.csv, plot.png and README.md.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the report in --out, if there is one.")] = False,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap intervals, and of the needles.")] = 0,
) -> int:
    """See `_PPL_HELP`."""
    from .display import print_rows, progress
    from .files import to_json
    from .options import expanded, parse_tokens
    from .ppl import Options, run

    options = Options(
        model=model,
        policies=policies,
        contexts=contexts,
        text=tuple(text or ()),
        protocol=protocol.value,
        chunk=parse_tokens("--chunk", chunk),
        score_tokens=parse_tokens("--score-tokens", score_tokens),
        dtype=dtype.value,
        rope_scaling=rope_scaling.value if rope_scaling else "",
        needle=needle,
        max_memory=max_memory,
        reuse_prefix=None if reuse_prefix is None else expanded("--reuse-prefix", reuse_prefix),
        out=None if out is None else expanded("--out", out),
        resume=resume,
        seed=seed,
    )
    with only_our_output() as (console, say):
        result = run(options, context.obj or ["ppl"], say, partial(progress, console))
    if json:
        sys.stdout.write(to_json(result.document()))
    else:
        say("")
        print_rows(Console(), result.rows)
        if out is not None:
            say(f"Report in {out}")
    return EXIT_OK if all(row.status == "ok" for row in result.rows) else EXIT_ROWS


_REPORT_HELP = """One page, with plots, of what `kvquant ppl --out` wrote; it needs nothing else to be read.

[bold]Examples[/bold]

  kvquant report results

  kvquant report results-a results-b --out both.html
"""


@app.command(help=_REPORT_HELP)
def report(
    folders: Annotated[list[str], typer.Argument(metavar="DIR", help="Folders that kvquant ppl --out wrote.")],
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The page; its plots go beside it as PNG. Default: report.html in DIR, if there is only one.",
        ),
    ] = None,
) -> int:
    """See `_REPORT_HELP`."""
    from .options import expanded
    from .page import render
    from .report import prepare_page, write_page
    from .results import default_page, read_all

    with only_our_output() as (_, say):
        places = [expanded("DIR", folder) for folder in folders]
        reports = read_all(places)
        page = default_page(places) if out is None else expanded("--out", out)
        prepare_page(page)
        say(f"{len(write_page(page, *render(reports))) - 1} plots beside the page")
    print(printable(str(page)))
    return EXIT_OK


_DOCTOR_HELP = """What a policy does to a model, layer by layer and why, without loading its weights; and what this
machine has to do it with.

[bold]Example[/bold]

  kvquant doctor smollm2-135m --policy shallow-fp16-deep-int4
"""


@app.command(help=_DOCTOR_HELP)
def doctor(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    policy: Annotated[str, typer.Option(help="A preset or a policy file.")] = "int4",
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> int:
    """See `_DOCTOR_HELP`."""
    from kvquant.kernels import means

    from .display import print_diagnosis
    from .doctor import diagnose

    with only_our_output() as (_, say):
        diagnosis = diagnose(model, policy, say)
    if json:
        print_json(context, diagnosis.rows, notes=diagnosis.notes, kernels=means())
    else:
        print_diagnosis(Console(), diagnosis, means())
    return EXIT_OK if diagnosis.served else EXIT_ROWS


def run(arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit code; bad input becomes one line on standard error."""
    arguments = list(arguments)
    try:
        code = app(arguments, prog_name="kvquant", standalone_mode=False, obj=arguments)
    except KVQuantError as error:
        return _complain(str(error))
    except typer.Abort:
        code = EXIT_INTERRUPTED
    except Exception as error:
        if not hasattr(error, "format_message"):  # what a wrong command line raises
            raise
        return _complain(error.format_message() + _given(error, arguments))
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    return code if isinstance(code, int) else EXIT_OK


def _given(error: Any, arguments: Sequence[str]) -> str:
    """What the user gave for the option an error is about, where its message does not quote it."""
    names = getattr(getattr(error, "param", None), "opts", ())
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    given = [following for word, following in pairwise(words) if word in names]
    return f"; given: {given[-1]!r}" if given and given[-1] not in error.format_message() else ""


def _complain(message: str) -> int:
    """One line on standard error."""
    print(f"kvquant: {printable(' '.join(message.split()))}", file=sys.stderr)
    return EXIT_USAGE
