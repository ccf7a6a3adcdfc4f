"""Compares our cycles of systolic arrays with those of SCALE-Sim 3.0.0, which runs in its own environment.

    python -m venv build/venvs/scalesim
    build/venvs/scalesim/bin/pip install scalesim==3.0.0 "numpy<2.2" "pandas<3"
    python -m bench.codesign_scalesim --python build/venvs/scalesim/bin/python

This writes tests/codesign/scalesim.json, with which a test compares our model.
"""

import csv
import itertools
import json
import pathlib
import subprocess
import tempfile

import jax.numpy as jnp

from bench import harness
from envs.codesign import layers, templates

RESULTS = harness.ROOT / "tests/codesign/scalesim.json"
DATAFLOWS = ("os", "ws", "is")
ARRAYS = ((8, 8), (16, 4), (4, 16), (12, 14), (32, 32))
# Rows and columns of the input, rows and columns of the kernel, channels, kernels, stride.
LAYERS = (
    (14, 14, 3, 3, 4, 8, 1),
    (15, 15, 3, 3, 3, 10, 2),
    (9, 9, 1, 1, 16, 12, 1),
    (12, 12, 5, 5, 2, 6, 1),
    (7, 7, 7, 7, 5, 20, 1),
    (11, 9, 3, 2, 3, 17, 2),
)
_CONFIGURATION = """[general]
run_name = run
[architecture_presets]
ArrayHeight: {rows}
ArrayWidth: {columns}
ifmapsramszkB: 512
filtersramszkB: 512
ofmapsramszkB: 256
IfmapOffset: 0
FilterOffset: 10000000
OfmapOffset: 20000000
Bandwidth: 1000
Dataflow: {dataflow}
MemoryBanks: 1
ReadRequestBuffer: 32
WriteRequestBuffer: 32
[layout]
IfmapCustomLayout: False
IfmapSRAMBankBandwidth: 10
IfmapSRAMBankNum: 10
IfmapSRAMBankPort: 2
FilterCustomLayout: False
FilterSRAMBankBandwidth: 10
FilterSRAMBankNum: 10
FilterSRAMBankPort: 2
[sparsity]
SparsitySupport: false
SparseRep: ellpack_block
OptimizedMapping: false
BlockSize: 8
RandomNumberGeneratorSeed: 40
[run_presets]
InterfaceBandwidth: CALC
UseRamulatorTrace: False
"""


def simulate(python: str, dataflow: str, rows: int, columns: int) -> list[int]:
    """SCALE-Sim's cycles of `LAYERS`, without stalls."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        configuration = _CONFIGURATION.format(dataflow=dataflow, rows=rows, columns=columns)
        (folder / "array.cfg").write_text(configuration)
        topology = [f"L{i},{','.join(map(str, layer))},\n" for i, layer in enumerate(LAYERS)]
        (folder / "topology.csv").write_text("".join(["head\n", *topology]))
        layout = [f"L{i},{','.join(['1'] * 20)},\n" for i in range(len(LAYERS))]
        (folder / "layout.csv").write_text("".join(["head\n", *layout]))
        files = ["-t", "topology.csv", "-l", "layout.csv", "-c", "array.cfg", "-p", "out", "-s", "N"]
        subprocess.run([python, "-m", "scalesim.scale", *files], cwd=folder, check=True, capture_output=True)
        with (folder / "out/run/COMPUTE_REPORT.csv").open() as file:
            lines = list(csv.DictReader(file, skipinitialspace=True))
    return [int(float(line["Total Cycles"])) - int(float(line["Stall Cycles"])) for line in lines]


def our_cycles(case: dict) -> int:
    """The cycles of our template for a case of `scalesim.json`."""
    in_rows, in_columns, kernel_rows, kernel_columns, channels, kernels, stride = case["layer"]
    # SCALE-Sim rounds the number of outputs up.
    out_rows = (in_rows - kernel_rows + stride + stride - 1) // stride
    out_columns = (in_columns - kernel_columns + stride + stride - 1) // stride
    layer = layers.Layer(kernels, channels, out_rows, out_columns, kernel_rows, kernel_columns, stride)
    template = templates.get(f"systolic-{case['dataflow']}")
    scalars = layers.Layers(*(x[0] for x in layers.stack([layer])))
    return int(template.cycles(scalars, jnp.int32(case["rows"]), jnp.int32(case["columns"])))


def main() -> None:
    parser = harness.parser("bench.codesign_scalesim", __doc__)
    parser.add_argument(
        "--python", type=harness.interpreter, required=True, help="an interpreter with SCALE-Sim"
    )
    python = parser.parse_args().python
    cases = [
        {"dataflow": dataflow, "rows": rows, "columns": columns, "layer": layer, "cycles": cycles}
        for dataflow, (rows, columns) in itertools.product(DATAFLOWS, ARRAYS)
        for layer, cycles in zip(LAYERS, simulate(python, dataflow, rows, columns), strict=True)
    ]
    RESULTS.write_text("[\n " + ",\n ".join(map(json.dumps, cases)) + "\n]\n")
    print(f"{len(cases)} cases, {sum(our_cycles(case) != case['cycles'] for case in cases)} differ")


if __name__ == "__main__":
    main()
