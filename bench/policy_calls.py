"""What a call of `run.policy` costs, compared with one of onnxruntime with the same policy.

    python -m bench.policy_calls                                        # PPO on CartPole-v1
    python -m bench.policy_calls --algo recurrent_ppo --rounds 40
    python -m bench.policy_calls --asynchronous                         # JAX's default: a thread answers

One observation a call, in turns: a hundred calls of each in every round; onnxruntime with its own settings.
JAX answers in the thread that calls (`jax_cpu_enable_async_dispatch` off), as docs/using.md advises for a
deployed policy. Prints the median of each over the rounds, the middle half, and the ratio of the medians. An
untrained policy: what it has learned changes no times.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

import algos
import envs
import fdg
from bench.harness import Spread, in_turns, parser

AT_MOST = 5.0  # calls of onnxruntime


def seconds_a_call(call: Callable[[], object], calls: int) -> float:
    """Of calls one after the other, the mean."""
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begun) / calls


def main() -> int:
    """Prints the figures; 1 if the ratio is above `AT_MOST`."""
    line = parser("bench.policy_calls", __doc__)
    line.add_argument("--algo", default="ppo")
    line.add_argument("--env", default="CartPole-v1")
    line.add_argument("--rounds", type=int, default=30)
    line.add_argument("--calls", type=int, default=300)
    line.add_argument("--asynchronous", action="store_true", help="calls on a thread of XLA's own")
    given = line.parse_args()
    jax.config.update("jax_cpu_enable_async_dispatch", given.asynchronous)
    import onnxruntime

    algorithm = algos.get(given.algo)(env=envs.make(given.env))
    run = fdg.Run(algorithm, jax.jit(algorithm.init)(jax.random.key(0)), 0)
    with tempfile.TemporaryDirectory() as folder:
        path = run.export(Path(folder) / "policy.onnx")
        session = onnxruntime.InferenceSession(path.read_bytes())
    observation = np.zeros(algorithm.env.observation_space.shape, algorithm.env.observation_space.dtype)
    kinds = {"tensor(float)": np.float32, "tensor(bool)": np.bool_, "tensor(int32)": np.int32}
    feed = {
        one.name: np.zeros([1, *one.shape[1:]], kinds.get(one.type, np.uint8)) for one in session.get_inputs()
    }
    first = session.get_inputs()[0].name
    calls = {
        "run.policy": lambda: run.policy(observation),
        "onnxruntime": lambda: session.run(None, {**feed, first: observation[None]})[0][0],
    }
    for call in calls.values():
        seconds_a_call(call, 100)  # the first ones compile
    sides = {
        name: lambda _, call=call: 1e6 * seconds_a_call(call, given.calls) for name, call in calls.items()
    }
    spent = in_turns(sides, given.rounds, warm_up=0)
    for name, each in spent.items():
        print(f"{name}: {Spread.of(each):.1f} us a call, least {min(each):.1f}")
    ratio = statistics.median(spent["run.policy"]) / statistics.median(spent["onnxruntime"])
    print(f"ratio {ratio:.2f}, at most {AT_MOST:g} wanted")
    return int(ratio > AT_MOST)


if __name__ == "__main__":
    sys.exit(main())
