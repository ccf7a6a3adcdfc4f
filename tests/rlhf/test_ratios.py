"""Probability ratios divide densities of the same distribution, for all sampling settings."""

import jax
import jax.numpy as jnp
import numpy as np

from algos.language import Decoder, DecoderConfig, Prompts, Sampling, generate
from algos.rlhf.responses import Responses, response_log_probs


def test_recorded_log_probs_match_the_learners():
    """Before top-k and top-p, at the sampling temperature and at temperature 1; by hand from the logits."""
    decoder = Decoder(DecoderConfig.tiny(9, num_layers=1, hidden_size=16, initializer_range=0.3))
    parameters, count = jax.jit(decoder.init)(jax.random.key(0)), 400
    prompts = Prompts(jnp.arange(2 * count).reshape(count, 2) % 9, jnp.ones((count, 2), bool))
    apply = jax.jit(decoder.apply)
    logits = np.asarray(apply(parameters, prompts.tokens, jnp.ones((count, 2), jnp.int32))[:, -1])
    for t, k, p in [(0.6, 0, 1.0), (0.6, 3, 0.5)]:
        sampling = Sampling(1, temperature=t, top_k=k, top_p=p)
        draw = jax.jit(lambda key, s=sampling: generate(decoder, parameters, prompts, key, s))
        found = draw(jax.random.key(1))
        token = np.asarray(found.tokens)
        for scale, log_prob in ((t, found.tempered_log_probs), (1.0, found.policy_log_probs)):
            probs = np.exp(logits / scale)
            probs /= probs.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(np.exp(log_prob), np.take_along_axis(probs, token, 1), rtol=1e-4)
        responses = Responses(prompts, found.tokens, found.mask, found.mask)
        expected = jax.jit(lambda rows, t=t: response_log_probs(decoder, parameters, rows, t)[0])(responses)
        np.testing.assert_allclose(found.tempered_log_probs, expected, atol=1e-5)
        gap = np.mean(found.log_probs - expected)  # top-k and top-p raise the probability
        assert gap > 0.02 if k or p < 1 else abs(gap) < 1e-5
