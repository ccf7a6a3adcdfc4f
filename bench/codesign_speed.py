"""Compares evaluated designs per second: compiled, in plain Python, and with a new process for each design.

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
    """Cycles of a layer, and words between buffer and PEs: the formulas of `envs.codesign.templates`."""
    # K and C are channels, P and Q output rows and columns, R and S kernel rows and columns, u the stride.
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
        height = (p - down) * min(u, r) + down * r
        width = (q - across) * min(u, s) + across * s
        cycles = down * across * layer.out_channels * c * r * s
        return cycles, (layer.weight_words * down * across, layer.out_channels * c * height * width, outputs)
    strip = max(1, min(p, columns))
    sets = max(1, rows // r) * max(1, columns // strip)
    cycles = ceil_div(p, strip) * ceil_div(layer.out_channels * c, sets) * q * s * ceil_div(r, rows)
    strips, at_once = ceil_div(p, min(p, columns)), min(k, 16 * sets)
    height = (p - strips) * min(u, r) + strips * r
    width = min(layer.in_columns, (q - 1) * min(u, s) + s)
    sums = 2 * ceil_div(c, max(1, 12 // s)) - 1
    inputs = layer.in_channels * ceil_div(k, at_once) * height * width
    return cycles + ceil_div(cycles * 3, 25), (layer.weight_words * strips, inputs, outputs * sums)


def layer_cost(layer, kind, dram, technology):
    """Cycles and pJ of a layer on a sub-accelerator; `kind`: PEs, template, NoC bytes a cycle, buffer KB."""
    pes, template, noc, kilobytes = kind
    rows, columns = templates.get(template).shape(pes)
    tensors = layer.weight_words, layer.input_words, layer.output_words
    cycles, words = cycles_and_words(layer, template, rows, columns) if layer.has_weights else (0, tensors)
    half_buffer = kilobytes * 1024 / 2
    weights, inputs, outputs = tensors
    offchip = outputs + weights + inputs
    if min(weights, inputs) > half_buffer:
        tiled_words = min(
            min(weights + inputs * math.ceil(weights / (i / 16 * half_buffer)) for i in range(1, 16)),
            min(inputs + weights * math.ceil(inputs / ((1 - i / 16) * half_buffer)) for i in range(1, 16)),
        )
        offchip = outputs + max(tiled_words, weights + inputs)
    longest = max(cycles, math.ceil(sum(words) / noc), math.ceil(offchip / dram))
    energy = layer.macs * 5 + 8 * sum(words) + 200 * offchip
    return longest + (rows + columns) * layer.has_weights, technology.mac_pj * energy


def cost_in_python(workload, choices):
    """Cycles, pJ and mm2 of one design, in plain Python, with the constants of `envs.codesign`."""
    # Indices: n is a network, a and b are sub-accelerators.
    decisions, technology = workload.decisions(), workload.technology
    values = [decision.options[index] for decision, index in zip(decisions, choices, strict=True)]
    num_used, networks = 0, []
    for task in workload.tasks:
        networks.append(task.build(*values[num_used : num_used + len(task.decisions)]))
        num_used += len(task.decisions)
    kinds = [tuple(values[index : index + 4]) for index in range(num_used, len(values), 4)]
    subs = [index for index, kind in enumerate(kinds) if kind[0]]
    dram = workload.chips.dram_bytes_per_cycle
    costs = [
        [{a: layer_cost(x, kinds[a], dram, technology) for a in subs} for x in network]
        for network in networks
    ]
    slowest = min(kinds[a][2] for a in subs)
    transfer_cycles = [[math.ceil(x.output_words / slowest) for x in network] for network in networks]
    after = [[dict.fromkeys(subs, 0.0) for _ in network] for network in networks]
    for n, network in enumerate(networks):
        for index in reversed(range(len(network) - 1)):
            for a in subs:
                totals = (
                    after[n][index + 1][b] + costs[n][index + 1][b][0] + (a != b) * transfer_cycles[n][index]
                    for b in subs
                )
                after[n][index][a] = min(totals)
    free_from, index = dict.fromkeys(subs, 0), [0] * len(networks)
    ready_from = [dict.fromkeys(subs, 0) for _ in networks]
    energy = 0.0
    for _ in range(sum(map(len, networks))):
        best = None
        for n, network in enumerate(networks):
            if index[n] == len(network):
                continue
            starts = {a: max(ready_from[n][a], free_from[a]) for a in subs}
            cost = costs[n][index[n]]
            fastest = min(subs, key=lambda a: starts[a] + cost[a][0] + after[n][index[n]][a])
            remaining = min(after[n][index[n]][a] + cost[a][0] for a in subs)
            key = starts[fastest] - 0.3 * remaining
            if best is None or key < best[0]:
                best = key, n, fastest, starts[fastest] + cost[fastest][0], cost[fastest][1]
        _, n, fastest, end, energy_pj = best
        energy += energy_pj
        free_from[fastest] = end
        ready_from[n] = {a: end + (a != fastest) * transfer_cycles[n][index[n]] for a in subs}
        index[n] += 1
    pe = {"dla": 1, "shi": 1.2, "rs": 1.5}
    area = 0.0
    for pes, template, _, kilobytes in (kinds[a] for a in subs):
        rows, columns = templates.get(template).shape(pes)
        area += rows * columns * technology.pe_mm2 * pe[template] + technology.buffer_mm2_per_kb * kilobytes
    return max(free_from.values()), energy, area + technology.chip_mm2


def rates(evaluate):
    """Designs per second of wall time and of CPU time: the medians over rounds, then the maxima."""
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
        f"the same formulas in Python: {np.median(python_rates):,.0f} designs a second of CPU,"
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
        (rate, cpu_rate), (top, top_cpu) = rates(evaluate)
        print(
            f"compiled, {devices} devices: {rate:,.0f} designs/s (highest {top:,.0f}), {cpu_rate:,.0f} a"
            f" second of CPU ({top_cpu:,.0f}): {rate / np.median(python_rates):,.0f}"
            f" ({top / max(python_rates):,.0f}) and {cpu_rate / np.median(python_rates):,.0f}"
            f" ({top_cpu / max(python_rates):,.0f}) times Python"
        )
    costs = np.stack([np.asarray(x, np.float64).ravel()[:count] for x in evaluate()[:3]], 1)
    print("  largest relative differences", np.abs(costs / expected - 1).max(0))
    before = time.perf_counter()
    for _ in range(20):
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    spawns = 20 / (time.perf_counter() - before)
    print(f"an empty process for each design: {spawns:,.1f} designs/s, {rate / spawns:,.0f} times fewer")


if __name__ == "__main__":
    main()
