"""Sampling under policies: each device fills its share of slots, and tokens are those of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fdg
import policies
from algos.language import Decoder, DecoderConfig, Prompts, Sampling, generate, lora, sample_keys
from fdg.errors import FdgWarning
from tests.conformance.comparison import assert_same, plain
from tests.language.test_generation import TINY, prompts


@dataclasses.dataclass(frozen=True)
class Imitator:
    """Learns its own samples: an actor that generates, a learner that fits log-probabilities."""

    decoder: Decoder
    batch: int = 16
    slots: int | None = 4

    @property
    def parameter_rules(self):
        return self.decoder.parameter_rules

    def init(self, key):
        trained, frozen = lora.split(self.decoder.init(key))
        return {"trained": trained, "frozen": frozen, "adam": self._adam.init(trained), "key": key}

    @property
    def _adam(self):
        return optax.adam(1e-2)

    def iterate(self, state):
        key, own = jax.random.split(state["key"])
        asked = prompts(self.batch)
        samples = self.act(state["trained"], state["frozen"], asked, sample_keys(own, self.batch))
        trained, adam, loss = self.learn(state["trained"], state["adam"], state["frozen"], asked, samples)
        state = {"trained": trained, "frozen": state["frozen"], "adam": adam, "key": key}
        return state, {"loss": loss, "tokens": jnp.sum(samples.tokens * jnp.arange(1, 6)[None])}

    @fdg.fragment("actor", in_axes=(None, None, 0, 0))
    def act(self, trained, frozen, asked, keys):
        sampling = Sampling(5, stop_tokens=(3,))
        return generate(self.decoder, lora.join(trained, frozen), asked, keys, sampling, self.slots)

    @fdg.fragment("learner", in_axes=(None, None, None, 0, 0), out_axes=None)
    def learn(self, trained, adam, frozen, asked: Prompts, samples):
        tokens = jnp.concatenate([asked.tokens, samples.tokens], axis=1)
        segments = jnp.concatenate([asked.mask, samples.mask], axis=1).astype(jnp.int32)

        def loss(trained):
            log_probs = self.decoder.log_probs(lora.join(trained, frozen), tokens, segments)[:, -5:]
            return -jnp.sum(log_probs * samples.mask) / jnp.sum(samples.mask)

        value, slope = jax.value_and_grad(loss)(trained)
        updates, adam = self._adam.update(slope, adam)
        return optax.apply_updates(trained, updates), adam, value


def imitator(**changes):
    return Imitator(
        Decoder(
            DecoderConfig.tiny(
                11, **TINY | {"num_layers": 1}, initializer_range=0.3, max_positions=32, **changes
            )
        )
    )


def test_policies_give_the_plain_numbers_and_sampling_exchanges_nothing(devices):
    assert not exchanges_of_sampling(policies.SingleLearnerCoarse(actors=2, learners=2), devices[:4])


def test_sampling_with_split_heads_exchanges_activations_and_no_parameters(devices):
    exchanged = exchanges_of_sampling(policies.GPUOnly(model_parallel=2), devices[:4])
    # Of a prompt of 5 tokens; the smallest parameter that is split has 16 x 16.
    assert exchanged and all(each.bytes <= 4 * 5 * 16 for each in exchanged)


def exchanges_of_sampling(policy, devices):
    """What the fragment that samples exchanges under a policy, whose numbers are the plain ones."""
    algorithm = imitator()
    expected, metrics = plain(algorithm, jax.jit(algorithm.init)(jax.random.key(0)), 2)
    with pytest.warns(
        FdgWarning, match="slots=4 is the number on all devices together, 2 on each of 2; it was"
    ):
        engine = fdg.compile(algorithm, policy, devices=devices)
        state, found = engine.run(engine.init(0), 2)
    assert_same(expected, state, 1e-4)
    np.testing.assert_array_equal(found["tokens"], metrics["tokens"])
    (acting,) = [each for each in engine.programs if "act" in each.fragments]
    return [each for each in acting.collectives() if "act" in each.fragments]
