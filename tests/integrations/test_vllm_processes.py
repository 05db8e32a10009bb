"""vLLM's engine under pressure, behind its own connector, in processes one after another."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvquant.testing import relative_rms
from tests.integrations import engine
from tests.integrations.engine import BLOCK, prompt, run, save_model, start, states, stop, the_tier

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's, and of what it loads

PROMPT, SINKS = 5 * BLOCK, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def test_preempted_requests_go_on_as_they_would(model):
    prompts = [prompt(2 * BLOCK + 7, seed) for seed in range(6)]
    plain = start(model, max_model_len=512)
    texts, _ = run(plain, *prompts, tokens=100)
    stop(plain)
    extra = {"policy": "fp16", "host_budget": "64MiB"}
    tight = start(model, extra=extra, num_gpu_blocks_override=34, max_model_len=512)
    metrics = tight.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    original = metrics._preempt_request
    metrics._preempt_request = lambda request, *rest, **named: (
        preempted.append(request.request_id),
        original(request, *rest, **named),
    )
    found, cached = run(tight, *prompts, tokens=100)
    again, cached_again = run(tight, *prompts, tokens=100)
    stats = the_tier().stats()
    stop(tight)
    assert preempted
    assert found == again == texts
    assert cached == [0] * 6
    assert cached_again == [2 * BLOCK] * 6
    assert stats.loaded >= 12


def test_int4_behind_vllms_own_connector(tmp_path):
    model = save_model(tmp_path, num_key_value_heads=4, hidden_size=256)
    llm = start(model, "OffloadingConnector", {"policy": "int4", "host_budget": "64MiB"}, dtype="bfloat16")
    (computed,), _ = run(llm, prompt(PROMPT))
    exact = states(llm)
    assert llm.reset_prefix_cache()
    (loaded,), (cached,) = run(llm, prompt(PROMPT))
    found = states(llm)
    stats = the_tier().stats()
    stop(llm)
    assert len(loaded) == len(computed) == 12
    assert cached == PROMPT  # as vLLM counts: it computes one of them all the same
    assert (stats.stored, stats.loaded) == (5, 5)
    assert stats.engine_bytes / stats.payload_bytes > 3.2
    errors = [relative_rms(one, other) for one, other in zip(found, exact, strict=True)]
    assert 0.02 < min(errors) <= max(errors) < 0.15
    for one, other in zip(found, exact, strict=True):
        same = (one == other).all(dim=-1).all(dim=1)  # [blocks, tokens] of vLLM's
        firsts = same[:, :SINKS].all(dim=1) & ~same[:, SINKS:].any(dim=1)
        assert firsts.sum() == 1  # the sequence's first tokens are as they were


def alone(model, folder, **more):
    """What `engine` tells of one prompt, in a process of its own; its output where it fails."""
    given = {"model": model, "tokens": PROMPT, "extra": {"policy": "fp16"} | folder} | more
    here = str(Path(__file__).parent.parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, engine.__file__, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    found = re.search("^RESULT (.*)$", done.stdout, re.MULTILINE)
    return json.loads(found[1]) if found else done.stdout + done.stderr


def test_blocks_outlive_the_process_and_damage_does_not_matter(model, tmp_path):
    disk = {"host_budget": "8MiB", "disk_budget": "64MiB", "disk_path": str(tmp_path / "kv")}
    known = {"text": alone(model, disk)["text"]}
    assert alone(model, disk) == known | {"cached": PROMPT - 1}
    assert alone(model, disk | {"tenant": "other"}) == known | {"cached": 0}
    slab = max((tmp_path / "kv").iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(slab.read_bytes())
    for at in range(0, len(content), 4096):
        content[at] ^= 0xFF
    slab.write_bytes(content)
    assert alone(model, disk) == known | {"cached": 0}
    assert alone(model, disk) == known | {"cached": PROMPT - 1}


def test_a_worker_in_another_process_is_refused(model):
    told = alone(model, {"host_budget": "8MiB"}, environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert "executor 'mp'; allowed: 'uni', the worker in the scheduler's process" in told
