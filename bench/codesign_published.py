"""Compares the cost model of `envs.codesign` with published chips: Eyeriss, and seven sizes of NVDLA.

python -m bench.codesign_published
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from bench.harness import table
from envs.codesign import cost, layers, networks, templates

# Table V of Chen et al., JSSC 2017 (AlexNet, 4 images, 200 MHz): ms, active PEs of 12 x 14, MB of DRAM.
EYERISS = {
    "CONV1": (16.5, 154, 5.0),
    "CONV2": (39.2, 135, 4.0),
    "CONV3": (21.8, 156, 3.0),
    "CONV4": (16.0, 156, 2.1),
    "CONV5": (10.0, 156, 1.3),
}
EYERISS_IMAGES, EYERISS_MHZ, EYERISS_WORD_BYTES = 4, 200, 2

# nvdla.org, primer: multipliers, buffer KB, DRAM GB/s, mm2 at 28 nm, ResNet-50 frames/s.
NVDLA = (
    (2048, 512, 20.0, 5.5, 269.0),
    (1024, 256, 15.0, 3.0, 153.0),
    (512, 256, 10.0, 2.3, 93.0),
    (256, 256, 5.0, 1.7, 46.0),
    (128, 256, 2.0, 1.4, 20.0),
    (64, 128, 1.0, 0.91, 7.3),
    (32, 128, 0.5, 0.85, 3.6),
)
MIN_FITTED_MACS = 128  # larger chips share one efficiency; smaller ones wait for memory


def eyeriss() -> list[dict]:
    """Rows by layer: ours without zero compression ("raw": also without `templates.FILL`), and Table V's."""
    alexnet = networks.alexnet()
    stacked, pe_rows, pe_columns = layers.stack(alexnet), jnp.int32(12), jnp.int32(14)
    cycles_per_ms = EYERISS_MHZ * 1e3 / EYERISS_IMAGES
    rows = []
    for i, (name, (ms, pes, dram_mb)) in enumerate(EYERISS.items()):
        layer = jax.tree.map(lambda x, i=i: x[i], stacked)
        raw, filled = (
            int(templates.row_stationary_cycles(layer, pe_rows, pe_columns, fill))
            for fill in ((1, 1), templates.FILL)
        )
        words = EYERISS_IMAGES * (alexnet[i].input_words + alexnet[i].output_words) + alexnet[i].weight_words
        rows.append(
            {
                "layer": name,
                "active_pes": alexnet[i].macs / raw,
                "active_pes_error": alexnet[i].macs / raw / pes - 1,
                "raw_ms": raw / cycles_per_ms,
                "raw_error": raw / cycles_per_ms / ms - 1,
                "filled_ms": filled / cycles_per_ms,
                "filled_error": filled / cycles_per_ms / ms - 1,
                "published_ms": ms,
                "compulsory_mb": words * EYERISS_WORD_BYTES / 1e6,
                "published_dram_mb": dram_mb,
            }
        )
    return rows


def nvdla() -> list[dict]:
    """A row for each configuration with our figures and those of the primer: frames/s at 1 GHz, and area.

    `mm2_error_left_out` is the error of a linear model of the area, fitted to the other configurations.
    """
    stacked = layers.stack(networks.resnet50())
    chips = [
        cost.sub_accelerator(
            "dla", macs, buffer_bytes=1024 * kb, noc_bytes_per_cycle=128, dram_bytes_per_cycle=gb_s
        )
        for macs, kb, gb_s, _, _ in NVDLA
    ]
    stacked_chips = jax.tree.map(lambda *x: jnp.stack(x), *chips)
    frames = 1e9 / np.asarray(cost.layer_costs(stacked, stacked_chips).latency_cycles, np.int64).sum(0)
    sizes = np.asarray([(macs, kb, 1) for macs, kb, *_ in NVDLA], np.float64)
    published_mm2 = np.asarray([row[3] for row in NVDLA])
    rows = []
    for i, (macs, _, _, mm2, published) in enumerate(NVDLA):
        others = [j for j in range(len(NVDLA)) if j != i]
        fitted = np.linalg.lstsq(sizes[others], published_mm2[others], rcond=None)[0]
        ours = float(cost.area_mm2(jax.tree.map(lambda x, i=i: x[i : i + 1], stacked_chips)))
        rows.append(
            {
                "macs": macs,
                "frames_s": frames[i],
                "published_frames_s": published,
                "ratio": frames[i] / published,
                "mm2": ours,
                "published_mm2": mm2,
                "mm2_error": ours / mm2 - 1,
                "mm2_error_left_out": float(sizes[i] @ fitted) / mm2 - 1,
            }
        )
    return rows


def fitted_errors(rows: list[dict]) -> dict[tuple[int, int], float]:
    """Fits one efficiency to each pair of rows; returns the largest error of the others, by pair of MACs."""
    ratios = {row["macs"]: row["ratio"] for row in rows if row["macs"] >= MIN_FITTED_MACS}
    errors = {}
    for pair in itertools.combinations(ratios, 2):
        efficiency = np.sqrt(ratios[pair[0]] * ratios[pair[1]])
        errors[pair] = max(abs(ratio / efficiency - 1) for macs, ratio in ratios.items() if macs not in pair)
    return errors


if __name__ == "__main__":
    for name, rows in (("Eyeriss, AlexNet", eyeriss()), ("NVDLA, ResNet-50", nvdla())):
        cells = [[f"{x:.3g}" if isinstance(x, float) else x for x in row.values()] for row in rows]
        print(f"{name}\n{table(rows[0], cells)}\n")
    print("largest error with one efficiency fitted on two rows")
    for (first, second), error in fitted_errors(nvdla()).items():
        print(f"{first:5d} {second:5d} {error:.1%}")
