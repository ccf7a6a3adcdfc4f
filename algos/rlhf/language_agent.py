"""The base of language-model algorithms: settings, prompts, responses, rewards, gradients, updates.

An algorithm gets its components through `registry.option`: the network (`network.py`), the optimiser
(`optimizer.py`), a reward model (`reward_models.py`), generation ahead (`streaming.py`), and the functions
that use a trained network: sampling, evaluation, answers, export (`speaker.py`).

Shapes: `B` prompts of an iteration, `G` responses to each, `N = B * G`; `P` prompt and `R` response tokens.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import presets, registry
from algos.rlhf.objective import masked_mean, token_weights
from algos.rlhf.responses import Responses, Rollout, length_metrics, repeat_rows, response_log_probs
from algos.rlhf.updates import Rows, map_micro_batches
from envs.text import Problem, Reward, is_game
from envs.text.game import checked_reply, checked_sample
from fdg.settings.fields import hyperparameter
from fdg.settings.presets import HasPresets


class State(NamedTuple):
    """The state of GRPO, DPO and SFT."""

    parameters: Any
    reference: Any  # parameters of the KL reference; () if there is none, or if it is the adapters' base
    reward_model: Any  # () if rewards come from the task
    optimizer_state: Any
    key: jax.Array  # of the whole run
    iteration: jax.Array  # int32
    stream: Any = ()  # unfinished responses; () if ahead=0


@dataclasses.dataclass(frozen=True)
class LanguageAgent(HasPresets, driver=registry.option("speaker")):
    """Base of the algorithms that train a decoder on a text task; other algorithms need no base class.

    A subclass is a frozen dataclass with `init` and `iterate`, and with `_loss(parameters, is_first,
    minibatch)`, which returns the contribution of a micro-batch to the loss and metrics. Contributions are
    added; of metrics whose name ends in `_max`, the largest is taken. If it learns from rewards, it has the
    parts `Judge` and `Streams`.

    Raises:
      FdgError: at construction, if a field is out of range, or the network does not fit the task.
    """

    default_env: ClassVar[str] = "text:addition"
    preset_table: ClassVar[Any] = presets
    steps_are: ClassVar[str] = "responses"  # the unit of `steps_per_iteration` and `env_steps`
    _imitates: ClassVar[bool] = False  # True if it imitates answers

    env: Any  # a TextTask, or a TextGame
    network_settings = registry.option("language network").NetworkSettings()
    max_response: int | None = hyperparameter(
        None,
        "longest response in tokens (None: the task's longest answer; with a checkpoint's tokenizer"
        " 64, or the rest of its context)",
    )
    num_prompts: int = hyperparameter(32, "prompts per iteration")
    total_steps: int = hyperparameter(64_000, "total responses")
    dataset_size: int | None = hyperparameter(
        None, "number of problems, used in turn (None: all rows of a file; otherwise new ones each time)"
    )
    num_epochs: int = hyperparameter(1, "passes over each batch of responses")
    num_minibatches: int = hyperparameter(1, "updates per pass")
    micro_batch: int | None = hyperparameter(
        None, "responses computed at once, on all devices; does not change results (None: a whole minibatch)"
    )
    remove_padding: bool = hyperparameter(
        False, "pack sequences, without padding; micro_batch counts packed rows"
    )
    optimizer_settings = registry.option("language optimizer").TextOptimizer(
        learning_rate=1e-3, max_grad_norm=1.0
    )
    temperature: float = hyperparameter(
        1.0, "divides logits, in sampling and in learning", structural="how tokens are drawn"
    )
    top_k: int = hyperparameter(0, "sample among this many most likely tokens; 0: all")
    top_p: float = hyperparameter(
        1.0,
        "sample from the most likely tokens with this total probability (nucleus sampling)",
        structural="how tokens are drawn",
    )
    slots: int | None = hyperparameter(
        None, "responses generated at once; a finished one's slot takes the next prompt (None: all)"
    )

    def __new__(cls, *positional: Any, **named: Any) -> Any:
        """Records which fields the caller sets."""
        fields = [field.name for field in dataclasses.fields(cls) if field.init]
        self = super().__new__(cls, *positional, **named)
        # `__post_init__` deletes the record.
        object.__setattr__(self, "_named", (*fields[: len(positional)], *named))
        return self

    def __post_init__(self) -> None:
        requirements = registry.option("requirements")
        requirements.check_fields(self)
        named = self.__dict__.pop("_named", ())
        for name, value in self._sizes(vars(self), named).items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "env", self.network_settings.task_with_tokenizer(self))
        requirements.check_together(self)

    @classmethod
    def rows_of(cls, values: Mapping[str, Any]) -> Rows:
        """The rows of an iteration's updates, from field values by name."""
        prompts = values["num_prompts"]
        return Rows(prompts * values.get("group_size", 1), prompts, "responses")

    @classmethod
    def oversampling_factor(cls, values: Mapping[str, Any]) -> int:
        """The ratio of sampled to learned prompts."""
        return 1

    @property
    def responses_per_prompt(self) -> int:
        """`G`, the responses to each prompt."""
        return getattr(self, "group_size", 1)

    @property
    def steps_per_iteration(self) -> int:
        """`N`, responses of an iteration."""
        return self.num_prompts * self.responses_per_prompt

    @property
    def updates_per_iteration(self) -> int:
        """Gradient steps in one iteration."""
        return self.num_epochs * self.num_minibatches

    @property
    def longest(self) -> int:
        """The maximum number of tokens of a response, over all turns of a game."""
        return self.env.response_length * getattr(self.env, "turns", 1)

    @property
    def rows_per_micro_batch(self) -> int | None:
        """Rows of a micro-batch; None for no limit, and with `remove_padding`, where tokens are packed."""
        size = self.rows_of(vars(self)).size // self.num_minibatches
        return None if self.micro_batch is None or self.remove_padding else min(self.micro_batch, size)

    @property
    def _packed_rows(self) -> int | None:
        size = self.rows_of(vars(self)).size // self.num_minibatches
        return min(self.micro_batch or max(8, size // 16), size) if self.remove_padding else None

    @property
    def network(self) -> Any:
        """The trained decoder, an `algos.language.Decoder`: pure functions of its parameters."""
        return self.network_settings.of(self)

    @property
    def parameter_rules(self) -> Any:
        """How a policy may shard the network's parameters."""
        return self.network.parameter_rules

    # --- fragments ---

    @fdg.fragment("environment")
    def problems(self, keys, numbers=()):
        """`keys [B]`, and row numbers for a file, -> a `Problem [B]` to train on."""
        return (
            checked_sample(self.env, keys) if is_game(self.env) else self.env.sample(keys, "train", *numbers)
        )

    @fdg.fragment("actor", in_axes=(None, None, 0, 0))
    def respond(self, parameters, version, prompts, keys):
        """`prompts [N]`, `keys [N]` -> `Samples [N]`, and the `version [N]` of the parameters."""
        generate = registry.option("speaker").generate
        samples = generate(self.network, parameters, prompts, keys, self._sampling, self.slots)
        return samples, jnp.full(keys.shape, version, jnp.int32)

    @fdg.fragment("environment")
    def hear(self, state, tokens, mask):
        """A game's replies to `tokens [N, R]` of its turn: a `Reply [N]`."""
        return checked_reply(self.env, state, tokens, mask)

    @fdg.fragment("reward")
    def score(self, answer, tokens, mask):
        """The rewards of responses `tokens [N, R]` to problems with these answers: a `Reward [N]`."""
        return self.env.reward(answer, tokens, mask)

    @fdg.fragment("reference", in_axes=(None, 0))
    def refer(self, parameters, responses):
        """Log-probabilities `[N, R]` of `Responses [N]` under the reference."""
        return self._log_probs(parameters, responses)

    @fdg.fragment("gradient", in_axes=(None, None, 0), out_axes=None)
    def gradient(self, parameters, is_first, minibatch):
        """The contribution of rows `[n]` to gradient and metrics; `is_first` is True in the first update."""

        def loss(trained):
            return self._loss(self._with_trained(parameters, trained), is_first, minibatch)

        return jax.grad(loss, has_aux=True)(self._trained(parameters))

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, gradient, optimizer_state, trained):
        """One step of the optimiser: trained parameters and optimiser state."""
        steps, optimizer_state = self._optimizer.update(gradient, optimizer_state, trained)
        return optax.apply_updates(trained, steps), optimizer_state

    # --- state ---

    def _initial_state(self, key: jax.Array, count: int, has_reference: bool = True) -> State:
        """The initial state; an iteration samples responses to `count` prompts."""
        parameter_key, key = jax.random.split(key)
        parameters = self._initial_parameters(parameter_key)
        is_judged = getattr(self, "reward_model", None) is not None
        return State(
            parameters=parameters,
            # With adapters, the reference is the network without them.
            reference=() if "base" in parameters or not has_reference else jax.tree.map(jnp.copy, parameters),
            reward_model=self.reward_settings.initial_parameters(self, parameter_key) if is_judged else (),
            optimizer_state=self._optimizer.init(self._trained(parameters)),
            key=key,
            iteration=jnp.int32(0),
            stream=registry.option("stream").first_stream(self, count, parameters, key) if count else (),
        )

    def _next_state(self, state: Any, trained: Any, optimizer_state: Any, **further: Any) -> Any:
        """The state after an iteration's updates, with further changes."""
        parameters = self._with_trained(state.parameters, trained)
        changes = {"parameters": parameters, "optimizer_state": optimizer_state, **further}
        return state._replace(iteration=state.iteration + 1, **changes)

    def _initial_parameters(self, key: jax.Array) -> Any:
        return self.network_settings.initial_parameters(self, key)

    def _responding_parameters(self, state: Any) -> Any:
        """The parameters of the network that responds: here the trained ones."""
        return state.parameters

    def _trained(self, parameters: Any) -> Any:
        """The trained part of the parameters: all, or the adapters."""
        return parameters["adapters"] if "base" in parameters else parameters

    def _with_trained(self, parameters: Any, trained: Any) -> Any:
        return {"base": parameters["base"], "adapters": trained} if "base" in parameters else trained

    def _reference_parameters(self, state: Any) -> Any:
        return state.parameters.get("base", state.reference)

    def _version(self, state: Any) -> jax.Array:
        """The number of iterations that have changed the parameters.

        The optimiser counts them, because its state and the parameters have the same staleness.
        """
        count = registry.option("language optimizer").count(state.optimizer_state)
        return count // self.updates_per_iteration

    def _iteration_key(self, state: Any, index: int) -> jax.Array:
        """A key of this iteration, distinct from those of its problems; `index` is 1 or more."""
        return jax.random.fold_in(jax.random.fold_in(state.key, index), state.iteration)

    def _problem_keys(self, state: Any, count: int) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The arguments of `problems` for the state's iteration: see `algos.rlhf.speaker.problems_of`."""
        key = jax.random.fold_in(state.key, 0)
        problems_of = registry.option("speaker").problems_of
        return problems_of(self.env, key, state.iteration, count, self.dataset_size)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return self.optimizer_settings.of(self.num_iterations * self.updates_per_iteration)

    @property
    def _sampling(self) -> Any:
        return registry.option("speaker").sampling_of(self)

    @property
    def _stops(self) -> tuple[int, ...]:
        return tuple(self.env.tokenizer.stops)

    @property
    def _needs_answers(self) -> bool:
        """True if the task's problems must have answers, to imitate or to compute rewards."""
        other_reward = getattr(self.env, "host_reward", None) or getattr(self, "reward_model", None)
        return self._imitates or other_reward is None

    @property
    def _candidates(self) -> int:
        """Prompts sampled in an iteration."""
        return self.num_prompts

    # --- responses and their rewards ---

    def _rollout(self, state: Any, count: int) -> Rollout:
        """Responses to `count` new prompts, as from `play_problems`."""
        problem = self.problems(*self._problem_keys(state, count))
        keys = jax.random.split(self._iteration_key(state, 1), count * self.responses_per_prompt)
        return self.play_problems(state, problem, keys)

    def play_problems(self, state: Any, problem: Problem, keys: jax.Array) -> Rollout:
        """Responses to problems `[B]`, `G` contiguous ones to each, by `keys [B * G]`, with their rewards."""
        problem = jax.tree.map(lambda x: repeat_rows(x, self.responses_per_prompt), problem)
        versions = []

        def respond(prompts, keys):
            samples, version = self.respond(state.parameters, self._version(state), prompts, keys)
            versions.append(version)
            return samples

        responses, log_prob, reward = registry.option("speaker").responses_to(
            self.env, problem, keys, respond, self.score, self.hear
        )
        return self._with_rewards(state, Rollout(responses, log_prob, versions[0], reward, None))

    def _with_rewards(self, state: Any, rollout: Rollout) -> Rollout:
        """A rollout with the reward model's rewards, if any; without a reward, `policy_mask` is False."""
        responses, reward = rollout.responses, rollout.reward
        if reward.given is not None:
            responses = responses._replace(policy_mask=responses.policy_mask & reward.given[:, None])
        if getattr(self, "reward_model", None) is not None:
            responses, reward = self.reward_settings.with_scores(self, state.reward_model, responses, reward)
        return rollout._replace(responses=responses, reward=reward)

    def _log_probs(self, parameters: Any, responses: Responses) -> jax.Array:
        def log_probs(part: Responses) -> jax.Array:
            return response_log_probs(self.network, parameters, part, self.temperature)[0]

        return map_micro_batches(log_probs, responses, self.rows_per_micro_batch)

    def _shares(self, mask: jax.Array) -> jax.Array:
        return token_weights(mask, "token_mean", self.longest)

    def _log_prob_differences(self, old: Any, sampled: Any, mask: Any) -> dict[str, jax.Array]:
        """Metrics of the learner's log-probabilities `[N, R]` before its updates, and those at sampling."""
        difference = jnp.where(mask, jnp.abs(old - sampled), 0.0)
        return {
            "log_prob_difference": masked_mean(difference, mask),
            "log_prob_difference_max": jnp.max(difference),
        }

    def _lengths(self, responses: Responses) -> dict[str, jax.Array]:
        return length_metrics(responses, self._stops, judged=not self._needs_answers)

    def _response_metrics(
        self, responses: Responses, reward: Reward, is_rewarded: jax.Array
    ) -> dict[str, jax.Array]:
        """Metrics of an iteration's `Responses [N]` and rewards; only where `is_rewarded [N]`."""
        return {
            "episode_return": masked_mean(reward.total, is_rewarded),
            **{f"reward_{name}": jnp.mean(part) for name, part in reward.parts.items()},
            **self._lengths(responses),
        }
