"""Densities that are divided are of one distribution, however tokens are chosen."""

import jax
import jax.numpy as jnp
import numpy as np

from algos.language import Decoder, DecoderConfig, Prompts, Sampling, generate
from algos.rlhf.responses import Responses, scores


def test_every_way_to_sample_records_what_a_learner_computes():
    """Of each token: as drawn, before it was cut, and at temperature 1; by hand from the logits."""
    decoder = Decoder(DecoderConfig.tiny(9, num_layers=1, hidden_size=16, initializer_range=0.3))
    parameters, count = jax.jit(decoder.init)(jax.random.key(0)), 400
    asked = Prompts(jnp.arange(2 * count).reshape(count, 2) % 9, jnp.ones((count, 2), bool))
    apply = jax.jit(decoder.apply)
    logits = np.asarray(apply(parameters, asked.tokens, jnp.ones((count, 2), jnp.int32))[:, -1])
    for t, k, p in [(0.6, 0, 1.0), (0.6, 3, 0.5)]:
        sampling = Sampling(1, temperature=t, top_k=k, top_p=p)
        draw = jax.jit(lambda key, s=sampling: generate(decoder, parameters, asked, key, s))
        found = draw(jax.random.key(1))
        token = np.asarray(found.tokens)
        for scale, log_prob in ((t, found.tempered_log_probs), (1.0, found.policy_log_probs)):
            chances = np.exp(logits / scale)
            chances /= chances.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(np.exp(log_prob), np.take_along_axis(chances, token, 1), rtol=1e-4)
        said = Responses(asked, found.tokens, found.mask, found.mask)
        learned = jax.jit(lambda said, t=t: scores(decoder, parameters, said, t)[0])(said)
        np.testing.assert_allclose(found.tempered_log_probs, learned, atol=1e-5)
        more = np.mean(found.log_probs - learned)  # a token that was drawn of fewer is likelier
        assert more > 0.02 if k or p < 1 else abs(more) < 1e-5
