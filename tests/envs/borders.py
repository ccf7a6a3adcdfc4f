"""Gymnasium test environments: random spaces with values in varied forms, and invalid results."""

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import register


def random_space(rng, depth=0, *, floats=True, categories=True):
    """A random space of a kind that is supported for observations or actions."""
    shape = tuple(map(int, rng.integers(1, 4, rng.integers(0, 3))))
    makers = []
    if floats:
        makers.append(lambda: _box(rng.choice([np.float32, np.float64]), shape))
    if categories:
        makers += [
            lambda: spaces.Discrete(int(rng.integers(2, 5)), start=int(rng.integers(-3, 4))),
            lambda: spaces.MultiDiscrete(
                rng.integers(2, 5, (2, *shape[:1])), start=np.full((2, *shape[:1]), 7)
            ),
            lambda: spaces.MultiBinary(shape or 2),
            lambda: spaces.Box(-2, 3, (2, *shape), rng.choice([np.int8, np.int32, np.int64])),
        ]
    if depth < 2:
        inner = lambda: random_space(rng, depth + 1, floats=floats, categories=categories)  # noqa: E731
        makers += [
            lambda: spaces.Dict({key: inner() for key in "ba"[: rng.integers(1, 3)]}),
            lambda: spaces.Tuple([inner() for _ in range(rng.integers(1, 3))]),
        ]
    return makers[rng.integers(len(makers))]()


def _box(dtype, shape):
    return spaces.Box(np.full(shape, -3.1, dtype), np.full(shape, 0.1, dtype), dtype=dtype)


def random_representation(rng, element):
    """An equal element as Python numbers, lists or tuples, in another dtype, or unchanged."""
    if isinstance(element, dict):
        return {key: random_representation(rng, part) for key, part in [*element.items()][::-1]}
    if isinstance(element, tuple):
        return tuple(random_representation(rng, part) for part in element)
    forms = [
        lambda: element,
        lambda: np.asarray(element).tolist(),
        lambda: np.asarray(element, np.float64),
        lambda: _tuples(np.asarray(element).tolist()),
    ]
    return forms[rng.integers(len(forms))]()


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class Random(gymnasium.Env):
    """Random spaces from the seed `case`; refuses actions outside its space; episodes have four steps."""

    def __init__(self, case=0):
        rng = np.random.default_rng(case)
        self.observation_space = random_space(rng)
        is_float = bool(rng.integers(2))
        self.action_space = random_space(rng, floats=is_float, categories=not is_float)
        self.rng = rng

    def observe(self):
        self.observation = self.observation_space.sample()
        return random_representation(self.rng, self.observation)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is outside of {self.action_space}")
        self.steps += 1
        forms = [1.5, np.float32(1.5), np.array([1.5]), np.array(1.5)]
        return self.observe(), forms[self.steps % 4], np.bool_(False), self.steps >= 4, {}


class Wrong(gymnasium.Env):
    """`reset` or `step` returns an invalid result."""

    observation_space = spaces.Dict({"a": spaces.Box(0, 9, (3,), np.float32), "b": spaces.Discrete(3)})
    action_space = spaces.Discrete(2)
    good = ({"a": np.zeros(3), "b": 1}, 1.0, False, False, {})

    def __init__(self, mistake="", when="step"):
        self.mistake, self.when = mistake, when

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.answer((self.good[0], {}), self.when == "reset")

    def step(self, action):
        return self.answer(self.good, self.when == "step")

    def answer(self, good, is_wrong):
        return MISTAKES[self.mistake](good) if is_wrong else good


class Huge(Wrong):
    """Rewards are beyond float32."""

    good = (Wrong.good[0], 1e300, *Wrong.good[2:])

    def answer(self, good, is_wrong):
        return good


def _with_parts(**parts):
    return lambda good: ({**good[0], **parts}, *good[1:])


MISTAKES = {
    "four": lambda good: good[:4],
    "alone": lambda good: good[0],
    "none": lambda good: None,
    "no info": lambda good: (good[0], None),
    "shape": _with_parts(a=np.zeros(4)),
    "column": _with_parts(a=np.zeros((3, 1))),
    "ragged": _with_parts(a=[1, [2, 3]]),
    "text": _with_parts(a="three"),
    "complex": _with_parts(a=np.full(3, 1j)),
    "hole": _with_parts(a=[1, None, 3]),
    "above": _with_parts(b=3),
    "below": _with_parts(b=-1),
    "half": _with_parts(b=0.5),
    "part": lambda good: ({"a": good[0]["a"]}, *good[1:]),
    "array": lambda good: (np.zeros(4), *good[1:]),
    "reward": lambda good: (good[0], np.ones(2), *good[2:]),
    "no reward": lambda good: (good[0], None, *good[2:]),
    "reward of none": lambda good: (good[0], [None], *good[2:]),
    "complex reward": lambda good: (good[0], np.complex128(1j), *good[2:]),
}

register("Random-v0", entry_point=Random)
register("Wrong-v0", entry_point=Wrong)
