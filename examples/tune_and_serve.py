"""Find the policy that loses least in a budget of bytes, on your model and text, and serve with it.

`kvquant tune` measures which layers can do with fewer bits and writes a policy. Then the end of the text, which it has
not seen, is read uncompressed, with the `int4` preset and with that policy. Printed of each: bytes, KL from the
uncompressed model's predictions (0: the same), how often the likeliest next token is the same, and what it writes.

    python examples/tune_and_serve.py --budget 0.30 --context 4096 --minutes 10
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvquant

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="hub name, or a local folder")
parser.add_argument("--text", default=Path(__file__).parent.parent / "README.md", help="a text of twice the context")
parser.add_argument("--budget", type=float, default=0.40, help="share of the bytes at 16 bits")
parser.add_argument("--context", type=int, default=2048, help="tokens of the cache that is to fit")
parser.add_argument("--codecs", default="int8,int4,int3", help="to choose from, beside fp16")
parser.add_argument("--minutes", type=float, default=1.0, help="for measuring, after first estimates")
parser.add_argument("--new", type=int, default=24, help="tokens that are written")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
ids = tokenizer(Path(args.text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, -args.context :]
scored = args.context // 8  # the last tokens, whose predictions are compared
kvquant.enable(model)


@torch.no_grad()
def predictions(policy: kvquant.PrecisionPolicy) -> tuple[torch.Tensor, float]:
    """Logarithms of the probabilities of what follows each of the last tokens; the share of bytes."""
    cache = kvquant.KVQuantCache.for_model(model, policy)
    model(ids[:, :-scored], cache=cache, logits_to_keep=1)  # is compressed at the end of the call
    return model(ids[:, -scored:], cache=cache).logits[0].log_softmax(-1), cache.stats().kv_ratio


with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "kvquant_eval", "tune", "--no-verify", "--out", f"{folder}/tuned.yaml"]
    for name in ("model", "text", "budget", "context", "codecs", "minutes"):
        command += [f"--{name}", str(getattr(args, name))]
    subprocess.run([*command, "--score-tokens", str(scored)], check=True, stdout=subprocess.DEVNULL)
    policies = [kvquant.PrecisionPolicy.load(policy) for policy in ("fp16", "int4", f"{folder}/tuned.yaml")]
exact, _ = predictions(policies[0])
for policy in policies:
    (found, share), cache = predictions(policy), kvquant.KVQuantCache.for_model(model, policy)
    kl, same = (exact.exp() * (exact - found)).sum(-1).mean(), (exact.argmax(-1) == found.argmax(-1)).float().mean()
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": args.new, "do_sample": False}
    text = tokenizer.decode(model.generate(ids, cache=cache, **given)[0, ids.shape[1] :])
    print(f"{policy.name}: {share:.3f} of the bytes, KL {kl:.2g}, {same:.1%} the same next token: {text!r}")
