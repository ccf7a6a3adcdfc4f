"""Sample tables: responses of a language model to held-out prompts during training.

An algorithm with sample tables has `examples(state, key, count) -> arrays`, which is jitted, and
`example_rows(arrays) -> rows`. With each checkpoint, the rows are written to `RUN/samples/ITERATION.jsonl`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import fdg
from fdg.identity_cache import IdentityCache
from fdg.processes import distributed
from fdg.running.xla_options import jit
from fdg.training.evaluation import evaluation_keys
from fdg.training.job import Job
from fdg.training.run_directory import RunDirectory

COUNT = 8  # rows per table
_NUM_PRINTED = 3  # rows of the last table that are printed at the end of a run
_WIDTH = 60  # maximum characters of a printed prompt or response
_EXAMPLES: IdentityCache[Any] = IdentityCache(max_entries=4)  # the jitted `examples` of algorithms


def write_samples(
    job: Job, engine: fdg.Engine, state: Any, run: RunDirectory, iteration: int
) -> list[dict[str, Any]]:
    """Writes the first agent's table after an iteration. A collective: process 0 writes.

    `iteration` is the number of completed iterations of `state`. Returns the rows: empty in other processes,
    or if the algorithm has no method `examples`.
    """
    algorithm = job.algorithm
    if not callable(getattr(algorithm, "examples", None)):
        return []
    state = engine.algorithm_state(state)
    if distributed.count() > 1:
        state = distributed.gather(state)
        if state is None:
            return []
    if job.agents is not None:
        state = jax.tree.map(lambda x: x[0], state)
    if distributed.count() == 1:
        state = jax.device_put(state, engine.devices[0])
    key = evaluation_keys(job.seed, None, iteration)
    examples = _EXAMPLES(
        algorithm, None, lambda: jit(lambda state, key: algorithm.examples(state, key, COUNT))
    )
    arrays = jax.tree.map(np.asarray, examples(state, key))
    rows = [{"iteration": iteration, **row} for row in algorithm.example_rows(arrays)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    run.publish(f"samples/{iteration:08d}.jsonl", lambda file: file.write(text.encode()))
    return rows


def sample_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The first rows of a table as lines to print.

    >>> sample_lines([{"iteration": 1, "prompt": "1+1=", "response": "2", "reward": 1.0}])
    ["sample: '1+1=' -> '2' (reward 1)"]
    """
    lines = []
    for row in rows[:_NUM_PRINTED]:
        reward = f" (reward {row['reward']:g})" if "reward" in row else ""
        lines.append(f"sample: {_shorten(row['prompt'])} -> {_shorten(row['response'])}{reward}")
    return lines


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _WIDTH else f"{text[: _WIDTH // 2]} ... {text[-_WIDTH // 2 :]}")
