"""Compares streams with synchronous training if few responses are long: up to 10 times the mean length.

A response's random key alone gives its length, from a lognormal distribution. There are as many slots as
responses in a batch. All `SIDES` run on the same devices, in turns. Only tokens with non-zero weight in the
loss count. The ratios are of tokens per second, of tokens per second of CPU time (which other work on the
machine affects less), and of tokens per tick (a decoding step), which ignore the time outside of generation.

    python -m bench.long_tails                      # one device: Colocated
    python -m bench.long_tails --policy split       # two devices: Split, staleness 1
    python -m bench.long_tails --policy generation  # one device, without learning
    python -m bench.long_tails --mean 48 --hidden 128
"""

import os

# Set before JAX starts: one thread per device, and each operation on one thread.
os.environ["PJRT_NPROC"] = "2"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()

import dataclasses
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import envs
import fdg
import policies
from algos.language.generation import Answers
from algos.rlhf import streaming
from algos.rlhf.group_relative import GRPO
from algos.rlhf.responses import loss_mask, rollouts
from bench.harness import Spread, in_turns, parser, table

SIDES = {
    "synchronous": {},
    "wait": {"ahead": 4},  # a stream: generates 4 iterations ahead; a batch waits for its oldest responses
    "mask": {"ahead": 4, "late": "mask"},  # a stream that never waits: tokens that are too old have no weight
    "padded": {"remove_padding": False, "micro_batch": 32},  # synchronous, with padded rows in learning
}
GROUP, PROMPTS, LONGEST = 8, 8, 10  # responses to a prompt, prompts, longest length over mean length


@dataclasses.dataclass(frozen=True)
class CountedTokens(GRPO):
    """GRPO that counts the tokens in its loss."""

    def _batch_metrics(self, batch, iteration):
        return {
            **super()._batch_metrics(batch, iteration),
            "num_weighted": jnp.sum(batch.weight_mask, dtype=jnp.int32),
        }


def with_drawn_lengths(draw, mean):
    """Wraps `Answers.draw` so that each response ends at a lognormal length with this mean."""

    def draw_and_end(self, logits, keys, position, now):  # `now`: a `fdg.stream.Now`
        tokens, *rest = draw(self, logits, keys, position, now)
        normal = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, 1 << 20)))(keys)
        length = jnp.clip(jnp.round(mean * jnp.exp(normal - 0.5)), 2, self.width).astype(jnp.int32)
        stop = self.sampling.stop_tokens[0]
        not_stop = jnp.where(tokens == stop, (stop + 1) % logits.shape[-1], tokens)
        return jnp.where(position + 1 >= length, stop, not_stop), *rest

    return draw_and_end


def generate(algorithm, state):
    """Runs an iteration without learning; returns the state, and metrics of the new responses."""
    rollout, stream, _ = rollouts(algorithm, state, PROMPTS, lambda rollout: rollout)
    length = jnp.sum(rollout.responses.policy_mask, axis=1)
    metrics = {
        "num_weighted": jnp.sum(loss_mask(algorithm, rollout), dtype=jnp.int32),
        "response_length": jnp.mean(length),
        "response_length_max": jnp.max(length),
        "staleness": jnp.zeros(()),
        **streaming.metrics(algorithm, state.stream, stream),
    }
    return state._replace(iteration=state.iteration + 1, stream=stream), metrics


class Side:
    """One side. A call runs a round; it returns tokens per second, per second of CPU time, and per tick."""

    def __init__(self, policy, devices, args, **fields):
        task = dataclasses.replace(envs.make("text:addition"), max_response=LONGEST * args.mean)
        algorithm = CountedTokens(
            env=task, num_prompts=PROMPTS, group_size=GROUP, hidden_size=args.hidden, kl_coefficient=0.0,
            old_log_prob="actor", total_steps=10**9,
            **{"remove_padding": True, "micro_batch": 4, **fields},
        )  # fmt: skip
        self.metrics_of_rounds: list[dict[str, np.ndarray]] = []
        if policy is None:
            self.state = jax.jit(algorithm.init)(jax.random.key(0))
            self.run = jax.jit(
                lambda state: jax.lax.scan(
                    lambda state, _: generate(algorithm, state), state, None, args.iterations
                )
            )
        else:
            engine = fdg.compile(algorithm, policy, devices)
            self.state, self.run = engine.init(0), lambda state: engine.run(state, args.iterations)

    def __call__(self, _):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        self.state, metrics = jax.block_until_ready(self.run(self.state))
        wall_seconds, cpu_seconds = time.perf_counter() - wall_start, time.process_time() - cpu_start
        self.metrics_of_rounds.append({name: np.asarray(x) for name, x in metrics.items()})
        tokens = int(self.metrics_of_rounds[-1]["num_weighted"].sum())
        return (
            tokens / wall_seconds,
            tokens / cpu_seconds,
            tokens / float(self.metrics_of_rounds[-1].get("ticks", self.synchronous_ticks()).sum()),
        )

    def synchronous_ticks(self):
        """Ticks of a synchronous iteration: the longest response's tokens, minus one."""
        return np.maximum(self.metrics_of_rounds[-1]["response_length_max"] - 1, 1)


def main():
    command = parser("bench.long_tails", __doc__)
    command.add_argument("--policy", choices=("colocated", "split", "generation"), default="colocated")
    command.add_argument("--rounds", type=int, default=7)
    command.add_argument("--iterations", type=int, default=10, help="iterations per round")
    command.add_argument("--mean", type=int, default=24, help="mean tokens of a response")
    command.add_argument("--hidden", type=int, default=64)
    args = command.parse_args()
    fdg.host_devices(2)
    fdg.keep_programs()
    policy, count = {
        "colocated": (policies.Colocated(), 1),
        "split": (policies.Split(staleness=1), 2),
        "generation": (None, 1),
    }[args.policy]
    devices = jax.devices()[:count]
    with mock.patch.object(Answers, "draw", with_drawn_lengths(Answers.draw, args.mean)):
        sides = {
            name: Side(policy, devices, args, **fields)
            for name, fields in SIDES.items()
            if policy is not None or name != "padded"
        }
        timed = in_turns(sides, args.rounds)
    rows = []
    for name, rounds in timed.items():
        ratios = [
            Spread.ratio([r[i] for r in rounds], [r[i] for r in timed["synchronous"]]) for i in range(3)
        ]
        rates = Spread.of(r[0] for r in rounds)
        metrics_of_rounds = sides[name].metrics_of_rounds[1:]
        ticks = [x["ticks"] for x in metrics_of_rounds if "ticks" in x]
        busy = np.average([x["slots_busy"] for x in metrics_of_rounds], weights=ticks) if ticks else None
        mean = np.mean([x["response_length"] for x in metrics_of_rounds])
        oldest = max(float(x.get("staleness_max", x["staleness"]).max()) for x in metrics_of_rounds)
        rows.append(
            (name, f"{rates:.0f}", *(f"{ratio:.2f}" for ratio in ratios),
             f"{mean:.1f}, {max(x['response_length_max'].max() for x in metrics_of_rounds):.0f}",
             f"{busy:.2f}" if ticks else "", f"{oldest:.0f}")
        )  # fmt: skip
    head = ("side", "tokens/s", "ratio", "of CPU", "by ticks", "length: mean, longest", "busy", "oldest")
    print(f"{args.policy}, load {os.getloadavg()[0]:.1f}")
    print(table(head, rows))


if __name__ == "__main__":
    main()
