"""kvquant_eval: the `kvquant` command; what each precision policy costs in fidelity and saves in bytes.

The command line (`cli`, `ppl`) reads models (`models`) and texts (`texts`); a `walk` takes the uncompressed model and
the policies' caches over the text together, in lanes that the `protocols` lay; `metrics` turns logits into numbers,
`sweep` makes rows of those, and `report` is the only writer of files. `results` reads them back for the `page`.
`bench` measures time.
"""
