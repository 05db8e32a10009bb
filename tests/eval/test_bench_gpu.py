"""`make gpu-check` where there is no GPU, and all of it rehearsed: the kernels interpreted on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "gpu_check.py"
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
_spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
gpu_check = importlib.util.module_from_spec(_spec)
sys.modules["gpu_check"] = gpu_check
_spec.loader.exec_module(gpu_check)


def run(*words):
    """Exit code, what the one line on stdout says, and stderr."""
    done = subprocess.run([sys.executable, SCRIPT, *words], env=NO_GPU, capture_output=True, text=True, check=False)
    assert done.stdout.count("\n") == 1, done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def test_without_a_gpu_one_line_says_so_and_what_to_do():
    code, found, told = run()
    assert code == 2
    assert found["status"] == "unavailable"
    assert found["fix"]
    assert told == f"gpu-check: {found['reason']}; {found['fix']}\n"


def test_without_time_everything_is_named(tmp_path):
    code, found, _ = run("--rehearse", "--seconds", "0", "--out", str(tmp_path))
    assert code == 1
    assert found["status"] == "failed"
    assert found["skipped"] == [stage.name for stage in gpu_check.TINY.stages]


def test_rehearsal(tmp_path):
    """Every kind of stage, from its first line to the report."""
    pytest.importorskip("triton", reason="Triton is not installed")
    code, found, told = run("--rehearse", "--out", str(tmp_path))
    assert code == 0, told
    assert {name: stage["status"] for name, stage in found["stages"].items()} == {
        stage.name: "ok" for stage in gpu_check.TINY.stages
    }
    assert found["tests"]["passed"] == len(gpu_check.TINY.tests)
    assert {row["bench"] for row in found["rows"]} == {"attention", "codecs", "tuning"}
    assert {row["subject"] for row in found["rows"] if row["bench"] == "attention"} == {"int4", "SDPA", "best dense"}
    assert all(target["measured"] > 0 for target in found["targets"])
    (report,) = tmp_path.iterdir()
    assert report.name == f"{found['date'][:10]}-cpu-interpreted.json"
    assert json.loads(report.read_text()) == found


def python(code):
    return [sys.executable, "-c", code]


def test_what_a_stage_breaks_is_told():
    def bench(code, seconds=60):
        return gpu_check.run_bench(gpu_check.REAL, python(code), seconds)

    row = {"bench": "attention", "case": 8, "subject": "int4", "ms_median": 1.0, "value": 0.5, "detail": ""}
    assert bench('print(\'{"rows": [], "cases": []}\')')["status"] == "ok"
    assert bench("import os; os.abort()")["reason"] == "ended by signal 6"
    assert bench("raise SystemExit(3)")["reason"] == "exit code 3"
    assert bench('print(\'{"faults": ["no memory"]}\')')["reason"] == "no memory"
    assert bench(f"import json; print(json.dumps({{'rows': [{row}]}}))")["reason"] == "int4 at 8: relative error 0.5"
    row["value"] = "nan"
    assert bench(f"import json; print(json.dumps({{'rows': [{row}]}}))")["reason"] == "int4 at 8: relative error nan"
    row = {**row, "ms_median": None, "detail": "no memory"}
    late = bench(f"import json, time; print(json.dumps({{'rows': [{row}]}}), flush=True); time.sleep(60)", seconds=2)
    assert late == {"rows": [row], "cases": [], "status": "timed out", "reason": "int4 at 8: no memory"}


def test_what_tests_break_is_told(tmp_path):
    (tmp_path / "tests").mkdir()
    file = tmp_path / "tests" / "test_it.py"
    file.write_text("def test_right(): pass\ndef test_wrong(): raise ValueError('so it is')\n")
    plan = replace(gpu_check.TINY, tests=(str(file),))
    result = gpu_check.run_tests(plan, 60)
    assert result["passed"] == 1
    assert list(result["failed"].values()) == ["ValueError: so it is"]
    assert (result["status"], result["reason"]) == ("failed", "1 failed")
