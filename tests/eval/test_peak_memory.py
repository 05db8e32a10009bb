"""What a process takes, as the system counts it: compression that only shows in a formula saves nobody's memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MEASURE = """
import gc, json, sys
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
import kvquant
from kvquant_eval.bench.peak import _status, extra_peak, least

policy, tokens = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=128, max_position_embeddings=2 * tokens, attn_implementation="sdpa",
)
model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
if policy == "none":
    cache = DynamicCache(config=config)
else:
    kvquant.enable(model)
    cache = kvquant.KVQuantCache.for_model(model, policy)
ids = torch.randint(64, (1, tokens))

def read(ids):
    for part in ids.split(512, dim=1):
        model(input_ids=part, cache=cache, logits_to_keep=1)

with torch.inference_mode():
    read(ids[:, :8])
    before = _status("VmRSS")
    found = {"prefill": extra_peak(lambda: read(ids[:, 8:]))}
    extra_peak(lambda: None)  # gives back what the allocator keeps
    found["resident"] = _status("VmRSS") - before
    found["decode"] = least(lambda: extra_peak(lambda: read(ids[:, :1])))
print(json.dumps(found))
"""


def measured(policy: str, tokens: int) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, policy, str(tokens)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's peak")
def test_memory_of_the_process():
    """After and while a prompt is read, and in a step: what stays, and the most beside it."""
    short, long = 4 << 10, 16 << 10
    plain, int4 = ({tokens: measured(policy, tokens) for tokens in (short, long)} for policy in ("none", "int4"))
    stays = [found[long]["resident"] - found[short]["resident"] for found in (plain, int4)]
    assert stays[1] <= 0.4 * stays[0]
    assert int4[long]["prefill"] < plain[long]["prefill"]
    assert int4[long]["decode"] == pytest.approx(int4[short]["decode"], rel=0.25, abs=64 << 10)  # in pages
    assert int4[long]["decode"] < plain[long]["decode"] / 4
