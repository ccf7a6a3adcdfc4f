"""Derives the specs of co-design workloads: quantiles of the costs of a million random designs.

python -m bench.codesign_specs            # prints specs for envs/codesign/workloads/*.toml
"""

import dataclasses
import functools
import tomllib

import jax
import numpy as np

from envs.codesign import problem, reading

LEVELS = {"tight": 0.08, "medium": 0.15, "loose": 0.30}
CHUNK, SAMPLES = 10_000, 1_000_000


@functools.partial(jax.jit, static_argnames="workload")
def costs_of_chunk(workload, key):
    """Latency (cycles), energy (pJ) and area (mm2) of `CHUNK` random designs, [CHUNK] each."""
    choices = jax.vmap(functools.partial(problem.draw, workload))(jax.random.split(key, CHUNK))
    return problem.evaluate(workload, choices)[:3]


def random_costs(workload):
    """Latency (cycles), energy (pJ) and area (mm2) of random designs, [SAMPLES, 3]."""
    workload = dataclasses.replace(workload, accuracy="surrogate", specs=problem.Specs())
    keys = jax.random.split(jax.random.key(0), SAMPLES // CHUNK)
    costs = [np.stack([np.asarray(x, np.float64) for x in costs_of_chunk(workload, key)], 1) for key in keys]
    return np.concatenate(costs)


def spec_lines(values, clock_hz):
    """Lines of TOML from latency (cycles), energy (pJ) and area (mm2)."""
    latency, energy, area = values
    return (
        f"latency_us = {latency / clock_hz * 1e6:.4g}\nenergy_uj = {energy / 1e6:.4g}\narea_mm2 = {area:.4g}"
    )


def main():
    for name in reading.WORKLOADS:
        workload = reading.get(name)
        costs = random_costs(workload)
        print(f"# {name}: of {len(costs):,} designs drawn uniformly")
        for level, quantile in LEVELS.items():
            text = spec_lines(np.quantile(costs, quantile, axis=0), workload.technology.clock_hz)
            specs = reading.specs(name, tomllib.loads(text), workload.technology)
            share = np.all(costs <= np.asarray(specs)[None], 1).mean()
            print(f"[specs.{level}] # quantile {quantile} of costs; {share:.3%} of designs meet all\n{text}")
        print(f"[bounds] # the largest costs\n{spec_lines(costs.max(0), workload.technology.clock_hz)}\n")


if __name__ == "__main__":
    main()
