"""Latency and energy of layers compared with ZigZag 3.9, which runs in an environment of its own.

    python -m venv build/venvs/zigzag
    build/venvs/zigzag/bin/pip install zigzag-dse==3.9.1 six
    python -m bench.codesign_zigzag --python build/venvs/zigzag/bin/python --out zigzag.json

ZigZag searches the loops around the same arrays, with the same buffers, bandwidths and energies.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile

import numpy as np

from envs.codesign import cost, exports, layers, networks

MEMORY = {"buffer_bytes": 2**18, "noc_bytes_per_cycle": 64, "dram_bytes_per_cycle": 16}
ARRAYS = {"dla": (64, 16), "shi": (16, 16), "rs": (12, 14)}
_DRIVER = """
import json, logging, sys
from zigzag.api import get_hardware_performance_zigzag as run
logging.disable(logging.CRITICAL)
folder, number = sys.argv[1], int(sys.argv[2])
for at in range(number):
    try:
        energy, latency, cmes = run(f"{folder}/workload_{at}.yaml", f"{folder}/accelerator.yaml",
            f"{folder}/mapping_{at}.yaml", opt="latency", dump_folder=f"{folder}/out{at}",
            loma_show_progress_bar=False)
        one = cmes[0][1][0][0]
        print(json.dumps({"at": at, "energy_pj": float(energy), "latency_cycles": float(latency),
            "macs": int(one.layer.total_mac_count), "ideal_cycles": float(one.ideal_temporal_cycle),
            "mac_pj": float(one.mac_energy), "by_memory": {str(k): [float(x) for x in v] for k, v in one.mem_energy_breakdown.items()},
            "stall": float(one.stall_slack_comb), "onload": float(one.data_onloading_cycle), "offload": float(one.data_offloading_cycle)}), flush=True)
    except Exception as error:
        print(json.dumps({"at": at, "error": repr(error)}), flush=True)
"""


def chosen() -> list[tuple[str, layers.Layer]]:
    """Layers that multiply: all distinct ones of ResNet-18, and each third of MobileNetV2's and a U-Net's."""
    found = []
    for name, every in (("resnet18", 1), ("mobilenet_v2", 6), ("unet", 4)):
        distinct = list(dict.fromkeys(one for one in networks.get(name) if one.has_weights))
        found += [(f"{name} {at}", layer) for at, layer in enumerate(distinct) if at % every == 0]
    return found


def run(python: str, template: str, of: list[layers.Layer], folder: pathlib.Path) -> list[dict]:
    """What ZigZag finds for each layer, one after another."""
    rows, columns = ARRAYS[template]
    chip = exports.Chip(template, rows, columns, **MEMORY)
    for at, layer in enumerate(of):
        files = exports.zigzag([layer], chip, cost.PROCESS)
        (folder / "accelerator.yaml").write_text(files["accelerator"])
        (folder / f"mapping_{at}.yaml").write_text(files["mapping"])
        (folder / f"workload_{at}.yaml").write_text(files["workload"])
    done = subprocess.run(
        [python, "-c", _DRIVER, str(folder), str(len(of))], capture_output=True, text=True, cwd=folder
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="of the environment that has ZigZag")
    parser.add_argument("--out", default="zigzag.json")
    parser.add_argument("--only", nargs="*", default=list(ARRAYS))
    parser.add_argument("--first", type=int, default=None)
    given = parser.parse_args()
    found = {}
    for template in given.only:
        with tempfile.TemporaryDirectory() as folder:
            cases = chosen()[: given.first]
            found[template] = run(given.python, template, [layer for _, layer in cases], pathlib.Path(folder))
    pathlib.Path(given.out).write_text(json.dumps(found, indent=1))
    print(len(chosen()))


if __name__ == "__main__":
    main()
