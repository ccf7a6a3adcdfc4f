"""Classes of operations by the names of JAX's primitives, for counts, memory estimates and the cost model."""

import functools
from collections.abc import Mapping

CLASSES: Mapping[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "product": "dot_general ragged_dot_general",
        "convolution": "conv_general_dilated",
        "transcendental": "tanh exp exp2 expm1 log log1p log2 logistic erf erfc sqrt rsqrt",
        "special": """sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh pow rem cbrt erf_inv lgamma
            digamma polygamma zeta igamma igammac igamma_grad_a regularized_incomplete_beta bessel_i0e
            bessel_i1e random_gamma""",
        "elementwise": """abs add add_any and ceil clamp clz complex conj convert_element_type div eq eq_to
            floor ge gt imag integer_pow is_finite le le_to lt lt_to max min mul mulhi ne neg nextafter not
            one_minus_square or polynomial population_count real round select_n shift_left
            shift_right_arithmetic shift_right_logical sign square sub xor zeros_like""",
        "reduction": """reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax
            argmin reduce reduce_window reduce_window_sum reduce_window_max reduce_window_min cumsum cumprod
            cummax cummin cumlogsumexp reduce_precision select_and_scatter_add select_and_gather_add""",
        "random": """random_bits random_split random_fold_in random_seed threefry2x32 rng_bit_generator
            rng_uniform""",
        "sort": "sort top_k approx_top_k",
        "movement": "gather scatter scatter-add scatter-sub scatter-mul scatter-max scatter-min",
        "copy": """dynamic_slice dynamic_update_slice concatenate stack unstack tile pad rev transpose copy
            device_put slice split""",
        "linear algebra": """cholesky cholesky_update eig eigh fft geqp3 geqrf hessenberg householder_product
            lu lu_pivots_to_permutation ormqr qr schur svd symmetric_product triangular_solve tridiagonal
            tridiagonal_solve""",
        "exchange": "psum psum_invariant pmax pmin all_gather all_to_all ppermute axis_index",
        "host": "io_callback pure_callback debug_callback",
    }.items()
}
"""Classes of operations by primitive name; other primitives are "elementwise".

"special" operations are scalar on a CPU; "transcendental" operations are vectorised. The names of
both, of "elementwise" and of "linear algebra" also give operations their batch rule (`fdg.batch.rules`).
"""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
# Operations for which XLA allocates no array, or that it fuses into their readers.
VIEWS = frozenset(
    """reshape squeeze broadcast_in_dim iota empty empty2 fragment_boundary stop_gradient optimization_barrier
    name pvary tie platform_index random_clone random_wrap random_unwrap sharding_constraint
    bitcast_convert_type""".split()
)
# Operations that read only as much of their first operand as they return.
PICKS = frozenset({"gather", "dynamic_slice"})
# Operations that change only a part of their first operand.
PUTS = frozenset("scatter scatter-add scatter-sub scatter-mul scatter-max scatter-min".split())


@functools.cache
def class_of(primitive: str) -> str:
    """The class of an operation.

    >>> class_of("tanh"), class_of("add")
    ('transcendental', 'elementwise')
    """
    return next((name for name, members in CLASSES.items() if primitive in members), "elementwise")
