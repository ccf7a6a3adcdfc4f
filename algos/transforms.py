"""Transforms: what a user's function makes of rows between collecting and learning.

Reanalysis computes what actors recorded again, under newer parameters (MuZero Reanalyse, Schrittwieser et
al., arXiv 2104.06294). Relabelling gives other rewards or goals (hindsight, Andrychowicz et al., arXiv
1707.01495). The fragment `transform` has the role `buffer`, so a distribution policy says where it lives.
"""

import dataclasses
from typing import Any, ClassVar

import jax

import fdg
from envs import own
from fdg.arguments import check_takes
from fdg.errors import FdgError
from fdg.settings.parts import Part


class Transform:
    """A pure function `(rows, parameters, key) -> rows`; any function that takes these will do.

    - `rows`: of an algorithm on policy a `Trajectory [T, B]` (`algos.on_policy`); of SAC, TD3 and CrossQ the
      minibatches drawn from replay, `Transition [U, N]` (`algos.replay`). The result has the same shapes.
    - `parameters`: on policy the network's before the update; of SAC, TD3 and CrossQ all that an update
      changes. Under a policy's `staleness` they are newer than those that acted.
    - `key`: one key; split it over the second axis, so that the numbers do not depend on the placement.
    """

    _fields: ClassVar[tuple[str, ...]] = ("__call__",)

    @staticmethod
    def described() -> str:
        """What messages call it."""
        return "a function of (rows, parameters, key), 'module:name' of one"


TRANSFORM: dict[str, Any] = {
    "help": "module:name of a function of rows between collecting and learning, an algos.Transform",
    "flag": str | None,
    "holds": "transform",
}


@dataclasses.dataclass(frozen=True)
class Transforming(Part):
    """The setting of algorithms that transform rows."""

    transform: Transform | None = dataclasses.field(default=None, metadata=TRANSFORM)

    def rows(self, rows: Any, parameters: Any, key: jax.Array) -> Any:
        """The rows `[T, B, ...]` that are learned from.

        Raises:
          FdgError: the transform takes other arguments, or gives rows of another structure, shape or dtype.
        """
        if self.transform is None:
            return rows
        given: Any = self.transform
        function = own.found("--transform", given) if isinstance(given, str) else given
        check_takes(function, ("rows", "parameters", "key"), "transform")

        @fdg.fragment("buffer", in_axes=(1, None, None), out_axes=1)
        def transform(rows: Any, parameters: Any, key: jax.Array) -> Any:
            after = function(rows, parameters, key)
            _check_same(rows, after)
            return after

        return transform(rows, parameters, jax.random.fold_in(key, 1))


def _check_same(before: Any, after: Any) -> None:
    one, other = str(jax.tree.structure(before)), str(jax.tree.structure(after))
    if one != other:
        raise FdgError(
            f"transform gives {jax.tree.structure(after)!s:.300}: give rows of the structure that it is given"
            " (rows._replace(...))"
        )
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        found, expected = ((jax.numpy.shape(leaf), jax.numpy.result_type(leaf)) for leaf in (y, x))
        if found != expected:
            raise FdgError(
                f"transform gives rows{jax.tree_util.keystr(path)} of shape {found[0]} and dtype {found[1]}:"
                f" give shape {expected[0]} and dtype {expected[1]}, as it is given"
            )
