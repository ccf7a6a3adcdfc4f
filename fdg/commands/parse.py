"""Parses a command line to a checked `Job`.

Each setting of a run, each hyperparameter of the algorithm and each field of the policy is a flag. So parsing
has two steps: first the settings, which name the algorithm and the policy, then the remaining flags, which
are those of these two.
"""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from fdg.aliases import instead
from fdg.commands import earlier, preset_flags
from fdg.commands.flags import Flag, JobFlags, Words, fields_of, spellings
from fdg.commands.search_flags import check_searched, normalised_search, normalised_sweep
from fdg.errors import FdgError, one_line
from fdg.kinds import dataclass_fields, to_json
from fdg.processes import distributed
from fdg.running.host_devices import device_a_core, make_host_devices
from fdg.running.program_cache import keep_programs
from fdg.running.xla_options import choose_xla_options
from fdg.training import settings
from fdg.training.settings import AUTO, Names, Processes, Settings

_KEPT = settings.kept_settings(Names, Settings)
_NAMES = ("algo", "env", "policy")
_REFUSED_BY_AUTO = {
    "staleness": "under --policy {policy} it is the most that may be chosen: use --max-staleness {value}, or"
    " name a policy, such as --policy single_learner_coarse",
    "lag": "--policy {policy} chooses among whole iterations (--max-staleness 1): name a policy, such as"
    " --policy split",
}


def parse(argv: Sequence[str], program: str, description: str, runs: bool = True) -> Any:
    """The `Job` of a command line.

    With `runs=False` the job is only planned, and may be shorter than an iteration. Raises SystemExit after
    `--help`.
    """
    return CommandLine(argv).job(program, description, runs)


class CommandLine:
    """The command line of a job.

    Attributes:
      given: the given settings by name; `job` adds the others.

    Flags of `more` are in `given`, too.
    """

    def __init__(self, argv: Sequence[str], more: Sequence[Flag] = ()):
        self._argv, self._words = argv, Words(argv)
        self.given = self._words.take(JobFlags().parser(more=more, add_help=False))
        distributed.check_flags(self.given)

    def join(self) -> None:
        """Joins a multi-process run if the command line says so; before `job`, which may start JAX."""
        given = self.given
        named = {flag.name: given.get(flag.name) for flag in fields_of(Processes) if flag.kind is not bool}
        triple = {name: value for name, value in named.items() if value is not None}
        if triple or given.get("distributed"):
            # Sooner than all are there.
            settings.check_divides(given.get("devices"), given.get("num_processes") or 1)
            distributed.initialize(**triple)

    def job(self, program: str, description: str, runs: bool = True) -> Any:
        """The job; arguments and errors as for `parse`."""
        given = self.given
        file, base = earlier.base_of(given)
        before = settings.read_settings(file, base)  # settings that are not given keep their old values
        cores = self._make_devices(before, chooses=not base)
        # Before the imports below, which may start JAX's backends and compile.
        from fdg.settings.fields import absolute_folder
        from fdg.settings.presets import HasPresets
        from fdg.training.description import build_algorithm, build_policy
        from fdg.training.job import Job
        from fdg.training.starting import take_over_fields

        of = self._resolve(file, base, before)
        cls, algo = of.cls, of.algo
        flags = JobFlags.of(cls, of.policy_class, of.policy in AUTO)
        parser = flags.parser(of.title, prog=program, description=description)
        self._check_owners(of, parser.options())
        helps = self._words.drop("-h", "--help")
        given |= self._words.take(parser) if helps else self._words.take_all(parser)
        given |= {f.name: absolute_folder(f, given[f.name]) for f in dataclass_fields(cls) if f.name in given}
        own = {flag.name: given[flag.name] for flag in flags.own if flag.name in given}
        kept = _hyperparameters(file, base, algo, cls, given)
        preset = preset_flags.starting_preset(
            cls, given.get("preset"), of.registered, of.env, {**kept, **own}
        )
        begun = dict(preset.values) if preset else {}
        if helps:
            flags = flags.beginning_with(begun)
            flags.parser(of.title, prog=program, description=description).print_help()
            raise SystemExit(0)
        if given.get("show_preset"):
            shown = preset_flags.defaults(cls) if given.get("preset") == "none" else preset
            print(
                preset_flags.preset_table(
                    shown, algo, of.env_name, fields_of(cls), preset_flags.preset_names(cls)
                ),
                flush=True,
            )
            raise SystemExit(0)
        if given.get("sweep") is not None:
            given["sweep"] = normalised_sweep(given["sweep"], given)
        if given.get("search") is not None:
            given["search"] = normalised_search(given["search"], flags.own, given)
        if resumes := "resume" in given:
            earlier.check_agrees({name: given[name] for name in [*_KEPT, *own] if name in given}, base)

        resolver = dataclasses.replace(of.resolver, named=given)
        resolver.check_fields(cls, kept)
        asked = {**begun, **kept, **own, **({} if of.env is None else {"env": of.env})}
        values = cls.adjust_unnamed(asked, own) if issubclass(cls, HasPresets) else asked
        follows = {
            name: value for name, value in values.items() if name not in asked or value is not asked[name]
        }
        known = {**before, **given}
        run = {flag.name: known.get(flag.name, flag.default) for flag in flags.run}
        config = {
            "algo": algo,
            "env": None if of.env is None else of.env_name,
            "policy": of.policy,
            "policy_fields": self._policy_fields(file, base, of, flags),
            "staleness": known.get("staleness", Names.staleness),
            "lag": known.get("lag", Names.lag),
            "hyperparameters": values,
        }
        settings.check({**run, **config})
        resolver.check_trackers(run)
        policy = build_policy(config, resolver)
        algorithm = build_algorithm({**run, **config}, resolver)
        if given.get("start_from") is not None:
            trust = given.get("trust", False)
            algorithm = take_over_fields(algorithm, given["start_from"], {**config, **values}, trust)
        check_searched(algorithm, run, flags.own, resolver)
        names = dict.fromkeys([*(flag.name for flag in flags.own), *kept])  # a file may have more than flags
        hyperparameters = {name: to_json(getattr(algorithm, name)) for name in names}
        out = given.get("out")
        run |= {
            "out": file.parent if resumes else None if out is None else Path(out),
            "devices_chosen": None if "devices" in given else before.get("devices_chosen"),
        }
        return Job.make(
            algorithm,
            policy,
            {**config, "hyperparameters": hyperparameters},
            run,
            runs,
            cores=cores,
            resumes=resumes,
            start_from=Path(given["start_from"]) if given.get("start_from") is not None else None,
            trust=given.get("trust", False),
            explains=known.get("policy") is not None,
            record=earlier.record_of(program, self._argv, preset, follows, given, base),
        )

    def _policy_fields(
        self, file: Path, base: Mapping[str, Any], of: "_Resolved", flags: JobFlags
    ) -> dict[str, Any]:
        from fdg.training.description import read_fields

        for name, said in _REFUSED_BY_AUTO.items():
            if of.policy in AUTO and (value := self.given.get(name)):
                settings.check_range(name, value)
                raise FdgError(f"--{name} {value}: {said.format(policy=of.policy, value=value)}")
        fields = {flag.name: flag.default for flag in flags.policy}
        if base.get("policy") == of.policy:  # the fields of another mean nothing to it
            fields |= read_fields(file, "policy_fields", base, of.policy_class, of.policy)
        return fields | {name: self.given[name] for name in fields if name in self.given}

    def _make_devices(self, before: Mapping[str, Any], chooses: bool) -> int | None:
        """Configures host devices; returns how many there are to choose from, or None."""
        given = self.given
        keep_programs(given.get("program_cache"))
        choose_xla_options(given.get("xla_options"))
        devices = given.get("devices", before.get("devices"))
        if devices is not None:
            settings.check_range("devices", devices)
            settings.check_divides(devices, distributed.count())
            make_host_devices(devices // distributed.count())
        elif before.get("devices_chosen") is not None:
            make_host_devices(before["devices_chosen"])
        return device_a_core() if chooses and devices is None and distributed.count() == 1 else None

    def _resolve(self, file: Path, base: Mapping[str, Any], before: Mapping[str, Any]) -> "_Resolved":
        """Resolves the names on the command line, or else those of the configuration that it starts from."""
        import envs
        from fdg.training.name_resolver import NameResolver

        given, options = self.given, self._words.options
        for name in _NAMES:
            if given.get(name) == "":
                raise FdgError(f"--{name}: give a name")
        has_memory = options.get("--memory", "none").lower() != "none"
        if has_memory and given.get("algo", None if base else "ppo") == "ppo":
            given["algo"] = "recurrent_ppo"
        if "env" in given:  # so that the run can be used from any folder
            given["env"] = envs.absolute(given["env"])
        if "resume" in given:
            earlier.check_agrees({name: given[name] for name in _NAMES if name in given}, base)
        known: dict[str, Any] = {**before, **given}
        algo, env_name, policy = (known.get(name) for name in _NAMES)
        algo = algo or Names.algo
        if policy is None:  # `gpu_only` if a flag of that policy is given, else chosen
            policy = "gpu_only" if options.keys() & _options_of("gpu_only") else Names.policy
        resolver = NameResolver(file if base else None, given, given.get("trust", False))
        cls, policy_class = resolver.algorithm_class(algo), resolver.policy_class(policy)
        has_env = any(field.name == "env" for field in dataclass_fields(cls))
        if env_name is None:
            env_name = str(getattr(cls, "default_env", Names.env))
            resolver = dataclasses.replace(resolver, named={**given, "env": env_name})  # the class does
        if given.get("env_workers") is not None and not has_env:
            raise FdgError(f"--env-workers {given['env_workers']}: {algo} has its own environment")
        if "env" in given and not has_env:
            raise FdgError(f"--env {env_name}: {algo} has its own environment (no field 'env')")
        registered, overrides = resolver.environment(env_name)
        if base and has_env and known.get("env") is None:
            raise FdgError(f"{file} names no environment, and {algo} needs one: say which by --env")
        env = _environment(registered, overrides, _workers(registered, given, before)) if has_env else None
        preset_flags.check_allowed(given, "resume" in given, base.get("algo") == algo)
        return _Resolved(resolver, algo, cls, policy, policy_class, env_name, registered, env)

    def _check_owners(self, of: "_Resolved", known: Container[str]) -> None:
        """Refuses a flag that only other algorithms or policies have."""
        import algos
        import policies

        for option in (option for option in self._words.options if option not in known):
            if owners := [name for name in (*policies.names(), "auto") if option in _options_of(name)]:
                has = ", ".join(flag.option for flag in fields_of(of.policy_class)) or "none"
                raise FdgError(
                    f"unknown flag '{option}' under --policy {of.policy}, which has {has}:"
                    f" it is a flag of --policy {', '.join(owners)}"
                )
            owners = [
                name
                for name in algos.names()
                if any(option in spellings(flag) for flag in fields_of(algos.get(name)))
            ]
            if owners:
                became = ", which PPO with a --memory is" if of.algo == "recurrent_ppo" else ""
                fix = f"{fix}; " if (fix := instead(option)) else ""
                raise FdgError(
                    f"unknown flag '{option}' under --algo {of.algo}{became}:"
                    f" {fix}it is a flag of --algo {', '.join(owners)}: use one of these, or leave it out"
                )


@dataclasses.dataclass(frozen=True)
class _Resolved:
    """The classes and the environment that a job's names stand for."""

    resolver: Any  # the `NameResolver` of these names
    algo: str  # the algorithm's name
    cls: type  # its class
    policy: str  # the policy's name
    policy_class: type  # its class
    env_name: str  # the environment's name, with its parameters
    registered: str  # its name without parameters
    env: Any  # the environment; None if the algorithm has its own

    @property
    def title(self) -> str:
        """The title of the algorithm's flags in `--help`."""
        return f"hyperparameters of {self.algo}" + ("" if self.env is None else f" for {self.env_name}")


def _options_of(policy: str) -> set[str]:
    """The flags of a policy's fields."""
    import policies

    return {flag.option for flag in fields_of(policies.Auto if policy == "auto" else policies.get(policy))}


def _hyperparameters(
    file: Path, base: Mapping[str, Any], algo: str, cls: type, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Hyperparameters of an earlier run: all for the same algorithm, else those of its network."""
    from fdg.settings.fields import OF_NETWORK
    from fdg.training.description import read_fields

    if base.get("algo") != algo:
        if given.get("start_from") is None:
            return {}
        shared = {field.name for field in dataclass_fields(cls)} & OF_NETWORK
        there = {name: value for name, value in base["hyperparameters"].items() if name in shared}
        base = {"hyperparameters": there}
    return read_fields(file, "hyperparameters", base, cls, algo)


def _workers(name: str, given: Mapping[str, Any], before: Mapping[str, Any]) -> int | None:
    """The number of workers that an environment was given, or None."""
    asked = given.get("env_workers")
    settings.check_range("env_workers", asked)
    if name.startswith(("ray:", "gymnasium:")):
        return asked if "env_workers" in given else before.get("env_workers")
    if asked is not None:
        what = "has threads: write ?num_threads=N" if name.startswith("envpool:") else "runs in the program"
        raise FdgError(
            f"--env-workers {asked}: environments of ray: and gymnasium: have workers; '{name}' {what}"
        )
    return None


def _environment(name: str, overrides: Mapping[str, Any], workers: int | None) -> Any:
    """Makes an environment and tries parameters that are not defaults, without running a step."""
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
