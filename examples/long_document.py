"""Ask a question about a long document, with the KV cache in 4 bits instead of 16.

The document is read and answered from twice, with transformers' own cache and with kvquant's. Printed of each: the
answer, the bytes the cache takes, and the tokens it wrote per second; at last how much the second saved.

    python examples/long_document.py --document book.txt --question "Who tells the story?"
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import Cache

import kvquant

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="hub name, or a local folder")
parser.add_argument("--document", default=Path(__file__).parent.parent / "README.md", help="a text file")
parser.add_argument("--question", default="What is kvquant? Answer in one sentence.")
parser.add_argument("--policy", default="int4", help="a preset, or a policy file")
parser.add_argument("--tokens", type=int, default=4000, help="of the document that are read")
parser.add_argument("--new", type=int, default=64, help="tokens that are written at most")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
kvquant.enable(model)  # attention reads compressed blocks where they lie

document = tokenizer(Path(args.document).read_text(encoding="utf-8")).input_ids[: args.tokens]
message = {"role": "user", "content": f"{tokenizer.decode(document)}\n\n{args.question}"}
prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_tensors="pt", return_dict=True)


def answer(cache: Cache) -> float:
    """Print what the model answers; tokens per second once the document has been read."""
    ids = model.generate(**prompt, cache=cache, max_new_tokens=1, do_sample=False)  # reads it all
    started = time.perf_counter()
    mask = torch.ones_like(ids)
    written = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=args.new - 1, do_sample=False)
    rate = (written.shape[1] - ids.shape[1]) / (time.perf_counter() - started)
    print(tokenizer.decode(written[0, ids.shape[1] - 1 :], skip_special_tokens=True))
    return rate


plain, compressed = DynamicCache(config=model.config), kvquant.KVQuantCache.for_model(model, args.policy)
plain_rate = answer(plain)
plain_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
print(f"-- DynamicCache: {plain_bytes / 2**20:.1f} MiB, {plain_rate:.1f} tokens/s")
rate, stats = answer(compressed), compressed.stats()
taken = stats.kv_bytes + stats.other_bytes
print(f"-- kvquant {args.policy}: {taken / 2**20:.1f} MiB, {rate:.1f} tokens/s")
print(f"{plain_bytes - taken} bytes saved, {1 - taken / plain_bytes:.0%} of the cache")
