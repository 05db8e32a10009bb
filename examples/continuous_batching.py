"""Continuous batching: texts of any lengths share a cache, and as one ends the next begins while the others go on.

Printed: how many of the texts are what they are alone, the bytes of the cache over those of its rows alone, and tokens
per second beside one text at a time.

    python examples/continuous_batching.py --rows 16 --longest 4000 --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

import argparse
import random
import time
from itertools import accumulate, chain, pairwise

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import kvquant

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="hub name, or a local folder (default: a small random one)")
parser.add_argument("--rows", type=int, default=16, help="texts at a time; there are twice as many")
parser.add_argument("--longest", type=int, default=4000, help="tokens of the longest prompt; the shortest has 9")
args = parser.parse_args()
if args.rows < 1 or args.longest < 9:
    parser.error("--rows: at least 1; --longest: at least 9")
CHUNK, POLICY = 512, "fp16"


class Text:
    """A prompt and what follows it."""

    def __init__(self, number, prompt, new):
        self.number, self.ids, self.end, self.read = number, prompt, len(prompt) + new, 0

    def step(self):
        """What to read next: a part of the prompt, later the newest token."""
        part = self.ids[self.read : self.read + CHUNK]
        self.read += len(part)
        return part

    def take(self, token):
        """Go on with a token, if all is read and the text is not at its end; whether there is more to read."""
        if self.read == len(self.ids) < self.end:
            self.ids = [*self.ids, token]
        return self.read < len(self.ids)


@torch.no_grad()
def run(waiting, rows):
    """Texts to their end, so many at a time; gives after each step the cache's bytes, and whose they are."""
    cache, running = kvquant.KVQuantCache.for_model(model, POLICY), []
    while waiting or running:
        room = rows - len(running)
        running, waiting = running + waiting[:room], waiting[room:]
        parts = [text.step() for text in running]
        ends = [*accumulate(map(len, parts), initial=0)]
        cache.begin(cu_seqlens=ends, rows=range(len(running)))  # rows that are not there yet begin
        last = torch.tensor(ends[1:]) - 1  # of each row's tokens: the one whose logits are wanted
        logits = model(torch.tensor([[*chain(*parts)]]), cache=cache, logits_to_keep=last).logits[0]
        yield cache.stats().kv_bytes, [(text.number, text.read) for text in running]
        more = [text.take(token) for text, token in zip(running, logits.argmax(-1).tolist(), strict=True)]
        keep = [row for row, goes_on in enumerate(more) if goes_on]
        running = [running[row] for row in keep]
        cache.batch_select_indices(keep) if keep else cache.reset()  # the memory of the others is free at once


torch.manual_seed(0)
shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=1000, max_position_embeddings=8192, initializer_range=0.1, **shape)
model = AutoModelForCausalLM.from_pretrained(args.model) if args.model else AutoModelForCausalLM.from_config(config)
kvquant.enable(model.eval())
chance, count = random.Random(3), 2 * args.rows
lengths = [round(9 * (args.longest / 9) ** (number / (count - 1))) for number in range(count)]  # from 9 to the longest
prompts = [[chance.randrange(model.config.vocab_size) for _ in range(n)] for n in chance.sample(lengths, count)]
told = [(number, prompt, chance.randint(8, 64)) for number, prompt in enumerate(prompts)]
together, alone, seconds = [Text(*one) for one in told], [Text(*one) for one in told], [time.perf_counter()]
steps = list(run(together, args.rows))
seconds.append(time.perf_counter())
steps_alone = [step for text in alone for step in run([text], 1)]
seconds.append(time.perf_counter())
bytes_alone = {rows[0]: nbytes for nbytes, rows in steps_alone}
ratios = [nbytes / sum(bytes_alone[row] for row in rows) for nbytes, rows in steps]
same, read = sum(a.ids == b.ids for a, b in zip(together, alone, strict=True)), sum(text.read for text in alone)
speeds = [read / (after - before) for before, after in pairwise(seconds)]
print(f"{count} texts of {lengths[0]} to {lengths[-1]} tokens, {args.rows} at a time: {same} are what they are alone")
print(f"bytes over the sum of those of the rows alone: {min(ratios):.3f} to {max(ratios):.3f}")
print(f"{speeds[0]:.0f} tokens per second, {speeds[1]:.0f} one text at a time")
