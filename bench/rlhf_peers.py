"""GRPO compared with TRL's `GRPOTrainer` (1.16) and tunix's `GRPOLearner` (0.1.7): speed, in turns.

    python -m bench.rlhf_peers speed               # target 3
    python -m bench.rlhf_peers speed --peer tunix  # target 1.2

Both sides have the same network in float32, in a folder of Hugging Face's format, the same problems, lengths,
responses, updates and step sizes. Peers run in environments of their own:

    python -m venv build/venvs/language
    build/venvs/language/bin/pip install torch==2.13.0 trl==1.16.0
    python -m venv build/venvs/tunix
    build/venvs/tunix/bin/pip install google-tunix==0.1.7

2 prompts x 4 responses of at most 16 tokens, one update, 77 thousand parameters; a round is some iterations
of each side in turn, so that what else the machine does falls on both.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import envs
from algos.language import Decoder, DecoderConfig, weights
from bench.harness import ROOT, Spread, in_turns, parser
from bench.peers.alternate import Driver, ours

PEERS = {"trl": ("language", 3.0), "tunix": ("tunix", 1.2)}  # environment, and the target of the ratio
NETWORK = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
_PROBLEMS = 8_192


def pairs_of(env: Any, count: int) -> list[tuple[str, str]]:
    """Problems with their answers, as text."""
    keys = jax.random.split(jax.random.key(7), count)
    shown = jax.jit(env.demonstration, static_argnums=1)(keys, "train")
    prompts = env.texts(shown.prompts.tokens, np.asarray(shown.prompts.mask))
    return list(zip(prompts, env.texts(shown.responses, shown.mask), strict=True))


def speed(peer_name: str, rounds: int, iterations: int) -> dict[str, Any]:
    """Responses a second of both sides, in turns, and their ratio."""
    env_name = "text:addition?max_response=16"
    task, parameters = envs.parse(env_name)
    env = envs.make(task, **parameters)
    with tempfile.TemporaryDirectory() as folder:
        decoder = Decoder(DecoderConfig(env.tokenizer.vocab_size, **NETWORK))
        weights.save(folder, decoder, jax.jit(decoder.init)(jax.random.key(0)))
        flags = f"--algo grpo --env {env_name} --preset none --model {folder} --num-prompts 2 --group-size 4"
        flags += f" --kl-coefficient 0 --learning-rate 1e-6 --total-steps {8 * iterations}"
        problems = Path(folder, "problems.json")  # too many for a command line
        problems.write_text(json.dumps({"problems": pairs_of(env, _PROBLEMS)}))
        theirs = {
            "model": folder,
            "alphabet": env.tokenizer.alphabet,
            "problems": str(problems),
            "iterations": iterations,
            "rounds": rounds + 2,
            "trl": {
                "per_device_train_batch_size": 8,
                "num_generations": 4,
                "steps_per_generation": 1,
                "max_completion_length": env.response_length,
                "learning_rate": 1e-6,
                "max_grad_norm": 1.0,
            },
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


def _python(peer: str) -> Path:
    path = ROOT / "build" / "venvs" / PEERS[peer][0] / "bin" / "python"
    if not path.exists():
        raise SystemExit(f"{path} is not there: python -m bench.rlhf_peers --help says how it is made")
    return path


def main() -> None:
    line = parser("bench.rlhf_peers", __doc__)
    line.add_argument("what", nargs="?", choices=("speed",), default="speed")
    line.add_argument("--peer", choices=PEERS, default="trl")
    line.add_argument("--rounds", type=int, default=7)
    line.add_argument("--iterations", type=int, default=20, help="of a round")
    given = line.parse_args()
    print(json.dumps(speed(given.peer, given.rounds, given.iterations), indent=1))


if __name__ == "__main__":
    main()
