"""Files for other tools: agreement with ZigZag's results, and the grammar of MAESTRO."""

import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy  # imports `stats` on first use

from envs.codesign import cost, exports, layers, networks
from envs.codesign.layers import convolution, depthwise, gemm, pooling
from fdg.errors import FdgError

CHIP = exports.Chip("dla", 16, 8, 2**17, 16, 4)
LAYERS = [
    convolution(3, 16, 32, stride=2),
    depthwise(16, 16),
    pooling(16, 16, kernel=2, stride=2),
    gemm(1, 10, 16),
]


def sampled_layers():
    """Distinct layers with weights: all of ResNet-18, every sixth of MobileNetV2, every fourth of a U-Net."""
    sample = {}
    for name, every in (("resnet18", 1), ("mobilenet_v2", 6), ("unet", 4)):
        distinct = dict.fromkeys(layer for layer in networks.get(name) if layer.has_weights)
        sample |= {f"{name} {i}": layer for i, layer in enumerate(distinct) if i % every == 0}
    return sample


def test_agreement_with_zigzag():
    """`zigzag.json` has the costs of ZigZag 3.9.1, which searches loop orders for least latency."""
    cases, sample = json.loads((Path(__file__).parent / "zigzag.json").read_text()), sampled_layers()
    latency, energy = [], []  # of both sides
    for template, rows, columns in (("dla", 64, 16), ("shi", 16, 16), ("rs", 12, 14)):
        chip = cost.sub_accelerator(
            template, rows=rows, columns=columns, buffer_bytes=2**18, noc_bytes_per_cycle=64,
            dram_bytes_per_cycle=16,
        )  # fmt: skip
        of_template = [case for case in cases if case["template"] == template]
        stacked = layers.stack([sample[case["layer"]] for case in of_template])
        ours = cost.layer_costs(stacked, jax.tree.map(lambda x: x[None], chip))
        for i, case in enumerate(of_template):
            assert sample[case["layer"]].macs == case["macs"]
            latency.append((int(ours.latency_cycles[i, 0]), case["latency_cycles"]))
            energy.append((float(ours.energy_pj[i, 0]), case["energy_pj"]))
    assert len(latency) == len(cases) >= 60
    assert scipy.stats.spearmanr(latency).statistic >= 0.95
    assert scipy.stats.spearmanr(energy).statistic >= 0.90
    assert np.median([abs(ours / theirs - 1) for ours, theirs in latency]) <= 0.15


@pytest.mark.parametrize("template", exports.EXPORTED)
def test_zigzag_files(template):
    yaml = pytest.importorskip("yaml")
    files = exports.zigzag(LAYERS, CHIP._replace(template=template), cost.PROCESS)
    names = ("accelerator", "mapping", "workload")
    accelerator, mapping, workload = (yaml.safe_load(files[name]) for name in names)
    assert accelerator["operational_array"]["sizes"] == [16, 8]
    assert [one["name"] for one in mapping] == [
        "default",
        "layer0",
        "layer1",
        "layer2",
    ]  # pooling is left out
    for one in mapping:
        for axis, limit in (("D1", 16), ("D2", 8)):
            sizes = [int(part.split(", ")[1]) for part in one["spatial_mapping"][axis]]
            assert 1 <= math.prod(sizes) <= limit
    macs = [math.prod(layer["loop_sizes"]) for layer in workload]
    assert macs == [layer.macs for layer in LAYERS if layer.has_weights]
    # Energy per word: that of an access of the port's width, divided by its words.
    buffer = accelerator["memories"]["buffer"]
    width = buffer["ports"][0]["bandwidth_max"]
    assert width == 8 * 16 and buffer["r_cost"] / (width / 8) == pytest.approx(0.23 * 8)


MAP = r"(?:Temporal|Spatial)Map\((?:\d+|Sz\([RS]\)),(?:\d+|Sz\([RS]\))\) (?:[KCRSYX]|Y'|X');"
CLUSTER = r"Cluster\((?:\d+|Sz\(R\)), P\);"
DIMENSIONS = ", ".join(rf"{name}: [1-9]\d*" for name in "KCRSYX")
LAYER_PATTERN = (
    r"Layer \w+ \{ Type: (?:CONV|DSCONV) Stride \{ X: [1-9]\d*, Y: [1-9]\d* \} "
    rf"Dimensions \{{ {DIMENSIONS} \}} Dataflow \{{ (?:{MAP} )+(?:{CLUSTER} (?:{MAP} )+)*\}} \}} "
)
GRAMMAR = re.compile(rf"Network \w+ \{{ (?:{LAYER_PATTERN})+\}}")


def test_maestro_file_follows_its_grammar():
    """Maps, clusters and layers match the grammar; a level maps each dimension once, and one spatially."""
    for template in exports.EXPORTED:
        chip = CHIP._replace(template=template)
        maestro_file = exports.maestro([(f"net: {at}", layer, chip) for at, layer in enumerate(LAYERS)])
        text = " ".join(re.sub(r"//.*", "", maestro_file).split())
        assert GRAMMAR.fullmatch(text), text
        assert text.count("Layer ") == 3 and "K: 16, C: 3, R: 3, S: 3, Y: 33, X: 33" in text
        assert (
            "Type: DSCONV Stride { X: 1, Y: 1 } Dimensions { K: 1, C: 16, R: 3, S: 3, Y: 18, X: 18 }" in text
        )
        for dataflow in re.findall(r"Dataflow \{(.*?)\}", text):
            for level in dataflow.split("Cluster"):
                named = re.findall(r"Map\([^;]*\) ([A-Z]'?);", level)
                assert len(named) == len(set(named)) and "SpatialMap" in level
        assert not GRAMMAR.fullmatch(text.replace("Stride", "Strides")) and not GRAMMAR.fullmatch(text[:-1])


def test_unsupported_templates_are_refused():
    with pytest.raises(FdgError, match=r"'systolic-os' has no description for other tools; .*: dla, shi, rs"):
        exports.zigzag(LAYERS, CHIP._replace(template="systolic-os"), cost.PROCESS)
