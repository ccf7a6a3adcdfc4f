"""Tree search with mctx (github.com/google-deepmind/mctx), from a position of a game or from a latent state.

mctx searches a batch of positions with one random key. Here each position has its own key and its own search
(mctx with a batch size of one, under `jax.vmap`), so results do not depend on how the batch is split over
devices.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envs.games.game import Game, Position, play_on, random_move, score_of, seen, where
from fdg.errors import FdgError
from fdg.settings.fields import hyperparameter, require_positive
from fdg.settings.parts import Part

Evaluate = Callable[[Any, jax.Array, Position], tuple[jax.Array, jax.Array]]
"""`(parameters, key, position) -> (logits [n], value [])`: logits of moves; value for the player to move."""
EvaluateLatent = Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]
"""`(parameters, latent [N, D]) -> (logits [N, n], value [N])`."""
Imagine = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""`(parameters, latent [N, D], action [N]) -> (next latent [N, D], reward [N])`."""


@dataclasses.dataclass(frozen=True)
class SearchSettings(Part):
    """Settings of a search, and the weight of the value loss."""

    num_simulations: int = hyperparameter(
        32, "simulations of a search: positions, or latent states, added to its tree"
    )
    max_considered: int = hyperparameter(16, "actions considered at the root of a search, at most")
    gumbel_scale: float = hyperparameter(1.0, "scale of the Gumbel noise of a search, in training")
    value_coefficient: float = hyperparameter(1.0, "weight of the value loss")

    def check(self, algorithm: Any) -> None:
        """Refuses sizes that are not positive."""
        require_positive(algorithm, "num_simulations", "max_considered")


class Search(NamedTuple):
    """The result of searching one position."""

    action: jax.Array  # [] int32
    policy: jax.Array  # [n] float32, the improved policy over moves; 0 for illegal moves
    # [] float32, the value for the player to move: the mean value of visited moves, weighted by the policy
    value: jax.Array


def gumbel_search(
    game: Game,
    evaluate: Evaluate,
    parameters: Any,
    key: jax.Array,
    position: Position,
    simulations: int,
    considered: int = 16,
    scale: float | jax.Array = 1.0,
    discount: float | jax.Array = 1.0,
) -> Search:
    """A search as in Danihelka et al. 2022, "Policy improvement by planning with Gumbel".

    At the root, the search samples moves without replacement by the Gumbel top-k trick, and divides the
    simulations among them by sequential halving (algorithm 2); `policy` is the softmax of logits and
    completed values (equation 11).

    `evaluate(parameters, ...)` evaluates leaves. `position` is not terminal. The tree gets `simulations`
    positions; at most `considered` moves are considered at the root. `scale` multiplies the Gumbel noise.
    `discount` is per move.
    """
    model_key, search_key = jax.random.split(key)
    return _run_gumbel_search(
        parameters, search_key, _root_output(evaluate, parameters, model_key, position),
        _recurrent_function(game, evaluate, discount), game.legal(position), simulations, considered, scale,
        _completed_values,
    )  # fmt: skip


def latent_search(
    evaluate: EvaluateLatent,
    imagine: Imagine,
    parameters: Any,
    key: jax.Array,
    latent: jax.Array,
    allowed: jax.Array,
    simulations: int,
    considered: int = 16,
    scale: float | jax.Array = 1.0,
    discount: float | jax.Array = 1.0,
    least_range: float | jax.Array = 1e-8,
) -> Search:
    """Like `gumbel_search`, with a learned model, from one latent state `[D]` (Schrittwieser et al. 2020).

    `allowed [n]` is the mask of actions at the root; below it, all actions are allowed. Since returns have no
    known bounds, the values of a node's actions are divided by their range, but at least by `least_range`.
    """

    def model(parameters: Any, key: jax.Array, action: jax.Array, latent: jax.Array) -> tuple[Any, jax.Array]:
        latent, reward = imagine(parameters, latent, action)
        logits, value = evaluate(parameters, latent)
        discounts = jnp.broadcast_to(jnp.asarray(discount, jnp.float32), reward.shape)
        return _mctx().RecurrentFnOutput(
            reward=reward, discount=discounts, prior_logits=logits, value=value
        ), latent

    logits, value = evaluate(parameters, latent[None])
    root = _mctx().RootFnOutput(prior_logits=logits, value=value, embedding=latent[None])
    transform = functools.partial(_mctx().qtransform_completed_by_mix_value, epsilon=least_range)
    return _run_gumbel_search(
        parameters, key, root, model, allowed, simulations, considered, scale, transform
    )


def _run_gumbel_search(
    parameters: Any,
    key: jax.Array,
    root: Any,
    model: Callable[..., Any],
    legal: jax.Array,
    simulations: int,
    considered: int,
    scale: float | jax.Array,
    transform: Callable[..., jax.Array],
) -> Search:
    """Runs mctx's search from `root`, a batch of one; `transform` rescales the values of a node's actions."""
    with jax.numpy_rank_promotion("allow"):  # mctx promotes ranks
        result = _mctx().gumbel_muzero_policy(
            parameters,
            key,
            root,
            model,
            simulations,
            ~_batch(legal),
            max_num_considered_actions=min(considered, legal.size),
            gumbel_scale=scale,
            qtransform=transform,
        )
    summary = result.search_tree.summary()
    visited_weights = jnp.where(summary.visit_counts > 0, result.action_weights, 0.0)
    value = jnp.sum(visited_weights * summary.qvalues, axis=1) / jnp.sum(visited_weights, axis=1)
    return Search(result.action[0].astype(jnp.int32), result.action_weights[0], value[0])


def _completed_values(tree: Any, node: jax.Array) -> jax.Array:
    """mctx's completed values, without mctx's rescaling: outcomes are already between -1 and 1.

    Rescaling to the range of a node's values would enlarge tiny errors where all moves lose. With rescaling,
    the second player in tic-tac-toe did not block three in a row.
    """
    return _mctx().qtransform_completed_by_mix_value(tree, node, value_scale=0.1, rescale_values=False)


def _root_output(evaluate: Evaluate, parameters: Any, key: jax.Array, position: Position) -> Any:
    logits, value = evaluate(parameters, key, position)
    return _mctx().RootFnOutput(prior_logits=_batch(logits), value=_batch(value), embedding=_batch(position))


def _recurrent_function(game: Game, evaluate: Evaluate, discount: float | jax.Array) -> Callable[..., Any]:
    """mctx's recurrent function: plays one move, returns the mover's reward, evaluates the next position.

    If the other player moves next, the discount is negative, since the next value is the other player's. It
    is zero if the game is over.
    """

    def play_one(
        parameters: Any, key: jax.Array, action: jax.Array, position: Position
    ) -> tuple[Any, Position]:
        mover = game.player(position)
        was_over, _ = game.outcome(position)
        after = play_on(game, position, action)
        is_over, _ = game.outcome(after)
        logits, value = evaluate(parameters, key, after)
        legal = seen(game, after).action_mask
        return _mctx().RecurrentFnOutput(
            reward=jnp.where(was_over, 0.0, score_of(game, after, mover)),
            discount=jnp.where(is_over, 0.0, jnp.where(game.player(after) == mover, discount, -discount)),
            prior_logits=jnp.where(legal, logits - jnp.max(logits), jnp.finfo(jnp.float32).min),
            value=jnp.where(is_over, 0.0, value),
        ), after

    def play_batch_of_one(
        parameters: Any, key: jax.Array, action: jax.Array, positions: Position
    ) -> tuple[Any, Position]:
        output = play_one(parameters, key, action[0], jax.tree.map(lambda x: x[0], positions))
        return jax.tree.map(_batch, output)

    return play_batch_of_one


def _batch(tree: Any) -> Any:
    """Adds a leading axis: a batch of one."""
    return jax.tree.map(lambda x: x[None], tree)


def _mctx() -> Any:
    try:
        import mctx
    except ModuleNotFoundError as error:
        raise FdgError(
            f"search needs mctx, and {error.name} is not installed: pip install 'fdg[search]'"
        ) from error
    return mctx


# --- players that search ---


@dataclasses.dataclass(frozen=True, eq=False)
class SearchPlayer:
    """An `envs.games.Player` that searches with a trained evaluation; compared by identity.

    The attributes are arguments of `gumbel_search`, which is called for each move.
    """

    game: Any
    evaluate: Evaluate
    parameters: Any
    simulations: int
    considered: int = 16
    scale: float = 0.0
    discount: Any = 1.0

    def begin(self, key: jax.Array) -> tuple[()]:
        """An empty memory: each move has its own tree."""
        return ()

    def choose(self, key: jax.Array, memory: Any, position: Position) -> tuple[jax.Array, Any]:
        """The best move of the search."""
        result = gumbel_search(
            self.game, self.evaluate, self.parameters, key, _or_new_game(self.game, key, position),
            self.simulations, self.considered, self.scale, self.discount,
        )  # fmt: skip
        return result.action, memory


@dataclasses.dataclass(frozen=True)
class RandomPlayouts:
    """An `envs.games.Player`: Monte Carlo tree search without a network.

    A leaf's value is the outcome of one game of random moves (Coulom 2006, "Efficient selectivity and backup
    operators in Monte-Carlo tree search"). In the tree, PUCT with equal priors selects moves (Silver et al.
    2017, arXiv 1712.01815, with mctx's constants). The player then makes the most visited move.
    """

    game: Any
    simulations: int = 64

    def begin(self, key: jax.Array) -> tuple[()]:
        """An empty memory."""
        return ()

    def choose(self, key: jax.Array, memory: Any, position: Position) -> tuple[jax.Array, Any]:
        """The most visited move."""
        position = _or_new_game(self.game, key, position)
        model_key, search_key = jax.random.split(key)
        with jax.numpy_rank_promotion("allow"):
            result = _mctx().muzero_policy(
                (),
                search_key,
                _root_output(self._evaluate, (), model_key, position),
                _recurrent_function(self.game, self._evaluate, 1.0),
                self.simulations,
                ~_batch(self.game.legal(position)),
                dirichlet_fraction=0.0,
                temperature=0.0,
            )
        return result.action[0].astype(jnp.int32), memory

    def _evaluate(self, parameters: Any, key: jax.Array, position: Position) -> tuple[jax.Array, jax.Array]:
        """Equal logits `[n]`, and the outcome `[]` of one game of random moves, for the player to move."""
        game = self.game

        def one_move(carry: tuple[jax.Array, Position]) -> tuple[jax.Array, Position]:
            key, position = carry
            key, move_key = jax.random.split(key)
            return key, play_on(game, position, random_move(game, move_key, position))

        _, end = jax.lax.while_loop(lambda carry: ~game.outcome(carry[1])[0], one_move, (key, position))
        return jnp.zeros(game.num_actions, jnp.float32), score_of(game, end, game.player(position))


def _or_new_game(game: Game, key: jax.Array, position: Position) -> Position:
    """The position, or a new game's if its game is over, because a search needs a move."""
    is_over, _ = game.outcome(position)
    return where(is_over, game.init(key), position)
