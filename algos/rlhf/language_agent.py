"""The base of language-model algorithms: network, prompts, responses, evaluation, optimiser.

Shapes: `B` prompts of an iteration, `G` responses to each, `N = B * G`; `P` prompt and `R` response tokens.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import presets, registry
from algos.language.config import DecoderConfig
from algos.language.decoder import Decoder
from algos.language.generation import Samples, Sampling
from algos.language.layers import split_adapters
from algos.optimizers import ClippedOptimizer
from algos.rlhf import requirements, updates
from algos.rlhf.losses import masked_mean
from algos.rlhf.requirements import Rows, fitting_sizes
from algos.rlhf.responses import (
    Heard,
    Responses,
    Speaker,
    converse,
    lengths,
    problems_of,
    repeated,
    return_metrics,
)
from algos.rlhf.streaming import Rollout
from envs.text import Problem, Prompts, Reward, is_game
from envs.text.game import checked_reply, checked_sample
from fdg.settings.fields import (
    hyperparameter,
    keep_absolute,
    require,
    require_not_negative,
    require_positive,
    require_types,
)
from fdg.settings.parts import check_parts
from fdg.settings.presets import HasPresets


@dataclasses.dataclass(frozen=True)
class LanguageAgent(HasPresets):
    """Base of the algorithms that train a decoder on a text task; other algorithms need no base class.

    A subclass is a frozen dataclass with `init` and `iterate`. The trained network is a decoder with the
    task's vocabulary and the sizes here, the checkpoint in `model`, or any `decoder`.

    Raises:
      FdgError: (construction) a field is out of range, or the network does not fit the task.
    """

    # For evaluations during training: 0/1 rewards need many episodes, and responses are cheap.
    episodes_while_training: ClassVar[int] = 256
    default_env: ClassVar[str] = "text:addition"
    preset_table: ClassVar[Any] = presets
    steps_are: ClassVar[str] = "responses"  # what `steps_per_iteration` and `env_steps` count
    # How a run that starts from another run's weights initialises leaves of its state: the reference from the
    # weights at the start, the critic from the other's critic or policy, an adapted network from one without.
    begins_as: ClassVar[dict[str, tuple[str, ...]]] = {
        ".reference": (".parameters",),
        ".critic['network']": (".critic['network']", ".parameters"),
        ".parameters['base']": (".parameters['base']", ".parameters"),
    }

    _imitates: ClassVar[bool] = False  # True if it learns from answers

    env: Any  # a TextTask, or a TextGame
    decoder: Decoder | None = hyperparameter(None, "network; None: made from the fields below")
    model: str | None = hyperparameter(
        None,
        "folder of an initial checkpoint in Hugging Face's format (None: random weights)",
        holds="folder",
    )
    tokenizer: str | None = hyperparameter(
        None,
        "folder with the checkpoint's tokenizer, 'characters' for the task's own, or characters=ABC for a"
        " token for each of these (None: the checkpoint's folder, or the task's own)",
        holds="folder or characters",
    )
    adapters: str | None = hyperparameter(
        None,
        "folder of an initial LoRA adapter in PEFT's format, for the checkpoint (None: a new one)",
        holds="folder",
    )
    hidden_size: int = hyperparameter(128, "width of the network")
    num_layers: int = hyperparameter(2, "transformer blocks")
    num_heads: int = hyperparameter(4, "query heads")
    num_kv_heads: int | None = hyperparameter(None, "key-value heads (None: as many as query heads)")
    intermediate_size: int | None = hyperparameter(None, "width of the MLPs (None: three times hidden_size)")
    dtype: Literal["float32", "bfloat16"] = hyperparameter("float32", "compute dtype")
    remat: bool = hyperparameter(False, "rematerialise blocks for the gradient")
    lora_rank: int = hyperparameter(0, "rank of LoRA adapters, trained instead of the network; 0: none")
    lora_alpha: float = hyperparameter(
        16.0, "LoRA's alpha: adapters are scaled by alpha / rank", only_with="lora_rank"
    )
    max_response: int | None = hyperparameter(
        None,
        "longest response in tokens (None: the task's longest answer; with a checkpoint's tokenizer"
        " 64, or the rest of its context)",
    )
    num_prompts: int = hyperparameter(32, "prompts per iteration")
    total_steps: int = hyperparameter(64_000, "total responses")
    dataset_size: int | None = hyperparameter(
        None,
        "number of problems, used in turn (None: all rows of a file; otherwise new ones each time)",
    )
    num_epochs: int = hyperparameter(1, "passes over each batch of responses")
    num_minibatches: int = hyperparameter(1, "updates per pass")
    micro_batch: int | None = hyperparameter(
        None,
        "responses computed at once, on all devices; does not change results (None: a whole minibatch)",
    )
    remove_padding: bool = hyperparameter(
        False, "pack sequences, without padding; micro_batch counts packed rows"
    )
    optimizer_settings = ClippedOptimizer(learning_rate=1e-3, max_grad_norm=1.0)
    warmup: int = hyperparameter(0, "updates of linear warm-up of the step size")
    weight_decay: float = hyperparameter(0.0, "AdamW's decoupled weight decay")
    temperature: float = hyperparameter(1.0, "divides logits, in sampling and in learning")
    top_k: int = hyperparameter(0, "sample among this many most likely tokens; 0: all")
    top_p: float = hyperparameter(
        1.0, "sample from the most likely tokens with this total probability (nucleus sampling)"
    )
    slots: int | None = hyperparameter(
        None, "responses generated at once; a finished one's slot takes the next prompt (None: all)"
    )

    def __new__(cls, *first: Any, **given: Any) -> Any:
        """Records which fields were given."""
        fields = [field.name for field in dataclasses.fields(cls) if field.init]
        made = super().__new__(cls, *first, **given)
        object.__setattr__(made, "_named", (*fields[: len(first)], *given))  # until construction ends
        return made

    def __post_init__(self) -> None:
        requirements.check_task(self)
        keep_absolute(self)
        require_types(self)
        require_positive(self, "num_prompts", "total_steps", "num_epochs", "num_minibatches")
        zero = f"temperature={self.temperature}: it must be above zero; greedy=True takes the likeliest token"
        require(self, self.temperature > 0, zero)
        check_parts(self)
        for name in ("dataset_size", "micro_batch", "slots"):
            if getattr(self, name) is not None:
                require_positive(self, name)
        decays = self.optimizer is None or not self.weight_decay
        require(self, decays, f"weight_decay={self.weight_decay} is AdamW's: leave it out with an optimizer")
        require_not_negative(self, "warmup")
        named = self.__dict__.pop("_named", ())
        for name, value in self._sizes(vars(self), named).items():
            object.__setattr__(self, name, value)
        self._check_network()
        requirements.check_answers(self, self._needs_answers, self._imitates)
        _ = self._speaker  # which checks itself
        requirements.check_sizes(self, self.rows_of)

    @classmethod
    def preset_name(cls, given: Mapping[str, Any]) -> str | None:
        """For a checkpoint, its published settings, not the task's."""
        if given.get("model") is None:
            return None
        return "checkpoint-lora" if given.get("lora_rank") or given.get("adapters") else "checkpoint"

    def changed(self, **values: Any) -> Any:
        """A copy with changed fields, and a micro-batch that divides."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        named = {*fields, *values} - ({"micro_batch"} - values.keys())
        return type(self)(**self.adjust_unnamed({**fields, **values}, named))

    @classmethod
    def rows_of(cls, values: Mapping[str, Any]) -> Rows:
        """The rows of an iteration's updates, for these field values."""
        prompts = values["num_prompts"]
        return Rows(prompts * values.get("group_size", 1), prompts, "responses")

    @classmethod
    def times_drawn(cls, values: Mapping[str, Any]) -> int:
        """The ratio of sampled to learned prompts."""
        return 1

    @classmethod
    def _sizes(cls, values: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
        """Changes of unnamed fields so that sizes divide: see `fitting_sizes`."""
        sizes = ("num_prompts", "num_minibatches", "group_size", "micro_batch", "dataset_size")
        for name in sizes:
            value = values.get(name, 1)
            none = value is None and name not in ("num_prompts", "num_minibatches", "group_size")
            if not none and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                return {}  # the algorithm then refuses the sizes
        found = fitting_sizes(values, named, cls.rows_of, cls.times_drawn(values))
        heads, pairs = values["num_heads"], values["num_kv_heads"]
        if "num_heads" not in named and pairs in range(1, 1 << 16) and heads % pairs:
            found["num_heads"] = pairs * max(1, round(heads / pairs))
        return found

    @property
    def responses_per_prompt(self) -> int:
        """`G`."""
        return 1

    def check_files(self) -> None:
        """Raises an `FdgError` if the initial weights are missing; a plan needs none."""
        if self.model is not None:
            _checkpoints().check_there(self.model)

    @property
    def steps_per_iteration(self) -> int:
        """`N`, responses of an iteration."""
        return self.num_prompts * self.responses_per_prompt

    @property
    def longest(self) -> int:
        """The maximum number of tokens of a response, over all turns of a game."""
        return self.env.response_length * getattr(self.env, "turns", 1)

    @property
    def at_once(self) -> int | None:
        """Rows of a micro-batch; None for no limit."""
        size = self.rows_of(vars(self)).size // self.num_minibatches
        return None if self.micro_batch is None or self.remove_padding else min(self.micro_batch, size)

    @property
    def _packed_rows(self) -> int | None:
        size = self.rows_of(vars(self)).size // self.num_minibatches
        return min(self.micro_batch or max(8, size // 16), size) if self.remove_padding else None

    @property
    def updates_per_iteration(self) -> int:
        """Gradient steps in one iteration."""
        return self.num_epochs * self.num_minibatches

    def taken_from(self, earlier: Any) -> dict[str, Any]:
        """Fields that a run takes from the one whose weights it begins with: its alphabet, if wider."""
        return requirements.wider_alphabet(self, getattr(earlier, "env", None))

    def why_not_from(self, earlier: Any) -> str | None:
        """Why weights of another algorithm's run cannot be used, or None."""
        return requirements.other_tokens(self.env, getattr(earlier, "env", None))

    def evaluate(
        self, state: Any, key: jax.Array, episodes: int, greedy: bool = True
    ) -> dict[str, jax.Array]:
        """Responds to held-out problems, by default with the most likely tokens.

        Returns:
          `return` `[]`, the mean reward; `returns` and `lengths` (in tokens) `[episodes]`.
        """
        return return_metrics(*self._speaker.held_out(self._speaking(state), key, episodes, greedy))

    def examples(self, state: Any, key: jax.Array, count: int) -> dict[str, jax.Array]:
        """Held-out problems and sampled responses, for `example_rows`: arrays with leading axis `count`."""
        return self._speaker.examples(self._speaking(state), key, count)

    def example_rows(self, examples: dict[str, Any]) -> list[dict[str, Any]]:
        """The results of `examples` as rows of a table: texts `prompt` and `response`, and rewards."""
        return self._speaker.rows(examples)

    def answer(
        self,
        state: Any,
        prompts: Sequence[Any],
        seed: int = 0,
        greedy: bool = True,
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        system: str | None = None,
    ) -> list[str]:
        """Answers prompts, given as texts or lists of messages (`[{"role": "user", "content": "1+1="}]`).

        Args:
          greedy: take the most likely tokens, else sample.
          temperature: instead of `greedy`: divides the logits; 0 takes the most likely tokens.
          max_new_tokens: the most tokens of an answer; None for the limit in training.
          system: the system message; None for the task's.

        Raises:
          FdgError: `prompts` is not a list; a prompt is too long, or has a character outside the vocabulary;
            a number is out of range; or the tokenizer has no place for a system message.
        """
        speaker = self._speaker.asked(greedy, temperature, max_new_tokens, system)
        return speaker.answer(self._speaking(state), prompts, seed)

    def export(self, state: Any, path: Path) -> None:
        """Writes network (adapters merged) and tokenizer in Hugging Face's format, for `--model`.

        Raises:
          FdgError: it cannot be written, or the tokenizer cannot be exported.
        """
        _checkpoints().save(path, self.network, state.parameters, self.env.tokenizer)

    @property
    def export_formats(self) -> dict[str, Callable[[Any, Path], None]]:
        """Other export formats by name: `peft`, only the adapters."""

        def adapters_alone(state: Any, path: Path) -> None:
            _checkpoints().save_adapters(path, self.network, state.parameters, self.env.tokenizer, self.model)

        return {"peft": adapters_alone}

    @fdg.fragment("environment")
    def problems(self, keys, numbers=()):
        """`keys [B]`, and row numbers for a file, -> a `Problem [B]` to train on."""
        return (
            checked_sample(self.env, keys) if is_game(self.env) else self.env.sample(keys, "train", *numbers)
        )

    @fdg.fragment("actor", in_axes=(None, None, 0, 0))
    def respond(self, parameters, version, prompts, keys):
        """`prompts [N]`, `keys [N]` -> `Samples [N]`, and the `version [N]` of the parameters."""
        said = self._speaker.say(parameters, prompts, keys)
        return said, jnp.full(keys.shape, version, jnp.int32)

    @fdg.fragment("reward")
    def score(self, answer, tokens, mask):
        """The rewards of responses `tokens [N, R]` to problems with these answers: a `Reward [N]`."""
        return self.env.reward(answer, tokens, mask)

    @fdg.fragment("environment")
    def hear(self, state, tokens, mask):
        """A game's replies to `tokens [N, R]` of its turn: a `Reply [N]`."""
        return checked_reply(self.env, state, tokens, mask)

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, gradient, optimizer_state, trained):
        """One step of the optimiser: trained parameters and optimiser state."""
        steps, optimizer_state = self._optimizer.update(gradient, optimizer_state, trained)
        return optax.apply_updates(trained, steps), optimizer_state

    @property
    def _needs_answers(self) -> bool:
        return self._imitates or getattr(self.env, "host_reward", None) is None

    @property
    def network(self) -> Decoder:
        """The trained decoder."""
        if self.decoder is not None:
            config = dataclasses.replace(self.decoder.config, packed_rows=self._packed_rows)
            return dataclasses.replace(self.decoder, config=config) if self.remove_padding else self.decoder
        options: dict[str, Any] = {"dtype": self.dtype, "remat": self.remat, "packed_rows": self._packed_rows}
        if self.model is not None and self.adapters is not None:
            found = _checkpoints().adapted_config_of(self.model, self.adapters)
            return Decoder(dataclasses.replace(found, **options))
        options |= {"lora_rank": self.lora_rank, "lora_alpha": self.lora_alpha}
        if self.model is not None:
            return Decoder(dataclasses.replace(_checkpoints().config_of(self.model), **options))
        return Decoder(
            DecoderConfig(
                vocab_size=self.env.tokenizer.vocab_size,
                hidden_size=self.hidden_size,
                intermediate_size=self.intermediate_size or 3 * self.hidden_size,
                num_layers=self.num_layers,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads or self.num_heads,
                # RoPE needs an even width; the heads' total width may differ from the network's.
                head_dim=2 * max(1, round(self.hidden_size / self.num_heads / 2)),
                max_positions=self._context,
                # Nguyen and Salazar 2019, arXiv 1910.05895, section 2.2: 0.08 at width 64. With 0.02, as in
                # large networks, a small one needs five times as many updates to begin to learn.
                initializer_range=math.sqrt(2 / (5 * self.hidden_size)),
                **options,
            )
        )

    @property
    def parameter_rules(self) -> Any:
        """How a policy may shard the network's parameters."""
        return self.network.parameter_rules

    def _first_parameters(self, key: jax.Array) -> Any:
        if self.model is None:
            return self.network.init(key)
        return _checkpoints().begun(self.network, self.model, self.adapters, key)

    def _speaking(self, state: Any) -> Any:
        return state.parameters

    def _trained(self, parameters: Any) -> Any:
        """The trained part of the parameters: all, or the adapters."""
        return split_adapters(parameters)[0]

    def _with_trained(self, parameters: Any, trained: Any) -> Any:
        return {"base": parameters["base"], "adapters": trained} if "base" in parameters else trained

    def _frozen(self, parameters: Any) -> Any:
        """The reference's parameters in the state; empty if it is the network without adapters."""
        return () if "base" in parameters else parameters

    def _reference_parameters(self, state: Any) -> Any:
        return state.parameters.get("base", state.reference)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        total = self.num_iterations * self.updates_per_iteration
        step_size = updates.warmed_up(
            self.learning_rate, self.warmup, total if self.anneal_learning_rate else None
        )
        return updates.optimizer(self.optimizer, step_size, self.weight_decay, self.max_grad_norm)

    @property
    def _speaker(self) -> Speaker:
        sampling = Sampling(
            max_new_tokens=self.env.response_length,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop_tokens=self._stops,
            pad_token=self.env.tokenizer.pad,
        )
        return Speaker(self.network, self.env, sampling, self.slots)

    def _problem_keys(self, state: Any, count: int) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        key = jax.random.fold_in(state.key, 0)
        return problems_of(self.env, key, state.iteration, count, self.dataset_size)

    def _version(self, state: Any) -> jax.Array:
        """Iterations that made the parameters, counted by the optimiser: both have the same staleness."""
        return updates.count(state.optimizer_state) // self.updates_per_iteration

    def _iteration_key(self, state: Any, stream: int) -> jax.Array:
        """A key of this iteration, distinct from those of its problems; `stream` counts from 1."""
        return jax.random.fold_in(jax.random.fold_in(state.key, stream), state.iteration)

    def _rollout(self, state: Any, count: int) -> Rollout:
        """`count` prompts with `G` contiguous responses to each, as from `played`."""
        problem = self.problems(*self._problem_keys(state, count))
        keys = jax.random.split(self._iteration_key(state, 1), count * self.responses_per_prompt)
        return self.played(state, problem, keys)

    def played(self, state: Any, problem: Problem, keys: jax.Array) -> Rollout:
        """Responses to problems `[B]`, `G` contiguous ones to each, by keys `[B G]`.

        Returns responses (without `own` tokens where there is no reward); log-probabilities `[N, R]` of their
        tokens at sampling, before top-k and top-p; the version `[N]` of the parameters; rewards.
        """
        problem = jax.tree.map(lambda x: repeated(x, self.responses_per_prompt), problem)
        versions = []

        def respond(prompts: Prompts, keys: jax.Array) -> Samples:
            samples, version = self.respond(state.parameters, self._version(state), prompts, keys)
            versions.append(version)
            return samples

        if is_game(self.env):
            heard = Heard(self.env.tokenizer, self.env.turns, self.hear)
            responses, log_prob, reward = converse(heard, problem, keys, respond)
        else:
            said = respond(problem.prompts, keys)
            reward = self.score(problem.answer, said.tokens, said.mask)
            responses = Responses(problem.prompts, said.tokens, said.mask, said.mask)
            log_prob = said.tempered_log_probs
        if reward.given is not None:  # responses without a reward are not learned from
            responses = responses._replace(own=responses.own & reward.given[:, None])
        return Rollout(responses, log_prob, versions[0], reward, None)

    @property
    def _stops(self) -> tuple[int, ...]:
        return tuple(self.env.tokenizer.stops)

    @property
    def _context(self) -> int:
        turns, reply = getattr(self.env, "turns", 1), getattr(self.env, "reply_length", 0)
        return self.env.prompt_length + turns * (self.env.response_length + reply)

    def _lengths(self, responses: Responses) -> dict[str, jax.Array]:
        return lengths(responses, self._stops, judged=not self._needs_answers)

    def _said(self, responses: Responses, reward: Reward, given: jax.Array) -> dict[str, jax.Array]:
        """Metrics of an iteration's `Responses [N]` and rewards; only those `given [N]` count."""
        return {
            "episode_return": masked_mean(reward.total, given),
            **{f"reward_{name}": jnp.mean(part) for name, part in reward.parts.items()},
            **self._lengths(responses),
        }

    def _check_network(self) -> None:
        requirements.check_initial_network(self)
        env = self.env
        if self.model is not None:
            _checkpoints().config_of(self.model)  # can be read
        if self.model is not None or self.tokenizer is not None:
            env = _checkpoints().in_its_words(env, self.model, self.tokenizer, self.max_response)
        if not is_game(env) and self.max_response not in (None, env.max_response):
            env = dataclasses.replace(env, max_response=self.max_response)
        object.__setattr__(self, "env", env)
        requirements.check_room(self, self.network.config, self._context)


def _checkpoints() -> Any:
    return registry.option("model")
