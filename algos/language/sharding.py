"""How a decoder's parameters are split over devices, as rules on their paths (docs/policies.md).

A block has two products in a row twice: into heads and out of them, into the SwiGLU and out of it. Tensor
parallelism splits the first by columns and the second by rows, so that devices meet once after each pair
(Megatron-LM, arXiv 1909.08053, sec. 3). Adapters are split as what they adapt, on the side that they share.
"""

from typing import Any

Rules = tuple[tuple[str, Any], ...]

_FIRST, _SECOND = "(query|key|value|gate|up)", "(output|down)"


def tensor_parallel() -> Rules:
    """Heads and hidden units over the mesh's axis `model`; embeddings along their largest dimension.

    >>> tensor_parallel()[0]
    ("'(query|key|value|gate|up)'.*'kernel'", (None, 'model'))
    """
    return _rules(None)


def fully_sharded_tensor_parallel() -> Rules:
    """The same, and the other dimension over `batch`: each device keeps one part of batch x model parts."""
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
