"""Operations of JAX as functions of one row, float32 [F]."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import jax.scipy.integrate
import jax.scipy.optimize
import jax.scipy.signal
import jax.scipy.sparse.linalg
from jax import lax

from tests.batch.rows import F, integers, matrix, positive, square, unit

# ruff: noqa: E501


@jax.custom_jvp
def custom_forward(row):
    return jnp.sin(row) * row.sum()


custom_forward.defjvp(lambda p, t: (custom_forward(*p), t[0] * jnp.cos(p[0]).sum() + t[0].sum()))


@jax.custom_vjp
def custom_reverse(row):
    return jnp.cumsum(row) * row.max()


custom_reverse.defvjp(lambda row: (custom_reverse(row), row), lambda row, g: (g * jnp.cos(row) + g.sum(),))


def image(row):
    """[4, 4, 3] of a row."""
    return jnp.outer(row, row).reshape(-1)[:16].reshape(4, 4, 1) * jnp.arange(1.0, 4.0).reshape(1, 1, 3)


def convolve(row, groups=1, **kwargs):
    kernel = jnp.sin(jnp.arange(2 * 2 * (3 // groups) * 6.0)).reshape(2, 2, 3 // groups, 6)
    return lax.conv_general_dilated(
        image(row)[None], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups, **kwargs)[0]  # fmt: skip


horner = getattr(lax, "polynomial", lambda x, coefficients: jnp.polyval(jnp.stack(coefficients[::-1]), x))


OPERATIONS = {
    # elementwise
    **{f"jnp.{n}": getattr(jnp, n) for n in
       "abs sin cos tan arctan sinh cosh tanh arcsinh exp expm1 exp2 square floor ceil round sign cbrt negative "
       "deg2rad isnan isfinite signbit positive i0 sinc nan_to_num trunc rint fabs frexp modf".split()},
    **{f"jnp.{n}": lambda r, n=n: getattr(jnp, n)(unit(r)) for n in
       "arcsin arccos arctanh sqrt log log2 log10 log1p reciprocal".split()},
    **{f"jnp.{n}": lambda r, n=n: getattr(jnp, n)(r, jnp.roll(r, 1)) for n in
       "add subtract multiply divide maximum minimum hypot arctan2 logaddexp logaddexp2 copysign heaviside "
       "fmod remainder floor_divide greater equal nextafter ldexp isclose array_equal".split() if n != "ldexp"},
    **{f"jnp.{n}": lambda r, n=n: getattr(jnp, n)(integers(r), integers(jnp.roll(r, 1))) for n in
       "bitwise_and bitwise_or bitwise_xor left_shift right_shift gcd lcm".split()},
    "clip": lambda r: jnp.clip(r, -0.5, 0.5),
    "clamp by scalars": lambda r: lax.clamp(-0.5, r, 0.5),
    "power": lambda r: positive(r) ** jnp.roll(r, 1),
    "integer power": lambda r: lax.integer_pow(r, 3),
    "where": lambda r: jnp.where(r > 0, r, 2 * r),
    "select_n": lambda r: lax.select_n(integers(r) % 3, r, 2 * r, 3 * r),
    "reduce_precision": lambda r: lax.reduce_precision(r, 5, 10),
    "bitcast same width": lambda r: lax.bitcast_convert_type(r, jnp.int32),
    "bitcast to narrow": lambda r: lax.bitcast_convert_type(r, jnp.uint8),
    "bitcast to wide": lambda r: lax.bitcast_convert_type(lax.bitcast_convert_type(r, jnp.uint8), jnp.int32),
    "astype": lambda r: r.astype(jnp.bfloat16).astype(jnp.float32),
    "complex extremes": lambda r: jnp.abs(lax.complex(r, r * r).max() + lax.complex(jnp.abs(r), r).min()),
    "complex": lambda r: jnp.abs(lax.complex(r, r * 2)) + jnp.angle(lax.complex(r, r)),
    "population_count": lambda r: lax.population_count(integers(r)),
    "clz": lambda r: lax.clz(integers(r)),
    "stop_gradient": lambda r: lax.stop_gradient(r) * r,
    "optimization_barrier": lambda r: lax.optimization_barrier((r, r * 2)),
    # activations and scipy
    **{f"nn.{n}": getattr(jax.nn, n) for n in
       "relu gelu silu softplus elu celu selu log_sigmoid leaky_relu hard_tanh softmax log_softmax glu "
       "relu6 soft_sign standardize squareplus mish".split()},
    "one_hot": lambda r: jax.nn.one_hot(integers(r), 8),
    "logsumexp": lambda r: jsp.special.logsumexp(r),
    **{f"special.{n}": lambda r, n=n: getattr(jsp.special, n)(positive(r)) for n in
       "gammaln digamma erf erfc i0e i1e i1 entr expi exp1 gamma factorial spence".split()
       if hasattr(jsp.special, n)},
    **{f"special.{n}": lambda r, n=n: getattr(jsp.special, n)(unit(r)) for n in
       "erfinv ndtri logit expit ndtr log_ndtr xlogy".split() if n != "xlogy"},
    "special.xlogy": lambda r: jsp.special.xlogy(positive(r), positive(r)),
    "special.gammainc": lambda r: jsp.special.gammainc(positive(r), 1.0),
    "special.gammaincc": lambda r: jsp.special.gammaincc(positive(r), positive(r)),
    "special.betainc": lambda r: jsp.special.betainc(positive(r), positive(r), unit(r)),
    "special.betaln": lambda r: jsp.special.betaln(positive(r), 2.0),
    "special.beta": lambda r: jsp.special.beta(positive(r), 2.0),
    "special.zeta": lambda r: jsp.special.zeta(positive(r) + 1.0, 1.0),
    "special.polygamma": lambda r: jsp.special.polygamma(1, positive(r)),
    "special.multigammaln": lambda r: jsp.special.multigammaln(positive(r) + 3, 2),
    "special.hyp1f1": lambda r: jsp.special.hyp1f1(positive(r), 2.0, 0.5),
    "special.rel_entr": lambda r: jsp.special.rel_entr(positive(r), unit(r)),
    "stats.norm.cdf": lambda r: jsp.stats.norm.logcdf(r),
    "stats.beta": lambda r: jsp.stats.beta.logpdf(unit(r), 2.0, 3.0),
    "stats.gamma": lambda r: jsp.stats.gamma.logpdf(positive(r), 2.0),
    "stats.t": lambda r: jsp.stats.t.logpdf(r, 4.0),
    "stats.dirichlet": lambda r: jsp.stats.dirichlet.logpdf(jax.nn.softmax(r), jnp.ones(F) * 2),
    "stats.multivariate_normal": lambda r: jsp.stats.multivariate_normal.logpdf(r, jnp.zeros(F), matrix(r)),
    "stats.poisson": lambda r: jsp.stats.poisson.logpmf(integers(r), 3.0),
    "stats.vonmises": lambda r: jsp.stats.vonmises.logpdf(r, 1.0),
    "stats.rankdata": lambda r: jsp.stats.rankdata(r),
    "stats.mode": lambda r: jsp.stats.mode(integers(r)).mode,
    # reductions, scans, orders
    **{f"jnp.{n}": getattr(jnp, n) for n in
       "sum mean max min prod std var any all argmax argmin median ptp nansum nanmean cumsum cumprod sort argsort "
       "count_nonzero diff ediff1d nanmax nanstd nancumsum average unwrap".split()},
    "reduce_xor": lambda r: lax.reduce_xor_p.bind(integers(r), axes=(0,)),
    "reduce_and bits": lambda r: lax.reduce_and_p.bind(integers(r), axes=(0,)),
    "reduce generic": lambda r: lax.reduce(r, jnp.float32(0), lambda a, b: a * 0.5 + b, (0,)),
    "reduce pair": lambda r: lax.reduce(
        (r, integers(r)), (jnp.float32(-9), jnp.int32(0)),
        lambda a, b: (jnp.where(a[0] > b[0], a[0], b[0]), jnp.where(a[0] > b[0], a[1], b[1])), (0,)),
    "percentile": lambda r: jnp.percentile(r, 30),
    "quantile": lambda r: jnp.quantile(r, jnp.array([0.2, 0.5])),
    "cummax": lambda r: lax.cummax(r),
    "cummin reverse": lambda r: lax.cummin(r, reverse=True),
    "cumlogsumexp": lambda r: lax.cumlogsumexp(r),
    "associative_scan": lambda r: lax.associative_scan(jnp.multiply, r),
    "sort pairs": lambda r: lax.sort((r, integers(r)), num_keys=1),
    "sort key val": lambda r: lax.sort_key_val(r, jnp.arange(F)),
    "lexsort": lambda r: jnp.lexsort((r, integers(r))),
    "partition": lambda r: jnp.partition(r, 2),
    "argpartition": lambda r: jnp.argpartition(r, 3),
    "top_k": lambda r: lax.top_k(r, 2),
    "approx_max_k": lambda r: lax.approx_max_k(r, 2),
    "approx_min_k": lambda r: lax.approx_min_k(r, 2),
    "searchsorted": lambda r: jnp.searchsorted(jnp.linspace(-1, 1, 9), r),
    "searchsorted own": lambda r: jnp.searchsorted(jnp.sort(r), r),
    "digitize": lambda r: jnp.digitize(r, jnp.linspace(-1, 1, 9)),
    "histogram": lambda r: jnp.histogram(r, 4)[0],
    "bincount": lambda r: jnp.bincount(integers(r), length=8),
    "interp": lambda r: jnp.interp(r, jnp.linspace(-1, 1, 9), jnp.arange(9.0)),
    "unique": lambda r: jnp.unique(integers(r), size=4),
    "nonzero": lambda r: jnp.nonzero(r > 0, size=4, fill_value=-1)[0],
    "argwhere": lambda r: jnp.argwhere(r > 0, size=4),
    "isin": lambda r: jnp.isin(integers(r), jnp.array([1, 2])),
    "convolve": lambda r: jnp.convolve(r, jnp.array([1.0, 2.0, 1.0])),
    "correlate": lambda r: jnp.correlate(r, jnp.array([1.0, 2.0, 1.0])),
    "gradient": lambda r: jnp.gradient(r),
    "trapezoid": lambda r: jsp.integrate.trapezoid(r),
    "corrcoef": lambda r: jnp.corrcoef(r, jnp.roll(r, 1)),
    "cov": lambda r: jnp.cov(matrix(r)),
    "polyval": lambda r: jnp.polyval(r, jnp.arange(3.0)),
    "polynomial": lambda r: horner(r, [1.0, r[0], 2.0]),
    "polynomial of many": lambda r: horner(r, [0.1 * k for k in range(12)]),
    "roots": lambda r: jnp.sort(jnp.abs(jnp.roots(r, strip_zeros=False))),
    # shapes
    "reshape": lambda r: r.reshape(2, 3).T,
    "transpose": lambda r: jnp.transpose(r.reshape(1, 2, 3), (2, 0, 1)),
    "flip": lambda r: jnp.flip(r),
    "roll": lambda r: jnp.roll(r, 2),
    "dynamic roll": lambda r: jnp.roll(r, integers(r)[0]),
    "pad": lambda r: jnp.pad(r, 2),
    "pad reflect": lambda r: jnp.pad(r, 2, mode="reflect"),
    "pad wrap": lambda r: jnp.pad(r, 2, mode="wrap"),
    "lax.pad negative": lambda r: lax.pad(r, 0.0, [(-1, 2, 1)]),
    "lax.pad by an element": lambda r: lax.pad(r, r[0], [(1, 2, 1)]),
    "tile": lambda r: jnp.tile(r, 3),
    "repeat": lambda r: jnp.repeat(r, 2),
    "repeat counts": lambda r: jnp.repeat(r, integers(r) % 3, total_repeat_length=8),
    "concatenate": lambda r: jnp.concatenate([r, r * 2]),
    "stack": lambda r: jnp.stack([r, 2 * r, r]),
    "split": lambda r: jnp.split(r, 3),
    "unstack": lambda r: jnp.unstack(r.reshape(2, 3), axis=1),
    "array_split": lambda r: jnp.array_split(r, 4),
    "meshgrid": lambda r: jnp.meshgrid(r, r),
    "broadcast": lambda r: jnp.broadcast_to(r, (3, F)),
    "expand and squeeze": lambda r: jnp.squeeze(jnp.expand_dims(r, (0, 2)), 0),
    "tril": lambda r: jnp.tril(matrix(r)),
    "diag": lambda r: jnp.diag(r),
    "diagonal": lambda r: jnp.diagonal(matrix(r)),
    "trace": lambda r: jnp.trace(matrix(r)),
    "rot90": lambda r: jnp.rot90(matrix(r)),
    "kron": lambda r: jnp.kron(r, r),
    "vander": lambda r: jnp.vander(r, 3),
    "packbits": lambda r: jnp.packbits(r > 0),
    "unpackbits": lambda r: jnp.unpackbits(integers(r).astype(jnp.uint8)),
    "insert": lambda r: jnp.insert(r, 2, 5.0),
    "delete": lambda r: jnp.delete(r, 2),
    "append": lambda r: jnp.append(r, 1.0),
    "compress": lambda r: jnp.compress(jnp.array([1, 0, 1, 1, 0, 0], bool), r, size=3),
    "strided slice": lambda r: r[::2],
    "select": lambda r: jnp.select([r > 1, r > 0], [r, 2 * r], 0.0),
    "piecewise": lambda r: jnp.piecewise(r, [r < 0, r >= 0], [lambda x: -x, lambda x: x * 2]),
    # look-ups and updates
    "index": lambda r: r[2],
    "dynamic index": lambda r: r[integers(r)[0] % F],
    "take": lambda r: jnp.take(r, integers(r)[:3], mode="wrap"),
    "take_along_axis": lambda r: jnp.take_along_axis(r, jnp.argsort(r), 0),
    "take fill": lambda r: jnp.take(r, integers(r), mode="fill"),
    "dynamic_slice": lambda r: lax.dynamic_slice(r, (integers(r)[0],), (3,)),
    "dynamic_slice shared": lambda r: lax.dynamic_slice(jnp.arange(9.0), (integers(r)[0],), (3,)),
    "dynamic_update_slice": lambda r: lax.dynamic_update_slice(r, jnp.ones(2), (integers(r)[0],)),
    "dynamic_update_slice of shared": lambda r: lax.dynamic_update_slice(jnp.zeros(9), r[:2], (integers(r)[0],)),
    "set": lambda r: r.at[integers(r)[0]].set(7.0),
    "add at": lambda r: jnp.zeros(8).at[integers(r)].add(r),
    "mul at": lambda r: jnp.ones(8).at[integers(r)].multiply(r),
    "min at": lambda r: jnp.ones(8).at[integers(r)].min(r),
    "max at": lambda r: jnp.ones(8).at[integers(r)].max(r),
    "apply at": lambda r: r.at[1].apply(jnp.exp),
    "scatter sub": lambda r: jnp.zeros(8).at[integers(r)].subtract(r),
    "matrix set": lambda r: matrix(r).at[integers(r) % F, jnp.arange(F)].set(r),
    "segment_sum": lambda r: jax.ops.segment_sum(r, integers(r), 8),
    "segment_max": lambda r: jax.ops.segment_max(r, integers(r), 8),
    "look-up in a table": lambda r: jnp.sin(jnp.arange(24.0)).reshape(8, 3)[integers(r)],
    "map_coordinates": lambda r: jsp.ndimage.map_coordinates(matrix(r), [unit(r) * 4, unit(r) * 3], 1),
    # products and windows
    "dot": lambda r: r @ r,
    "matmul": lambda r: matrix(r) @ square(r),
    "shared matmul": lambda r: r @ jnp.sin(jnp.arange(18.0)).reshape(F, 3),
    "einsum": lambda r: jnp.einsum("i,j,ij->i", r, r, matrix(r)),
    "preferred type": lambda r: lax.dot(r.astype(jnp.bfloat16), r.astype(jnp.bfloat16), preferred_element_type=jnp.float32),
    "tensordot": lambda r: jnp.tensordot(matrix(r), r, 1),
    "outer": lambda r: jnp.outer(r, r),
    "cross": lambda r: jnp.cross(r[:3], r[3:]),
    "conv": convolve,
    "conv grouped": lambda r: convolve(r, 3),
    "conv dilated": lambda r: convolve(r, rhs_dilation=(2, 2)),
    "conv kernel per row": lambda r: lax.conv_general_dilated(
        jnp.ones((1, 4, 4, 2)), jnp.outer(r, r).reshape(-1)[:16].reshape(2, 2, 2, 2), (1, 1), "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC")),
    "conv both per row": lambda r: lax.conv_general_dilated(
        image(r)[None], jnp.outer(r, r).reshape(-1)[:24].reshape(2, 2, 3, 2), (1, 1), "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC")),
    "conv transpose": lambda r: lax.conv_transpose(image(r)[None], jnp.ones((2, 2, 3, 2)), (2, 2), "SAME"),
    "avg_pool": lambda r: lax.reduce_window(image(r), 0.0, lax.add, (2, 2, 1), (1, 1, 1), "VALID"),
    "max_pool": lambda r: lax.reduce_window(image(r), -jnp.inf, lax.max, (2, 2, 1), (2, 2, 1), "SAME"),
    "min_pool": lambda r: lax.reduce_window(image(r), jnp.inf, lax.min, (2, 2, 1), (2, 2, 1), "SAME"),
    "reduce_window generic": lambda r: lax.reduce_window(r, jnp.float32(0), lambda a, b: a * 0.5 + b, (2,), (1,), "VALID"),
    "image resize": lambda r: jax.image.resize(image(r), (6, 6, 3), "linear"),
    "conv patches": lambda r: lax.conv_general_dilated_patches(
        image(r)[None], (2, 2), (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")),
    # Fourier
    "fft": lambda r: jnp.abs(jnp.fft.fft(r)),
    "rfft": lambda r: jnp.abs(jnp.fft.rfft(r)),
    "irfft": lambda r: jnp.fft.irfft(jnp.fft.rfft(r)),
    "fft2": lambda r: jnp.abs(jnp.fft.fft2(matrix(r))),
    "dct": lambda r: jsp.fft.dct(r),
    "fftshift": lambda r: jnp.fft.fftshift(r),
    "stft": lambda r: jnp.abs(jsp.signal.stft(jnp.tile(r, 4), nperseg=8)[2]),
    "fftconvolve": lambda r: jsp.signal.fftconvolve(r, r),
    # linear algebra
    "cholesky": lambda r: jnp.linalg.cholesky(matrix(r)),
    "solve": lambda r: jnp.linalg.solve(square(r), r),
    "solve shared": lambda r: jnp.linalg.solve(square(jnp.arange(F) * 0.1), r),
    "inv": lambda r: jnp.linalg.inv(square(r)),
    "det": lambda r: jnp.linalg.det(square(r)),
    "slogdet": lambda r: jnp.linalg.slogdet(square(r)),
    "qr": lambda r: jnp.abs(jnp.linalg.qr(square(r))[1]),
    "qr with pivots": lambda r: jnp.abs(jsp.linalg.qr(square(r), pivoting=True)[1]),
    "symmetric_product": lambda r: lax.linalg.symmetric_product(square(r), matrix(r)),
    "svd": lambda r: jnp.linalg.svd(square(r), compute_uv=False),
    "eigh": lambda r: jnp.linalg.eigvalsh(matrix(r) + jnp.diag(jnp.arange(F))),
    "eig": lambda r: jnp.sort(jnp.abs(jnp.linalg.eigvals(square(r)))),
    "schur": lambda r: jnp.abs(jnp.diagonal(jsp.linalg.schur(matrix(r))[0])).sum(),
    "hessenberg": lambda r: jnp.abs(jsp.linalg.hessenberg(square(r))),
    "expm": lambda r: jsp.linalg.expm(square(r) * 0.1),
    "pinv": lambda r: jnp.linalg.pinv(square(r)),
    "lstsq": lambda r: jnp.linalg.lstsq(square(r), r)[0],
    "matrix_power": lambda r: jnp.linalg.matrix_power(square(r), 3),
    "norm": lambda r: jnp.linalg.norm(r),
    "cond number": lambda r: jnp.linalg.cond(matrix(r)),
    "cho_solve": lambda r: jsp.linalg.cho_solve(jsp.linalg.cho_factor(matrix(r)), r),
    "lu": lambda r: jsp.linalg.lu(square(r)),
    "lu_solve": lambda r: jsp.linalg.lu_solve(jsp.linalg.lu_factor(square(r)), r),
    "triangular": lambda r: jsp.linalg.solve_triangular(matrix(r), r, lower=True),
    "tridiagonal_solve": lambda r: lax.linalg.tridiagonal_solve(r * 0.1, r * 0 + 2, r * 0.1, r[:, None]),
    "householder": lambda r: lax.linalg.householder_product(square(r), unit(r)),
    "polar": lambda r: jsp.linalg.polar(matrix(r))[0],
    "sqrtm": lambda r: jnp.abs(jsp.linalg.sqrtm(matrix(r))),
    "cg": lambda r: jsp.sparse.linalg.cg(lambda v: matrix(r) @ v, r, maxiter=5)[0],
    "gmres": lambda r: jsp.sparse.linalg.gmres(lambda v: matrix(r) @ v, r, maxiter=2)[0],
    "toeplitz": lambda r: jsp.linalg.toeplitz(r),
    "block_diag": lambda r: jsp.linalg.block_diag(matrix(r), matrix(r)),
    "minimize": lambda r: jsp.optimize.minimize(lambda v: ((v - r) ** 2).sum(), r * 0, method="BFGS").x,
    "custom_root": lambda r: lax.custom_root(
        lambda v: v * 2 - r, r * 0, lambda f, v: lax.fori_loop(0, 3, lambda _, v: v - f(v) / 2, v),
        lambda g, y: y / g(jnp.ones_like(y))),
    # calls
    "jit": lambda r: jax.jit(lambda x: jnp.sin(x) @ x)(r),
    "checkpoint": jax.checkpoint(lambda r: jnp.tanh(r) * r.sum()),
    "custom_jvp": custom_forward,
    "custom_vjp": custom_reverse,
    "scan": lambda r: lax.scan(lambda c, x: (c * 0.5 + x, c), jnp.float32(0), r),
    "while": lambda r: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + jnp.abs(c) + 1, r),
    "fori": lambda r: lax.fori_loop(0, 3, lambda i, c: c + i * jnp.roll(c, i), r),
    "cond": lambda r: lax.cond(r[0] > 0, lambda x: x[::-1], lambda x: jnp.sort(x), r),
    "switch": lambda r: lax.switch(integers(r)[0] % 3, [jnp.sin, jnp.cumsum, jnp.flip], r),
    "map": lambda r: lax.map(lambda x: x * jnp.cos(x), r),
    "jvp": lambda r: jax.jvp(jnp.cumprod, (r,), (jnp.ones(F),)),
    "hessian": lambda r: jax.hessian(lambda x: (jnp.sin(x) * x.sum()).sum())(r),
    "linearize": lambda r: jax.linear_transpose(lambda x: jnp.cumsum(x) * 2, r)(r),
    "vmap inside": lambda r: jax.vmap(lambda x: jnp.sin(x) * r.sum())(r),
    "named_call": lambda r: jax.named_call(jnp.sin, name="inner")(r),
}  # fmt: skip
