"""The commands of `kvquant bench`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..terminal import (
    EXIT_OK,
    EXIT_ROWS,
    JSON_HELP,
    MODEL_HELP,
    POLICIES_HELP,
    DType,
    only_our_output,
    print_json,
)

if TYPE_CHECKING:
    from ..ppl import Progress
    from .rows import Outcome

app = typer.Typer(help="Measure time, each result as a ratio to a baseline of the same run.")

_Model = Annotated[str, typer.Option(help=MODEL_HELP)]
_Policies = Annotated[str, typer.Option(help=POLICIES_HELP)]
_Contexts = Annotated[
    str, typer.Option(help="Tokens of history, e.g. 512,8K (K = 1024), however many the model takes.")
]
_Batch = Annotated[
    int, typer.Option(min=1, max=1 << 16, help="Rows, of different lengths around the context if several.")
]
_Steps = Annotated[int, typer.Option(min=1, max=1000, help="Steps timed in each turn.")]
_Repeats = Annotated[int, typer.Option(min=1, max=1000, help="Turns of each subject; medians are taken over all.")]
_DType = Annotated[DType, typer.Option(help="What the model computes in.")]
_Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]

_ATTENTION_HELP = """One layer's attention over a compressed history, by itself: time, bandwidth and error.

[bold]Example[/bold]

  kvquant bench attention --kv-heads 8 --q-heads 32 --head-dim 128 --tokens 32K --policies int4,int8
"""


@app.command("attention", help=_ATTENTION_HELP)
def attention(
    context: typer.Context,
    kv_heads: Annotated[int, typer.Option(min=1, help="Heads of keys and values.")] = 8,
    q_heads: Annotated[int, typer.Option(min=1, help="Heads of queries, a multiple of --kv-heads.")] = 32,
    head_dim: Annotated[int, typer.Option(min=1, help="Channels of a head.")] = 128,
    tokens: Annotated[str, typer.Option(help="Tokens of history and new ones together, e.g. 8K,32K.")] = "32K",
    policies: _Policies = "int4,int8",
    queries: Annotated[int, typer.Option(min=1, help="New tokens.")] = 1,
    repeats: _Repeats = 15,
    dtype: Annotated[DType, typer.Option(help="Of queries, and of keys and values as they are.")] = DType.bfloat16,
    json: _Json = False,
) -> int:
    """See `_ATTENTION_HELP`."""
    from .attention import AttentionOptions, run_attention

    options = AttentionOptions(kv_heads, q_heads, head_dim, tokens, policies, queries, repeats, dtype.value)
    return _report(context, partial(run_attention, options), json)


_DECODE_HELP = """The time of one decode step of a model after a long history, and the memory it takes.

[bold]Examples[/bold]

  kvquant bench decode --model smollm2-135m --contexts 512,8K,32K --policies int4,int8

  kvquant bench decode --model ./my-model --contexts 8K --batch 4 --json
"""


@app.command("decode", help=_DECODE_HELP)
def decode(
    context: typer.Context,
    model: _Model,
    contexts: _Contexts = "512,8K",
    policies: _Policies = "int4,int8",
    batch: _Batch = 1,
    dtype: _DType = DType.bfloat16,
    steps: _Steps = 3,
    repeats: _Repeats = 5,
    json: _Json = False,
) -> int:
    """See `_DECODE_HELP`."""
    from .decode import DecodeOptions, run_decode

    options = DecodeOptions(model, policies, contexts, batch, dtype.value, steps, repeats)
    return _report(context, partial(run_decode, options), json)


_PEERS_HELP = """The same step through transformers' QuantizedCache: quanto and HQQ, where installed, and fp8.

[bold]Example[/bold]

  kvquant bench peers --model smollm2-135m --contexts 8K
"""


@app.command("peers", help=_PEERS_HELP)
def peers(
    context: typer.Context,
    model: _Model,
    contexts: _Contexts = "8K",
    policies: _Policies = "int4",
    batch: _Batch = 1,
    dtype: _DType = DType.bfloat16,
    steps: _Steps = 3,
    repeats: _Repeats = 5,
    json: _Json = False,
) -> int:
    """See `_PEERS_HELP`."""
    from .decode import DecodeOptions
    from .peers import run_peers

    options = DecodeOptions(model, policies, contexts, batch, dtype.value, steps, repeats)
    return _report(context, partial(run_peers, options), json)


_PREFILL_HELP = """What compressing adds to, or saves of, the time of reading a prompt.

[bold]Examples[/bold]

  kvquant bench prefill --model smollm2-135m --policies int8,int4 --contexts 4K

  kvquant bench prefill --model smollm2-135m --contexts 8K --chunk 512
"""


@app.command("prefill", help=_PREFILL_HELP)
def prefill(
    context: typer.Context,
    model: _Model,
    policies: _Policies = "int4",
    contexts: Annotated[str, typer.Option(help="Prompt lengths in tokens, e.g. 2K,4096 (K = 1024).")] = "4K",
    chunk: Annotated[str, typer.Option(metavar="TOKENS", help="Tokens per forward.")] = "4K",
    repeats: _Repeats = 3,
    dtype: _DType = DType.float32,
    json: _Json = False,
) -> int:
    """See `_PREFILL_HELP`."""
    from ..options import parse_tokens
    from .prefill import PrefillOptions, run_prefill

    options = PrefillOptions(model, policies, contexts, parse_tokens("--chunk", chunk), repeats, dtype.value)
    return _report(context, partial(run_prefill, options), json)


_RESIDENCY_HELP = """How many reads a store serves from the device that has room for some of a model's layers only.

[bold]Example[/bold]

  kvquant bench residency --layers 32 --room 16,24,31
"""


@app.command("residency", help=_RESIDENCY_HELP)
def residency(
    context: typer.Context,
    layers: Annotated[int, typer.Option(min=2, max=1000, help="Layers, which are read in a cycle.")] = 32,
    room: Annotated[str, typer.Option(help="Layers that the device has room for, e.g. 16,24.")] = "16,24,31",
    policies: Annotated[
        str, typer.Option(help="Who leaves first: next-use, lru, mru or pinned-layers, separated by commas.")
    ] = "next-use,lru,mru,pinned-layers",
    json: _Json = False,
) -> int:
    """See `_RESIDENCY_HELP`."""
    from .residency import ResidencyOptions, run_residency

    return _report(context, partial(run_residency, ResidencyOptions(layers, room, policies)), json)


_STORE_HELP = """The disk tier beside one plain file, on the same disk in the same run: writing and reading layers.

[bold]Example[/bold]

  kvquant bench store --path /mnt/ssd --block 140K --total 512M
"""


@app.command("store", help=_STORE_HELP)
def store(
    context: typer.Context,
    path: Annotated[str, typer.Option(metavar="DIR", help="A folder on the disk; what is written there is removed.")],
    block: Annotated[str, typer.Option(metavar="BYTES", help="Of a payload, e.g. 140K (K = 1024).")] = "140K",
    total: Annotated[str, typer.Option(metavar="BYTES", help="Of all payloads, e.g. 512M, 2G.")] = "512M",
    repeats: _Repeats = 5,
    json: _Json = False,
) -> int:
    """See `_STORE_HELP`."""
    from .store import StoreOptions, run_store

    return _report(context, partial(run_store, StoreOptions(path, block, total, repeats)), json)


_OFFLOAD_HELP = """Decode steps of a model whose compressed history lies mostly in the host's memory, or on disk.

[bold]Examples[/bold]

  kvquant bench offload --model smollm2-135m --contexts 8K,32K --policy int4 --device-share .25

  kvquant bench offload --model smollm2-135m --contexts 8K --disk-share .5 --path /mnt/ssd
"""


@app.command("offload", help=_OFFLOAD_HELP)
def offload(
    context: typer.Context,
    model: _Model,
    contexts: _Contexts = "8K",
    policy: Annotated[str, typer.Option(help="A preset or a policy file.")] = "int4",
    device_share: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Of the compressed blocks, what the device has room for. Default: 0.25"),
    ] = None,
    device_budget: Annotated[
        str | None, typer.Option(metavar="BYTES", help="The same in bytes, e.g. 8M, for all contexts.")
    ] = None,
    disk_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of the compressed blocks, what lies on disk; needs --path.")
    ] = 0.0,
    path: Annotated[
        str | None, typer.Option(metavar="DIR", help="A folder on the disk; what is written there is removed.")
    ] = None,
    dtype: _DType = DType.bfloat16,
    steps: _Steps = 3,
    repeats: _Repeats = 5,
    json: _Json = False,
) -> int:
    """See `_OFFLOAD_HELP`."""
    from ..errors import InputError
    from .offload import OffloadOptions, run_offload

    if device_share is not None and device_budget is not None:
        raise InputError(f"--device-share {device_share}, --device-budget {device_budget}; allowed: one of them")
    device_share = 0.25 if device_share is None else device_share
    options = OffloadOptions(
        model, policy, contexts, device_share, device_budget, disk_share, path, dtype.value, steps, repeats
    )
    return _report(context, partial(run_offload, options), json)


def _report(context: typer.Context, run: Callable[[Callable[[str], None], Progress], Outcome], json: bool) -> int:
    """Runs a bench and prints what it found."""
    from ..display import print_bench, progress

    with only_our_output() as (console, say):
        outcome = run(say, partial(progress, console))
    if json:
        from kvquant.kernels import means

        # How idle threads wait decides how long small parallel loops take.
        how = {"kernels": means(), "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY")}
        print_json(context, outcome.rows, cases=[asdict(case) for case in outcome.cases], **how)
    else:
        print_bench(Console(), outcome)
    return EXIT_ROWS if any(row.failed for row in outcome.rows) else EXIT_OK
