"""Decode with a quarter of the device memory that the compressed cache would take.

The text is continued twice: with all int4 blocks on the device, and with a store that has room for a quarter of them
there, for another quarter in the host's memory, and for the rest on disk. Printed: what lies in each tier, how often
it was read from there, and whether both wrote the same text, as they should.

    python examples/offload.py --tokens 4000 --disk /mnt/ssd
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvquant

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="hub name, or a local folder")
parser.add_argument("--text", default=Path(__file__).parent.parent / "README.md", help="a text file to continue")
parser.add_argument("--tokens", type=int, default=2000, help="of the text that are read")
parser.add_argument("--new", type=int, default=32, help="tokens that are written")
parser.add_argument("--disk", help="where to make a folder for blocks (default: the system's place for such)")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
kvquant.enable(model)
text = Path(args.text).read_text(encoding="utf-8")
ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.tokens]
# Blocks are encoded as soon as they are complete; by default they stay as they were while the device has room.
policy = kvquant.PrecisionPolicy.load("int4").model_copy(update={"when": "seal"})


def written(store: kvquant.TieredStore | None) -> tuple[str, kvquant.KVQuantCache]:
    """What the model writes, and its cache."""
    cache = kvquant.KVQuantCache.for_model(model, policy, store=store)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": args.new, "do_sample": False}
    return tokenizer.decode(model.generate(ids, cache=cache, **given)[0, ids.shape[1] :]), cache


expected, cache = written(None)
blocks = sum(layer.block_bytes for layer in cache.stats().layers)
if not blocks:
    parser.error(f"--text: its {ids.shape[1]} tokens fill no block; give a longer one")
quarter = blocks // 4
print(f"all on the device: {cache.stats()}; {blocks} bytes are blocks")
with tempfile.TemporaryDirectory(dir=args.disk) as folder:
    store = kvquant.TieredStore(quarter, quarter, 2 * blocks, folder, staging="2MiB")
    text, cache = written(store)
    for tier in store.stats().tiers:
        print(f"{tier.name}: {tier.used} of {tier.budget} bytes, {tier.payloads} blocks, {tier.hits} hits")
    print(f"with a store: {cache.stats()}\n{store.stats()}")
    store.close()
print(f"{'the same' if text == expected else 'another'} text: {text!r}")
