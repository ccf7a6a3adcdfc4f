"""The oracle: random algorithms under random placements, compared with plain JAX.

`program.py` says what a program is, `operations.py` what its lines may do, `generate.py` makes one from a
seed and `placements.py` places it. `interpret.py` runs it as plain JAX with fragments, `staleness.py` as
plain Python that keeps old parameters by group. `compare.py` checks one program under one placement,
`shrink.py` makes a failing one small, `fuzz.py` does that for as long as one likes, and `breakage.py` breaks
the engine on purpose.
"""
