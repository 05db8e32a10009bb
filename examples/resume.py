"""Save a conversation to a folder and go on with it in another process, without reading it again.

A question about a text is answered and the session saved; then another is asked of the cache that is still there, and
of a fresh process, which finds the session in the folder. Printed: tokens read for each answer, and the answers.

    python examples/resume.py --folder chats   # the fresh process is given --resume as well
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvquant

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="hub name, or a local folder")
parser.add_argument("--text", default=Path(__file__).parent.parent / "README.md", help="a text file to talk about")
parser.add_argument("--tokens", type=int, default=2000, help="of the text that are read")
parser.add_argument("--new", type=int, default=24, help="tokens of an answer")
parser.add_argument("--folder", type=Path, default="chats", help="where the session is kept")
parser.add_argument("--resume", action="store_true", help="go on with the session that is in the folder")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
kvquant.enable(model)
store = kvquant.TieredStore(device_budget="1GiB", disk_budget="4GiB", disk_path=args.folder / "store")
told = args.folder / "chat.json"  # what was said: the cache keeps keys and values, the words are yours to keep


def ask(cache: kvquant.KVQuantCache, said: list[int], question: str) -> list[int]:
    """All that was said, with one more question and its answer."""
    said = said + tokenizer(f"\n\nQuestion: {question}\nAnswer:", add_special_tokens=False).input_ids
    print(f"{len(said) - sum(cache.stats().tokens)} tokens are read, of {len(said)}", end=": ")
    ids = torch.tensor([said])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": args.new, "do_sample": False}
    ids = model.generate(ids, cache=cache, **given)
    print(repr(tokenizer.decode(ids[0, len(said) :])), flush=True)
    return ids[0].tolist()


if args.resume:
    said, cache = json.loads(told.read_text()), kvquant.KVQuantCache.load(model, "chat", store)
else:
    text = tokenizer(Path(args.text).read_text(encoding="utf-8")).input_ids[: args.tokens]
    cache = kvquant.KVQuantCache.for_model(model, "int4", store=store)
    said = ask(cache, text, "What is this text about?")
    cache.save("chat")
    told.write_text(json.dumps(said))
ask(cache, said, "What does it save?")
store.close()  # so that another process may open it
if not args.resume:
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--resume"], check=True)
