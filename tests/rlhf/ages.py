"""Compares the metrics of streams with a reference in plain Python, `tests.stream.reference.Clock`.

    python -m tests.rlhf.ages
    python -m tests.rlhf.ages --only grpo --lag 1 --lag 2

The metrics of each run contain the prompt and the response length of every row. Given these lengths, the
reference computes which version of the parameters sampled each token, hence the ages of tokens and the
problems of each batch. These must equal those of the run, and no problem may be skipped or used twice.
"""

import argparse
import dataclasses

import fdg

if __name__ == "__main__":
    fdg.host_devices(2)

import jax
import jax.numpy as jnp
import numpy as np

import algos
import envs
import policies
from algos.rlhf import streaming
from envs.text.tokenizers import CharacterTokenizer
from tests.rlhf.small import SMALL
from tests.stream.reference import Clock, Sizes

FIELDS = {"group_size": 2, "learning_rate": 1e-2}
CASES = [
    (name, policy, fields)
    for name in ("grpo", "ppo_rlhf")
    for policy, fields in (
        (policies.Colocated(), {"ahead": 2, "micro_batches": 2}),
        (policies.Colocated(), {"ahead": 1, "slots": 5, "order": "prompt"}),
        (policies.Split(staleness=1), {"ahead": 3, "slots": 6}),
        (policies.Split(staleness=2), {"ahead": 1, "micro_batches": 4, "late": "mask"}),
        (policies.Split(lag=3), {"ahead": 1, "slots": 6, "micro_batches": 2}),
        *(
            (policies.Split(lag=lag), {"ahead": ahead, "micro_batches": 4})
            for lag in (1, 2, 4)
            for ahead in (0, 2)
        ),
    )
]


def task():
    """Addition with a small vocabulary, so that some responses of an untrained network end early."""
    problem = envs.make("text:addition", digits=4).problem
    return envs.text.TextTask(problem, CharacterTokenizer("0123456789+="), max_response=12)


def prompt_ids(tokens, mask):
    """An integer id for each prompt `[N, P]`."""
    powers = jnp.asarray([pow(31, i, 1 << 20) for i in range(tokens.shape[1])], jnp.int32)
    return jnp.sum(jnp.where(mask, (tokens + 1) * powers[None], 0), axis=1, dtype=jnp.int32) % (1 << 22)


def with_rows(name, **fields):
    """An algorithm whose metrics include the prompt id and the response length of each row."""
    kind = algos.get(name)

    @dataclasses.dataclass(frozen=True)
    class WithRows(kind):
        def _lengths(self, responses):
            rows = {
                "prompt": prompt_ids(responses.prompts.tokens, responses.prompts.mask),
                "length": jnp.sum(responses.mask, axis=1, dtype=jnp.int32),
            }
            each = {f"{what}_{i}": x for what, row in rows.items() for i, x in enumerate(row)}
            return {**super()._lengths(responses), **each}

    return WithRows(env=task(), **{**SMALL, **FIELDS, **fields})


def check(name, policy, devices, iterations=12, **fields):
    """Compares one run with the reference.

    Returns:
      The largest age of a token.

    Raises:
      AssertionError: they differ.
    """
    algorithm = with_rows(name, **fields)
    engine = fdg.compile(algorithm, policy, devices=devices)
    first = engine.init(seed=3)
    start = jax.jit(algorithm.init)(jax.random.key(3))
    _, metrics = engine.run(first, iterations)
    metrics = {key: np.asarray(x) for key, x in metrics.items()}
    sizes = Sizes(**streaming.sizes(algorithm, algorithm.num_prompts))
    group, rows = sizes.group, sizes.batch * sizes.group

    @jax.jit
    def prompts(iteration):
        keys, numbers = algorithm._problem_keys(start._replace(iteration=iteration), sizes.batch)
        batch = algorithm.problems(keys, *numbers).prompts
        return prompt_ids(batch.tokens, batch.mask)

    def by_micro_batch(rows):
        # Problem j M + m of an iteration belongs to micro-batch m.
        return np.asarray(rows).reshape(-1, sizes.micro_batches).T.reshape(-1)

    ids = np.concatenate([by_micro_batch(prompts(i)) for i in range(iterations + sizes.ahead)]).tolist()
    assert len(set(ids)) == len(ids), "two prompts are equal: use another seed"
    lengths = {}
    used = [[int(metrics[f"prompt_{row}"][i]) for row in range(rows)] for i in range(iterations)]
    for i in range(iterations):
        for row in range(rows):
            response = ids.index(used[i][row]) * group + row % group
            assert response not in lengths, "a problem was used twice"
            lengths[response] = int(metrics[f"length_{row}"][i])
    assert len(set(lengths.values())) > 3, "response lengths do not vary: the test shows nothing"

    clock = Clock(sizes, lambda response: max(1, lengths[response] - 1))
    parts, oldest = sizes.micro_batches, 0
    lag = getattr(policy, "lag", 0) or getattr(policy, "staleness", 0) * parts
    for i in range(iterations - sizes.ahead - 1):
        before, ages, responses = (clock.t, clock.busy), [], []
        for part in range(parts):
            take = clock.take(max(0, (i * parts + part - lag) // parts))
            responses.append(take.responses)
            for response, drawn in zip(take.responses, take.drawn, strict=True):
                versions = [version for _, version in drawn]
                # Without a stream, a run counts the age of each response, which all of its tokens share.
                tokens = [versions[0], *versions][: lengths[response] if sizes.ahead else 1]
                ages += [i - version for version in tokens]
        by_row = np.asarray(responses).reshape(parts, -1, group).transpose(1, 0, 2).reshape(-1)
        assert used[i] == [ids[response // group] for response in by_row], f"iteration {i}: problems differ"
        counted, ticks = clock.counts(), clock.t - before[0]
        expected = {
            "staleness": np.mean(ages),
            "staleness_max": max(ages),
            "ticks": max(ticks, 1),
            "slots_busy": (clock.busy - before[1]) / max(ticks, 1) / sizes.slots,
            "queued": counted["queued"],
            "running": counted["running"],
        }
        if not sizes.ahead:
            expected = {"staleness": expected["staleness"]}  # the others are metrics of a stream
        for key, value in expected.items():
            np.testing.assert_allclose(metrics[key][i], value, rtol=1e-6, err_msg=f"{key}, iteration {i}")
        oldest = max(oldest, *ages)
    return oldest


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted({name for name, *_ in CASES}))
    parser.add_argument("--lag", type=int, action="append", help="only cases with this lag (None: all)")
    arguments = parser.parse_args()
    for name, policy, fields in CASES:
        if arguments.only not in (None, name):
            continue
        if arguments.lag and getattr(policy, "lag", 0) not in arguments.lag:
            continue
        devices = jax.devices()[: 1 if policy == policies.Colocated() else 2]
        oldest = check(name, policy, devices, **fields)
        print(f"{name}, {policy}, {fields}: equal; maximum age {oldest} updates", flush=True)


if __name__ == "__main__":
    main()
