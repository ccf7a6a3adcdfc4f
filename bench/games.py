"""Matches between AlphaZero, PPO under self-play, older selves, and players that were not trained.

    python -m bench.games                                   # Connect Four on 5 x 4 places
    python -m bench.games --env game:tic_tac_toe --steps 100000 --out build/games

Both algorithms are trained for `--steps` moves, of which AlphaZero makes those of both sides. AlphaZero
plays by search, PPO draws from its policy; each game begins with two random moves. Ratings are Elo's, fitted
to all matches (Bradley and Terry), random moves being 0. With --out: games.json, and the ratings over
training as a picture.
"""

import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import algos
import envs
import fdg
import policies
from algos.search import RandomPlayouts
from bench import harness
from envs import games

CHECKPOINTS = 4
_OUTCOMES = {1: "won", 0: "drawn", -1: "lost"}


def trained(algorithm: Any, steps: int, seed: int) -> tuple[list[Any], float]:
    """States after equal parts of a run, and its seconds without compilation."""
    engine = fdg.compile(algorithm, policies.GPUOnly(), devices=jax.devices()[:1])
    part = max(1, steps // algorithm.steps_per_iteration // CHECKPOINTS)
    engine.run(engine.init(seed), part)  # compiles
    state, states, seconds = engine.init(seed), [], 0.0
    for _ in range(CHECKPOINTS):
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(engine.run(state, part))
        seconds += time.perf_counter() - begin
        states.append(jax.tree.map(np.asarray, policy_of(engine.algorithm_state(state))))
    return states, seconds


def policy_of(state: Any) -> Any:
    """What a player needs of a state."""
    return state.learner.parameters if hasattr(state, "learner") else state.parameters


def elo(names: list[str], results: dict[tuple[str, str], np.ndarray]) -> dict[str, float]:
    """Ratings by maximum likelihood, with one drawn game added to each match; the first name has 0.

    Args:
      names: players.
      results: for two players, scores of the first: 1 won, 0 drawn, -1 lost.

    >>> found = elo(["a", "b"], {("a", "b"): np.array([-1.0] * 10 + [1.0] * 0 + [0.0] * 0)})
    >>> round(found["b"])  # 10.5 of 11 points: 400 log10(21)
    529
    """
    index = {name: i for i, name in enumerate(names)}
    points, played = np.zeros(len(names)), np.zeros((len(names), len(names)))
    for (one, other), scores in results.items():
        i, j, count = index[one], index[other], len(scores) + 1
        won = float(np.sum(np.asarray(scores) + 1) / 2) + 0.5
        points[i] += won
        points[j] += count - won
        played[i, j] += count
        played[j, i] += count
    strength = np.ones(len(names))
    for _ in range(10_000):
        new = points / np.sum(played / (strength[:, None] + strength[None]), axis=1)
        new /= np.exp(np.mean(np.log(new)))
        if np.allclose(new, strength, rtol=1e-10):
            break
        strength = new
    ratings = 400 * np.log10(strength / strength[0])
    return dict(zip(names, ratings.tolist(), strict=True))


def main() -> int:
    """The command line."""
    parser = harness.parser("bench.games", __doc__)
    parser.add_argument("--env", default="game:connect_four?rows=5&columns=4")
    parser.add_argument("--steps", type=int, default=300_000, help="moves that each is trained for")
    parser.add_argument("--games", type=int, default=200, help="of each match")
    parser.add_argument("--simulations", type=int, default=32, help="of each move, of AlphaZero")
    parser.add_argument(
        "--playouts", type=int, default=64, help="of each move, of the search without network"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--last", action="store_true", help="matches of the trained AlphaZero alone")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()

    name, parameters = envs.parse(given.env)
    env = envs.make(name, **parameters)
    game = env.single.game
    common = {"num_envs": 64, "num_steps": 16, "hidden": (128, 128), "total_steps": given.steps}
    alphazero = algos.AlphaZero(env=env, num_simulations=given.simulations, **common)
    ppo = algos.PPO(
        env=env, learning_rate=1e-3, activation="relu", gae_lambda=0.95, **{**common, "num_minibatches": 4}
    )
    found, seconds = {}, {}
    for label, algorithm in (("alphazero", alphazero), ("ppo", algos.SelfPlay(ppo, size=4, every=10))):
        found[label], seconds[label] = trained(algorithm, given.steps, given.seed)
        print(f"{label}: {given.steps:,} moves in {seconds[label]:.0f} s", flush=True)

    empty = {
        "alphazero": jax.eval_shape(alphazero.init, jax.random.key(0)),
        "ppo": jax.eval_shape(ppo.init, jax.random.key(0)),
    }

    def player(kind: str, parameters: Any) -> Any:
        match kind:
            case "random":
                return games.Uniform(game)
            case "greedy":
                return games.Greedy(game)
            case "playouts":
                return RandomPlayouts(game, given.playouts)
            case "alphazero":
                return alphazero.player(empty[kind]._replace(parameters=parameters))
            case "network":
                actor = alphazero.actor(empty["alphazero"]._replace(parameters=parameters))
                return games.Trained(game, actor, greedy=False)
        actor = ppo.actor(empty[kind]._replace(parameters=parameters))
        return games.Trained(game, actor, greedy=False)

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def play(one: str, first: Any, other: str, second: Any, key: Any) -> Any:
        return games.match(game, player(one, first), player(other, second), key, given.games, 2)

    parts = range(1, CHECKPOINTS + 1)
    versions = {(kind, part): found[kind][part - 1] for kind in found for part in parts}
    versions[("network", CHECKPOINTS)] = versions[("alphazero", CHECKPOINTS)]
    versions |= {(kind, 0): () for kind in ("random", "greedy", "playouts")}
    last = ("alphazero", CHECKPOINTS)
    fixed = ("random", "greedy", "playouts")
    pairs = [(one, (other, 0)) for one in versions for other in fixed if one[1] and one[0] != "network"]
    pairs += [(("network", CHECKPOINTS), ("greedy", 0))]
    pairs += [
        (("greedy", 0), ("random", 0)),
        (("playouts", 0), ("random", 0)),
        (("playouts", 0), ("greedy", 0)),
    ]
    pairs += [(last, one) for one in versions if one[1] and one != last]
    if given.last:
        pairs = [(one, other) for one, other in pairs if one == last and other[1] in (0, CHECKPOINTS)]

    def said(one: tuple[str, int]) -> str:
        return f"{one[0]} {100 * one[1] // CHECKPOINTS}%" if one[1] else one[0]

    results = {}
    for i, (one, other) in enumerate(pairs):
        key = jax.random.fold_in(jax.random.key(given.seed), i)
        scores = np.asarray(play(one[0], versions[one], other[0], versions[other], key))
        results[said(one), said(other)] = scores
        shares = ", ".join(f"{np.mean(scores == x):.1%} {word}" for x, word in _OUTCOMES.items())
        print(f"{said(one)} against {said(other)}: {shares}", flush=True)
    if given.last:
        return 0
    ratings = elo([said(("random", 0)), *(said(one) for one in versions if one[0] != "random")], results)
    best_first = sorted(ratings, key=lambda name: -ratings[name])
    print(harness.table(("player", "Elo"), [(name, round(ratings[name])) for name in best_first]))
    if given.out:
        write(given, results, ratings, seconds)
    return 0


def write(given: Any, results: dict[Any, Any], ratings: dict[str, float], seconds: dict[str, float]) -> None:
    """games.json and ratings.png."""
    import matplotlib.pyplot as plt

    given.out.mkdir(parents=True, exist_ok=True)
    facts = {
        "env": given.env,
        "steps": given.steps,
        "games": given.games,
        "seconds": seconds,
        "won, drawn, lost": {
            f"{one}, {other}": [int((s == x).sum()) for x in (1, 0, -1)]
            for (one, other), s in results.items()
        },
        "elo": ratings,
    }
    (given.out / "games.json").write_text(json.dumps(facts, indent=1) + "\n")
    figure, axes = plt.subplots(figsize=(6, 4))
    for kind in ("alphazero", "ppo"):
        steps = [given.steps * part / CHECKPOINTS for part in range(1, CHECKPOINTS + 1)]
        names = [f"{kind} {100 * part // CHECKPOINTS}%" for part in range(1, CHECKPOINTS + 1)]
        axes.plot(steps, [ratings[name] for name in names], marker="o", label=kind)
    for kind in ("greedy", "playouts", "random"):
        axes.axhline(ratings[kind], linestyle=":", color="grey")
        axes.annotate(kind, (0, ratings[kind]))
    axes.set(xlabel="moves in training", ylabel="Elo (random moves: 0)", title=given.env)
    axes.legend()
    figure.savefig(given.out / "ratings.png", bbox_inches="tight")


if __name__ == "__main__":
    raise SystemExit(main())
