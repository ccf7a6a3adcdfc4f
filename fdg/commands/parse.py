"""From a command line to a checked `Job`.

Most flags are not written here: each hyperparameter of the chosen algorithm, and each field of the chosen
policy, is one. So a command line is read twice, the first time for the names alone.
"""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from fdg.aliases import instead
from fdg.commands import presets
from fdg.commands.construct import check_kind, construct, with_staleness
from fdg.commands.earlier import loggers_of, record_of, template_of
from fdg.commands.flags import (
    Flag,
    Parser,
    add_aliases,
    dataclass_fields,
    fields_of,
    normalise,
    to_json,
    written,
)
from fdg.commands.memory import with_memory
from fdg.commands.run_flags import (
    DEVICES_CHOSEN,
    FREE_ON_RESUME,
    MACHINE,
    NAMES,
    PROCESSES,
    RUN,
    STALENESS,
    TOTAL_STEPS,
    JobFlags,
    add_flags,
)
from fdg.commands.stored import check_agrees, earlier_run, part
from fdg.commands.sweeping import check_searched, spelled_search, spelled_sweep, with_sweep
from fdg.errors import FdgError, UnknownNameError, one_line, unknown_name
from fdg.processes import distributed
from fdg.running.host_devices import device_a_core, make_host_devices
from fdg.running.program_cache import keep_programs
from fdg.running.xla_options import choose_xla_options
from fdg.training.job import MOST_DEVICES, Job, at_least, check_divides, check_run, lengths

_AUTO = ("auto", "auto:measure")


def join(argv: Sequence[str]) -> None:
    """Makes this process one of several, if the command line says so; before `parse`, which may start JAX.

    Raises:
      FdgError: as `distributed.initialize`, or the flags do not fit together.
    """
    first = Parser(add_help=False, allow_abbrev=False)
    add_flags(first, (*RUN, *PROCESSES))
    add_aliases(first, RUN)
    given = vars(first.parse_known_args(normalise(argv))[0])
    distributed.check(given)
    triple = {
        flag.name: given[flag.name]
        for flag in PROCESSES
        if given.get(flag.name) is not None and flag.kind is not bool
    }
    if triple or given.get("distributed"):
        check_divides(given.get("devices"), given.get("num_processes") or 1)  # sooner than all are there
        distributed.initialize(**triple)


def parse(argv: Sequence[str], program: str, description: str, runs: bool = True) -> Job:
    """Reads and checks a command line.

    Args:
      argv: the words after the program's name.
      program: its name, for `--help`.
      description: what it does, for `--help`.
      runs: whether the job will run; a plan may be of a job that is too short to.

    Raises:
      FdgError: with the one line to show.
      SystemExit: after `--help`.
    """
    words = normalise(argv)
    first = Parser(add_help=False, allow_abbrev=False)
    add_flags(first, (*NAMES, *presets.FLAGS, *RUN, *MACHINE, *PROCESSES))
    add_aliases(first, (*NAMES, *RUN))
    words, early = with_memory(words, vars(first.parse_known_args(words)[0]))
    distributed.check(early)
    stored_flags = (*NAMES, *RUN, STALENESS, TOTAL_STEPS, DEVICES_CHOSEN)
    out, stored = earlier_run(early, stored_flags)
    template, file = template_of(early, stored_flags)
    if stored:
        assert out is not None
        file = out / "config.json"
    if stored.get("rebuilds") is False:
        raise FdgError(
            f"--resume {out} was trained from Python, with what a file cannot say: go on from there,"
            f" with fdg.fit(..., out={str(out)!r}, resume=True)"
        )
    base = stored or template  # what is not given is as it was there
    known = {**base, **early}
    # Before the imports below, which may start JAX's backends and compile.
    keep_programs(early.get("program_cache"))
    choose_xla_options(early.get("xla_options"))
    if known.get("devices") is not None:
        at_least(1, devices=known["devices"])
        if known["devices"] > MOST_DEVICES:
            raise FdgError(f"--devices {known['devices']}: it must be at most {MOST_DEVICES}")
        check_divides(known["devices"], distributed.count())
        make_host_devices(known["devices"] // distributed.count())
    chosen_before = stored.get("devices_chosen")
    at_least(1, devices_chosen=chosen_before)
    choosing = distributed.count() == 1 and known.get("devices") is None and not stored
    cores = device_a_core() if choosing else None
    if chosen_before is not None and known.get("devices") is None:
        make_host_devices(chosen_before)

    from algos.hyperparameters import absolute_folder
    from fdg.training.said import Said
    from fdg.training.sweep import agent_count

    for flag in NAMES:
        if known.get(flag.name) == "":
            raise FdgError(f"{flag.option}: give a name")
    if "env" in early:  # so that the run can be used from any folder
        import envs

        early["env"] = known["env"] = envs.absolute(early["env"])
    named = {flag.name: early[flag.name] for flag in NAMES if flag.name in early}
    if stored:
        check_agrees(named, stored, FREE_ON_RESUME)
    said = Said(file if base else None, early, early.get("trust", False))
    algo, env_name, policy_name = (known.get(flag.name) or flag.default for flag in NAMES)
    if known.get("policy") is None:
        policy_name = _unnamed_policy(words)
    is_auto = policy_name in _AUTO
    chosen, policy_class = said.algorithm_class(algo), _policy_class(policy_name, said)
    if known.get("env") is None:
        env_name = getattr(chosen, "default_env", env_name)
        said = dataclasses.replace(said, named={**early, "env": env_name})  # the class does
    has_env = any(field.name == "env" for field in dataclass_fields(chosen))
    if early.get("env_workers") is not None and not has_env:
        raise FdgError(f"--env-workers {early['env_workers']}: {algo} has its own environment")
    if "env" in early and not has_env:
        raise FdgError(f"--env {env_name}: {algo} has its own environment (no field 'env')")
    registered_name, overrides = said.environment(env_name)
    if base and has_env and known.get("env") is None:
        raise FdgError(f"{file} names no environment, and {algo} needs one: say which by --env")
    env = (
        {"env": _environment(registered_name, overrides, _workers(registered_name, early, base))}
        if has_env
        else {}
    )
    check_kind(chosen, algo, env.get("env"))
    presets.check_allowed(early, bool(stored), base.get("algo") == algo)
    earlier = _hyperparameters(file, base, algo, fields_of(chosen), early)
    found = presets.chosen(chosen, early.get("preset"), registered_name, env.get("env"), words, earlier)
    preset = dict(found.values) if found else {}

    flags = JobFlags.of(chosen, policy_class, is_auto, preset)
    own_flags, policy_flags, run_flags = flags.own, flags.policy, flags.run
    what = f"hyperparameters of {algo}" + (f" for {env_name}" if has_env else "")
    parser = flags.parser(what, prog=program, description=description)
    _check_policy_flags(words, policy_name, policy_class, [*policy_flags, STALENESS, *own_flags])
    _check_algorithm_flags(words, algo, parser.options())
    given = parser.parse_strictly(words)
    given |= {name: early[name] for name in given.keys() & {"env"}}
    given |= {f.name: absolute_folder(f, given[f.name]) for f in dataclass_fields(chosen) if f.name in given}
    if given.get("show_preset"):
        if early.get("preset") == "none":
            found = presets.defaults(chosen)
        print(presets.table(found, algo, env_name, fields_of(chosen), presets.known(chosen)), flush=True)
        raise SystemExit(0)
    for flag in (
        *presets.FLAGS,
        *MACHINE,
        *PROCESSES,
    ):  # they say how it is carried out, and no run is bound to them
        given.pop(flag.name, None)
    start_from = given.pop("start_from", None)
    given.pop("config", None)
    if given.get("sweep") is not None:
        given["sweep"] = spelled_sweep(given["sweep"], given)
    if given.get("search") is not None:
        given["search"] = spelled_search(given["search"], own_flags, given)
    if stored:
        check_agrees(given, stored, FREE_ON_RESUME | {flag.name for flag in policy_flags})

    said = dataclasses.replace(said, named=given)
    said.check_fields(chosen, earlier)
    now = {flag.name: given[flag.name] for flag in own_flags if flag.name in given}
    asked = {**preset, **earlier, **now, **env}
    values = presets.settled(chosen, asked, now)
    algorithm = construct(chosen, algo, values)
    follows = {name: value for name, value in values.items() if name not in asked or value is not asked[name]}
    # The fields of another policy than this one mean nothing to it.
    same = base.get("policy") == policy_name
    kept = part(file, "policy_fields", base, policy_flags, policy_name) if same else {}
    if is_auto and given.get("staleness"):
        at_least(0, staleness=given["staleness"])
        raise FdgError(
            f"--staleness {given['staleness']}: under --policy {policy_name} it is the most that may be"
            f" chosen: use --max-staleness {given['staleness']}, or name a policy, such as"
            " --policy single_learner_coarse"
        )
    policy_fields = {flag.name: {**kept, **given}.get(flag.name, flag.default) for flag in policy_flags}
    run = {flag.name: {**base, **given}.get(flag.name, flag.default) for flag in (STALENESS, *run_flags)}
    run.pop("out")
    check_run(run)
    said.check_trackers(run)
    policy_values = with_staleness(policy_class, policy_name, policy_fields, run)
    if policy_name == "auto:measure":
        policy_values = {**policy_values, "measure": True}
    policy = construct(policy_class, policy_name, policy_values)
    algorithm = with_sweep(algorithm, run)
    check_searched(algorithm, run, own_flags, said)
    num_iterations, steps_per_iteration = lengths(algorithm, algo, run.get("total_steps"), runs)
    return Job(
        algorithm=algorithm,
        policy=policy,
        devices=run["devices"],
        cores=cores,
        chosen=chosen_before,
        seed=run["seed"],
        agents=agent_count(algorithm, run["num_seeds"]),
        num_iterations=num_iterations,
        steps_per_iteration=steps_per_iteration,
        eval_episodes=run["eval_episodes"],
        checkpoint_every=run["checkpoint_every"],
        out=out,
        resumes=bool(stored),
        profiles=run.pop("profile"),
        draws_timeline=run.pop("timeline"),
        on_nan=run["on_nan"],
        start_from=None if start_from is None else Path(start_from),
        trust=early.get("trust", False),
        eval_every=run["eval_every"],
        stop_at=run["stop_at"],
        loggers=loggers_of(run),
        explains=known.get("policy") is not None,
        record=record_of(program, argv, preset, found.name if found else None, early, base)
        | ({"follows": follows} if follows else {}),
        config={
            "algo": algo,
            "env": env_name if has_env else None,
            "policy": policy_name,
            "policy_fields": policy_fields,
            **run,
            "hyperparameters": {flag.name: to_json(getattr(algorithm, flag.name)) for flag in own_flags},
        },
    )


def _hyperparameters(
    file: Path, base: Mapping[str, Any], algo: str, flags: Sequence[Flag], early: Mapping[str, Any]
) -> dict[str, Any]:
    """An earlier run's: all of one of this algorithm; of another one that gives weights, its network's."""
    from algos.hyperparameters import OF_NETWORK

    if base.get("algo") == algo:
        return part(file, "hyperparameters", base, flags, algo)
    if early.get("start_from") is None:
        return {}
    shared = [flag for flag in flags if flag.name in OF_NETWORK & base["hyperparameters"].keys()]
    kept = {flag.name: base["hyperparameters"][flag.name] for flag in shared}
    return part(file, "hyperparameters", {"hyperparameters": kept}, shared, algo)


def _workers(name: str, early: Mapping[str, Any], base: Mapping[str, Any]) -> int | None:
    """How many workers an environment was asked to have; None where it has none, or chooses itself."""
    asked = early.get("env_workers")
    at_least(1, env_workers=asked)
    if name.startswith(("ray:", "gymnasium:")):
        return asked if "env_workers" in early else base.get("env_workers")
    if asked is not None:
        what = "has threads: write ?num_threads=N" if name.startswith("envpool:") else "runs in the program"
        raise FdgError(
            f"--env-workers {asked}: environments of ray: and gymnasium: have workers; '{name}' {what}"
        )
    return None


def _environment(name: str, overrides: Mapping[str, Any], workers: int | None) -> Any:
    """An environment; parameters that are not its defaults are tried out on it, without running a step."""
    import envs
    from envs.text import is_text

    if workers is not None:
        overrides = {**overrides, "workers": workers}
    made = envs.make(name, **overrides)
    looks_itself = name.startswith(("gymnasium:", "envpool:", "ray:"))  # at its parameters
    by_itself = looks_itself or is_text(made)
    if (overrides or name not in envs.names()) and not by_itself:
        given = "&".join(f"{key}={value}" for key, value in overrides.items())
        try:
            envs.check(made, steps=0)
        except FdgError:
            raise
        except Exception as error:
            raise FdgError(f"environment '{name}' does not work with {given}: {one_line(error)}") from error
    return made


def _unnamed_policy(words: Sequence[str]) -> str:
    """The policy where none is named: `gpu_only` if a flag of its own is given, else one that is chosen."""
    import policies

    own = {f"--{flag.name.replace('_', '-')}" for flag in fields_of(policies.GPUOnly)}
    return "gpu_only" if own & {word.partition("=")[0] for word in words} else "auto"


def _policy_class(name: str, said: Any) -> type:
    """The class of a policy, or that of `auto`.

    Args:
      name: of the policy.
      said: who says so, a `Said`.

    Raises:
      FdgError: there is none; says the nearest.
    """
    import policies

    if name in _AUTO:
        return policies.Auto
    try:
        return said.policy_class(name)
    except UnknownNameError:
        raise unknown_name("policy", name, (*policies.names(), *_AUTO)) from None


def _check_algorithm_flags(words: Sequence[str], algo: str, known: Container[str]) -> None:
    """Refuses a flag that only other algorithms have.

    Args:
      words: of the command line, normalised.
      algo: the algorithm's name.
      known: every flag of this command line, as it is written.
    """
    import algos

    for option in [word.partition("=")[0] for word in words if word.startswith("--")]:
        if option in known:
            continue
        owners = [
            other
            for other in algos.names()
            if any(option in written(flag) for flag in fields_of(algos.get(other)))
        ]
        if owners:
            became = ", which PPO with a --memory is" if algo == "recurrent_ppo" else ""
            fix = f"{fix}; " if (fix := instead(option)) else ""
            raise FdgError(
                f"unknown flag '{option}' under --algo {algo}{became}:"
                f" {fix}it is a flag of --algo {', '.join(owners)}"
            )


def _check_policy_flags(
    words: Sequence[str], policy_name: str, policy_class: type, known: Sequence[Flag]
) -> None:
    """Refuses a flag that only other policies have."""
    import policies

    mine = {flag.name for flag in known}
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    for option in options:
        name = option.removeprefix("--").replace("-", "_")
        owners = [
            other
            for other in policies.names()
            if any(flag.name == name for flag in fields_of(policies.get(other)))
        ]
        if owners and name not in mine:
            own = [f"--{flag.name.replace('_', '-')}" for flag in fields_of(policy_class)]
            raise FdgError(
                f"unknown flag '{option}' under --policy {policy_name}, which has {', '.join(own) or 'none'}:"
                f" it is a flag of --policy {', '.join(owners)}"
            )
