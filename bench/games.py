"""Plays matches of AlphaZero, PPO trained by self-play, their earlier checkpoints, and untrained players.

    python -m bench.games                                   # Connect Four on a board of 5 x 4
    python -m bench.games --env game:tic_tac_toe --steps 100000 --out build/games

AlphaZero trains for `--steps` moves, or for `--seconds` if that is less; the moves of both sides count. PPO
then trains for the same number of moves, in which the moves of its opponents do not count. AlphaZero plays by
search; "network" samples from its policy instead. PPO samples from its policy; "ppo greedy" plays the most
probable move. Untrained players: "random", "greedy" (looks two moves ahead), "playouts" (searches by random
playouts). Each game begins with two random moves; each side has the first move in half of the games. Elo
ratings (Bradley and Terry) are fitted to all matches. `--out` writes games.json after each match, and a
picture of the ratings over training.
"""

import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np

import algos
import fdg
import policies
from algos.search import RandomPlayouts
from bench import harness
from envs import games

CHECKPOINTS = 4  # of a training; the last one is at its end
_CHUNKS = 24  # a training has this many calls of `Engine.run`; the time limit is checked after each
_OUTCOMES = {1: "won", 0: "drawn", -1: "lost"}  # by result of the first player's game


class Residual(nn.Module):
    """Policy and value of boards `[N, H, W, C]` from one residual tower: `([N, moves], [N])` float32.

    The network of Silver et al. 2017 (Nature 550, Methods, "Neural network architecture"), but smaller, and
    without batch normalisation: each block is initialised as the identity.
    """

    moves: int
    blocks: int
    channels: int

    @nn.compact
    def __call__(self, boards: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.relu(nn.Conv(self.channels, (3, 3))(boards))
        for _ in range(self.blocks):
            inner = nn.relu(nn.Conv(self.channels, (3, 3))(x))
            x = nn.relu(x + nn.Conv(self.channels, (3, 3), kernel_init=nn.initializers.zeros_init())(inner))
        policy, value = (nn.relu(nn.Conv(8, (1, 1))(x)).reshape(len(x), -1) for _ in range(2))
        value = nn.Dense(1)(nn.relu(nn.Dense(self.channels)(value)))
        return nn.Dense(self.moves, kernel_init=nn.initializers.orthogonal(0.01))(policy), value[:, 0]


class Training:
    """A training run, which the constructor compiles."""

    def __init__(self, algorithm: Any, seed: int):
        self.algorithm = algorithm
        self.engine = fdg.compile(algorithm, policies.GPUOnly(), devices=jax.devices()[:1])
        self.engine.compile()
        self.state = self.engine.init(seed)

    def run(self, moves: float, limit: float) -> tuple[list[Any], int, float]:
        """Trains for this many moves, or about `limit` seconds if that is less.

        Returns:
          Parameters at `CHECKPOINTS` equally spaced times of the training, the number of moves, and seconds.
        """
        moves_per_iteration = self.algorithm.steps_per_iteration
        total = min(self.algorithm.num_iterations, round(moves / moves_per_iteration))
        snapshots, iterations, seconds = [], 0, 0.0
        # The next chunk takes about the mean time of the earlier ones.
        while iterations < total and seconds + seconds / max(1, len(snapshots)) <= limit:
            chunk = min(max(1, total // _CHUNKS), total - iterations)
            begun = time.perf_counter()
            self.state, _ = jax.block_until_ready(self.engine.run(self.state, chunk))
            seconds += time.perf_counter() - begun
            iterations += chunk
            snapshots.append(jax.tree.map(np.asarray, policy_of(self.engine.algorithm_state(self.state))))
        chosen = [max(0, len(snapshots) * part // CHECKPOINTS - 1) for part in range(1, CHECKPOINTS + 1)]
        return [snapshots[i] for i in chosen], iterations * moves_per_iteration, seconds


def policy_of(state: Any) -> Any:
    """The policy's parameters in a training state."""
    return state.learner.parameters if hasattr(state, "learner") else state.parameters


def elo(names: list[str], results: dict[tuple[str, str], np.ndarray]) -> dict[str, float]:
    """Elo ratings by maximum likelihood; each match gets one more drawn game, and the first player has 0.

    Args:
      names: the players.
      results: by pair of players, the results of the first player's games: 1 won, 0 drawn, -1 lost.

    >>> ratings = elo(["a", "b"], {("a", "b"): -np.ones(10)})
    >>> round(ratings["b"])  # 10.5 of 11 points: 400 log10(21)
    529
    """
    index = {name: i for i, name in enumerate(names)}
    points, played = np.zeros(len(names)), np.zeros((len(names), len(names)))
    for (first, second), scores in results.items():
        i, j, count = index[first], index[second], len(scores) + 1
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


def main() -> None:
    parser = harness.parser("bench.games", __doc__)
    add, no_limit = parser.add_argument, float("inf")
    add("--env", default="game:connect_four?rows=5&columns=4")
    add("--steps", type=int, default=300_000, help="moves in training")
    add("--seconds", type=float, default=no_limit, help="limit of AlphaZero's training time")
    add("--until", type=float, default=no_limit, help="seconds from the start after which no match begins")
    add("--games", type=int, default=200, help="games of each match")
    add("--simulations", type=int, default=32, help="AlphaZero's simulations per move in training")
    add("--playouts", type=int, default=64, help="simulations per move in matches, for players that search")
    add("--num-envs", type=int, default=64, help="AlphaZero's parallel games")
    add("--ppo-num-envs", type=int, default=64, help="PPO's parallel games")
    add("--minibatch", type=int, default=256, help="moves per minibatch")
    add("--epochs", type=int, default=1, help="AlphaZero's passes over each rollout (PPO: 4)")
    add("--hidden", type=int, nargs="*", default=(128, 128), help="widths of dense layers")
    add("--blocks", type=int, default=0, help="residual blocks in place of dense layers")
    add("--channels", type=int, default=64, help="channels of residual blocks")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=None)
    args = parser.parse_args()
    begun = time.perf_counter()

    def report(text: str) -> None:
        print(f"{time.perf_counter() - begun:4.0f} s  {text}", flush=True)

    env = harness.environment(args.env)
    game = env.single.game
    network = Residual(game.num_actions, args.blocks, args.channels) if args.blocks else None

    def common_fields(num_envs: int) -> dict[str, Any]:
        return {
            "num_envs": num_envs, "num_steps": 16, "num_minibatches": num_envs * 16 // args.minibatch,
            "total_steps": args.steps, "learning_rate": 1e-3, "network": network,
            "hidden": tuple(args.hidden), "activation": "relu",
        }  # fmt: skip

    alphazero = algos.AlphaZero(
        env=env, num_simulations=args.simulations, num_epochs=args.epochs, **common_fields(args.num_envs)
    )
    ppo = algos.PPO(env=env, **common_fields(args.ppo_num_envs))
    key = jax.random.key(args.seed)
    state_shapes = {"alphazero": jax.eval_shape(alphazero.init, key), "ppo": jax.eval_shape(ppo.init, key)}

    def player(kind: str, parameters: Any) -> Any:
        """A player of `games.match`; untrained players ignore `parameters`."""
        match kind:
            case "random":
                return games.Uniform(game)
            case "greedy":
                return games.Greedy(game)
            case "playouts":
                return RandomPlayouts(game, args.playouts)
            case "alphazero":
                return alphazero.player(state_shapes[kind]._replace(parameters=parameters), args.playouts)
            case "network":
                actor = alphazero.actor(state_shapes["alphazero"]._replace(parameters=parameters))
                return games.Trained(game, actor, greedy=False)
        actor = ppo.actor(state_shapes["ppo"]._replace(parameters=parameters))
        return games.Trained(game, actor, greedy=kind != "ppo")

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def play(kind: str, first: Any, other_kind: str, second: Any, key: Any) -> Any:
        """Results [games] of a match; `first` and `second` are the players' parameters."""
        return games.match(game, player(kind, first), player(other_kind, second), key, args.games, 2)

    shapes = {kind: policy_of(state_shapes[kind]) for kind in state_shapes}
    shapes |= {"network": shapes["alphazero"], "ppo greedy": shapes["ppo"]}
    pool, programs = ThreadPoolExecutor(), {}

    def program(kind: str, other: str) -> Any:
        """A future of the compiled `play` for two kinds."""
        if (kind, other) not in programs:
            lowered = play.lower(kind, shapes.get(kind, ()), other, shapes.get(other, ()), key)
            programs[kind, other] = pool.submit(lowered.compile)
        return programs[kind, other]

    # The programs of the most important matches compile in parallel, before anything is timed.
    precompiled = [program("alphazero", other) for other in ("ppo", "playouts", "ppo greedy", "alphazero")]
    training = Training(alphazero, args.seed)
    update_every = max(1, ppo.num_iterations // 60)
    training_ppo = Training(algos.SelfPlay(ppo, size=4, every=update_every), args.seed)
    for compiled in precompiled:
        compiled.result()
    report("compiled")
    checkpoints, seconds = {}, {}
    checkpoints["alphazero"], moves, seconds["alphazero"] = training.run(args.steps, args.seconds)
    report(f"alphazero: {moves:,} moves in {seconds['alphazero']:.0f} s")
    checkpoints["ppo"], ppo_moves, seconds["ppo"] = training_ppo.run(moves, no_limit)
    report(f"ppo: {ppo_moves:,} moves in {seconds['ppo']:.0f} s")

    # Players are (kind, checkpoint); checkpoint 0: untrained. `versions` has their parameters.
    parts = range(1, CHECKPOINTS + 1)
    versions = {(kind, part): checkpoints[kind][part - 1] for kind in checkpoints for part in parts}
    last, rival = ("alphazero", CHECKPOINTS), ("ppo", CHECKPOINTS)
    network_player, greedy_rival = ("network", CHECKPOINTS), ("ppo greedy", CHECKPOINTS)
    versions |= {network_player: versions[last], greedy_rival: versions[rival]}
    untrained = playouts, uniform, greedy = [("playouts", 0), ("random", 0), ("greedy", 0)]
    versions |= dict.fromkeys(untrained, ())
    earlier, earlier_ppo = ([(kind, part) for part in parts[:-1]] for kind in ("alphazero", "ppo"))
    pairs = [  # the most important matches first; their programs are compiled already
        *((last, x) for x in (rival, playouts, greedy_rival, *earlier_ppo, *earlier)),
        *((x, playouts) for x in earlier),
        *((rival, x) for x in untrained),
        *((network_player, x) for x in (greedy, rival)),
        *((last, x) for x in (uniform, greedy)),
        *((x, greedy) for x in (playouts, uniform, *earlier, *earlier_ppo)),
    ]

    def label(kind: str, part: int) -> str:
        return f"{kind} {100 * part // CHECKPOINTS}%" if part else kind

    results = {}
    for i, (first, second) in enumerate(pairs):
        if results and time.perf_counter() - begun > args.until:
            break
        match = program(first[0], second[0]).result()
        scores = np.asarray(match(versions[first], versions[second], jax.random.fold_in(key, i)))
        names = label(*first), label(*second)
        results[names] = scores
        shares = ", ".join(f"{np.mean(scores == x):.1%} {word}" for x, word in _OUTCOMES.items())
        report(f"{names[0]} against {names[1]}: {shares}")
        if args.out:
            write(args, moves, results, seconds)
    ratings = elo(list(dict.fromkeys(name for pair in results for name in pair)), results)
    best_first = sorted(ratings, key=lambda name: -ratings[name])
    print(harness.table(("player", "Elo"), [(name, round(ratings[name])) for name in best_first]))
    if args.out:
        draw(args, moves, ratings)


def write(args: Any, moves: int, results: dict[Any, Any], seconds: dict[str, float]) -> None:
    """Writes games.json: the arguments, training times, and the outcomes of the matches so far."""
    args.out.mkdir(parents=True, exist_ok=True)
    facts = {
        **{name: value for name, value in vars(args).items() if value not in (args.out, float("inf"))},
        "device": jax.devices()[0].device_kind,
        "moves": moves,
        "training seconds": seconds,
        "won, drawn, lost": {
            ", ".join(names): [int((score == x).sum()) for x in _OUTCOMES] for names, score in results.items()
        },
    }
    (args.out / "games.json").write_text(json.dumps(facts, indent=1) + "\n")


def draw(args: Any, moves: int, ratings: dict[str, float]) -> None:
    """Draws the ratings of AlphaZero and PPO over training, with lines for untrained players."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for kind in ("alphazero", "ppo"):
        parts = range(1, CHECKPOINTS + 1)
        names = {moves * part / CHECKPOINTS: f"{kind} {100 * part // CHECKPOINTS}%" for part in parts}
        points = [(x, ratings[name]) for x, name in names.items() if name in ratings]
        axes.plot(*zip(*points, strict=True), marker="o", label=kind)
    for kind in ratings.keys() & {"greedy", "playouts", "random"}:
        axes.axhline(ratings[kind], linestyle=":", color="grey")
        axes.text(0.12, ratings[kind], kind, transform=axes.get_yaxis_transform(), va="bottom", color="grey")
    axes.set(xlabel="moves in training", ylabel="Elo", title=args.env)
    axes.legend()
    figure.savefig(args.out / "ratings.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
