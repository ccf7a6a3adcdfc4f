"""User-defined functions and objects that do not fit: refused before training, with the fix."""

import dataclasses
import math
import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import algos
import envs
import fdg
import policies
from algos import buffers, explorers
from envs import games
from fdg.training.recorder import NoLoss
from tests.refusing import refuses

ENV, CONTROL, GAME = envs.make("CartPole-v1"), envs.make("Pendulum-v1"), envs.make("game:tic_tac_toe")
PPO = algos.PPO(env=ENV, num_envs=4, num_steps=8, num_minibatches=2, num_epochs=1, hidden=(4,))
DQN = algos.DQN(env=ENV, num_envs=4, num_steps=2, learning_starts=8, batch_size=8, hidden=(4,))
TD3 = algos.TD3(env=CONTROL, num_envs=4, learning_starts=16, batch_size=8, hidden=(4,))
REACH = algos.SAC(env=envs.make("probe:reach"), num_envs=4, learning_starts=200, batch_size=8, hidden=(4,))


def explorer(apply, init=jnp.zeros_like):
    return {"explore": algos.Explorer(init, apply)}


def normalizer(apply=lambda known, seen: seen, update=lambda known, seen: known):
    return {"normalize": algos.Normalizer(lambda space: jnp.ones(space.shape), apply, update)}


def bonus(apply):
    return {"bonus": algos.Bonus(lambda observation: jnp.zeros(3), apply)}


MISTAKES = [
    (
        DQN,
        explorer(lambda state, policy, *rest: policy.mode()),
        "apply of explore gives int32[4]: give a pair",
    ),
    (
        DQN,
        explorer(lambda state, policy: None),
        "apply of explore takes (state, policy), but is called with",
    ),
    (
        DQN,
        explorer(lambda state, policy, *rest: (state, 1.0 * policy.mode())),
        "action of shape (4,) and dtype float32: give shape (4,) and dtype int32",
    ),
    (DQN, explorer(lambda state, policy, *rest: (state[:1], policy.mode())), "state of shape (1,)"),
    (
        DQN,
        {"explore": explorers.correlated_noise()},
        "these are int32: for discrete actions give boltzmann(...)",
    ),
    (TD3, {"explore": explorers.boltzmann()}, "give correlated_noise(...) to SAC, TD3 and CrossQ"),
    (PPO, normalizer(apply=lambda known, seen: seen[..., :2]), "observations of shape (4, 2)"),
    (PPO, normalizer(update=lambda known, seen: jnp.max(seen)), "statistics of shape () and dtype"),
    (PPO, bonus(lambda state, step: (state, jnp.zeros(3))), "reward of shape (3,)"),
    (PPO, bonus(lambda state, step: step.reward), "give a pair, (state, reward)"),
    (PPO, bonus(lambda state, step: (state[:1], step.reward)), "apply of bonus gives state of shape (1,)"),
    (PPO, {"transform": lambda rows, parameters, key: rows.time_step}, "transform gives rows as TimeStep("),
    (
        REACH,
        {"replay": lambda spec: buffers.hindsight(spec, reward=lambda achieved, desired: achieved - desired)},
        "of one step's goals returned float32[4]: return one number",
    ),
]


@pytest.mark.parametrize(("algorithm", "fields", "words"), MISTAKES, ids=[words for *_, words in MISTAKES])
def test_invalid_function_results(algorithm, fields, words):
    with pytest.raises(fdg.FdgError) as caught:
        fdg.trace(dataclasses.replace(algorithm, **fields))
    text = str(caught.value)
    assert words in text
    assert "\n" not in text and ".py" not in text, "the message must not name a line of fdg"


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (explorers.boltzmann, {"temperature": 0.0}, "boltzmann: temperature=0.0: give a finite number above"),
        (explorers.correlated_noise, {"deviation": -1}, "deviation=-1: give a finite number from 0"),
        (explorers.correlated_noise, {"decay": 1.5}, "decay=1.5: give a number above -1 and below 1"),
        (explorers.correlated_noise, {"decay": "0.5"}, "decay='0.5': give a number"),
    ],
)
def test_impossible_explorers(make, settings, words):
    with refuses(words):
        make(**settings)


def without_metrics(self, parameters, minibatch):
    return algos.PPO.loss(self, parameters, minibatch)[0]


METHODS = [
    (
        {"advantage": lambda self, reward, value, next_value: (reward, value)},
        "(self, reward, value, next_value,",
    ),
    ({"loss": lambda self, minibatch, parameters: (0.0, {})}, "let it take these, in this order"),
    (
        {"step": lambda self, env_state, action: (env_state, action)},
        "called with (self, keys, env_state, action)",
    ),
    ({"loss": without_metrics}, "Own.loss gives float32[]: return 2 values, as PPO.loss does"),
    ({"advantage": lambda self, reward, value, *more: reward}, "Own.advantage gives float32[8, 4]: return 2"),
    (
        {"step": lambda self, keys, state, action: state},
        "return 2 values, as Agent.step does, tuple[Any, TimeStep]",
    ),
]


@pytest.mark.parametrize(("methods", "words"), METHODS, ids=[words for _, words in METHODS])
def test_invalid_method_arguments_and_results(methods, words):
    with refuses(words):
        own = type("Own", (algos.PPO,), methods)
        fdg.trace(own(**{field.name: getattr(PPO, field.name) for field in dataclasses.fields(PPO)}))


def test_optimizer_that_needs_the_loss():
    plateau = optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau())
    for optimizer in (plateau, optax.polyak_sgd()):
        with refuses("'value'", "leave out transformations that need the loss"):
            fdg.trace(algos.A2C(env=ENV, num_envs=2, num_steps=2, hidden=(4,), optimizer=optimizer))


def test_keys_of_other_kinds():
    legacy, typed = PPO.init(jax.random.PRNGKey(3)), PPO.init(jax.random.key(3))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, legacy.parameters, typed.parameters))
    for key in (0, None, jnp.zeros(2)):
        with refuses("PPO.init: ", "is not a random key: give jax.random.key(0)"):
            PPO.init(key)
        with refuses("PPO.init: ", "is not a random key"):
            PPO.init(key=key)


@pytest.mark.parametrize(
    ("order", "ahead", "why"), [("prompt", 1, "order='prompt'"), ("finished", 0, "ahead=0")]
)
def test_late_without_effect(order, ahead, why):
    with pytest.warns(fdg.FdgWarning, match=f"late='mask' has no effect with {why}.*, or leave late out"):
        algos.GRPO(env=envs.make("text:addition"), late="mask", order=order, ahead=ahead)


def test_exchanged_engine_arguments():
    engine = fdg.compile(PPO, policies.GPUOnly(), 1)
    for run in (engine.run, engine.start, engine.timeline):
        with pytest.raises(fdg.FdgError) as caught:
            run(10, {"x": 1})
        text = str(caught.value)
        assert text.startswith("iterations={'x': 1}") and text.endswith(
            ": the order is run(state, iterations)"
        )


class Letters:
    vocab_size, pad = 3, 0

    def encode(self, text):
        return [1]


def test_objects_without_required_methods():
    memory = algos.RecurrentNetwork(
        init=lambda key, observation: jnp.ones((4, 2)),
        memory=lambda num_envs: jnp.zeros((num_envs, 3)),
        unroll=lambda weight, memory, observation, start: (observation @ weight, memory),
    )
    task = envs.make("text:addition")
    for make, words in (
        (lambda: task.with_tokenizer(Letters()), "has no stops, decode or encode_rows: give one that has"),
        (
            lambda: task.with_tokenizer(Letters),
            "tokenizer=Letters is a class: give an instance, Letters(...)",
        ),
        (lambda: fdg.Stream(Letters(), slots=1, batch=1), "has no idle, begin, tick, done, refresh or row"),
        (
            lambda: fdg.trace(algos.RecurrentPPO(env=ENV, num_envs=2, num_minibatches=1, network=memory)),
            "has no policy, value or memory: give an algos.recurrent.Output(policy, value, memory)",
        ),
    ):
        with refuses(words):
            make()


def test_actor_without_memory_result():
    actor = algos.Actor(lambda num_envs: (), lambda memory, observation, start, keys, greedy: start)
    with pytest.raises(
        fdg.FdgError, match=r"act of algos.Actor gives bool\[2\]: give a pair, \(action, memory\)"
    ):
        actor.act((), None, jnp.zeros(2, bool), None, True)


def test_invalid_players():
    game, other = GAME.single.game, envs.make("game:hex", size=3).single.game
    for player, words in (
        (
            games.Uniform,
            "match(one=<class 'envs.games.players.Uniform'>): give a Player with begin and choose",
        ),
        (games.Uniform(other), "plays another game"),
        (3, "match(one=3): give a Player with begin and choose"),
    ):
        with refuses(words):
            games.match(game, player, games.Uniform(game), jax.random.key(0), 2)
    actor = algos.Actor(lambda num_envs: (), lambda memory, observation, start, keys, greedy: start)
    for make, values, order in (
        (games.Trained, (actor, game), "Trained(game, actor, greedy)"),
        (games.Against, (games.Uniform(game), game), "Against(game, opponent)"),
    ):
        with refuses(f"the order is {order}"):
            make(*values)
    with pytest.raises(fdg.FdgError, match="unknown parameter of HexGame 'rows'"):
        envs.make("game:hex", rows=3)


def test_self_play_of_non_algorithm():
    once = algos.SelfPlay(algos.PPO(env=GAME))
    for wrong in (algos.PPO, once):
        with pytest.raises(
            fdg.FdgError,
            match=r"is not an algorithm that it can wrap: give an algorithm such as algos.PPO\(env=env\)",
        ):
            algos.SelfPlay(wrong)


def test_acting_workers_refuse_wrappers():
    with pytest.raises(fdg.FdgError, match="acts=True does not work with the wrapper FrameStack"):
        envs.make("ray:gymnasium:CartPole-v1", workers=2, acts=True, frame_stack=4)


class Stuck:
    """Allows no action after its third step; the episode continues to its tenth."""

    name, max_episode_steps = "stuck", 10
    observation_space, action_space = envs.Box(0.0, 1.0, (2,)), envs.Discrete(3)

    def observe(self, steps):
        return envs.MaskedObservation(jnp.zeros(2), jnp.full(3, steps < 3))

    def reset(self, key):
        return jnp.int32(0), self.observe(jnp.int32(0))

    def step(self, key, steps, action):
        return steps + 1, self.observe(steps + 1), 1.0, False, False


def test_mask_without_allowed_action_warns(tmp_path):
    algorithm = algos.A2C(env=envs.vectorize(Stuck()), num_envs=4, num_steps=8, hidden=(4,))
    words = "'stuck' allows no action in an observation of iteration 1, after step 3 of the rollout"
    with pytest.warns(fdg.FdgWarning, match=words):
        fdg.fit(algorithm, total_steps=64, out=tmp_path / "run", devices=1, eval_episodes=0, progress=False)


class NaNReward(Stuck):
    """Its reward is NaN, in episodes that have not ended when the first loss is computed."""

    def observe(self, steps):
        return jnp.zeros(2)

    def step(self, key, steps, action):
        return steps + 1, self.observe(steps), jnp.where(steps == 5, jnp.nan, 1.0), False, False


def test_nan_reward_is_named_as_cause_of_nan_loss(tmp_path):
    algorithm = algos.A2C(env=envs.vectorize(NaNReward()), num_envs=4, num_steps=8, hidden=(4,))
    given = {"total_steps": 64, "out": tmp_path / "run", "devices": 1, "eval_episodes": 0, "progress": False}
    with pytest.raises(
        fdg.RunError, match="environment 'stuck': a reward is infinite or not a number"
    ) as caught:
        fdg.fit(algorithm, **given)
    assert "learning_rate" not in str(caught.value) and "learning-rate" not in str(caught.value)


def test_data_without_answers_is_refused(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "1+1=", "completion": ""}\n{"prompt": "2+2=", "completion": " "}\n')
    task = envs.make("text:file", path=str(file))
    for learn in (algos.SFT, algos.GRPO):
        with pytest.raises(
            fdg.FdgError, match=r"line 1, like every other row: has no answer, .* in each row"
        ):
            learn(env=task)
    assert algos.GRPO(env=task.with_reward(lambda responses: [1.0] * len(responses)))
    file.write_text(file.read_text() + '{"prompt": "3+3=", "completion": "6"}\n')
    assert algos.SFT(env=envs.make("text:file", path=str(file)))


def test_zero_loss_warns():
    def warned(*rows):
        monitor = NoLoss()
        return [monitor.check([row]) is not None for row in rows]

    nothing, early = {"loss": 0.0, "episode_return": math.nan}, {"loss": math.nan}
    assert warned(nothing, nothing, nothing, nothing) == [False, False, True, False]
    assert not any(warned(nothing, {"loss": 1e-9}, nothing, nothing, nothing))
    assert not any(warned(early, nothing, nothing, nothing)), "a loss before learning starts"
    assert not any(warned(*[{"loss": 0.0, "episode_return": 1.0}] * 4)), "the constant return explains it"
    assert not any(warned(*[{"entropy": 0.0}] * 4))


@pytest.mark.parametrize(
    ("env", "wrong", "text"),
    [
        (ENV, jnp.zeros(2), "float32, expected int32 of Discrete(n=2): choose one by jnp.argmax"),
        (ENV, jnp.zeros((2, 1), int), "action has shape (2, 1), expected (2,)"),
        (ENV, "left", "action is a value of type str: give an array of int32[2]"),
        (CONTROL, jax.random.split(jax.random.key(0), (2, 1)), "key<fry>, expected float32 of Box("),
        (CONTROL, None, "action is a value of type NoneType: give an array of float32[2, 1]"),
    ],
)
def test_invalid_actions(env, wrong, text):
    keys = jax.random.split(jax.random.key(0), 2)
    state, _ = env.reset(keys)
    with pytest.raises(fdg.FdgError, match=re.escape(text)):
        env.step(keys, state, wrong)


def test_number_of_keys():
    state, _ = ENV.reset(jax.random.split(jax.random.key(0), 3))
    with pytest.raises(fdg.FdgError, match=r"2 keys for a state of 3: use jax.random.split\(key, 3\)"):
        ENV.step(jax.random.split(jax.random.key(0), 2), state, jnp.zeros(2, int))


def test_actions_of_other_dtypes_are_accepted():
    keys = jax.random.split(jax.random.key(0), 2)
    state, _ = ENV.reset(keys)
    _, expected = ENV.step(keys, state, jnp.array([0, 1]))
    for same in ([0, 1], jnp.array([False, True]), jnp.array([0, 1], jnp.uint8)):
        assert (ENV.step(keys, state, same)[1].observation == expected.observation).all()


def test_named_settings_of_wrong_type(monkeypatch):
    own = types.ModuleType("own_parts")
    own.NUMBER, own.network = 3, lambda width, depth, seed: None
    monkeypatch.setitem(sys.modules, "own_parts", own)
    for field in ("transform", "bonus", "normalize", "network"):
        with pytest.raises(fdg.FdgError, match=f"{field}.*: (it must be|give a module)"):
            dataclasses.replace(PPO, **{field: "own_parts:NUMBER"})
    words = "network 'own_parts:network' takes (width, depth, seed), but is called with (observation_space"
    with pytest.raises(fdg.FdgError, match=re.escape(words)):
        dataclasses.replace(PPO, network="own_parts:network")


SINGLE = envs.make("CartPole-v1").single
ORDERS = [
    (lambda: algos.make(ENV, "ppo"), "the order is make(name, env)"),
    (lambda: envs.Box((2,), -1.0, 1.0), "the order is Box(low, high, shape, dtype)"),
    (lambda: envs.FrameStack(4, ENV), "FrameStack(env=4): the order is FrameStack(env, frames)"),
    (lambda: envs.HideObservations((0,), ENV), "the order is HideObservations(env, "),
    (lambda: algos.SelfPlay(algos.PPO(env=GAME), versions=3), "unknown argument of SelfPlay 'versions'"),
    (lambda: algos.GRPO(env="text:sorting"), "'text:sorting' is a name: use envs.make('text:sorting')"),
    (lambda: fdg.Stream(3), "Stream: slots is missing"),
    (lambda: fdg.agents(8, PPO), "the order is agents(algorithm, n)"),
    (
        lambda: fdg.Engine.run(None, None, steps=3),
        "unknown argument of run 'steps': did you mean 'iterations'?",
    ),
    (lambda: ENV.observation_space.sample(), "sample: key is missing"),
    (lambda: fdg.fit(ENV, total_steps=64), "this is an environment: write algos.make('ppo', env)"),
    (lambda: fdg.place(PPO, "gpu_onli", 1), "unknown policy 'gpu_onli': did you mean 'gpu_only'?"),
    (lambda: fdg.place(PPO, "gpu_only", 1), "write policies.get('gpu_only')()"),
]


@pytest.mark.parametrize(("call", "text"), ORDERS, ids=[text for _, text in ORDERS])
def test_exchanged_or_missing_arguments(call, text):
    with pytest.raises(fdg.FdgError, match=re.escape(text)):
        call()


ATTRIBUTES = [
    (ENV, "with_reward", "Vectorized has no with_reward: write a subclass of envs.Wrapper"),
    (ENV, "observation_spce", "did you mean 'observation_space'?"),
    (envs.FrameStack(ENV, 2), "frame", "did you mean 'frames'?"),
    (CONTROL.action_space, "n", "unknown attribute of Box 'n' (known: "),
    (PPO, "set_env", "PPO has no set_env: to change it, write dataclasses.replace(algorithm, env=env)"),
    (PPO, "learning_rte", "did you mean 'learning_rate'?"),
    (SINGLE.action_space, "nn", "unknown attribute of Discrete 'nn'"),
]


@pytest.mark.parametrize(("value", "name", "text"), ATTRIBUTES, ids=[name for _, name, _ in ATTRIBUTES])
def test_unknown_attributes(value, name, text):
    assert not hasattr(value, name)
    with pytest.raises(fdg.FdgError, match=re.escape(text)):
        getattr(value, name)


def test_unknown_parameter_of_user_factory(tmp_path, monkeypatch):
    (tmp_path / "own_factory.py").write_text(
        "import envs\ndef maker(size=3): return envs.make('CartPole-v1')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(fdg.FdgError, match="unknown parameter of maker 'sise': did you mean 'size'"):
        envs.make("own_factory:maker", sise=4)


@pytest.mark.parametrize("name", ["random", "types", "numbers"])
def test_files_that_hide_modules(tmp_path, name):
    """The import fails before fdg's own checks; one line names the file."""
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    (tmp_path / "main.py").write_text("import fdg, algos\n")
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{name}.py hides" in last and "rename it" in last
