"""GRPO beside TRL's `GRPOTrainer` (1.16) and tunix's `GRPOLearner` (0.1.7): speed in turns, and learning.

    python -m bench.rlhf_peers speed               # beside TRL, in turns: target 3
    python -m bench.rlhf_peers speed --peer tunix  # target 1.2
    python -m bench.rlhf_peers learning --seed 0   # from runs/rlhf/sorting-task-0/sft, which
                                                   # `python -m bench.rlhf_learning sorting` makes

Both sides have the same network in float32, in a folder of Hugging Face's format, the same problems, lengths,
responses, updates and step sizes. Peers run in environments of their own:

    python -m venv build/venvs/language
    build/venvs/language/bin/pip install torch==2.13.0 trl==1.16.0
    python -m venv build/venvs/tunix
    build/venvs/tunix/bin/pip install google-tunix==0.1.7

Speed: 2 prompts x 4 responses of at most 16 tokens, one update, 77 thousand parameters; a round is so many
iterations of each side in turn, so that what else the machine does falls on both. Learning: as
`bench.rlhf_learning` does it; `runs/rlhf/peer-SEED.json` has the share of held-out problems that is right,
and seconds, by iteration.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import algos
import envs
import fdg
from algos.language import Decoder, DecoderConfig, weights
from bench.harness import ROOT, Spread, in_turns, parser
from bench.peers.alternate import Driver, ours
from bench.rlhf_learning import EPISODES, EXPERIMENTS, RUNS

PEERS = {"trl": ("language", 3.0), "tunix": ("tunix", 1.2)}  # environment, and the target of the ratio
NETWORK = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
_PROBLEMS = 8_192


def pairs_of(env: Any, count: int, split: Any) -> list[tuple[str, str]]:
    """Problems with their answers, as text."""
    shown = jax.jit(env.demonstration, static_argnums=1)(jax.random.split(jax.random.key(7), count), split)
    prompts = env.texts(shown.prompts.tokens, np.asarray(shown.prompts.mask))
    return list(zip(prompts, env.texts(shown.responses, shown.mask), strict=True))


def speed(peer_name: str, rounds: int, iterations: int) -> dict[str, Any]:
    """Responses a second of both sides, in turns, and their ratio."""
    env_name = "text:addition?max_response=16"
    env = _made(env_name)
    with tempfile.TemporaryDirectory() as folder:
        decoder = Decoder(DecoderConfig(env.tokenizer.vocab_size, **NETWORK))
        weights.save(folder, decoder, jax.jit(decoder.init)(jax.random.key(0)))
        flags = f"--algo grpo --env {env_name} --preset none --model {folder} --num-prompts 2 --group-size 4"
        flags += f" --kl-coefficient 0 --learning-rate 1e-6 --total-steps {8 * iterations}"
        theirs = {
            **_problem_of(env, folder, held_out=0),
            "iterations": iterations,
            "rounds": rounds + 2,
            "trl": _settings(env, per_update=8, group=4, updates=1, learning_rate=1e-6),
        }
        with (
            ours(flags, continues=True) as mine,
            Driver(_python(peer_name), peer_name, theirs) as peer,
        ):
            said = in_turns({"ours": mine.round, "theirs": peer.round}, rounds)
    speeds = {side: [one["steps"] / one["seconds"] for one in ones] for side, ones in said.items()}
    return {
        "peer": peer_name,
        **{f"{side}_responses_per_s": statistics.median(each) for side, each in speeds.items()},
        **Spread.ratio(speeds["ours"], speeds["theirs"]).figures,
        "target": PEERS[peer_name][1],
        "rounds": rounds,
        "iterations": iterations,
    }


def learning(seed: int, rounds: int, scale: float) -> dict[str, Any]:
    """TRL's GRPO from the start of a seed, with fdg's settings: what is right, by iteration."""
    start = RUNS / f"sorting-task-{seed}" / "sft"
    if not start.exists():
        raise SystemExit(f"{start} is not there: python -m bench.rlhf_learning sorting --first-seed {seed}")
    env = _made(EXPERIMENTS["sorting"].env)
    grpo = algos.make("grpo", env, **EXPERIMENTS["sorting"].grpo)
    each = max(1, round(scale * grpo.num_iterations / rounds))
    with tempfile.TemporaryDirectory() as folder:
        fdg.load(start, trust=True).export(Path(folder, "start"))
        config = {
            **_problem_of(env, str(Path(folder, "start")), held_out=EPISODES),
            "iterations": each,
            "rounds": rounds,
            "trl": _settings(
                env,
                per_update=grpo.steps_per_iteration // grpo.num_minibatches,
                group=grpo.group_size,
                updates=grpo.num_minibatches,
                learning_rate=grpo.learning_rate,
                temperature=grpo.temperature,
                epsilon_high=grpo.objective.clip_high,
                lr_scheduler_type="linear",
                warmup_steps=grpo.warmup,
            ),
        }
        with Driver(_python("trl"), "trl", config) as peer:
            found = [peer.facts["first"], *(peer.round(number) for number in range(1, rounds))]
    seconds = np.cumsum([one["seconds"] for one in found])
    rows = [
        {"iteration": each * i, "held_out": one["held_out"], "training": one["return"], "wall_s": float(s)}
        for i, (one, s) in enumerate(zip(found, seconds, strict=True), 1)
    ]
    return {"seed": seed, "env": EXPERIMENTS["sorting"].env, "trl": "1.16.0", "rows": rows}


def _python(peer: str) -> Path:
    path = ROOT / "build" / "venvs" / PEERS[peer][0] / "bin" / "python"
    if not path.exists():
        raise SystemExit(f"{path} is not there: python -m bench.rlhf_peers --help says how it is made")
    return path


def _made(name: str) -> Any:
    task, parameters = envs.parse(name)
    return envs.make(task, **parameters)


def _problem_of(env: Any, folder: str, held_out: int) -> dict[str, Any]:
    problems = pairs_of(env, _PROBLEMS, "train"), pairs_of(env, held_out, "test") if held_out else []
    path = Path(folder, "problems.json")  # too many for a command line
    path.write_text(json.dumps(dict(zip(("problems", "held_out"), problems, strict=True))))
    return {"model": folder, "alphabet": env.tokenizer.alphabet, "problems": str(path)}


def _settings(
    env: Any, *, per_update: int, group: int, updates: int, learning_rate: float, **more: Any
) -> dict[str, Any]:
    """Of TRL's `GRPOConfig`, what fdg's settings are in its words."""
    return {
        "per_device_train_batch_size": per_update,
        "num_generations": group,
        "steps_per_generation": updates,
        "max_completion_length": env.response_length,
        "learning_rate": learning_rate,
        "max_grad_norm": 1.0,
        **more,
    }


def main() -> None:
    line = parser("bench.rlhf_peers", __doc__)
    line.add_argument("what", choices=("speed", "learning"))
    line.add_argument("--peer", choices=PEERS, default="trl", help="of speed")
    line.add_argument("--rounds", type=int, help="default: 7 of speed, 10 of learning")
    line.add_argument("--iterations", type=int, default=20, help="of a round of speed")
    line.add_argument("--seed", type=int, default=0)
    line.add_argument("--scale", type=float, default=1.0, help="of the iterations of learning")
    given = line.parse_args()
    if given.what == "speed":
        print(json.dumps(speed(given.peer, given.rounds or 7, given.iterations), indent=1))
        return
    found = learning(given.seed, given.rounds or 10, given.scale)
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / f"peer-{given.seed}.json").write_text(json.dumps(found, indent=1) + "\n")
    for row in found["rows"]:
        print(row)


if __name__ == "__main__":
    main()
