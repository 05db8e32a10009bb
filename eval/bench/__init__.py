"""`kvquant bench`: what compression costs and saves in time, each result as a ratio to a baseline of the same run.

All benches work alike. Subjects take turns, medians of their times are compared, so that a machine whose speed drifts
slows all alike; and it is watched for other programs (`load`), which make a benchmark lie more than anything else.
What the machine can do at best, its read bandwidth, is measured between the subjects' turns (`machine`). `attention`
is one layer's attention by itself; `decode` a whole step of a model, for which `history` fills caches; `peers` the
same step through other people's caches; `prefill` the reading of a prompt. `dense` has what torch can do at best
without compression, `peak` the memory a step takes beside the cache. `gpu` is what ``make gpu-check`` measures, by the
clock of `device`. Of stores, `residency` counts what the device serves, `store` times the disk tier, and `offload`
steps of a model whose history lies mostly elsewhere; `disk` has the folder they write to.
"""
