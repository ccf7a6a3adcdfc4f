"""Training runs on probe environments."""

import jax


def trained(algorithm, iterations):
    """The state after `iterations` iterations, run as one program."""

    @jax.jit
    def run(key):
        return jax.lax.scan(
            lambda state, _: algorithm.iterate(state), algorithm.init(key), length=iterations
        )[0]

    return run(jax.random.key(0))
