"""Speed of sampling: beside a hand-written loop, and slots that are refilled beside static batches.

    python -m bench.generation                 # 76k parameters, 64 prompts
    python -m bench.generation --stops 3 --prompts 128 --tokens 160    # lengths that differ more
    python -m bench.generation --prompts 16 --tokens 32 --repeats 1   # seconds
    python -m bench.generation --hidden 576 --layers 30 --vocabulary 49152 --dtype bfloat16  # on a GPU

Everything in one process, in turns, the median of the repeats. Lengths are those of a network without
training, whose stop tokens come at random. Steps are counted too, as they are taken, which no load of the
machine changes: a static batch takes as many as its longest row, slots at best all tokens divided by the
slots. Tokens of both are compared.
"""

import statistics

import jax
import jax.numpy as jnp
import numpy as np

from algos.language import Decoder, DecoderConfig, Prompts, Sampling, generate, sample_keys
from bench.harness import parser, timed_in_turns


def arguments():
    line = parser("bench.generation", __doc__)
    for name, default in {
        "prompts": 64, "slots": 8, "prompt-length": 16, "tokens": 128, "hidden": 64, "layers": 2,
        "vocabulary": 48, "stops": 2, "repeats": 5,
    }.items():  # fmt: skip
        line.add_argument(f"--{name}", type=int, default=default)
    line.add_argument("--dtype", default="float32")
    return line.parse_args()


class Counting(Decoder):
    """A decoder that counts its steps as they are taken, all of the class together in `steps`."""

    steps = 0

    def decode(self, parameters, cache, token):
        """As the decoder's, and counted: by a call whose zero the logits wait for, once a step."""
        nothing = jax.ShapeDtypeStruct((), jnp.float32)
        zero = jax.pure_callback(self._count, nothing, cache.step)
        logits, cache = super().decode(parameters, cache, token)
        return logits + zero, cache

    @classmethod
    def _count(cls, step):
        cls.steps += 1
        return np.float32(0)

    @classmethod
    def counted(cls, run):
        """What a function returns, and how many steps were taken in it."""
        cls.steps = 0
        return jax.block_until_ready(run()), cls.steps


def by_hand(decoder, parameters, prompts, keys, sampling):
    """What one would write: prefill, then a loop of decode and draw, that ends when all rows have."""
    width, stops = sampling.max_new_tokens, jnp.asarray(sampling.stop_tokens)
    parameters = decoder.cast(parameters)
    logits, cache = decoder.prefill(parameters, prompts.tokens, prompts.mask.astype(jnp.int32), width - 1)

    def draw(t, logits, done, tokens, log_probs):
        noise = jax.vmap(lambda k: jax.random.gumbel(jax.random.fold_in(k, t), logits.shape[1:]))(keys)
        token = jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
        own = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0]
        tokens = tokens.at[:, t].set(jnp.where(done, 0, token))
        log_probs = log_probs.at[:, t].set(jnp.where(done, 0.0, own))
        return token, done | jnp.any(token[:, None] == stops[None], axis=1), tokens, log_probs

    def step(carry):
        t, cache, token, *rest = carry
        logits, cache = decoder.decode(parameters, cache, token)
        return t + 1, cache, *draw(t, logits, *rest)

    begun = (
        jnp.zeros(len(keys), bool),
        jnp.zeros((len(keys), width), jnp.int32),
        jnp.zeros((len(keys), width)),
    )
    carry = (1, cache, *draw(0, logits, *begun))
    return jax.lax.while_loop(lambda c: (c[0] < width) & ~jnp.all(c[3]), step, carry)[4:]


def main():
    """Measures and prints."""
    chosen = arguments()
    decoder = Decoder(
        DecoderConfig.tiny(
            chosen.vocabulary, hidden_size=chosen.hidden, intermediate_size=2 * chosen.hidden,
            num_layers=chosen.layers, max_positions=4096, dtype=chosen.dtype,
        )
    )  # fmt: skip
    parameters = jax.jit(decoder.init)(jax.random.key(0))
    n, slots = chosen.prompts, chosen.slots
    words = np.random.default_rng(0).integers(0, chosen.vocabulary, (n, chosen.prompt_length))
    prompts = Prompts(jnp.asarray(words, jnp.int32), jnp.ones(words.shape, bool))
    keys = sample_keys(jax.random.key(1), n)
    sampling = Sampling(chosen.tokens, stop_tokens=tuple(range(chosen.stops)))

    def some(i):
        return jax.tree.map(lambda x: x[i : i + slots], (prompts, keys))

    def static(parameters):
        return [generating(parameters, *some(i)) for i in range(0, n, slots)]

    generating = jax.jit(lambda p, prompts, keys: generate(decoder, p, prompts, keys, sampling))
    hand = jax.jit(lambda p, prompts, keys: by_hand(decoder, p, prompts, keys, sampling))
    refilled = jax.jit(lambda p: generate(decoder, p, prompts, keys, sampling, slots))
    programs = {
        "by hand": lambda: hand(parameters, *some(0)),
        "generate": lambda: generating(parameters, *some(0)),
        "static batches": lambda: static(parameters),
        "slots, refilled": lambda: refilled(parameters),
    }
    found = {name: jax.block_until_ready(run()) for name, run in programs.items()}
    np.testing.assert_array_equal(found["by hand"][0], found["generate"].tokens)
    seconds = timed_in_turns(programs, chosen.repeats)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    lengths = np.asarray(found["slots, refilled"].mask.sum(axis=1))
    counting, bound = Counting(decoder.config), lengths.sum() / slots
    alike = jax.jit(lambda p, prompts, keys: generate(counting, p, prompts, keys, sampling))
    again = jax.jit(lambda p: generate(counting, p, prompts, keys, sampling, slots))
    waves = sum(Counting.counted(lambda i=i: alike(parameters, *some(i)))[1] for i in range(0, n, slots))
    refilled_again, taken = Counting.counted(lambda: again(parameters))
    for i in range(0, n, slots):
        whole = generating(parameters, *some(i))
        for name in ("tokens", "mask"):
            part = getattr(refilled_again, name)[i : i + slots]
            np.testing.assert_array_equal(part, getattr(whole, name))
    print(f"{decoder.config.num_parameters:,} parameters, {n} prompts, {slots} slots; on {jax.devices()[0]}")
    print(f"lengths: mean {lengths.mean():.1f}, longest / mean {lengths.max() / lengths.mean():.1f}")
    for name, each in medians.items():
        print(f"{name:<16} {1e3 * each:10.1f} ms")
    print(f"generate / by hand: {medians['by hand'] / medians['generate']:.2f} of its speed")
    print(
        f"refilled / static: {medians['static batches'] / medians['slots, refilled']:.2f} in time; in steps"
        f" {waves / taken:.2f} ({waves} and {taken}); of its bound ({bound:.0f} steps) {bound / taken:.0%}"
    )


if __name__ == "__main__":
    main()
