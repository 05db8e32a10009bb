"""The options of `kvquant tune`."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from .errors import InputError
from .terminal import EXIT_OK, EXIT_ROWS, JSON_HELP, MODEL_HELP, DType, only_our_output

TUNE_HELP = """The best codec for each layer's keys and values: the least KL from the uncompressed cache in a budget
of bytes, or the fewest bytes for a limit on KL or perplexity. What each layer loses under each codec is measured on
the model and the text; the choice among them is exact, and measured again as a whole. Beside the policy goes a folder
with what was measured, from which policies for other budgets follow in seconds, and how the policy compares with the
presets on held-out text. Exit status 1 if the goal was not met when it was verified.

[bold]Examples[/bold]

  kvquant tune --model smollm2-135m --text book.txt --context 8K --budget 0.28 --out tuned.yaml

  kvquant tune --from tuned/sensitivity.json --budget 0.2 --out smaller.yaml

  kvquant tune --model ./my-model --text a.txt --held-out b.txt --context 4K --max-kl 0.005 --out tuned.yaml
"""
_NEED_MODEL = ("text", "held_out", "tokens", "score_tokens", "dtype", "minutes", "no_verify", "seed")


def tune(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Text or dataset to measure on, as `kvquant ppl` takes it. Default: Python's library sources."
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option("--context", metavar="TOKENS", help="Tokens whose cache is to fit, e.g. 8K (K = 1024)."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Bytes of full-attention layers over those at 16 bits an element."),
    ] = None,
    max_kl: Annotated[
        str | None, typer.Option(metavar="NATS", help="Fewest bytes with at most this KL, per token, as measured.")
    ] = None,
    max_delta_ppl: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Fewest bytes with perplexity up by at most this. That may fall by luck, so KL is held to "
            "ln(1 + PERCENT/100), its equal on text the model would write; and to 0.7 of that, and so on, while "
            "perplexity as measured still rises by more.",
        ),
    ] = None,
    held_out: Annotated[
        list[str] | None,
        typer.Option(help="Text to compare with presets on. Default: what follows the beginning of --text."),
    ] = None,
    codecs: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Codecs to choose from beside fp16, e.g. int8,int4,int2. Default: all of integers. The "
            "others, nf4, fp4 and dynamic8, must be named, since attention has to decode them.",
        ),
    ] = None,
    score_tokens: Annotated[
        str, typer.Option(metavar="TOKENS", help="How many are scored at the end of each text.")
    ] = "512",
    dtype: Annotated[DType, typer.Option(help="What the model computes in.")] = DType.float32,
    minutes: Annotated[
        str, typer.Option(metavar="NUMBER", help="For measuring and improving, after estimates.")
    ] = "30",
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Skip the comparison on held-out text.")] = False,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="A sensitivity.json of an earlier run. With --model nothing of it is measured again; without, it is "
            "all there is, and nothing is measured.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The policy, ending in .yaml; the folder of the same name gets sensitivity.json, README.md, "
            "rows.json, layers.png and pareto.png. Default: the policy is printed.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the estimates' draws, and of the bootstrap intervals.")
    ] = 0,
) -> int:
    """See `TUNE_HELP`."""
    from .options import expanded, parse_tokens, split_list
    from .tuning.goal import Goal, positive

    if model is None and (idle := _given(context, _NEED_MODEL)):
        raise InputError(f"{idle}: needs --model; without it policies come from --from alone")
    goal = Goal.parse(budget, max_kl, max_delta_ppl)
    minutes_given = positive("--minutes", minutes)

    with only_our_output(models=model is not None) as (console, say):
        from .display import print_rows, progress, stages
        from .files import to_json
        from .tuning.command import Options, Talk, run
        from .tuning.outputs import told

        options = Options(
            goal=goal,
            model=model,
            text=tuple(text or ()),
            held_out=tuple(held_out or ()),
            context=None if tokens is None else parse_tokens("--context", tokens),
            codecs=None if codecs is None else tuple(split_list("--codecs", codecs)),
            score_tokens=parse_tokens("--score-tokens", score_tokens),
            dtype=dtype.value,
            minutes=minutes_given,
            verify=not no_verify,
            source=None if source is None else expanded("--from", source),
            out=None if out is None else expanded("--out", out),
            seed=seed,
        )
        talk = Talk(say, partial(stages, console), partial(progress, console))
        outcome = run(options, context.obj or ["tune"], talk)
    if json:
        sys.stdout.write(to_json(outcome.document()))
    elif options.out is None:
        sys.stdout.write(outcome.yaml)
        print_rows(console, outcome.solution.rows)
    else:
        print_rows(screen := Console(), outcome.solution.rows)
        screen.print(told(options.out, outcome.solution), markup=False, highlight=False, soft_wrap=True)
    return EXIT_ROWS if outcome.solution.broken else EXIT_OK


def _given(context: typer.Context, names: tuple[str, ...]) -> str:
    """The first of these options that was typed, or nothing."""
    options = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    typed = [name for name in names if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    return options[typed[0]] if typed else ""
