"""Rules that shard a decoder's parameters, by their paths (docs/policies.md).

A block has two pairs of matrix products: into and out of the attention heads, and into and out of the SwiGLU.
Tensor parallelism splits the kernel of the first product of a pair by columns, that of the second by rows, so
that each pair needs one all-reduce (Megatron-LM, arXiv 1909.08053, sec. 3). An adapter's matrix is split like
its kernel, along the axis that they share.
"""

from typing import Any

# Pairs: a pattern of paths, and the mesh axes for these parameters' axes (a name: only for the largest axis).
Rules = tuple[tuple[str, Any], ...]

_FIRST, _SECOND = "(query|key|value|gate|up)", "(output|down)"  # the products of a pair


def tensor_parallel(other_axis: str | None = None) -> Rules:
    """Shards heads and hidden units over the mesh axis `model`; embeddings along their largest dimension.

    The other dimension of kernels is split over `other_axis`, if given.

    >>> tensor_parallel()[0]
    ("'(query|key|value|gate|up)'.*'kernel'", (None, 'model'))
    """
    all_axes = "model" if other_axis is None else "batch+model"
    return (
        (f"'{_FIRST}'.*'kernel'", (other_axis, "model")),
        (f"'{_SECOND}'.*'kernel'", ("model", other_axis)),
        (f"'{_FIRST}'.*'b'", (None, "model")),
        (f"'{_SECOND}'.*'a'", ("model", None)),
        (f"'{_FIRST}'.*'bias'", ("model",)),
        ("'(embedding|head)'", all_axes),
    )


def fully_sharded_tensor_parallel() -> Rules:
    """Also shards the other dimension over `batch`: each device keeps one of batch x model parts."""
    return tensor_parallel("batch")
