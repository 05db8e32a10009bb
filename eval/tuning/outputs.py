"""What a tuning leaves behind: the policy with comments, and beside it a folder that tells how it came about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvquant import PrecisionPolicy
from kvquant.tuner.footprint import ROLES

from ..errors import InputError, printable
from ..files import prepare_folder, replace_file, to_json
from ..markdown import provenance, rows_table, table
from ..options import format_context, make_writable
from .explain import bits, choices
from .notes import DEFAULT, header, layer_notes
from .solution import Outcome, Solution

_MARK = "# kvquant tune: "  # how a policy that was tuned begins
_COMMAND = "kvquant tune"
SENSITIVITY = "sensitivity.json"
_NAMES = ("rows.json", SENSITIVITY, "README.md", "layers.png", "pareto.png")


def is_tuned(text: str) -> bool:
    """Whether a policy file is one of `kvquant tune`."""
    return text.startswith(_MARK)


def folder_of(path: Path) -> Path:
    """The folder beside a policy."""
    return path.with_suffix("")


@contextmanager
def prepared(path: Path) -> Iterator[None]:
    """As `prepare`; what fails or is interrupted within leaves none of the folders that were made and are empty."""
    folder = folder_of(path)
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        prepare(path)
        yield
    except BaseException:
        for each in made:
            with suppress(OSError):  # it holds something, or was not made
                each.rmdir()
        raise


def prepare(path: Path) -> None:
    """Proves that a policy can be written to ``path``, and its folder beside it, making that.

    Raises `InputError`, also where somebody's files rather than those of an earlier tuning would be replaced.
    """
    if path.suffix.lower() not in (".yaml", ".yml") or path.is_dir():
        raise InputError(f"--out: {path}: not the name of a policy file; allowed: a file ending in .yaml")
    make_writable("--out", path.parent)
    if path.exists() and not is_tuned(_beginning(path)):
        raise InputError(
            f"--out: {path}: not of an earlier `{_COMMAND}` and would be replaced; allowed: another name, or that "
            "file gone"
        )
    prepare_folder(folder_of(path), _NAMES, _COMMAND)


def write(path: Path, outcome: Outcome) -> None:
    """Writes the policy and its folder. Raises `InputError` if that can't be done any more."""
    from .pictures import layers_picture, pareto_picture

    folder = folder_of(path)
    solution = outcome.solution
    files = {
        path: outcome.yaml.encode(errors="backslashreplace"),
        folder / SENSITIVITY: solution.sensitivity.to_json().encode(),
        folder / "rows.json": to_json(outcome.document()).encode(),
        folder / "layers.png": layers_picture(solution),
        folder / "pareto.png": pareto_picture(solution, outcome.curve),
        folder / "README.md": _readme(outcome).encode(errors="backslashreplace"),
    }
    try:
        for file, data in files.items():
            replace_file(file, data)
    except OSError as error:
        raise InputError(f"--out: {path}: {error.strerror or error}") from error


def told(path: Path, solution: Solution) -> str:
    """What was written where, in a line: the policy's bytes, whatever calls bring the text, and its KL."""
    footprint = solution.sensitivity.candidates.footprint
    measured = "not measured" if solution.measured is None else f"measured {solution.measured:.3g}"
    whole = footprint.baseline / 2**20
    return printable(
        f"{path} written: at most {solution.ratio:.4f} of the 16-bit bytes ({solution.ratio * whole:.4g} of "
        f"{whole:.4g} MiB at {format_context(footprint.context)}), KL predicted {solution.predicted:.3g}, {measured}; "
        f"see {folder_of(path)}"
    )


def commented(solution: Solution, command: str) -> str:
    """The policy as YAML, with comments that say what it is for and why each layer has what it has.

    The file loads equal to the policy.
    """
    notes = layer_notes(solution)
    lines = [f"{_MARK}{solution.goal}.", *(f"# {printable(line)}".rstrip() for line in header(solution, command))]
    for line in solution.policy.to_yaml().splitlines():
        indent = line[: -len(line.lstrip())]
        lines += [f"{indent}# {printable(note)}" for note in notes.get(_entry(line), ())]
        lines.append(line)
    text = "\n".join(lines) + "\n"
    assert PrecisionPolicy.from_yaml(text) == solution.policy, "comments are no part of a policy"
    return text


def _entry(line: str) -> str:
    """The entry of a policy's layers, or the default, that a line of YAML begins; nothing for other lines."""
    indent = len(line) - len(line.lstrip())
    if not line.endswith(":") or indent != (0 if line == f"{DEFAULT}:" else 2):
        return ""
    return line.strip(" :'\"")


def _beginning(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(1000)
    except OSError as error:
        raise InputError(f"--out: {path}: {error.strerror or error}") from error


def _readme(outcome: Outcome) -> str:
    solution = outcome.solution
    footprint = solution.sensitivity.candidates.footprint
    return "\n".join(
        [
            f"# Tuned policy `{solution.policy.name}`",
            "",
            f"Tuned for {solution.goal}, at {footprint.context} tokens.",
            "",
            "```sh",
            printable(outcome.command),
            "```",
            "",
            *_verdict(solution),
            "",
            "![KL against bytes](pareto.png)",
            "",
            "![Bits by layer, over sensitivity by layer](layers.png)",
            "",
            *_held_out(solution),
            "## Every layer",
            "",
            *_layers(solution),
            "",
            "Bits are those of an element of a sealed block, parameters included. Rank 1 is the most sensitive layer. "
            "KL is the layer's part of it, as all that was measured tells.",
            "",
            "## Less or more bytes",
            "",
            *table(
                ("share of the bytes", "KL predicted"),
                [(f"{point.ratio:.4f}", f"{point.kl:.3g}") for point in outcome.curve],
            ),
            "",
            *_trials(solution),
            "## How it was made",
            "",
            *provenance(outcome.date, outcome.versions, outcome.machine, solution.facts),
            "",
            f"`kvquant tune --from {SENSITIVITY} --budget …` gives the policy for another budget in seconds, without "
            "the model.",
            "",
        ]
    )


def _verdict(solution: Solution) -> Iterator[str]:
    measured = "not measured" if solution.measured is None else f"measured {solution.measured:.3g}"
    yield (
        f"It takes at most **{solution.ratio:.4f}** of 16 bits an element in the full-attention layers, whatever "
        f"calls bring the text. KL in nats per token on the calibration text: predicted {solution.predicted:.3g}, "
        f"{measured}."
    )
    for words in solution.broken:
        yield f"\n**Not met:** {printable(words)}."


def _held_out(solution: Solution) -> Iterator[str]:
    if not solution.rows:
        return
    yield from ("## On held-out text", "", *rows_table(solution.rows), "")
    first = solution.rows[0]
    if first.kl_at_equal_bytes and first.ratio_to_rivals is not None:
        yield from (
            f"At the tuned policy's bytes the presets' KL, linear in its logarithm between the two nearest of their "
            f"front, is {first.kl_at_equal_bytes:.3g}: the tuned policy's is **{first.ratio_to_rivals:.2f}** of it.",
            "",
        )


def _layers(solution: Solution) -> list[str]:
    found = choices(solution.sensitivity, solution.assignment)
    latent = solution.sensitivity.candidates.latent
    names = ("latents", "rotary keys") if latent else ("keys", "values")
    headings = ["layer"] + [f"{name}{what}" for name in names for what in ("", ", bits", ", rank", ", KL")]
    rows = []
    for layer in sorted(solution.assignment.layers):
        row = [str(layer)]
        for role in ROLES:
            choice = found[layer, role]
            codec = choice.chosen.codec
            width = bits(solution.sensitivity, layer, role, codec)
            row += [codec, f"{width:.2f}", str(choice.rank), f"{choice.chosen.kl:.2g}"]
        rows.append(row)
    return table(headings, rows)


def _trials(solution: Solution) -> Iterator[str]:
    if not solution.trials:
        return
    yield from ("## What was measured on the way", "")
    yield from table(
        ("for", "share of the bytes", "KL predicted", "KL measured"),
        [(trial.what, f"{trial.ratio:.4f}", f"{trial.predicted:.3g}", f"{trial.kl:.3g}") for trial in solution.trials],
    )
    yield ""
