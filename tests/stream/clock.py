"""Random settings of the clock: its bounds in plain Python, and `fdg.stream` through XLA compared with it.

    python -m tests.stream.clock --settings 10000
    python -m tests.stream.clock --xla 300

Through XLA each setting runs some takes, with a checkpoint after a random one, from which another `Stream` of
the same fields goes on. Every response has to have been in the same slot, in the same ticks, under the same
versions, and in the same row of the same micro-batch as the reference says.
"""

import argparse
import io
import random

import jax
import jax.numpy as jnp
import numpy as np

from tests.stream.reference import Clock, Sizes

LONGEST = 9  # ticks of a response


def drawn(seed):
    """Random sizes, the length of each response, staleness, and how many takes."""
    rng = random.Random(seed)
    micro_batches, units, group = rng.choice([1, 1, 2, 3, 4]), rng.randint(1, 4), rng.choice([1, 1, 2, 3])
    batch, ahead = micro_batches * units, rng.randint(0, 3)
    most = (units + ahead * batch) * group
    slots = min(most, units * group) if rng.random() < 0.3 else rng.randint(1, most)
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
    """Of the parameters that micro-batch n is given."""
    return max(0, n // sizes.micro_batches - staleness)


def check_bounds(seed):
    """What the page says of any setting.

    Raises:
      AssertionError: it does not hold.
    """
    sizes, lengths, staleness, _ = drawn(seed)
    clock = Clock(sizes, lambda response: lengths[response % len(lengths)])
    seen = []
    for n in range(20):
        version = version_of(n, sizes, staleness)
        take = clock.take(version)
        seen += take.responses
        counted = clock.counts()
        assert counted["started"] == counted["trained"] + counted["queued"] + counted["running"]
        assert len(clock.live) <= sizes.units + sizes.ahead * sizes.batch
        assert len(take.ticks) <= 40 * LONGEST * sizes.batch * sizes.group, "it stands still"
        if sizes.order == "prompt" or sizes.late == "wait":
            oldest = min(version for response in take.drawn for _, version in response)
            assert n // sizes.micro_batches - oldest <= sizes.ahead + staleness
        if sizes.order == "prompt":
            assert seen == list(range(len(seen)))
    assert len(set(seen)) == len(seen), "a response was taken twice"
    if sizes.ahead == 0:
        assert seen == list(range(len(seen)))


class Source:
    """Responses of given lengths; each keeps the tick and the version of every tick that it was in."""

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
        works = kept["age"] < kept["length"]
        at = works[:, None] & (jnp.arange(LONGEST)[None] == kept["age"][:, None])
        return {
            **kept,
            "age": kept["age"] + works,
            "ticks": jnp.where(at, now.tick, kept["ticks"]),
            "versions": jnp.where(at, now.version, kept["versions"]),
            "fresh": kept["fresh"] & (~works | (cache == parameters)),
        }, cache

    def done(self, kept):
        return kept["age"] >= kept["length"]

    def refresh(self, parameters, kept):
        return jnp.broadcast_to(parameters, kept["index"].shape)

    def row(self, kept):
        return kept


def saved_and_restored(state):
    """A state by way of a file, as a checkpoint has it."""
    leaves, structure = jax.tree.flatten(state)
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    file = io.BytesIO()
    np.savez(file, *[jax.random.key_data(x) if k else x for x, k in zip(leaves, is_key, strict=True)])
    file.seek(0)
    with np.load(file) as found:
        back = [jnp.asarray(found[name]) for name in found]
    keys = [jax.random.wrap_key_data(x) if k else x for x, k in zip(back, is_key, strict=True)]
    return jax.tree.unflatten(structure, keys)


def check_through_xla(seed):
    """`fdg.stream` compared with the reference.

    Raises:
      AssertionError: they differ.
    """
    from fdg import stream

    sizes, lengths, staleness, takes = drawn(seed)
    source = Source(lengths)

    def made():
        return stream.Stream(
            source, sizes.slots, sizes.batch, sizes.micro_batches, sizes.ahead, sizes.order, sizes.late,
            sizes.group, sizes.prefills,
        )  # fmt: skip

    clock = Clock(sizes, lambda response: lengths[response % len(lengths)])
    one = made()
    state = jax.jit(one.init)(jax.random.key(seed))

    def taken(one):
        def take(parameters, version, state):
            rows, state = one.take(parameters, version, state)
            return rows, state, stream.counts(one, state)

        return jax.jit(take)

    take = taken(one)
    resumed = random.Random(f"resume {seed}").randrange(takes)
    for n in range(takes):
        version = version_of(n, sizes, staleness)
        rows, state, counted = take(np.float32(10 + version), np.int32(version), state)
        expected = clock.take(version)
        where = f"seed {seed}, take {n}, {sizes}"
        rows = jax.tree.map(np.asarray, rows)
        assert rows["index"].tolist() == list(expected.responses), where
        assert rows["fresh"].all(), f"{where}: a cache of other parameters"
        for i, response in enumerate(expected.drawn):
            of_row = list(zip(rows["ticks"][i], rows["versions"][i], strict=True))[: len(response)]
            assert of_row == list(response), f"{where}: response {expected.responses[i]}: {of_row}"
            assert (rows["ticks"][i][len(response) :] == -1).all(), where
        counted = {name: int(x) for name, x in counted.items()}
        assert counted == clock.counts(), f"{where}: {counted}, not {clock.counts()}"
        occupied = np.asarray(state.clock.occupied)
        index = np.asarray(state.kept["index"]).tolist()
        held = [x if there else None for x, there in zip(index, occupied, strict=True)]
        assert held == clock.slots, f"{where}: {held}, not {clock.slots}"
        if n == resumed:
            state, take = saved_and_restored(state), taken(made())


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, default=0, help="in plain Python")
    parser.add_argument("--xla", type=int, default=0, help="through XLA")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    for seed in range(given.seed, given.seed + given.settings):
        check_bounds(seed)
    wrong = 0
    for seed in range(given.seed, given.seed + given.xla):
        try:
            check_through_xla(seed)
        except AssertionError as error:
            wrong += 1
            print(error, flush=True)
        if (seed + 1 - given.seed) % 25 == 0:
            print(f"{seed + 1 - given.seed} through XLA, {wrong} of them otherwise", flush=True)
    print(
        f"{given.settings} settings within their bounds; {given.xla} through XLA, {wrong} of them otherwise"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
