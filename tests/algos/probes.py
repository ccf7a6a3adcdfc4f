"""Runs of an algorithm on a probe environment."""

import jax


def trained(algorithm, iterations):
    """The state after so many iterations, in one program."""

    @jax.jit
    def run(key):
        return jax.lax.scan(
            lambda state, _: algorithm.iterate(state), algorithm.init(key), length=iterations
        )[0]

    return run(jax.random.key(0))
