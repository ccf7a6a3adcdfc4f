"""Rules that shard a decoder's parameters, by their paths (docs/policies.md).

A block has two pairs of products: into and out of the heads, into and out of the SwiGLU. Tensor parallelism
splits the first of a pair by columns and the second by rows, so that each pair needs one all-reduce
(Megatron-LM, arXiv 1909.08053, sec. 3). Adapters are split like their kernel, along the axis that they share
with it.
"""

from typing import Any

Rules = tuple[tuple[str, Any], ...]

_FIRST, _SECOND = "(query|key|value|gate|up)", "(output|down)"


def tensor_parallel() -> Rules:
    """Shards heads and hidden units over the mesh axis `model`; embeddings along their largest dimension.

    >>> tensor_parallel()[0]
    ("'(query|key|value|gate|up)'.*'kernel'", (None, 'model'))
    """
    return _rules(None)


def fully_sharded_tensor_parallel() -> Rules:
    """Also shards the other dimension over `batch`: each device keeps one of batch x model parts."""
    return _rules("batch")


def _rules(other: str | None) -> Rules:
    everything = "model" if other is None else "batch+model"
    return (
        (f"'{_FIRST}'.*'kernel'", (other, "model")),
        (f"'{_SECOND}'.*'kernel'", ("model", other)),
        (f"'{_FIRST}'.*'b'", (None, "model")),
        (f"'{_SECOND}'.*'a'", ("model", None)),
        (f"'{_FIRST}'.*'bias'", ("model",)),
        ("'(embedding|head)'", everything),
    )
