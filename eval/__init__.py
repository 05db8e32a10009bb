"""kvquant_eval: the `kvquant` command; what each precision policy costs in fidelity and saves in bytes.

The command line reads models (`models`) and texts (`texts`), a protocol (`streaming`) drives the model and its
caches over them, `metrics` turns logits into numbers, `sweep` makes rows of those, and `report` is the only writer
of files.
"""
