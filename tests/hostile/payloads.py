"""Contents of hostile files: names of code that must not run, in many spellings, and invalid values."""

import json
import random
from pathlib import Path
from typing import Any

EVIL = """
import pathlib
pathlib.Path(r"{mark}").write_text("imported")
def thing(*given, **named):
    pathlib.Path(r"{mark}").write_text("called")
class Algo:
    steps_per_iteration = 1
    def __init__(self, **named):
        thing()
    def init(self, key):
        return thing()
    def iterate(self, state):
        return thing(), {{}}
    place = init
"""

_NAMES = tuple(
    """
    evilmod:thing evilmod:Algo evilpkg.sub:thing evilpkg:sub.thing evilmod evilpkg.sub subprocess:Popen
    subprocess:run subprocess:check_output os:system os:popen os:execv os:remove os:fork os:_exit os:kill
    posix:system pty:spawn shutil:rmtree runpy:run_path runpy:run_module importlib:import_module
    builtins:exec builtins:eval builtins:open builtins:__import__ builtins:input builtins:compile
    pickle:loads io:open ctypes:CDLL socket:create_connection urllib.request:urlopen webbrowser:open
    code:interact pdb:run timeit:timeit cProfile:run pydoc:locate pkgutil:resolve_name
    zipimport:zipimporter pathlib:Path.write_text pathlib:Path tempfile:mkdtemp logging.config:dictConfig
    site:addsitedir multiprocessing:Process concurrent.futures:ProcessPoolExecutor asyncio:run
    threading:Thread functools:partial operator:methodcaller operator:attrgetter types:FunctionType
    sys:exit numpy:load numpy:fromfile jax:pure_callback jax.export:deserialize
    orbax.checkpoint:Checkpointer gymnasium:make gymnasium:register optuna:create_study ray:init
    flax.linen:Module optax:adam envs.user_code:make envs.user_code:import_attribute envs.rendering:_module
    envs:make envs:register policies:get fdg.ctrl_c:evil fdg:load fdg:fit fdg.training.loading:load
    fdg.commands.cli:train_main algos.networks:_named algos:get algos:make algos.ppo:PPO
    policies.gpu_only:GPUOnly algos:PPO tests.tiny:Walk __main__:thing antigravity:geohash this:s
    idlelib.run:main lib2to3.main:main
    """.split()
)
_QUERIES = (
    *("?args=('touch','MARK')", "?command='touch MARK'", "?name='evilmod'", "?path_name='evilmod.py'"),
    *("?module=evilmod", "?name='evilmod:thing'&overrides={}", "?source=\"open('MARK','w')\""),
    *("?path='MARK'", "?file='MARK'&mode='w'", "?entry_point='evilmod:thing'", "?id='evilmod:X-v0'"),
    *("?render_mode='human'", "?xml_file='MARK'", "?vzd_path=evilmod", "?gravity=9.0"),
    *("?gravity='evilmod:thing'", "?backend='evilmod:thing'", "?length=1e400", "?length=1000000000"),
    *("?max_steps_in_episode=99999999999999999999", "?delay=((((1,),),),)", "?", "?&", "?=", "?a"),
    *("?a=b=c&a=d", "?__class__=1"),
)
_ENVIRONMENTS = (
    *("gymnasium:evilmod:X-v0", "gymnasium:gymnasium:evilmod:X-v0", "ray:gymnasium:evilmod:X-v0"),
    *("ray:ray:CartPole-v1", "ray:gymnasium:CartPole-v1", "gymnasium: evilmod:X-v0"),
    *("envpool:evilmod:X-v0", "envpool:D1Basic-v1", "envpool:Pong-v5", "gymnasium:CartPole-v1"),
    *("gymnasium:GymV26Environment-v0", "gymnasium:Hopper-v5", "gymnasium:ALE/Pong-v5", "gymnasium:"),
    *("MNISTBandit-bsuite", "jumanji:Sokoban-v0", "jumanji:Snake-v1", "brax:ant:evilmod", "brax:fast"),
    *("probe:memory", "text:file", "text:file?path=/etc/hostname", "text:file?path=/dev/zero"),
    *("text:file?path=MARK", "text:sorting?length=9", "text:file?path=http://127.0.0.1:9/x"),
    *("text:file?path=/dev/stdin", "text:file?path=evilmod.py", "text:reasoning_gym"),
    *(
        "text:reasoning_gym?dataset=evilmod",
        "verifiers:evilmod",
        "text:verifiers?environment=evilmod",
        "Pendulum-v1",
        "Breakout-MinAtar",
        "MPE_simple_v3",
    ),
    *("octax:brix", "CartPole-v1", "text:countdown?instruction=evilmod:thing"),
    *("probe:memory?delay=1000000", "DeepSea-bsuite?size=100000", "Craftax-Symbolic-v1"),
)
_ODD = (
    *("", " ", "\x00", "\n", "\x1b[2J\x1b]0;evil\x07", "../../../../tmp/evil", "/etc/passwd"),
    *("/dev/zero", "~", "file:///etc/passwd", "http://127.0.0.1:9/", "{{7*7}}", "{0.__class__}", "%s%n"),
    *("$(touch MARK)", "`touch MARK`", "; touch MARK", "| touch MARK", "-oProxyCommand=touch MARK"),
    *("--out=MARK", "\udcff", "ünï", "١", "a" * 100_000, "$\\frac", "$x^{$", "<script>alert(1)</script>"),
    *("log:1..2x999999", "learning_rate=log:1e-4..1e-2x999999", "learning_rate=1,2 discount=3"),
    *("network=evilmod:thing", "num_steps=2,4 network=evilmod:thing|none", "inf", "-inf", "nan", "NaN"),
    *("none", "null", "True", "best", "auto", "auto:measure", "python:exec"),
    *("!!python/object/apply:os.system ['touch MARK']", "__import__('os').system('touch MARK')"),
    "c__builtin__\neval",
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 1.5, -1e-3, 1e308, 1e400, float("nan"), 2**31, 2**32, 2**63),
    *(2**64, 10**30, 10**9, 10**6, 65_536, 65_537, [], {}, [None], [[]], [1, 2, 3], ["evilmod:thing"]),
    *({"evilmod:thing": 1}, [0] * 1000, {"__class__": "evilmod:Algo"}, {"py/object": "evilmod.Algo"}),
    *({"$ref": "MARK"}, {"entry_point": "evilmod:thing"}, [10**9]),
)
# Fields that some code may read, even if the file lacks them.
FIELDS = tuple(
    """
    network actor_network critic_network memory model reward_model decoder env env_workers algo policy
    policy_fields hyperparameters staleness sweep self_play search optuna halving exploit_every seed num_seeds
    devices devices_chosen eval_episodes total_steps tensorboard wandb mlflow profile out resume
    start_from from config trust preset preset_name follows versions resumes command program_cache
    xla_options coordinator_address num_processes distributed rebuilds logger tokenizer checkpoint_every
    id on_nan eval_every stop_at num_envs hidden activation git_commit host_reward measure may_change
    parameters model_parallel learners actors precision shuffle unroll cluster
    """.split()
)


def payload(draw: random.Random, mark: Path) -> str:
    """A string that names nothing, or code that must not run."""
    name = draw.choice(_NAMES)
    made = draw.choice(
        (
            lambda: name,
            lambda: name + draw.choice(_QUERIES),
            lambda: draw.choice(_ENVIRONMENTS),
            lambda: draw.choice(_ENVIRONMENTS).partition("?")[0] + draw.choice(_QUERIES),
            lambda: (
                draw.choice(("gymnasium:", "ray:", "envpool:", "text:", "brax:", "GYMNASIUM:", "gymnasium::"))
                + name
            ),
            lambda: draw.choice((" ", "\t", "\n", "\u200b", "\ufeff", ".", "..", ":", "./", "\x00")) + name,
            lambda: (
                name + draw.choice((" ", "\n", ".", ":", ".__init__", ".__globals__", "\x00", "()", ".py"))
            ),
            lambda: name.replace(
                ":", draw.choice(("：", ": ", " :", "::", ".", "/", "\\", "։", "#", "%3A", "\n:"))
            ),
            lambda: name.upper(),
            lambda: name.replace("e", draw.choice(("е", "ｅ", "𝐞"))),
            lambda: name.rpartition(":")[2],
            lambda: draw.choice(_ODD),
        )
    )()
    return made.replace("MARK", str(mark))


def value(draw: random.Random, mark: Path) -> Any:
    if draw.random() < 0.6:
        return payload(draw, mark)
    if draw.random() < 0.05:
        deep: Any = "evilmod:thing"
        for _ in range(draw.choice((10, 500))):
            deep = [deep] if draw.random() < 0.5 else {"a": deep}
        return deep
    return json.loads(json.dumps(draw.choice(_VALUES)).replace("MARK", str(mark)))


# Chat templates that loop, grow, access Python internals or files, or are invalid.
_DOUBLED = "{% for i in range(50) %}{% set ns.x = _ %}{% endfor %}{{ ns.x }}"
TEMPLATES = (
    "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "{{ 'a' * 8000000000 }}",
    "{{ (10 ** 10) ** (10 ** 8) }}",
    "{{ 'a'.center(9000000000) }}",
    "{{ 'a' | indent(9000000000, true) }}",
    "{% set ns = namespace(x='a') %}" + _DOUBLED.replace("_", "ns.x ~ ns.x"),
    "{% set ns = namespace(x=[1]) %}" + _DOUBLED.replace("_", "[ns.x, ns.x]"),
    "{% set ns = namespace(x={}) %}" + _DOUBLED.replace("_", "{1: ns.x, 2: ns.x}"),
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(70) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{{ messages[0].__init__ }}",
    "{{ '%0900000000d' % 1 }}",
    "{{ '{:900000000}'.format(1) }}",
    "{% if %}",
    "{{ " + "(" * 5000,
    "{{ lipsum(99999999) }}",
    "{{ (range(99999) | list) | join('x' * 99999) }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ raise_exception('no\nway') }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "",
)
