"""Trains every network of the co-design workloads' tasks, and writes their accuracies to a table.

An interrupted training continues. The table is a JSON file, from a task's signature to `"settings"` (of
training) and `"accuracy"`: `[seeds][networks]` integers, of which `accuracy.UNIT` is an accuracy of 1.

python -m bench.codesign_table --seeds 4            # the shipped table
python -m bench.codesign_table mine.toml --seeds 3 --out mine.json
python -m bench.codesign_table --show               # spreads, and how well two halves of the seeds agree
"""

import functools
import json
import time
from pathlib import Path

import jax
import numpy as np
import scipy  # imports `stats` on first use

from bench import harness, results
from envs.codesign import accuracy, children, images, reading
from fdg import files

SHIPPED = Path(accuracy.__file__).with_name(accuracy.SHIPPED)  # the table that `envs.codesign` reads
CHUNK = 16  # networks that one call trains


def tasks_of(workloads):
    """Tasks of the named workloads that have decisions, by signature; equal tasks appear once."""
    return {
        accuracy.signature(task): task
        for name in workloads
        for task in reading.get(name).tasks
        if task.decisions
    }


def save(path, table):
    """Writes the table atomically, with one line per seed."""
    lines = []
    for key, row in table.items():
        seeds = ",\n  ".join(json.dumps(scores, separators=(",", ":")) for scores in row["accuracy"])
        head = "".join(
            f"{json.dumps(name)}: {json.dumps(x)}, " for name, x in row.items() if name != "accuracy"
        )
        lines.append(f'{json.dumps(key)}: {{{head}"accuracy": [\n  {seeds}]}}')
    files.write(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


@functools.lru_cache(maxsize=4)
def trainer(task):
    """Returns a jitted function and the settings of training.

    The function trains networks: (choices `[CHUNK, decisions]`, seed) -> accuracies `[CHUNK]` in [0, 1].
    """
    data = images.get(task.data)
    children.check_images(task, data)
    network, settings = children.network(task), children.settings(data)
    return jax.jit(lambda choices, seed: children.train(network, data, choices, seed, settings)), settings


def measure(tasks, seeds, path):
    """Trains the networks that the table in `path` lacks, and writes the table after each task and seed.

    The accuracies of an unfinished task and seed are in a `.part.json` file in the table's folder.
    """
    for seed in range(seeds):
        for key, task in tasks.items():
            table = results.read(path)
            train, settings = trainer(task)
            # Accuracies from other settings of training are dropped.
            if table.get(key, {}).get("settings") != list(settings):
                table[key] = {"settings": list(settings), "accuracy": []}
            row = table[key]
            if len(row["accuracy"]) > seed:
                continue
            part_file, cell = path.with_suffix(".part.json"), {"task": key, "seed": seed}
            partial_results = results.read(part_file)
            scores = partial_results["found"] if partial_results and partial_results["at"] == cell else []
            options, cpu_before = children.options(task), time.process_time()
            while len(scores) < len(options):
                chunk = options[len(scores) : len(scores) + CHUNK]
                padded = np.pad(chunk, ((0, CHUNK - len(chunk)), (0, 0)), mode="edge")
                accuracies = np.asarray(train(padded, seed))[: len(chunk)]
                scores += np.rint(accuracies * accuracy.UNIT).astype(int).tolist()
                part_file.write_text(json.dumps({"at": cell, "found": scores}))
                seconds = time.process_time() - cpu_before
                print(
                    f"{task.name}, seed {seed}: {len(scores)} of {len(options)}, {seconds:.0f} s", flush=True
                )
            row["accuracy"].append(scores)
            save(path, table)
            part_file.unlink()


def show(tasks, path):
    """Prints the accuracies' spread over networks and seeds, and the agreement of two halves of the seeds."""
    for task in tasks.values():
        scores = accuracy.by_seed(task, "" if path == SHIPPED else str(path))  # [seeds, networks]
        mean, seeds = scores.mean(0), len(scores)
        print(f"{task.data}: {scores.shape[1]} networks, {seeds} seeds; {mean.min():.3f} to {mean.max():.3f}")
        if seeds > 1:
            noise = scores.std(0, ddof=1).mean()
            halves = scores[: seeds // 2].mean(0), scores[seeds // 2 :].mean(0)
            tau = scipy.stats.kendalltau(*halves)[0]
            spread = mean.max() - mean.min()
            print(f"  spread {spread:.3f}, deviation: of networks {mean.std():.3f}, of seeds {noise:.3f}")
            print(f"  Kendall's tau of the first {seeds // 2} and the others {tau:.2f}")


def main():
    parser = harness.parser("bench.codesign_table", __doc__)
    parser.add_argument("workloads", nargs="*", default=list(reading.WORKLOADS))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    tasks = tasks_of(args.workloads)
    if not args.show:
        measure(tasks, args.seeds, args.out)
    show(tasks, args.out)


if __name__ == "__main__":
    main()
