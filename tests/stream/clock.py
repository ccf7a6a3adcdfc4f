"""Fuzzes streams: checks bounds of the reference `Clock`, and compares `fdg.stream` with it.

    python -m tests.stream.clock --settings 10000
    python -m tests.stream.clock --xla 300

With `--xla`, each setting makes several takes in compiled code, with a checkpoint after a random one, from
which another `Stream` with the same fields resumes. Every response has the same slot, ticks, versions,
micro-batch and row as in the reference.
"""

import argparse
import io
import random

import jax
import jax.numpy as jnp
import numpy as np

from tests.stream.reference import Clock, Sizes

LONGEST = 9  # ticks of the longest response


def random_setting(seed):
    """Random sizes, response lengths, staleness, and number of takes."""
    rng = random.Random(seed)
    micro_batches, units, group = rng.choice([1, 1, 2, 3, 4]), rng.randint(1, 4), rng.choice([1, 1, 2, 3])
    batch, ahead = micro_batches * units, rng.randint(0, 3)
    max_slots = (units + ahead * batch) * group
    slots = min(max_slots, units * group) if rng.random() < 0.3 else rng.randint(1, max_slots)
    sizes = Sizes(
        batch=batch,
        slots=slots,
        group=group,
        micro_batches=micro_batches,
        ahead=ahead,
        prefills=rng.choice([None, None, rng.randint(1, slots)]),
        order=rng.choice(["prompt", "finished", "finished"]),
        late=rng.choice(["wait", "wait", "mask"]),
    )
    lengths = [rng.choice([1, 1, 2, 3, LONGEST, rng.randint(1, LONGEST)]) for _ in range(97)]
    return sizes, lengths, rng.choice([0, 1, 2]), rng.randint(3, 14)


def version_of(n, sizes, staleness):
    """The version of the parameters for micro-batch n."""
    return max(0, n // sizes.micro_batches - staleness)


def check_bounds(seed):
    """Checks the bounds of docs/streaming.md for a random setting.

    Raises:
      AssertionError: a bound does not hold.
    """
    sizes, lengths, staleness, _ = random_setting(seed)
    clock = Clock(sizes, lambda response: lengths[response % len(lengths)])
    taken = []
    for n in range(20):
        version = version_of(n, sizes, staleness)
        take = clock.take(version)
        taken += take.responses
        counts = clock.counts()
        assert counts["started"] == counts["trained"] + counts["queued"] + counts["running"]
        assert len(clock.live) <= sizes.units + sizes.ahead * sizes.batch
        assert len(take.ticks) <= 40 * LONGEST * sizes.batch * sizes.group, "no progress"
        if sizes.order == "prompt" or sizes.late == "wait":
            oldest = min(version for response in take.drawn for _, version in response)
            assert n // sizes.micro_batches - oldest <= sizes.ahead + staleness
        if sizes.order == "prompt":
            assert taken == list(range(len(taken)))
    assert len(set(taken)) == len(taken), "a response was taken twice"
    if sizes.ahead == 0:
        assert taken == list(range(len(taken)))


class Source:
    """Responses of given lengths; each records its ticks and their versions."""

    def __init__(self, lengths):
        self.lengths = jnp.asarray(lengths, jnp.int32)

    def idle(self, slots):
        rows = -jnp.ones((slots, LONGEST), jnp.int32)
        zeros = jnp.zeros(slots, jnp.int32)
        return {"index": zeros - 1, "age": zeros, "length": zeros + 1, "ticks": rows, "versions": rows,
                "fresh": jnp.ones(slots, bool)}  # fmt: skip

    def begin(self, parameters, key, index, now):
        kept = self.idle(index.shape[0])
        kept = {**kept, "index": index.astype(jnp.int32), "length": self.lengths[index % len(self.lengths)]}
        return kept, self.refresh(parameters, kept)

    def tick(self, parameters, kept, cache, now):
        active = kept["age"] < kept["length"]
        here = active[:, None] & (jnp.arange(LONGEST)[None] == kept["age"][:, None])
        return {
            **kept,
            "age": kept["age"] + active,
            "ticks": jnp.where(here, now.tick, kept["ticks"]),
            "versions": jnp.where(here, now.version, kept["versions"]),
            "fresh": kept["fresh"] & (~active | (cache == parameters)),
        }, cache

    def done(self, kept):
        return kept["age"] >= kept["length"]

    def refresh(self, parameters, kept):
        return jnp.broadcast_to(parameters, kept["index"].shape)

    def row(self, kept):
        return kept


def saved_and_restored(state):
    """The state, written to a file and read back."""
    leaves, structure = jax.tree.flatten(state)
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    file = io.BytesIO()
    np.savez(file, *[jax.random.key_data(x) if k else x for x, k in zip(leaves, is_key, strict=True)])
    file.seek(0)
    with np.load(file) as found:
        arrays = [jnp.asarray(found[name]) for name in found]
    keys = [jax.random.wrap_key_data(x) if k else x for x, k in zip(arrays, is_key, strict=True)]
    return jax.tree.unflatten(structure, keys)


def check_through_xla(seed):
    """Compares `fdg.stream` with the reference.

    Raises:
      AssertionError: they differ.
    """
    from fdg import stream

    sizes, lengths, staleness, takes = random_setting(seed)
    source = Source(lengths)

    def make_stream():
        return stream.Stream(
            source, sizes.slots, sizes.batch, sizes.micro_batches, sizes.ahead, sizes.order, sizes.late,
            sizes.group, sizes.prefills,
        )  # fmt: skip

    clock = Clock(sizes, lambda response: lengths[response % len(lengths)])
    current = make_stream()
    state = jax.jit(current.init)(jax.random.key(seed))

    def make_take(current):
        def take(parameters, version, state):
            rows, state = current.take(parameters, version, state)
            return rows, state, stream.counts(current, state)

        return jax.jit(take)

    take = make_take(current)
    resume_after = random.Random(f"resume {seed}").randrange(takes)
    for n in range(takes):
        version = version_of(n, sizes, staleness)
        rows, state, counts = take(np.float32(10 + version), np.int32(version), state)
        expected = clock.take(version)
        where = f"seed {seed}, take {n}, {sizes}"
        rows = jax.tree.map(np.asarray, rows)
        assert rows["index"].tolist() == list(expected.responses), where
        assert rows["fresh"].all(), f"{where}: a cache of other parameters"
        for i, response in enumerate(expected.drawn):
            ticks = list(zip(rows["ticks"][i], rows["versions"][i], strict=True))[: len(response)]
            assert ticks == list(response), f"{where}: response {expected.responses[i]}: {ticks}"
            assert (rows["ticks"][i][len(response) :] == -1).all(), where
        counts = {name: int(x) for name, x in counts.items()}
        assert counts == clock.counts(), f"{where}: {counts}, not {clock.counts()}"
        occupied = np.asarray(state.clock.occupied)
        index = np.asarray(state.kept["index"]).tolist()
        actual = [x if there else None for x, there in zip(index, occupied, strict=True)]
        assert actual == clock.slots, f"{where}: {actual}, not {clock.slots}"
        if n == resume_after:
            state, take = saved_and_restored(state), make_take(make_stream())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, default=0, help="number of settings in plain Python")
    parser.add_argument("--xla", type=int, default=0, help="number of settings through XLA")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    for seed in range(options.seed, options.seed + options.settings):
        check_bounds(seed)
    wrong = 0
    for seed in range(options.seed, options.seed + options.xla):
        try:
            check_through_xla(seed)
        except AssertionError as error:
            wrong += 1
            print(error, flush=True)
        if (seed + 1 - options.seed) % 25 == 0:
            print(f"{seed + 1 - options.seed} through XLA, {wrong} of them wrong", flush=True)
    print(
        f"{options.settings} settings within their bounds; {options.xla} through XLA, {wrong} of them wrong"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
