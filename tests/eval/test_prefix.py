"""The exact history on disk: the same rows without reading the text again, and nothing that does not fit."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant import KVQuantCache
from kvquant_eval import prefix as subject
from kvquant_eval.errors import InputError
from kvquant_eval.prefix import Prefix, exact_identity
from kvquant_eval.sweep import Settings, Sweep
from tests.models import tiny

from .test_ppl_cli import ppl, rows_of
from .tiny import small_policy, tiny_llama

CONTEXTS = (300, 600, 900)


@pytest.fixture
def text() -> torch.Tensor:
    return torch.randint(3, 97, (1000,), generator=torch.Generator().manual_seed(1))


def run(
    model: Any, text: torch.Tensor, folder: Path, *contexts: int, groups: Any = ()
) -> tuple[list[Any], int, list[str]]:
    """Rows without seconds, tokens the uncompressed model and the policies read, and what was said."""
    said: list[str] = []
    kept = Prefix(model, exact_identity(model), text, folder, said.append)
    kept.open()
    read: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    policies = [small_policy("int8"), small_policy("int4")]
    settings = Settings(contexts or CONTEXTS, "prefill", 16, 32)
    new = partial(KVQuantCache.for_model, model)
    rows = list(Sweep("tiny", model, text, policies, new, settings, groups=groups, prefix=kept).rows())
    hook.remove()
    assert all(row.status == "ok" for row in rows), rows[0].reason
    return [(row.policy, row.context, row.kl_mean, row.ppl, row.kv_bytes) for row in rows], sum(read), said


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2", "gpt2", "deepseek_v3", "gpt_oss"])
def test_a_second_sweep_reads_only_the_tails(family: str, text: torch.Tensor, tmp_path: Path) -> None:
    model = tiny(family)
    first, read, said = run(model, text, tmp_path)
    assert said == [f"Kept the exact history of 768 tokens in {tmp_path}"]
    again, reread, said = run(model, text, tmp_path)
    assert said[0] == f"Reusing the exact history of 768 tokens in {tmp_path}"
    assert again == first
    tails = sum(48 for _ in CONTEXTS) * 4  # a chunk more than is scored, for the reference, the policies, the floor
    assert reread <= tails + (900 - 768)
    assert read >= 900


def test_other_contexts_use_what_fits(text: torch.Tensor, tmp_path: Path) -> None:
    model = tiny("llama")
    run(model, text, tmp_path)
    alone, _, _ = run(model, text, tmp_path / "other", 400, 700)
    shared, read, _ = run(model, text, tmp_path, 400, 700)
    assert read < 400
    for mine, theirs in zip(shared, alone, strict=True):
        assert mine[:2] == theirs[:2]
        assert mine[2:] == pytest.approx(theirs[2:], rel=1e-3)  # read in other steps


def test_windows_are_there_only_where_a_tail_began(text: torch.Tensor, tmp_path: Path) -> None:
    model = tiny("gemma3")
    run(model, text, tmp_path)
    alone, read, said = run(model, text, tmp_path, 400)
    assert read >= 400  # no window was kept there
    assert said == [f"Kept the exact history of 768 tokens in {tmp_path}"]
    again, read, said = run(model, text, tmp_path, 400)
    assert read < 400
    for mine, theirs in zip(again, alone, strict=True):
        assert mine[2:] == pytest.approx(theirs[2:], rel=1e-3)  # read in other steps
    assert said == [f"Reusing the exact history of 768 tokens in {tmp_path}"]
    assert run(model, text, tmp_path)[1] < 900  # what was there before is there still


def test_files_of_others_stay(text: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    mine = [tmp_path / "my-model.safetensors", tmp_path / f"{'a' * 32}.safetensors"]
    for file in mine:
        save_file({"a": torch.zeros(10_000)}, file)
        os.utime(file, (0, 0))
    monkeypatch.setattr(subject, "LIMIT", 10**6)
    for start in (0, 10, 20):
        said = run(tiny("llama"), text[start:].contiguous(), tmp_path)[2]
    assert all(file.exists() for file in mine)
    assert "Deleted the oldest exact history" in said[-2]


def test_what_a_killed_run_left_goes_once_it_is_old(text: torch.Tensor, tmp_path: Path) -> None:
    left = [tmp_path / "kvquant-old.partial", tmp_path / "kvquant-new.partial", tmp_path / "mine.partial"]
    for file in left:
        file.touch()
    os.utime(left[0], (0, 0))
    run(tiny("llama"), text, tmp_path)
    assert [file.exists() for file in left] == [False, True, True]


def test_a_longer_sweep_extends_what_is_there(text: torch.Tensor, tmp_path: Path) -> None:
    for family in ("llama", "gemma3"):
        model = tiny(family)
        run(model, text, tmp_path, 300)
        _, read, said = run(model, text, tmp_path)
        assert said == [
            f"Reusing the exact history of 256 tokens in {tmp_path}",
            f"Kept the exact history of 768 tokens in {tmp_path}",
        ]
        assert run(model, text, tmp_path)[1] < read


def test_a_text_that_changes_later_on_shares_its_beginning(text: torch.Tensor, tmp_path: Path) -> None:
    model = tiny("gemma3")
    run(model, text, tmp_path)
    changed = text.clone()
    changed[500:] = text.flip(0)[:500]
    fresh, _, _ = run(model, changed, tmp_path / "fresh")
    mixed, _, said = run(model, changed, tmp_path)
    assert said[0] == f"Reusing the exact history of 256 tokens in {tmp_path}"
    for mine, theirs in zip(mixed, fresh, strict=True):
        assert mine[2:] == pytest.approx(theirs[2:], rel=1e-3)
    # What is stored now is of the changed text.
    assert run(model, changed, tmp_path)[0] == mixed


SETTINGS = {"rms_norm_eps": 0.5, "hidden_act": "relu", "sliding_window": 16, "query_pre_attn_scalar": 1}


@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_is_a_miss(text: torch.Tensor, tmp_path: Path, name: str) -> None:
    family = "llama" if name == "rms_norm_eps" else "gemma3"
    run(tiny(family), text, tmp_path)
    changed = tiny(family, **{"hidden_activation" if name == "hidden_act" else name: SETTINGS[name]})
    assert not any(line.startswith("Reusing") for line in run(changed, text, tmp_path)[2])


@pytest.mark.parametrize("what", ["model", "dtype", "text", "positions", "every other weight"])
def test_another_of_anything_is_a_miss(text: torch.Tensor, tmp_path: Path, what: str) -> None:
    run(tiny("llama"), text, tmp_path)
    model, other = tiny("llama"), text.clone()
    if what == "model":
        model.model.layers[3].mlp.up_proj.weight.data[0, 0] += 1
    elif what == "every other weight":
        weight = model.model.embed_tokens.weight.data
        picked = torch.linspace(0, weight.numel() - 1, 4096, dtype=torch.float64).long()
        assert len(picked) < weight.numel()
        kept = weight.view(-1)[picked].clone()
        weight *= -1
        weight.view(-1)[picked] = kept  # what a quick fingerprint reads
    elif what == "dtype":
        model = model.to(torch.bfloat16)
    elif what == "text":
        other[5] = (other[5] + 1) % 90 + 3
    else:
        model = tiny("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    assert not any(line.startswith("Reusing") for line in run(model, other, tmp_path)[2])


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "text", "no facts"])
def test_a_damaged_file_is_replaced(text: torch.Tensor, tmp_path: Path, damage: str) -> None:
    model = tiny("llama")
    first, _, _ = run(model, text, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-1000] ^= 1
    elif damage == "cut":
        del data[-1000:]
    elif damage == "empty":
        data.clear()
    elif damage == "text":
        data[:] = b"not a file of tensors"
    else:
        from safetensors.torch import save_file

        save_file({"a": torch.zeros(2)}, file)
        data[:] = file.read_bytes()
    file.write_bytes(data)
    again, _, said = run(model, text, tmp_path)
    assert "is of no use and will be replaced" in said[0]
    assert "\n" not in said[0]
    assert again == first
    assert run(model, text, tmp_path)[2][0].startswith("Reusing")


def test_groups_of_policies_share_it_within_a_sweep(text: torch.Tensor, tmp_path: Path) -> None:
    model = tiny("llama")
    whole, read, _ = run(model, text, tmp_path / "a")
    split, reread, _ = run(model, text, tmp_path / "b", groups=(("int8",), ("int4",)))
    assert sorted(split) == sorted(whole)
    assert reread < read + 600


def test_the_folder_is_bounded(text: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    run(model, text, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    monkeypatch.setattr(subject, "LIMIT", int(2.5 * file.stat().st_size))
    for start in (10, 20, 30):
        run(model, text[start:].contiguous(), tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    monkeypatch.setattr(subject, "LIMIT", 1000)
    said = run(model, text[40:].contiguous(), tmp_path)[2]
    assert said[0].startswith("The exact history is not kept: its")
    assert not list(tmp_path.glob("*.partial"))


def test_who_is_refused(tmp_path: Path, text: torch.Tensor) -> None:
    model = tiny("qwen3_next")
    with pytest.raises(InputError, match="state cannot be kept"):
        Prefix(model, exact_identity(model), text, tmp_path).open()
    (tmp_path / "file").touch()
    model = tiny_llama()
    with pytest.raises(InputError, match="--reuse-prefix: .*file"):
        Prefix(model, exact_identity(model), text, tmp_path / "file").open()


def test_command(arguments: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = arguments | {"--contexts": "96,500", "--protocol": "prefill", "--reuse-prefix": str(tmp_path / "kept")}
    given |= {"--score-tokens": "240"}
    for name in ("a", "b"):
        assert ppl(given | {"--out": str(tmp_path / name)}) == 0
    err = capsys.readouterr().err
    assert f"Kept the exact history of 256 tokens in {tmp_path / 'kept'}" in err
    assert f"Reusing the exact history of 256 tokens in {tmp_path / 'kept'}" in err
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")
    assert ppl(given | {"--protocol": "streaming"}) == 2
    assert "only --protocol prefill has an exact prefix" in capsys.readouterr().err
    assert ppl(given | {"--contexts": "1K", "--rope-scaling": "dynamic"}) == 2
    assert "prefixes do not nest" in capsys.readouterr().err
