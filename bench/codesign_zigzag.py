"""Compares our latency and energy of layers with ZigZag 3.9, which runs in its own environment.

    python -m venv build/venvs/zigzag
    build/venvs/zigzag/bin/pip install zigzag-dse==3.9.1 six
    python -m bench.codesign_zigzag --python build/venvs/zigzag/bin/python

This writes tests/codesign/zigzag.json, with which a test compares our model. Without --python, the command
only compares our model with that file.
Both sides have the same grids of processing elements, buffers, bandwidths and energies; ZigZag searches loop
orders.
"""

import json
import pathlib
import subprocess
import tempfile

import jax
import numpy as np
import scipy  # imports `stats` on first use

from bench import harness
from envs.codesign import cost, exports, layers, networks

RESULTS = harness.ROOT / "tests/codesign/zigzag.json"
MEMORY = {"buffer_bytes": 2**18, "noc_bytes_per_cycle": 64, "dram_bytes_per_cycle": 16}
PE_GRIDS = {"dla": (64, 16), "shi": (16, 16), "rs": (12, 14)}  # rows and columns, by dataflow template
_DRIVER = """
import json, logging, sys
from zigzag.api import get_hardware_performance_zigzag as run
logging.disable(logging.CRITICAL)
for at in range(int(sys.argv[1])):
    files = f"workload_{at}.yaml", "accelerator.yaml", f"mapping_{at}.yaml"
    energy, latency, results = run(
        *files, opt="latency", dump_folder=f"out{at}", loma_show_progress_bar=False
    )
    cost = results[0][1][0][0]
    print(json.dumps({
        "energy_pj": float(energy), "latency_cycles": float(latency), "macs": int(cost.layer.total_mac_count),
        "compute_cycles": float(cost.ideal_temporal_cycle), "stall_cycles": float(cost.stall_slack_comb)}),
        flush=True)
"""


def sampled_layers() -> list[tuple[str, layers.Layer]]:
    """Distinct layers with weights: all of ResNet-18, every sixth of MobileNetV2, every fourth of a U-Net."""
    sample = []
    for name, every in (("resnet18", 1), ("mobilenet_v2", 6), ("unet", 4)):
        distinct = list(dict.fromkeys(layer for layer in networks.get(name) if layer.has_weights))
        sample += [(f"{name} {i}", layer) for i, layer in enumerate(distinct) if i % every == 0]
    return sample


def run_zigzag(python: str, template: str) -> list[dict]:
    """ZigZag's cost of each sampled layer on a chip with this template; one row per layer."""
    chip, sample = exports.Chip(template, *PE_GRIDS[template], **MEMORY), sampled_layers()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for i, (_, layer) in enumerate(sample):
            files = exports.zigzag([layer], chip, cost.PROCESS)
            (folder / "accelerator.yaml").write_text(files["accelerator"])
            (folder / f"mapping_{i}.yaml").write_text(files["mapping"])
            (folder / f"workload_{i}.yaml").write_text(files["workload"])
        process = subprocess.run(
            [python, "-c", _DRIVER, str(len(sample))], capture_output=True, text=True, cwd=folder
        )
    if process.returncode:
        raise SystemExit(process.stderr[-2000:])
    rows = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    return [{"template": template, "layer": name, **row} for (name, _), row in zip(sample, rows, strict=True)]


def compare_cases(cases_of_zigzag: list[dict]) -> list[dict]:
    """ZigZag's cases with the figures of our model, and the term that bounds our latency."""
    by_name = dict(sampled_layers())
    cases = []
    for template, (rows, columns) in PE_GRIDS.items():
        of_template = [case for case in cases_of_zigzag if case["template"] == template]
        chip = cost.sub_accelerator(template, rows=rows, columns=columns, **MEMORY)
        chips = jax.tree.map(lambda x: x[None], chip)
        ours = cost.layer_costs(layers.stack([by_name[case["layer"]] for case in of_template]), chips)
        cases += [
            {
                **case,
                "our_macs": by_name[case["layer"]].macs,
                "our_latency_cycles": int(ours.latency_cycles[i, 0]),
                "our_energy_pj": float(ours.energy_pj[i, 0]),
                "bound": cost.BOUNDS[int(ours.bound[i, 0])],
            }
            for i, case in enumerate(of_template)
        ]
    return cases


def agreement(cases: list[dict]) -> dict[str, float]:
    """Rank correlations, the median relative error of latency, and the number of cases whose MACs differ."""
    latency, energy = (
        np.asarray([[case[f"our_{key}"], case[key]] for case in cases]).T
        for key in ("latency_cycles", "energy_pj")
    )
    return {
        "cases": len(cases),
        "macs_differ": sum(case["macs"] != case["our_macs"] for case in cases),
        "latency_spearman": float(scipy.stats.spearmanr(*latency)[0]),
        "energy_spearman": float(scipy.stats.spearmanr(*energy)[0]),
        "latency_median_error": float(np.median(abs(latency[0] / latency[1] - 1))),
    }


def main() -> None:
    parser = harness.parser("bench.codesign_zigzag", __doc__)
    parser.add_argument("--python", type=harness.interpreter, help="an interpreter with ZigZag")
    python = parser.parse_args().python
    if python:
        results = [row for template in PE_GRIDS for row in run_zigzag(python, template)]
        RESULTS.write_text("[\n " + ",\n ".join(map(json.dumps, results)) + "\n]\n")
    cases = compare_cases(json.loads(RESULTS.read_text()))
    scores = {
        name: agreement([x for x in cases if name in (x["template"], "all")]) for name in (*PE_GRIDS, "all")
    }
    head = ("arrays", "cases", "MACs differ", "Spearman: latency", "energy", "median error of latency")
    rows = [
        (name, x["cases"], x["macs_differ"], f"{x['latency_spearman']:.3f}", f"{x['energy_spearman']:.3f}",
         f"{x['latency_median_error']:.1%}") for name, x in scores.items()
    ]  # fmt: skip
    print(harness.table(head, rows), "\n")
    worst = sorted(cases, key=lambda x: -abs(np.log(x["our_latency_cycles"] / x["latency_cycles"])))
    columns = ("our_latency_cycles", "latency_cycles", "compute_cycles", "stall_cycles")
    rows = [(x["layer"], x["template"], *(f"{x[c]:,.0f}" for c in columns), x["bound"]) for x in worst[:10]]
    print(harness.table(("layer", "array", *columns, "ours bound by"), rows))


if __name__ == "__main__":
    main()
