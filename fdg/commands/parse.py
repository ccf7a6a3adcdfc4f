"""Parses a command line to a checked `Job`.

Each setting of a run, each hyperparameter of the algorithm and each field of the policy is a flag. So parsing
has two steps: first the settings, which name the algorithm and the policy; then the flags of these two.
"""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from fdg.aliases import instead
from fdg.commands import base_config, preset_flags
from fdg.commands.flags import Flag, JobFlags, Words, flags_of, spellings
from fdg.commands.search_flags import check_searched, normalised_search, normalised_sweep
from fdg.errors import FdgError, one_line
from fdg.kinds import dataclass_fields, to_json
from fdg.processes import distributed
from fdg.running.host_devices import make_device_per_core, make_host_devices
from fdg.running.program_cache import keep_programs
from fdg.running.xla_options import choose_xla_options
from fdg.training import settings
from fdg.training.settings import AUTO, Names, Processes, Settings

_NAMES = ("algo", "env", "policy")  # settings whose values are names to resolve
# Flag that does not fit an automatic policy -> the error.
_AUTO_REFUSALS = {
    "staleness": "--policy {policy} chooses the staleness: use --max-staleness {value}, or"
    " name a policy, such as --policy single_learner_coarse",
    "lag": "--policy {policy} chooses among whole iterations (--max-staleness 1): name a policy, such as"
    " --policy split",
}


def parse(argv: Sequence[str], program: str, description: str) -> Any:
    """The `Job` of a command line; see `CommandLine.job`."""
    job, _ = CommandLine(argv).job(program, description)
    return job


class CommandLine:
    """The command line of a job.

    Attributes:
      flags: values of the settings on the command line and of the flags `extra`, by name; `job` adds the
        flags of the algorithm and of the policy.
    """

    def __init__(self, argv: Sequence[str], extra: Sequence[Flag] = ()):
        self._argv, self._words = argv, Words(argv)
        self.flags = self._words.take(JobFlags().parser(extra=extra, add_help=False))
        distributed.check_flags(self.flags)

    def join(self) -> None:
        """Joins a multi-process run if flags ask for it. Call it before `job`, which may start JAX."""
        flags = self.flags
        names = [flag.name for flag in flags_of(Processes) if flag.kind is not bool]
        values = {name: flags[name] for name in names if flags.get(name) is not None}
        if values or flags.get("distributed"):
            # Fail before waiting for the other processes.
            settings.check_divides(flags.get("devices"), flags.get("num_processes") or 1)
            distributed.initialize(**values)

    def job(self, program: str, description: str, runs: bool = True) -> tuple[Any, Any]:
        """The `Job` of this command line, and the `StoredRun` whose weights initialise it, or None.

        With `runs=False` the job is only planned and may be shorter than an iteration. Raises SystemExit
        after `--help` and `--show-preset`.
        """
        flags = self.flags
        # Path, content and settings of the starting configuration (`--resume`, `--from` or `--config`).
        file, base = base_config.base_of(flags)
        stored = settings.read_settings(file, base)
        max_host_devices = self._make_devices(stored, may_choose=not base)
        # The devices are configured above, since these imports may start JAX's backends and compile.
        from fdg.settings.fields import absolute_folder
        from fdg.settings.presets import HasPresets
        from fdg.training.description import build_algorithm, build_policy
        from fdg.training.job import Job
        from fdg.training.loading import StoredRun, inherit_fields, open_origin

        resolved = self._resolve(file, base, stored)
        cls, algo = resolved.cls, resolved.algo
        job_flags = JobFlags.of(cls, resolved.policy_class)
        parser = job_flags.parser(resolved.title, prog=program, description=description)
        self._refuse_flags_of_others(resolved, parser.options())
        shows_help = self._words.drop("-h", "--help")
        flags |= self._words.take(parser) if shows_help else parser.parse_strictly(self._words.remaining)
        flags |= {f.name: absolute_folder(f, flags[f.name]) for f in dataclass_fields(cls) if f.name in flags}
        overrides = {flag.name: flags[flag.name] for flag in job_flags.algorithm if flag.name in flags}
        inherited = _inherited_hyperparameters(file, base, algo, cls, flags)
        preset = preset_flags.starting_preset(
            cls, flags.get("preset"), resolved.bare_env_name, resolved.env, {**inherited, **overrides}
        )
        preset_values = dict(preset.values) if preset else {}
        if shows_help:
            job_flags = job_flags.with_defaults(preset_values)
            job_flags.parser(resolved.title, prog=program, description=description).print_help()
            raise SystemExit(0)
        if flags.get("show_preset"):
            table = preset_flags.preset_table(flags.get("preset"), preset, cls, algo, resolved.env_name)
            print(table, flush=True)
            raise SystemExit(0)
        if flags.get("sweep") is not None:
            flags["sweep"] = normalised_sweep(flags["sweep"], flags)
        if flags.get("search") is not None:
            flags["search"] = normalised_search(flags["search"], job_flags.algorithm, flags)
        if resumes := "resume" in flags:
            fixed = [*settings.kept_settings(Names, Settings), *overrides]
            base_config.check_agrees({name: flags[name] for name in fixed if name in flags}, base)

        resolver = dataclasses.replace(resolved.resolver, caller_values=flags)
        resolver.check_fields(cls, inherited)
        env = {} if resolved.env is None else {"env": resolved.env}
        requested = {**preset_values, **inherited, **overrides, **env}
        values = cls.adjust_unnamed(requested, overrides) if issubclass(cls, HasPresets) else requested
        adjusted = {
            name: v for name, v in values.items() if name not in requested or v is not requested[name]
        }
        merged = {**stored, **flags}
        run_settings = {flag.name: merged.get(flag.name, flag.default) for flag in job_flags.run}
        config = {
            "algo": algo,
            "env": None if resolved.env is None else resolved.env_name,
            "policy": resolved.policy,
            "policy_fields": self._policy_fields(file, base, resolved, job_flags),
            "staleness": merged.get("staleness", Names.staleness),
            "lag": merged.get("lag", Names.lag),
            "hyperparameters": values,
        }
        settings.check_settings({**run_settings, **config})
        resolver.check_trackers(run_settings)
        policy = build_policy(config, resolver)
        algorithm = build_algorithm({**run_settings, **config}, resolver)
        start, trust = None, flags.get("trust", False)
        if resumes:
            start = open_origin(file.parent, {**config, **values}, trust=trust)
        elif flags.get("start_from") is not None:
            start = StoredRun.open(flags["start_from"], {**config, **values}, trust=trust)
        if start is not None:
            algorithm = inherit_fields(algorithm, start)
        check_searched(algorithm, run_settings, job_flags.algorithm, resolver)
        # A configuration may have fields that have no flag.
        names = dict.fromkeys([*(flag.name for flag in job_flags.algorithm), *inherited])
        hyperparameters = {name: to_json(getattr(algorithm, name)) for name in names}
        out = flags.get("out")
        run_settings |= {
            "out": file.parent if resumes else None if out is None else Path(out),
            "devices_chosen": None if "devices" in flags else stored.get("devices_chosen"),
        }
        job = Job.make(
            algorithm,
            policy,
            {**config, "hyperparameters": hyperparameters},
            run_settings,
            runs,
            max_host_devices=max_host_devices,
            resumes=resumes,
            explains=merged.get("policy") is not None,
            record=base_config.record_of(program, self._argv, preset, adjusted, flags, base),
        )
        return job, start

    def _policy_fields(
        self, file: Path, base: Mapping[str, Any], resolved: "_ResolvedNames", job_flags: JobFlags
    ) -> dict[str, Any]:
        """The policy's fields by name: from flags, else the starting configuration, else defaults."""
        from fdg.training.description import read_fields

        for name, message in _AUTO_REFUSALS.items():
            if resolved.policy in AUTO and (value := self.flags.get(name)):
                settings.check_range(name, value)
                raise FdgError(f"--{name} {value}: {message.format(policy=resolved.policy, value=value)}")
        fields = {flag.name: flag.default for flag in job_flags.policy}
        if base.get("policy") == resolved.policy:  # the fields of another policy do not apply
            fields |= read_fields(file, "policy_fields", base, resolved.policy_class, resolved.policy)
        return fields | {name: self.flags[name] for name in fields if name in self.flags}

    def _make_devices(self, stored: Mapping[str, Any], may_choose: bool) -> int | None:
        """Configures host devices, one per core if fdg may choose their number (`may_choose`).

        Returns the largest number that fdg may choose; None if the number is fixed.
        """
        flags = self.flags
        keep_programs(flags.get("program_cache"))
        choose_xla_options(flags.get("xla_options"))
        devices = flags.get("devices", stored.get("devices"))
        if devices is not None:
            settings.check_range("devices", devices)
            settings.check_divides(devices, distributed.count())
            make_host_devices(devices // distributed.count())
        elif stored.get("devices_chosen") is not None and distributed.count() == 1:
            make_host_devices(stored["devices_chosen"])
        return make_device_per_core() if may_choose and devices is None and distributed.count() == 1 else None

    def _resolve(self, file: Path, base: Mapping[str, Any], stored: Mapping[str, Any]) -> "_ResolvedNames":
        """Resolves the names on the command line, or else in the starting configuration."""
        import envs
        from fdg.training.name_resolver import NameResolver

        flags, options = self.flags, self._words.options
        for name in _NAMES:
            if flags.get(name) == "":
                raise FdgError(f"--{name} is empty: give a name")
        has_memory = options.get("--memory", "none").lower() != "none"
        if has_memory and flags.get("algo", None if base else "ppo") == "ppo":
            flags["algo"] = "recurrent_ppo"
        if "env" in flags:  # absolute, so that the run can be loaded from any folder
            flags["env"] = envs.absolute(flags["env"])
        if "resume" in flags:
            base_config.check_agrees({name: flags[name] for name in _NAMES if name in flags}, base)
        merged: dict[str, Any] = {**stored, **flags}
        algo, env_name, policy = (merged.get(name) for name in _NAMES)
        algo = algo or Names.algo
        if policy is None:  # `gpu_only` if the command line has one of its flags
            policy = "gpu_only" if options.keys() & _policy_options("gpu_only") else Names.policy
        resolver = NameResolver(file if base else None, flags, flags.get("trust", False))
        cls, policy_class = resolver.algorithm_class(algo), resolver.policy_class(policy)
        has_env = any(field.name == "env" for field in dataclass_fields(cls))
        if env_name is None:
            env_name = str(getattr(cls, "default_env", Names.env))
            # An environment that the class names is trusted.
            resolver = dataclasses.replace(resolver, caller_values={**flags, "env": env_name})
        if flags.get("env_workers") is not None and not has_env:
            raise FdgError(f"--env-workers {flags['env_workers']}: {algo} has its own environment")
        if "env" in flags and not has_env:
            raise FdgError(
                f"--env {env_name}: {algo} has its own environment (no field 'env'): leave out --env"
            )
        bare_env_name, overrides = resolver.environment(env_name)
        if base and has_env and merged.get("env") is None:
            raise FdgError(f"{file} does not name an environment, and {algo} needs one: give --env")
        env = (
            _make_environment(bare_env_name, overrides, _num_workers(bare_env_name, flags, stored))
            if has_env
            else None
        )
        preset_flags.check_allowed(flags, "resume" in flags, base.get("algo") == algo)
        return _ResolvedNames(resolver, algo, cls, policy, policy_class, env_name, bare_env_name, env)

    def _refuse_flags_of_others(self, resolved: "_ResolvedNames", options: Container[str]) -> None:
        """Raises an error for a flag that only other algorithms or policies have."""
        import algos
        import policies

        for option in (option for option in self._words.options if option not in options):
            if owners := [name for name in (*policies.names(), "auto") if option in _policy_options(name)]:
                policy_flags = ", ".join(flag.option for flag in flags_of(resolved.policy_class)) or "none"
                raise FdgError(
                    f"unknown flag '{option}' under --policy {resolved.policy}, which has {policy_flags}:"
                    f" it is a flag of --policy {', '.join(owners)}: use such a policy, or leave the flag out"
                )
            flags = {name: flags_of(algos.get(name)) for name in algos.names()}
            if owners := [name for name in flags if any(option in spellings(flag) for flag in flags[name])]:
                note = " (PPO with a --memory)" if resolved.algo == "recurrent_ppo" else ""
                fix = f"{fix}; " if (fix := instead(option)) else ""
                raise FdgError(
                    f"unknown flag '{option}' under --algo {resolved.algo}{note}:"
                    f" {fix}it is a flag of --algo {', '.join(owners)}: use such an algorithm, or leave the"
                    " flag out"
                )


@dataclasses.dataclass(frozen=True)
class _ResolvedNames:
    """The names of a job, with their classes and environment."""

    resolver: Any  # the `NameResolver` of these names
    algo: str  # the algorithm's name
    cls: type  # the algorithm's class
    policy: str  # the policy's name
    policy_class: type  # the policy's class
    env_name: str  # the environment's name, with its parameters
    bare_env_name: str  # the environment's name without parameters
    env: Any  # the environment; None if the algorithm has no field `env`

    @property
    def title(self) -> str:
        """The title of the algorithm's flags in `--help`."""
        return f"hyperparameters of {self.algo}" + ("" if self.env is None else f" for {self.env_name}")


def _policy_options(policy: str) -> set[str]:
    """The flags of a policy, as on the command line."""
    import policies

    return {flag.option for flag in flags_of(policies.Auto if policy == "auto" else policies.get(policy))}


def _inherited_hyperparameters(
    file: Path, base: Mapping[str, Any], algo: str, cls: type, flags: Mapping[str, Any]
) -> dict[str, Any]:
    """Hyperparameters of the starting configuration; if the algorithm changes, only those of the network."""
    from fdg.settings.fields import NETWORK_FIELDS
    from fdg.training.description import read_fields

    if base.get("algo") != algo:
        if flags.get("start_from") is None:
            return {}
        network_fields = {field.name for field in dataclass_fields(cls)} & NETWORK_FIELDS
        inherited = {name: value for name, value in base["hyperparameters"].items() if name in network_fields}
        base = {"hyperparameters": inherited}
    return read_fields(file, "hyperparameters", base, cls, algo)


def _num_workers(name: str, flags: Mapping[str, Any], stored: Mapping[str, Any]) -> int | None:
    """The number of workers of an environment, or None if it has none."""
    from envs.registry import names_module

    count = flags.get("env_workers")
    settings.check_range("env_workers", count)
    if name.startswith(("ray:", "gymnasium:")):
        return count if "env_workers" in flags else stored.get("env_workers")
    if count is not None:
        reason = "runs in the program"
        if name.startswith("envpool:"):
            reason = "has threads: write ?num_threads=N"
        elif names_module(name):
            reason = f"has none: if it is a Gymnasium environment, write gymnasium:{name}"
        raise FdgError(
            f"--env-workers {count}: environments of ray: and gymnasium: have workers; '{name}' {reason}"
        )
    return None


def _make_environment(name: str, overrides: Mapping[str, Any], workers: int | None) -> Any:
    """Makes an environment. If it has parameters or is not registered, checks it without taking a step."""
    import envs
    from envs.text import is_text

    if workers is not None:
        overrides = {**overrides, "workers": workers}
    env = envs.make(name, **overrides)
    checks_parameters = name.startswith(("gymnasium:", "envpool:", "ray:"))
    is_checked = checks_parameters or is_text(env)
    if (overrides or name not in envs.names()) and not is_checked:
        parameters = "&".join(f"{key}={value}" for key, value in overrides.items())
        try:
            envs.check(env, steps=0)
        except FdgError:
            raise
        except Exception as error:
            raise FdgError(
                f"environment '{name}' does not work{parameters and f' with {parameters}'}: {one_line(error)}"
            ) from error
    return env
