"""`make gpu-check`: whether the GPU kernels are right and as fast as promised, told in one line of JSON.

    python3 .ci/gpu_check.py [--rehearse] [--seconds 450] [--out reports/gpu]

Wants a GPU, and a Python whose torch can use it. Stages run one after another, each in a process of its own: what
one breaks, or hangs in, becomes part of the result, and the others go on. When time runs out, those that are left are
named. Stdout gets the one line, which is also written to ``<out>/<date>-<card>.json``; all else goes to stderr. Exit
code 0: everything passed and every target was met, 1: not so, 2: there is nothing to check with.

``--rehearse`` runs all of it on the CPU, kernels interpreted and everything tiny, to see that it would run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 450.0  # and what it takes to begin: 8 minutes
LEAST_SECONDS = 10.0  # a stage is not begun with less
NEEDED = ("triton", "transformers", "pydantic", "yaml", "numpy", "xxhash", "psutil", "pytest", "hypothesis")
CALLED = {"yaml": "PyYAML"}  # where a package's name is not its module's
LARGEST_ERROR = 1e-2  # of attention's output, in 16 bits
EXIT_OK, EXIT_FAILED, EXIT_UNAVAILABLE = range(3)


@dataclass(frozen=True)
class Stage:
    """A part of the check, and the seconds it may take."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What is run, and how large: attention of ``rows`` sequences of each of ``lengths``, coding of ``blocks``."""

    device: str
    stages: tuple[Stage, ...]
    tests: tuple[str, ...]
    lengths: tuple[int, ...]
    rows: int
    kv_heads: int
    q_heads: int
    head_dim: int
    blocks: int
    repeats: int
    configs: int | None  # how many are tried in tuning


REAL = Plan(
    device="cuda:0",
    stages=(
        Stage("attention int4", 120),
        Stage("attention int8", 60),
        Stage("attention int2", 60),
        Stage("codecs", 60),
        Stage("tests", 240),
        Stage("attention int4-tokens", 60),
        Stage("attention int4-channels", 60),
        Stage("tuning", 120),
    ),
    tests=("tests/test_triton.py", "tests/test_triton_codecs.py", "tests/store/test_device.py"),
    lengths=(128 << 10, 32 << 10, 8 << 10),
    rows=8,
    kv_heads=8,
    q_heads=32,
    head_dim=128,
    blocks=2048,
    repeats=15,
    configs=None,
)
TINY = Plan(
    device="cpu",
    stages=tuple(Stage(name, 120) for name in ("attention int4", "codecs", "tests", "tuning")),
    tests=tuple(f"tests/test_triton_codecs.py::test_{name}" for name in ("no_blocks", "constants")),
    lengths=(256 + 128,),
    rows=2,
    kv_heads=1,
    q_heads=2,
    head_dim=64,
    blocks=2,
    repeats=1,
    configs=1,
)
CODECS = ("int8/channel/g64/none", "int4/channel/g64/none", "int4/token/g64/hadamard", "int2/channel/g64/none")


def main() -> int:
    """Run the check, or a stage of it."""
    parser = argparse.ArgumentParser(description="Check the GPU kernels; prints one line of JSON.")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, interpreted and tiny")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long all of it may take")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "gpu", help="folder of the report")
    parser.add_argument("--stage", help=argparse.SUPPRESS)  # as the check runs itself
    given = parser.parse_args()
    use_checkout()
    plan = TINY if given.rehearse else REAL
    if given.stage:
        for part in bench(plan, given.stage):
            print(json.dumps(part), flush=True)
        return EXIT_OK
    found: dict[str, Any] = {
        "check": "gpu",
        "status": "unavailable",
        "rehearsal": given.rehearse,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python3", ".ci/gpu_check.py", *sys.argv[1:]]),
    }
    if obstacle := what_is_missing(given.rehearse):
        say("; ".join(obstacle))
        print(line(found | dict(zip(("reason", "fix"), obstacle, strict=True))))
        return EXIT_UNAVAILABLE
    found |= surroundings(given.rehearse)
    found |= check(plan, given.seconds, [sys.executable, __file__, *["--rehearse"][: given.rehearse]])
    card = re.sub(r"[^A-Za-z0-9]+", "-", found["card"]["name"]).strip("-").lower()
    report = given.out / f"{found['date'][:10]}-{card}.json"
    given.out.mkdir(parents=True, exist_ok=True)
    report.write_text(line(found) + "\n")
    print(line(found))
    return EXIT_OK if found["status"] == "ok" else EXIT_FAILED


def use_checkout() -> None:
    """Import kvquant and its evaluation from here, whatever is installed."""
    sys.path.insert(0, str(ROOT))
    folder = ROOT / "eval"
    spec = importlib.util.spec_from_file_location(
        "kvquant_eval", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    sys.modules["kvquant_eval"] = importlib.util.module_from_spec(spec)


def what_is_missing(rehearse: bool) -> tuple[str, str] | None:
    """Why nothing can be checked, and what to do about it."""
    python = sys.executable
    try:
        import torch
    except (ImportError, OSError) as error:  # it is not there, or libraries that it wants are not
        why = " ".join(str(error).split())
        return f"{python}: {why}", "make gpu-check GPU_PYTHON=… with a Python whose torch was built for CUDA"
    if not rehearse and not torch.cuda.is_available():
        if torch.version.cuda is None:
            return f"torch {torch.__version__} was built without CUDA", "make gpu-check GPU_PYTHON=… with one that was"
        return f"torch {torch.__version__} finds no GPU", "see what nvidia-smi says, and CUDA_VISIBLE_DEVICES"
    try:
        if not rehearse and torch.cuda.get_device_capability() < (8, 0):
            return f"{torch.cuda.get_device_name()} does not multiply bfloat16", "use an Ampere GPU or a later one"
    except RuntimeError as error:
        return f"the GPU cannot be used: {' '.join(str(error).split())}", "see what nvidia-smi says"
    missing = [CALLED.get(name, name) for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"{python} has no {', '.join(missing)}", f"{python} -m pip install {' '.join(missing)}"
    return None


def surroundings(rehearse: bool) -> dict[str, Any]:
    """The card, and what else results depend on."""
    import torch
    import triton

    from kvquant_eval.environment import machine, versions

    card: dict[str, Any] = {"name": "CPU, interpreted"}
    if not rehearse:
        properties = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            driver = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            driver = None
        card = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "driver": driver,
            "cuda": torch.version.cuda,
        }
    return {"card": card, "versions": versions() | {"triton": triton.__version__}, "machine": machine()}


def check(plan: Plan, seconds: float, own: list[str]) -> dict[str, Any]:
    """The results of all stages, for which there are so many ``seconds``; ``own`` is the command of this script."""
    began = time.monotonic()
    found: dict[str, Any] = {"stages": {}, "rows": [], "cases": []}
    for stage in plan.stages:
        left = min(stage.seconds, began + seconds - time.monotonic())
        if left < LEAST_SECONDS:
            found["stages"][stage.name] = {"status": "skipped", "reason": "no time was left"}
            continue
        say(f"{stage.name}, {left:.0f} s at most")
        since = time.monotonic()
        if stage.name == "tests":
            result = found["tests"] = run_tests(plan, left)
        else:
            result = run_bench(plan, [*own, "--stage", stage.name], left)
            for kind in ("rows", "cases"):
                found[kind] += result.pop(kind)
        result["seconds"] = round(time.monotonic() - since, 1)
        found["stages"][stage.name] = {key: result[key] for key in ("status", "reason", "seconds") if key in result}
        say(": ".join(str(result[key]) for key in ("status", "reason") if key in result))
    found["skipped"] = [name for name, stage in found["stages"].items() if stage["status"] == "skipped"]
    found["targets"] = targets(plan, found["rows"])
    met = plan is TINY or all(target["met"] for target in found["targets"])
    passed = all(stage["status"] == "ok" for stage in found["stages"].values())
    return found | {"status": "ok" if met and passed else "failed", "seconds": round(time.monotonic() - began, 1)}


def targets(plan: Plan, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What attention to int4 has to reach at the greatest length, and what it does."""
    row = next((r for r in rows if (r["case"], r["subject"], r["baseline"]) == (plan.lengths[0], "int4", "SDPA")), {})
    fraction, ratio = row.get("bandwidth_fraction"), row.get("ratio")
    what = f"int4 decode attention, {plan.lengths[0]} tokens × {plan.rows}"
    return [
        {
            "target": f"{what}: share of the measured read bandwidth",
            "at_least": 0.5,
            "measured": fraction,
            "met": fraction is not None and fraction >= 0.5,
        },
        {
            "target": f"{what}: time over that of SDPA in bfloat16",
            "at_most": 0.45,
            "measured": ratio,
            "met": ratio is not None and ratio <= 0.45,
        },
    ]


def run_bench(plan: Plan, command: list[str], seconds: float) -> dict[str, Any]:
    """A stage's rows and cases, and whether all of it worked and was right."""
    result: dict[str, Any] = {"rows": [], "cases": []}
    faults = []

    def take(said: str) -> None:
        try:
            part = json.loads(said)
        except ValueError:  # something else that prints
            say(said.rstrip())
            return
        faults.extend(part.get("faults", ()))
        for kind in ("rows", "cases"):
            result[kind] += part.get(kind, ())

    ended = run(command, environment(plan), seconds, take)
    for row in result["rows"]:
        # What is tried in tuning may be too much for a GPU, but not what it is compared with.
        if row["baseline_ms_median" if row["bench"] == "tuning" else "ms_median"] is None:
            faults.append(f"{row['subject']} at {row['case']}: {row['detail']}")
        elif row["bench"] == "attention" and row["value"] is not None and not float(row["value"]) <= LARGEST_ERROR:
            faults.append(f"{row['subject']} at {row['case']}: relative error {row['value']}")
    return result | judged(ended, faults)


def run_tests(plan: Plan, seconds: float) -> dict[str, Any]:
    """The outcome of every test, as pytest tells it while it goes on."""
    command = [sys.executable, "-m", "pytest", *plan.tests, "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-o", "filterwarnings=default"]  # what other versions of other packages warn of is not at issue
    if plan is REAL and importlib.util.find_spec("xdist"):  # most of the time goes into compiling
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    outcomes: dict[str, str] = {}
    reasons: dict[str, str] = {}

    def take(said: str) -> None:
        print(said, end="", file=sys.stderr)
        if (word := re.search(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b", said)) and (test := re.search(r"tests/\S+", said)):
            outcomes[test[0]] = word[1].lower()
            if " - " in said:
                reasons[test[0]] = said.split(" - ", 1)[1].strip()[:300]

    ended = run(command, environment(plan), seconds, take)
    told = {word: [test for test, outcome in outcomes.items() if outcome == word] for word in set(outcomes.values())}
    failed = {test: reasons.get(test, "") for word in ("failed", "error") for test in told.get(word, ())}
    counts = {word: len(told.get(word, ())) for word in ("passed", "skipped")}
    faults = (
        [f"{len(failed)} failed"] if failed else [] if counts["passed"] else [f"none passed, {ended or 'all skipped'}"]
    )
    return counts | {"failed": failed} | judged(ended, faults)


def judged(ended: str, faults: list[str]) -> dict[str, Any]:
    """The status of a stage, and why it is not ok."""
    if ended == "timed out":
        return {"status": ended, "reason": "; ".join(faults)} if faults else {"status": ended}
    reason = "; ".join(dict.fromkeys(faults)) or ended
    return {"status": "failed", "reason": reason} if reason else {"status": "ok"}


def run(command: list[str], env: dict[str, str], seconds: float, take: Callable[[str], None]) -> str:
    """Run a command, give its lines to ``take`` as they come, and tell how it ended if not well."""
    late = threading.Event()
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    ) as process:

        def stop() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)  # and all that it started

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            assert process.stdout is not None
            for said in process.stdout:
                take(said)
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if late.is_set():
        return "timed out"
    return "" if code == 0 else f"ended by signal {-code}" if code < 0 else f"exit code {code}"


def environment(plan: Plan) -> dict[str, str]:
    """That of a stage."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "400"}
    return env | ({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if plan is TINY else {})


def bench(plan: Plan, name: str) -> Iterator[dict[str, Any]]:
    """The parts of a stage's result, as they come."""
    import torch

    from kvquant import get_codec
    from kvquant.kernels import gpu_attention
    from kvquant_eval.bench import gpu
    from kvquant_eval.bench.device import Stopwatch
    from kvquant_eval.bench.layer import Shape
    from kvquant_eval.errors import one_line

    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    watch = Stopwatch(torch.device(plan.device))
    if plan is TINY:
        gpu_attention.config = gpu_attention.config._replace(programs=1, waves=1)  # each program takes long
    kind, *subjects = name.split()
    for length in plan.lengths if kind == "attention" else plan.lengths[:1]:
        torch.cuda.empty_cache()  # what is kept of the last length does not count as free
        shape = Shape(plan.kv_heads, plan.q_heads, plan.head_dim, length, 1, torch.bfloat16, plan.device)
        try:
            if kind == "attention":
                outcome = gpu.run_attention(gpu.Batch(shape, plan.rows).fitting(), subjects, watch, plan.repeats)
            elif kind == "tuning":
                batch, configs = gpu.Batch(shape, plan.rows).fitting(), gpu.CONFIGS[: plan.configs]
                outcome = gpu.run_tuning(batch, "int4", watch, plan.repeats, configs)
            else:
                states = torch.stack([shape.states(plan.kv_heads, 128) for _ in range(plan.blocks)])
                codecs = [get_codec(codec, "key", 128) for codec in CODECS]
                outcome = gpu.run_codecs(states, codecs, watch, plan.repeats)
        except Exception as error:  # of one length: another may do
            yield {"faults": [f"{name} at {length}: {one_line(error)}"]}
            continue
        yield finite({"rows": [row.as_dict() for row in outcome.rows], "cases": [asdict(c) for c in outcome.cases]})


def finite(x: Any) -> Any:
    """The same, with words for numbers that JSON does not have."""
    if isinstance(x, dict):
        return {key: finite(value) for key, value in x.items()}
    if isinstance(x, list):
        return [finite(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def line(found: dict[str, Any]) -> str:
    """Strict JSON in one line."""
    return json.dumps(found, allow_nan=False, ensure_ascii=False)


def say(text: str) -> None:
    """Tell whoever watches."""
    print(f"gpu-check: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
