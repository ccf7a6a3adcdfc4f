"""Compares GRPO with the trainers of TRL (1.16) and tunix (0.1.7): speed, in turns, and reproducibility.

    python -m bench.rlhf_peers speed                     # `GRPOTrainer`; target: 3 times as fast
    python -m bench.rlhf_peers speed --peer tunix        # `GRPOLearner`; target: 1.2
    python -m bench.rlhf_peers speed --peer trl-async    # `AsyncGRPOTrainer`; target: 3
    python -m bench.rlhf_peers speed --peer tunix-async  # the agentic `GRPOLearner`; target: 1.2
    python -m bench.rlhf_peers repeat --peer trl-async

Both sides have the same network in float32, in a folder of Hugging Face's format, and the same problems,
lengths, responses, updates and step sizes. Asynchronous trainers have two devices on each side (TRL: two
processes with a thread each) and tokens at most two updates old. Peers run in their own environments:

    python -m venv build/venvs/language
    build/venvs/language/bin/pip install torch==2.13.0 trl==1.16.0 requests
    python -m venv build/venvs/tunix
    build/venvs/tunix/bin/pip install google-tunix==0.1.7

An iteration has 2 prompts x 4 responses of at most 16 tokens, and one update of 77 thousand parameters; a
round is some iterations. `repeat` trains a peer for two rounds, twice with one seed. A third run is killed
after the first round and resumed from its last checkpoint.
"""

import contextlib
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from algos.language import Decoder, DecoderConfig, weights
from bench.harness import ROOT, Spread, environment, in_turns, parser
from bench.peers.alternate import ON_CPU, Driver, ours, speeds

_ASYNCHRONOUS_FLAGS = "--policy split --devices 2 --slots 8 --ahead 1 --staleness 1 --old-log-prob actor"
# By peer: virtual environment, driver, target of the ratio, keys added to the configuration, our flags.
PEERS: dict[str, tuple[str, str, float, dict[str, Any], str]] = {
    "trl": ("language", "trl", 3.0, {}, ""),
    "tunix": ("tunix", "tunix", 1.2, {}, ""),
    "trl-async": ("language", "trl_async", 3.0, {"lag": 2}, _ASYNCHRONOUS_FLAGS),
    "tunix-async": ("tunix", "tunix", 1.2, {"lag": 2}, _ASYNCHRONOUS_FLAGS),
}
_TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
NETWORK = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
_PROBLEMS = 8_192


def prompts_and_answers(env: Any, count: int) -> list[tuple[str, str]]:
    """`count` prompts of a text environment with their answers, as text."""
    keys = jax.random.split(jax.random.key(7), count)
    demonstration = jax.jit(env.demonstration, static_argnums=1)(keys, "train")
    prompts = env.texts(demonstration.prompts.tokens, np.asarray(demonstration.prompts.mask))
    return list(zip(prompts, env.texts(demonstration.responses, demonstration.mask), strict=True))


@contextlib.contextmanager
def _task(rounds: int, iterations: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Our flags and the configuration of drivers, with a network and problems in a temporary folder.

    A round is `iterations` iterations; TRL trains for at most `rounds` rounds.
    """
    env_name = "text:addition?max_response=16"
    env = environment(env_name)
    with tempfile.TemporaryDirectory() as folder:
        decoder = Decoder(DecoderConfig(env.tokenizer.vocab_size, **NETWORK))
        weights.save(folder, decoder, jax.jit(decoder.init)(jax.random.key(0)))
        flags = f"--algo grpo --env {env_name} --preset none --model {folder} --tokenizer characters"
        flags += " --num-prompts 2 --group-size 4"
        flags += f" --kl-coefficient 0 --learning-rate 1e-6 --total-steps {8 * iterations}"
        problems = Path(folder, "problems.json")  # too many for a command line
        problems.write_text(json.dumps({"problems": prompts_and_answers(env, _PROBLEMS)}))
        yield (
            flags,
            {
                "model": folder,
                "alphabet": env.tokenizer.alphabet,
                "problems": str(problems),
                "iterations": iterations,
                "rounds": rounds,
                "trl": {
                    "per_device_train_batch_size": 8,
                    "num_generations": 4,
                    "max_completion_length": env.response_length,
                    "learning_rate": 1e-6,
                    "max_grad_norm": 1.0,
                },
            },
        )


def _driver(name: str, config: dict[str, Any]) -> Driver:
    venv, driver, _, added_config, _ = PEERS[name]
    python = ROOT / "build" / "venvs" / venv / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{python} does not exist: python -m bench.rlhf_peers --help says how to make it")
    variables = ON_CPU | (_TWO_DEVICES if added_config else {})  # asynchronous trainers have two devices
    return Driver(python, driver, {**config, **added_config}, variables)


def speed(name: str, rounds: int, iterations: int) -> dict[str, Any]:
    """Responses per second of fdg and of the peer `name`, in turns, and their ratio."""
    _, _, target, _, added_flags = PEERS[name]
    with (
        _task(rounds + 2, iterations) as (flags, driver_config),  # also a round at the start, and a warm-up
        ours(f"{flags} {added_flags}", keeps_state=True) as our_driver,
        _driver(name, driver_config) as driver,
    ):
        figures = in_turns({"ours": our_driver.round, "theirs": driver.round}, rounds)
    rates = {side: speeds(of_side) for side, of_side in figures.items()}
    return {
        "peer": name,
        **{f"{side}_responses_per_s": statistics.median(rate) for side, rate in rates.items()},
        **Spread.ratio(rates["ours"], rates["theirs"]).figures,
        "target": target,
        "rounds": rounds,
        "iterations": iterations,
    }


def repeat(name: str, iterations: int) -> dict[str, Any]:
    """The largest difference between the parameters of the first run and those of each other run.

    The others: a second run, a run that was killed and resumed, and this run after its first round.
    """
    with _task(2, iterations) as (_, driver_config):

        def parameters(folder: str, rounds: int) -> np.ndarray:
            """All parameters after `rounds` rounds; resumes a run in the folder."""
            path = Path(driver_config["model"], folder)
            path.mkdir(exist_ok=True)
            with _driver(name, {**driver_config, "run": str(path)}) as driver:  # killed at the end
                figures = driver.facts["first"]
                while figures["updates"] < rounds * iterations:
                    figures = driver.round(0)
            return np.load(path / "parameters.npy")

        first, second, after_first_round = (
            parameters("first", 2),
            parameters("second", 2),
            parameters("killed", 1),
        )
        resumed = parameters("killed", 2)
    other_parameters = {
        "second run": second,
        "killed and resumed": resumed,
        "after the first round": after_first_round,
    }
    return {"peer": name, "updates": 2 * iterations} | {
        side: float(np.abs(first - other).max()) for side, other in other_parameters.items()
    }


def main() -> None:
    command = parser("bench.rlhf_peers", __doc__)
    command.add_argument("what", nargs="?", choices=("speed", "repeat"), default="speed")
    command.add_argument("--peer", choices=PEERS, default="trl")
    command.add_argument("--rounds", type=int, default=7, help="rounds of speed")
    command.add_argument("--iterations", type=int, default=20, help="iterations per round")
    args = command.parse_args()
    sizes = (args.iterations,) if args.what == "repeat" else (args.rounds, args.iterations)
    print(json.dumps({"speed": speed, "repeat": repeat}[args.what](args.peer, *sizes), indent=1))


if __name__ == "__main__":
    main()
