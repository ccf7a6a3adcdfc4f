"""The metrics of streams counted by hand: what is needed is the lengths of responses, and the page's clock.

    python -m tests.rlhf.ages

Each run's metrics say, of each iteration, which problems it was over and how long each response was. The
clock in plain Python is given these lengths, and says which version drew each token: from it follow the ages
of tokens, and which problems make which batch. They have to be those of the run, and no problem may be
skipped or met twice.
"""

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
    )
]


def task():
    """Sums whose answers are of 12 characters of 13, so that responses of an untrained network end early."""
    problem = envs.make("text:addition", digits=4).problem
    return envs.text.TextTask(problem, CharacterTokenizer("0123456789+="), max_response=12)


def named(tokens, mask):
    """A number for each prompt `[N, P]`."""
    powers = jnp.asarray([pow(31, i, 1 << 20) for i in range(tokens.shape[1])], jnp.int32)
    return jnp.sum(jnp.where(mask, (tokens + 1) * powers[None], 0), axis=1, dtype=jnp.int32) % (1 << 22)


def shown(name, **fields):
    """An algorithm whose metrics have the prompt of each row, and the length of its response."""
    kind = algos.get(name)

    @dataclasses.dataclass(frozen=True)
    class Shown(kind):
        def _lengths(self, responses):
            rows = {
                "prompt": named(responses.prompts.tokens, responses.prompts.mask),
                "length": jnp.sum(responses.mask, axis=1, dtype=jnp.int32),
            }
            each = {f"{what}_{i}": x for what, row in rows.items() for i, x in enumerate(row)}
            return {**super()._lengths(responses), **each}

    return Shown(env=task(), **{**SMALL, **FIELDS, **fields})


def check(name, policy, devices, iterations=12, **fields):
    """One run, compared with the count.

    Returns:
      The largest age that was seen.

    Raises:
      AssertionError: they differ.
    """
    algorithm = shown(name, **fields)
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
        asked = algorithm.problems(keys, *numbers).prompts
        return named(asked.tokens, asked.mask)

    def in_parts(rows):
        # Problem j M + m of an iteration is in its micro-batch m.
        return np.asarray(rows).reshape(-1, sizes.micro_batches).T.reshape(-1)

    units = np.concatenate([in_parts(prompts(i)) for i in range(iterations + sizes.ahead)]).tolist()
    assert len(set(units)) == len(units), "two prompts are the same: take another seed"
    lengths = {}
    met = [[int(metrics[f"prompt_{row}"][i]) for row in range(rows)] for i in range(iterations)]
    for i in range(iterations):
        for row in range(rows):
            response = units.index(met[i][row]) * group + row % group
            assert response not in lengths, "a problem was met twice"
            lengths[response] = int(metrics[f"length_{row}"][i])
    assert len(set(lengths.values())) > 3, "all are as long: nothing is tried"

    clock = Clock(sizes, lambda response: max(1, lengths[response] - 1))
    parts, oldest = sizes.micro_batches, 0
    lag = getattr(policy, "lag", 0) or getattr(policy, "staleness", 0) * parts
    for i in range(iterations - sizes.ahead - 1):
        before, ages, of = (clock.t, clock.busy), [], []
        for part in range(parts):
            take = clock.take(max(0, (i * parts + part - lag) // parts))
            of.append(take.responses)
            for response, drawn in zip(take.responses, take.drawn, strict=True):
                versions = [version for _, version in drawn]
                tokens = [versions[0], *versions][: lengths[response]]
                ages += [i - version for version in tokens]
        by_row = np.asarray(of).reshape(parts, -1, group).transpose(1, 0, 2).reshape(-1)
        assert met[i] == [units[response // group] for response in by_row], f"iteration {i}: other problems"
        counted, ticks = clock.counts(), clock.t - before[0]
        expected = {
            "staleness": np.mean(ages),
            "staleness_max": max(ages),
            "ticks": max(ticks, 1),
            "slots_busy": (clock.busy - before[1]) / max(ticks, 1) / sizes.slots,
            "queued": counted["queued"],
            "running": counted["running"],
        }
        for key, value in expected.items():
            np.testing.assert_allclose(metrics[key][i], value, rtol=1e-6, err_msg=f"{key}, iteration {i}")
        oldest = max(oldest, *ages)
    return oldest


def main():
    for name, policy, fields in CASES:
        devices = jax.devices()[: 1 if policy == policies.Colocated() else 2]
        oldest = check(name, policy, devices, **fields)
        print(f"{name}, {policy}, {fields}: as counted; the oldest token {oldest} updates", flush=True)


if __name__ == "__main__":
    main()
