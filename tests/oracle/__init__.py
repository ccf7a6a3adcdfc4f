"""Fuzzer: random algorithms under random distribution policies, compared with plain JAX.

`generate.py` makes a program (`program.py`) from a seed, out of the operations of `operations.py`, and
`placements.py` chooses its policies. References: `interpret.py` runs a program as plain JAX with fragments,
and `staleness.py` in plain Python that keeps delayed parameters for each group. `compare.py` checks one
program under one placement, `shrink.py` minimizes a failing one, and `fuzz.py` runs many seeds. `breakage.py`
injects faults into the engine, which the fuzzer has to find.
"""
