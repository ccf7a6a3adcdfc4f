"""Mistakes in environments: (call, cause in the error message, fix in the error message)."""

import envs
from tests.mistakes import environments as faulty
from tests.mistakes.helpers import ENV, observation_first, ppo, trace_with, unpack

MISTAKES = {
    "a name as environment": (lambda: ppo(env="CartPole-v1"), "is a name", "envs.make('CartPole-v1')"),
    "a class as environment": (lambda: ppo(env=faulty.Corridor), "is a class", "envs.vectorize(Corridor())"),
    "one instance as environment": (
        lambda: ppo(env=faulty.Corridor()),
        "is one",
        "envs.vectorize(Corridor())",
    ),
    "vectorize a class": (lambda: envs.vectorize(faulty.Corridor), "a class", "envs.vectorize(Corridor())"),
    "vectorize a name": (lambda: envs.vectorize("CartPole-v1"), "is a name", "envs.make('CartPole-v1')"),
    "vectorize twice": (lambda: envs.vectorize(ENV), "is already vectorized", "leave out envs.vectorize"),
    "make what is made": (lambda: envs.make(ENV), "give a name", "use an Environment object as it is"),
    "an unknown name": (
        lambda: envs.make("CartPole-v2"),
        "unknown environment",
        "did you mean 'CartPole-v1'",
    ),
    "an unknown parameter": (
        lambda: envs.make("CartPole-v1", lenght=3),
        "unknown parameter 'lenght'",
        "takes",
    ),
    "no name": (lambda: envs.vectorize(faulty.WithoutName()), "has no name", "give its class name ="),
    "no step": (lambda: envs.vectorize(faulty.WithoutStep()), "has no step", "def step(self, key"),
    "does not hash": (lambda: envs.vectorize(faulty.HoldsAList()), "does not hash", "a frozen dataclass"),
    "a function as environment": (lambda: ppo(env=envs.make), "env=make is a function", "what it returns"),
    "step of an action": (
        lambda: envs.vectorize(faulty.TakesTheActionAlone()),
        "takes (action), but is called with (key, state, action)",
        "let it take these",
    ),
    "reset by a seed": (lambda: ENV.reset(seed=0), "unknown argument of reset 'seed'", "known: keys"),
    "step gives four": (faulty.StepReturnsFour, "step gives 4 values: return five", "one flag `done`"),
    "step gives six": (faulty.StepReturnsSix, "step gives 6 values: return five", "info is a dictionary"),
    "step gives a dict": (faulty.StepReturnsDict, "a value of type dict", "return five, (state, observation"),
    "reward is None": (faulty.NoReward, "step gives None as reward", "return five"),
    "reset gives one": (faulty.ResetGivesOne, "reset gives a value of type", "(state, observation)"),
    "reset as in Gymnasium": (faulty.ResetReturnsInfo, "type dict as observation", "in that order"),
    "somebody else's space": (faulty.ForeignSpace, "its action_space is", "envs.Discrete"),
    "a number as space": (faulty.SpaceAsANumber, "its action_space is 2", "envs.Discrete"),
    "half a step": (faulty.HalfStepLimit, "max_episode_steps is 2.5", "an integer of at least 1"),
    "a number as name": (faulty.NumberedName, "its name is 7", "give a string"),
    "if in step": (faulty.BranchesOnState, "line", "use jnp.where"),
    "a batch of pairs": (faulty.StepReturnsPair, "step gives", "envs.TimeStep"),
    "rewards of integers": (faulty.IntegerRewards, "reward as int32[4]", "it must be float32[4]"),
    "one flag for all": (faulty.ScalarFlag, "terminated as bool[]", "it must be bool[4]"),
    "a step without its state": (faulty.StepReturnsNoState, "an envs.TimeStep alone", "return (state, step)"),
    "observation of one": (faulty.ObservationWithoutBatch, "(1,)", "expected (4, 1)"),
    "state without batch": (faulty.StateWithoutBatch, "reset gives state[1]", "leading axis"),
    "self.t += 1 in step": (faulty.Counts, "step assigns self.t = 1, which was 0", "in the state"),
    "a count in a list": (faulty.Holds, "step assigns self.held[0] = 1, which was 0", "in the state"),
    "a count in an array": (faulty.HoldsAnArray, "step assigns self.held", "in the state"),
    "a count in its class": (faulty.CountsForItsClass, "self.__class__.t = 1, which was 0", "the state"),
    "a state that is kept": (faulty.KeepsTheState, "assigns self.kept[0], a traced value", "as a metric"),
    "a wider wrapper": (
        lambda: trace_with(faulty.Wider(ENV)),
        "wrapper Wider of environment 'corridor': begin gives a value of type float32[4, 2]",
        "expected (4, 1) of Box(low=0.0, high=3.0, shape=(1,), dtype='float32'): define observation_space",
    ),
    "a wrapper wider later": (
        lambda: trace_with(faulty.WiderLater(ENV)),
        "after gives",
        "define observation_",
    ),
    "a wrapper without a pair": (
        lambda: trace_with(faulty.BeginReturnsObservation(ENV)),
        "not float32[4, 1]",
        "return (state to keep, output)",
    ),
    "an environment and its parameters": (
        lambda: unpack(ENV),
        "does not unpack into environment and parameters",
        "parameters are arguments",
    ),
    "a wrapper and its parameters": (
        lambda: unpack(envs.FrameStack(ENV, 2)),
        "does not unpack into environment and parameters",
        "gravity=9.8",
    ),
    "a state for an observation": (
        observation_first,
        "step takes the state, but was given float32[2, 1]",
        "reset returns (state, observation)",
    ),
    "parameters in a name": (
        lambda: envs.make("CartPole-v1?frame_stack=4", gravity=9.0),
        "in Python, parameters are keywords",
        "envs.make('CartPole-v1', frame_stack=4, gravity=9.0)",
    ),
    **{
        f"the case of {name}": (lambda name=name: envs.make(name), f"unknown environment '{name}'", fix)
        for name, fix in {
            "Cartpole-v1": "did you mean 'CartPole-v1'?",
            "BREAKOUT-minatar": "did you mean 'Breakout-MinAtar'?",
            "halfcheetah-v4": "did you mean 'gymnasium:HalfCheetah-v4' or",
            "Hopper-V4": "did you mean 'gymnasium:Hopper-v4' or",
        }.items()
    },
    **{
        f"{option}={value!r} of {name}": (
            lambda name=name, option=option, value=value: envs.make(name, **{option: value}),
            f"{option}={value!r} must be",
            kind,
        )
        for name, option, value, kind in [
            ("CartPole-v1", "time_aware", "no", "True or False"),
            ("CartPole-v1", "time_aware", 0, "True or False"),
            ("gymnasium:CartPole-v1", "timeout", "60s", "a number"),
            ("gymnasium:CartPole-v1", "timeout", None, "a number"),
            ("gymnasium:CartPole-v1", "restarts", True, "an integer"),
            ("gymnasium:CartPole-v1", "max_episode_steps", "2h", "an integer or None"),
            ("gymnasium:CartPole-v1", "sutton_barto_reward", "no", "True or False"),
            ("text:addition", "max_response", "64t", "an integer or None"),
            ("text:addition", "padded", "yes", "True or False"),
            ("probe:memory", "delay", "two", "an integer"),
            ("brax:ant", "repeat_start", "no", "True or False"),
            ("MPE_simple_spread_v3", "agent_identity", "false", "True or False"),
            (f"{faulty.__name__}:parameters", "slippery", "no", "True or False"),
            (f"{faulty.__name__}:parameters", "loud", "false", "True or False"),
            (f"{faulty.__name__}:parameters", "size", "big", "an integer"),
        ]
    },
}
