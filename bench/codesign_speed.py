"""Designs per second: the compiled program, the same formulas in a Python loop, one empty process per design.

python -m bench.codesign_speed
"""

import dataclasses
import functools
import math
import subprocess
import sys
import time

import jax
import numpy as np

from envs.codesign import problem, reading, templates

BATCH, CHUNK, ROUNDS = 16384, 512, 25  # the data of a chunk of designs fit in the caches of a core


def ceil_div(a, b):
    return -(-a // b)


def cycles_and_words(layer, template, rows, columns):
    """Cycles of one layer, and words of weights, inputs and outputs that pass the buffer, in plain Python."""
    k, c, groups = layer.out_channels // layer.groups, layer.in_channels // layer.groups, layer.groups
    p, q, r, s, u = layer.out_rows, layer.out_columns, layer.kernel_rows, layer.kernel_columns, layer.stride
    outputs = layer.output_words
    if template == "dla":
        groups_at_once = max(1, min(rows // c, columns // k))
        packed = min(max(rows // c, 1), r) if groups == 1 and c <= 4 else 1
        passes = ceil_div(groups, groups_at_once) * ceil_div(c, rows) * ceil_div(k, columns)
        return p * q * ceil_div(r, packed) * s * passes, (
            layer.weight_words, layer.macs / max(1, min(k, columns)), outputs,
        )  # fmt: skip
    if template == "shi":
        down, across = ceil_div(p, rows), ceil_div(q, columns)
        high = (p - down) * min(u, r) + down * r
        wide = (q - across) * min(u, s) + across * s
        cycles = down * across * layer.out_channels * c * r * s
        return cycles, (layer.weight_words * down * across, layer.out_channels * c * high * wide, outputs)
    strip = max(1, min(p, columns))
    sets = max(1, rows // r) * max(1, columns // strip)
    cycles = ceil_div(p, strip) * ceil_div(layer.out_channels * c, sets) * q * s * ceil_div(r, rows)
    strips, at_once = ceil_div(p, min(p, columns)), min(k, 16 * sets)
    high = (p - strips) * min(u, r) + strips * r
    wide = min(layer.in_columns, (q - 1) * min(u, s) + s)
    sums = 2 * ceil_div(c, max(1, 12 // s)) - 1
    inputs = layer.in_channels * ceil_div(k, at_once) * high * wide
    return cycles + ceil_div(cycles * 3, 25), (layer.weight_words * strips, inputs, outputs * sums)


def layer_cost(layer, kind, dram, technology):
    """Cycles and pJ of one layer on one sub-accelerator."""
    pes, template, noc, kilobytes = kind
    rows, columns = templates.get(template).shape(pes)
    tensors = layer.weight_words, layer.input_words, layer.output_words
    cycles, words = cycles_and_words(layer, template, rows, columns) if layer.has_weights else (0, tensors)
    half = kilobytes * 1024 / 2
    weights, inputs, outputs = tensors
    offchip = outputs + weights + inputs
    if min(weights, inputs) > half:
        tiled_words = min(
            min(weights + inputs * math.ceil(weights / (i / 16 * half)) for i in range(1, 16)),
            min(inputs + weights * math.ceil(inputs / ((1 - i / 16) * half)) for i in range(1, 16)),
        )
        offchip = outputs + max(tiled_words, weights + inputs)
    longest = max(cycles, math.ceil(sum(words) / noc), math.ceil(offchip / dram))
    energy = layer.macs * 5 + 8 * sum(words) + 200 * offchip
    return longest + (rows + columns) * layer.has_weights, technology.mac_pj * energy


def cost_in_python(workload, choices):
    """Cycles, pJ and mm2 of one design, in plain Python."""
    decisions, technology = workload.decisions(), workload.technology
    chosen = [decision.options[at] for decision, at in zip(decisions, choices, strict=True)]
    first, networks = 0, []
    for task in workload.tasks:
        networks.append(task.build(*chosen[first : first + len(task.decisions)]))
        first += len(task.decisions)
    kinds = [tuple(chosen[at : at + 4]) for at in range(first, len(chosen), 4)]
    present = [at for at, kind in enumerate(kinds) if kind[0]]
    dram = workload.chips.dram_bytes_per_cycle
    costs = [
        [{a: layer_cost(x, kinds[a], dram, technology) for a in present} for x in network]
        for network in networks
    ]
    slowest = min(kinds[a][2] for a in present)
    transfer_cycles = [[math.ceil(x.output_words / slowest) for x in network] for network in networks]
    after = [[dict.fromkeys(present, 0.0) for _ in network] for network in networks]
    for n, network in enumerate(networks):
        for at in reversed(range(len(network) - 1)):
            for a in present:
                ways = (
                    after[n][at + 1][b] + costs[n][at + 1][b][0] + (a != b) * transfer_cycles[n][at]
                    for b in present
                )
                after[n][at][a] = min(ways)
    free, at = dict.fromkeys(present, 0), [0] * len(networks)
    ready = [dict.fromkeys(present, 0) for _ in networks]
    energy = 0.0
    for _ in range(sum(map(len, networks))):
        best = None
        for n, network in enumerate(networks):
            if at[n] == len(network):
                continue
            starts = {a: max(ready[n][a], free[a]) for a in present}
            cost = costs[n][at[n]]
            fastest = min(present, key=lambda a: starts[a] + cost[a][0] + after[n][at[n]][a])
            remaining = min(after[n][at[n]][a] + cost[a][0] for a in present)
            key = starts[fastest] - 0.3 * remaining
            if best is None or key < best[0]:
                best = key, n, fastest, starts[fastest] + cost[fastest][0], cost[fastest][1]
        _, n, fastest, end, spent = best
        energy += spent
        free[fastest] = end
        ready[n] = {a: end + (a != fastest) * transfer_cycles[n][at[n]] for a in present}
        at[n] += 1
    pe = {"dla": 1, "shi": 1.2, "rs": 1.5}
    area = 0.0
    for pes, template, _, kilobytes in (kinds[a] for a in present):
        rows, columns = templates.get(template).shape(pes)
        area += rows * columns * technology.pe_mm2 * pe[template] + technology.buffer_mm2_per_kb * kilobytes
    return max(free.values()), energy, area + technology.chip_mm2


def rates(evaluate):
    """Designs per second of wall time, and of CPU time: the medians over rounds, and the maxima."""
    jax.block_until_ready(evaluate())
    speeds = []
    for _ in range(ROUNDS):
        before, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(evaluate())
        speeds.append((BATCH / (time.perf_counter() - before), BATCH / (time.process_time() - cpu)))
    return np.median(speeds, 0), np.max(speeds, 0)


def main():
    jax.config.update("jax_num_cpu_devices", 2)
    workload = dataclasses.replace(reading.get("w1"), accuracy="surrogate")
    keys = jax.random.split(jax.random.key(0), BATCH)
    choices = jax.jit(jax.vmap(functools.partial(problem.draw, workload)))(keys)
    chunks = choices.reshape(-1, CHUNK, choices.shape[1])
    count, python_rates = 200, []
    for _ in range(5):
        before = time.process_time()
        expected = np.asarray(
            [cost_in_python(workload, choice) for choice in np.asarray(choices)[:count].tolist()]
        )
        python_rates.append(count / (time.process_time() - before))
    print(
        f"the same formulas in Python: {np.median(python_rates):,.0f} a second of CPU,"
        f" at most {max(python_rates):,.0f}"
    )
    for devices in (1, 2):
        mesh = jax.make_mesh((devices,), ("rows",), devices=jax.devices()[:devices])
        rows = jax.sharding.PartitionSpec("rows")
        evaluate_shard = jax.shard_map(
            lambda x: jax.lax.map(functools.partial(problem.evaluate, workload), x),
            mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False,
        )  # fmt: skip
        sharded = jax.device_put(chunks, jax.sharding.NamedSharding(mesh, rows))
        evaluate = functools.partial(jax.jit(evaluate_shard), sharded)
        (clock, cpu), (most, most_cpu) = rates(evaluate)
        print(
            f"compiled, {devices} devices: {clock:,.0f} designs/s (highest {most:,.0f}), {cpu:,.0f} a second"
            f" of CPU ({most_cpu:,.0f}): {clock / np.median(python_rates):,.0f}"
            f" ({most / max(python_rates):,.0f}) and {cpu / np.median(python_rates):,.0f}"
            f" ({most_cpu / max(python_rates):,.0f}) times Python"
        )
    costs = np.stack([np.asarray(x, np.float64).ravel()[:count] for x in evaluate()[:3]], 1)
    print("  largest relative differences", np.abs(costs / expected - 1).max(0))
    before = time.perf_counter()
    for _ in range(20):
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    process = 20 / (time.perf_counter() - before)
    print(f"an empty process a design: {process:,.1f} designs/s, {clock / process:,.0f} times fewer")


if __name__ == "__main__":
    main()
