"""A tiny random Llama in vLLM's engine, with what `kvquant.integrations.vllm` puts behind it.

As a program it runs one prompt and tells what came of it, for tests that need a process of its own.
"""

from __future__ import annotations

import json
import os
import random
import sys

VOCAB, VLLM_BLOCK, BLOCK = 512, 32, 128
MODULE = "kvquant.integrations.vllm"


def save_model(folder, seed=0, **settings):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "initializer_range": 0.08,  # so that texts depend on their prompts
    }
    LlamaForCausalLM(LlamaConfig(**config | settings)).save_pretrained(folder)
    return str(folder)


def start(model, connector="KVQuantConnector", extra=None, **settings):
    """An engine in this process; ``extra`` is what kvquant is told, None for an engine without it."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = None
    if extra is not None:
        transfer = KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=MODULE if connector == "KVQuantConnector" else None,
            kv_role="kv_both",
            kv_connector_extra_config={"spec_name": "KVQuantOffloadingSpec", "spec_module_path": MODULE, **extra},
        )
    chosen = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 2048,
        "enforce_eager": True,
        "block_size": VLLM_BLOCK,
        "kv_cache_memory_bytes": 64 << 20,
        "max_num_batched_tokens": 512,
    }
    return LLM(model, kv_transfer_config=transfer, **chosen | settings)


def stop(llm):
    llm.llm_engine.engine_core.shutdown()


def prompt(tokens, seed=0):
    chosen = random.Random(seed)
    return [chosen.randrange(3, VOCAB) for _ in range(tokens)]


def run(llm, *prompts, tokens=12, salt=None):
    """Greedy continuations, and how many tokens of each prompt were not computed."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})} for ids in prompts]
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in outputs], [each.num_cached_tokens for each in outputs]


def the_tier():
    from kvquant.integrations.vllm_transfer import ENGINES

    (found,) = ENGINES.values()
    return found.tier


def states(llm):
    """Keys and values of all that vLLM's prefix cache holds, by block's hash, layer after layer."""
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    layers = get_kv_transfer_group().connector_worker.worker._layers
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    held = {bytes(block.block_hash): block.block_id for block in pool.blocks if block.block_hash is not None}
    numbers = torch.tensor([held[name] for name in sorted(held)])
    return [side for layer in range(len(layers.pages)) for side in layers.read(layer, numbers, per=1)]


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    os.environ.update(given.get("environment", {}))
    engine = start(given["model"], extra=given["extra"])
    texts, cached = run(engine, prompt(given["tokens"]))
    print("RESULT " + json.dumps({"text": texts[0], "cached": cached[0]}), flush=True)
    stop(engine)
