"""Agreement of the cost model with published chips: Eyeriss, and seven sizes of NVDLA."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from envs.codesign import cost, layers, networks, templates

# Table V of Chen et al., JSSC 2017 (AlexNet, CONV1 to CONV5; 4 images, 200 MHz): ms, active PEs of 12 x 14.
EYERISS = ((16.5, 154), (39.2, 135), (21.8, 156), (16.0, 156), (10.0, 156))
EYERISS_CYCLES_PER_MS = 200e3 / 4  # of one image

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


def test_eyeriss_on_alexnet():
    alexnet = networks.alexnet()
    stacked = layers.stack(alexnet)
    for i, (ms, active_pes) in enumerate(EYERISS):
        layer = jax.tree.map(lambda x, i=i: x[i], stacked)
        unfilled, filled = (
            int(templates.row_stationary_cycles(layer, jnp.int32(12), jnp.int32(14), fill))
            for fill in ((1, 1), templates.FILL)
        )
        assert abs(alexnet[i].macs / unfilled / active_pes - 1) <= 0.02
        assert abs(unfilled / EYERISS_CYCLES_PER_MS / ms - 1) <= 0.16
        assert abs(filled / EYERISS_CYCLES_PER_MS / ms - 1) <= 0.08


def nvdla_chips():
    """The configurations of NVDLA as one stack of sub-accelerators."""
    chips = [
        cost.sub_accelerator(
            "dla", macs, buffer_bytes=1024 * kb, noc_bytes_per_cycle=128, dram_bytes_per_cycle=gb_s
        )
        for macs, kb, gb_s, _, _ in NVDLA
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *chips)


def test_speed_of_nvdla_on_resnet50():
    costs = cost.layer_costs(layers.stack(networks.resnet50()), nvdla_chips())
    frames = 1e9 / np.asarray(costs.latency_cycles, np.int64).sum(0)  # per second at 1 GHz
    assert frames.tolist() == sorted(frames, reverse=True)
    # One efficiency, fitted to two of the five larger chips, holds for all five. The others wait for memory.
    ratios = [ours / row[-1] for ours, row in zip(frames, NVDLA, strict=True) if row[0] >= 128]
    assert len(ratios) == 5
    for pair in itertools.combinations(range(5), 2):
        efficiency = np.sqrt(ratios[pair[0]] * ratios[pair[1]])
        assert max(abs(ratios[i] / efficiency - 1) for i in range(5) if i not in pair) <= 0.10


def test_area_of_nvdla():
    chips = nvdla_chips()
    ours = [float(cost.area_mm2(jax.tree.map(lambda x, i=i: x[i : i + 1], chips))) for i in range(len(NVDLA))]
    published = np.asarray([mm2 for *_, mm2, _ in NVDLA])
    assert np.abs(ours / published - 1).max() <= 0.08
    # The area is nearly linear in multipliers and buffer: a fit without a chip is near that chip, too.
    sizes = np.asarray([(macs, kb, 1) for macs, kb, *_ in NVDLA], np.float64)
    for i, others in enumerate(~np.eye(len(NVDLA), dtype=bool)):
        fitted = np.linalg.lstsq(sizes[others], published[others], rcond=None)[0]
        assert abs(sizes[i] @ fitted / published[i] - 1) <= 0.15
