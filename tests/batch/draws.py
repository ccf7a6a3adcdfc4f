"""Random draws of JAX: for one row from its key, and for a batch from one key."""

import jax
import jax.numpy as jnp

from tests.batch.rows import B, F, integers, matrix, positive, unit

# Functions of a key and a row.
DRAWS = {
    **{f"random.{n}": lambda k, r, n=n: getattr(jax.random, n)(k, (3,)) for n in
       "normal uniform bits exponential gumbel laplace logistic cauchy rademacher maxwell".split()},
    "random.rayleigh": lambda k, r: jax.random.rayleigh(k, 1.0, (3,)),
    "random.bernoulli": lambda k, r: jax.random.bernoulli(k, unit(r)),
    "random.categorical": lambda k, r: jax.random.categorical(k, r),
    "random.choice": lambda k, r: jax.random.choice(k, r, (2,)),
    "random.choice without": lambda k, r: jax.random.choice(k, r, (3,), replace=False),
    "random.choice weighted": lambda k, r: jax.random.choice(k, F, (2,), p=jax.nn.softmax(r)),
    "random.permutation": lambda k, r: jax.random.permutation(k, r),
    "random.randint": lambda k, r: jax.random.randint(k, (3,), 0, integers(r)[0] + 2),
    "random.truncated_normal": lambda k, r: jax.random.truncated_normal(k, -1.0, positive(r)),
    "random.gamma": lambda k, r: jax.random.gamma(k, positive(r)),
    "random.gamma scalar": lambda k, r: jax.random.gamma(k, 2.0),
    "random.loggamma": lambda k, r: jax.random.loggamma(k, positive(r)),
    "random.beta": lambda k, r: jax.random.beta(k, positive(r), 2.0),
    "random.dirichlet": lambda k, r: jax.random.dirichlet(k, positive(r)),
    "random.poisson": lambda k, r: jax.random.poisson(k, positive(r)),
    "random.binomial": lambda k, r: jax.random.binomial(k, 9, unit(r)),
    "random.geometric": lambda k, r: jax.random.geometric(k, unit(r)),
    "random.t": lambda k, r: jax.random.t(k, 3.0, (2,)),
    "random.f": lambda k, r: jax.random.f(k, 3.0, 4.0, (2,)),
    "random.chisquare": lambda k, r: jax.random.chisquare(k, 3.0, (2,)),
    "random.pareto": lambda k, r: jax.random.pareto(k, 3.0, (2,)),
    "random.weibull_min": lambda k, r: jax.random.weibull_min(k, 1.0, 2.0, (2,)),
    "random.wald": lambda k, r: jax.random.wald(k, positive(r)),
    "random.triangular": lambda k, r: jax.random.triangular(k, 0.0, 0.5, 1.0, (2,)),
    "random.lognormal": lambda k, r: jax.random.lognormal(k, 1.0, (2,)),
    "random.ball": lambda k, r: jax.random.ball(k, 3),
    "random.orthogonal": lambda k, r: jnp.abs(jax.random.orthogonal(k, 3)),
    "random.multivariate_normal": lambda k, r: jax.random.multivariate_normal(k, r, matrix(r)),
    "random.double_sided_maxwell": lambda k, r: jax.random.double_sided_maxwell(k, 0.0, 1.0, (2,)),
    "random.generalized_normal": lambda k, r: jax.random.generalized_normal(k, 2.0, (2,)),
    "random.multinomial": lambda k, r: jax.random.multinomial(k, 5, jax.nn.softmax(r)),
    "split": lambda k, r: jax.random.normal(jax.random.split(k)[1], (2,)),
    "split many": lambda k, r: jax.vmap(jax.random.normal)(jax.random.split(k, F)) * r,
    "fold_in": lambda k, r: jax.random.uniform(jax.random.fold_in(k, integers(r)[0])),
    "key_data": lambda k, r: jax.random.key_data(k) + 1,
    "wrap": lambda k, r: jax.random.normal(jax.random.wrap_key_data(
        jax.random.key_data(k) + 1, impl=jax.random.key_impl(k))),
    "clone": lambda k, r: jax.random.normal(jax.random.clone(k)),
    "seed": lambda k, r: jax.random.normal(jax.random.key(integers(r)[0], impl=str(jax.random.key_impl(k)))),
}  # fmt: skip


# Functions of a key and the batch [B, F].
BATCH_DRAWS = {
    **{f"batch {n}": lambda k, x, n=n: getattr(jax.random, n)(k, x.shape) * x for n in
       "normal uniform exponential gumbel cauchy".split()},
    "batch bernoulli": lambda k, x: jax.random.bernoulli(k, unit(x)),
    "batch gamma": lambda k, x: jax.random.gamma(k, positive(x)),
    "batch loggamma": lambda k, x: jax.random.loggamma(k, positive(x)),
    "batch beta": lambda k, x: jax.random.beta(k, positive(x), positive(x)),
    "batch dirichlet": lambda k, x: jax.random.dirichlet(k, positive(x)),
    "batch dirichlet shape": lambda k, x: jax.random.dirichlet(k, jnp.ones(F), (B,)) * x,
    "batch poisson": lambda k, x: jax.random.poisson(k, positive(x)),
    "batch binomial": lambda k, x: jax.random.binomial(k, 9, unit(x)),
    "batch categorical": lambda k, x: jax.random.categorical(k, x),
    "batch categorical axis": lambda k, x: jax.random.categorical(k, x, axis=0),
    "batch permutation": lambda k, x: jax.random.permutation(k, x),
    "batch permutation independent": lambda k, x: jax.random.permutation(k, x, axis=1, independent=True),
    "batch choice": lambda k, x: jax.random.choice(k, x, (4,)),
    "batch truncated_normal": lambda k, x: jax.random.truncated_normal(k, -1.0, positive(x)),
    "batch multivariate_normal": lambda k, x: jax.random.multivariate_normal(k, x, jnp.eye(F)[None]),
    "batch randint": lambda k, x: jax.random.randint(k, x.shape, 0, integers(x) + 2),
    "batch t": lambda k, x: jax.random.t(k, positive(x) + 2),
    "batch laplace": lambda k, x: jax.random.laplace(k, x.shape) + x,
    "batch split": lambda k, x: jax.vmap(jax.random.normal)(jax.random.split(k, B))[:, None] * x,
    "batch wald": lambda k, x: jax.random.wald(k, positive(x)),
    "batch multinomial": lambda k, x: jax.random.multinomial(k, 5, jax.nn.softmax(x)),
    "batch geometric": lambda k, x: jax.random.geometric(k, unit(x)),
    "batch chisquare": lambda k, x: jax.random.chisquare(k, positive(x)),
    "batch generalized_normal": lambda k, x: jax.random.generalized_normal(k, 2.0, x.shape) + x,
    "batch ball": lambda k, x: jax.random.ball(k, F, shape=(B,)) + x,
}  # fmt: skip
