"""A decode loop in plain PyTorch that keeps its history compressed: what that saves, and what it costs."""

import torch
from torch.nn.functional import rms_norm

from kvquant import BlockCompressor, Dense, streamed_attention

LAYERS, HEADS, KV_HEADS, DIM, WIDTH, PROMPT, NEW, RECENT = 4, 8, 2, 64, 512, 3000, 100, 64


class History:
    """One layer's keys and values: sealed blocks, and after them the latest tokens as they are."""

    def __init__(self, compressor):
        self.compressor, self.blocks, self.sealed = compressor, [], []
        self.k = self.v = torch.empty(KV_HEADS, 0, DIM, dtype=torch.bfloat16)

    def attend(self, q, k, v):
        """Attention of new tokens, ``[heads, tokens, dim]``, to all so far; then what is not recent is sealed."""
        self.k, self.v = torch.cat((self.k, k), 1), torch.cat((self.v, v), 1)
        output = streamed_attention(q[None], [[*self.sealed, Dense(self.k, self.v, causal=True)]])[0]
        size = self.compressor.block_tokens
        if (old := (self.k.shape[1] - RECENT) // size * size) > 0:
            k, v, start = self.k[None, :, :old], self.v[None, :, :old], len(self.blocks) * size
            self.blocks += self.compressor.compress_rows(k, v, start)[0]
            self.sealed = self.compressor.segments(self.blocks)
            self.k, self.v = self.k[:, old:].clone(), self.v[:, old:].clone()
        return output


def forward(ids, histories):
    """The logits of new tokens, by a transformer of attention alone."""
    x = embedding[ids]
    for (project, out), history in zip(layers, histories, strict=True):
        qkv = (rms_norm(x, x.shape[-1:]) @ project).unflatten(1, (-1, DIM)).transpose(0, 1)
        x = x + history.attend(*qkv.split((HEADS, KV_HEADS, KV_HEADS))).transpose(0, 1).flatten(1) @ out
    return rms_norm(x, x.shape[-1:]) @ embedding.T


torch.manual_seed(0)
shapes = (1000, WIDTH), *[(WIDTH, WIDTH + 2 * KV_HEADS * DIM), (WIDTH, WIDTH)] * LAYERS
embedding, *weights = ((torch.randn(shape) / WIDTH**0.5).bfloat16() for shape in shapes)
layers = list(zip(weights[::2], weights[1::2], strict=True))
plain, compressed = ([*map(History, BlockCompressor.for_layers(name, LAYERS))] for name in ("fp16", "int4"))
ids, worst = torch.randint(1000, (PROMPT,)), 0.0
for _ in range(NEW):
    expected, logits = forward(ids, plain)[-1], forward(ids, compressed)[-1]
    worst = max(worst, float((logits - expected).norm() / expected.norm()))
    ids = expected.argmax()[None]
full, taken = (
    sum(part.nbytes for each in histories for part in (each.k, each.v, *each.blocks))
    for histories in (plain, compressed)
)
print(f"{PROMPT + NEW - 1} tokens in {taken} bytes of {full}: {1 - taken / full:.0%} saved")
print(f"logits off by up to {worst:.2%}")
