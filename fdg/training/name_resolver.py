"""Resolves the names in configurations, without importing code that only an untrusted file names.

A run directory, a `--config` file and a `--from` run may come from another person, so their content is data:
numbers, strings, and names in the registries `algos`, `policies` and `envs`. Two kinds of values can do more:
`module:name`, which imports a user's module, and values that act outside this program (a Ray cluster, an
experiment tracker). These are accepted only if the caller gives the same value for the same field, or trusts
the file. A module that is imported already is not trusted either: the file would choose the arguments of its
functions. All code that reads such files resolves names here; see docs/security.md.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax

import algos
import envs
import policies
from envs import user_code
from fdg.errors import FdgError, UnknownNameError, unknown_name
from fdg.kinds import dataclass_fields
from fdg.training.data_copies import copied_dataset, copied_env_files
from fdg.training.settings import AUTO
from fdg.training.space import Choices, Space
from fdg.training.sweep import without_sweep

_MODULE = re.compile(r"[\w.\s-]+:")  # the module of `module:name`
_TRACKERS = ("wandb", "mlflow")


@dataclasses.dataclass(frozen=True)
class NameResolver:
    """Resolves the names that one source gives: the caller (the default), or a file."""

    # the source; None for the caller (command line or Python), who may name anything
    file: Path | None = None
    # values that the caller gives as well, by field (`algo`, `env`, `policy`, a hyperparameter); None if
    # the caller cannot give any
    named: Mapping[str, Any] | None = None
    trust: bool = False  # whether the caller trusts the file, which may then name anything
    # fields that the caller has a flag for, which messages name; None for all
    flags: Collection[str] | None = None

    def algorithm_class(self, name: Any) -> Any:
        """The class for `--algo`: one of `algos`, or a user's `module:Class`."""
        return self._class("algo", name, algos, ("init", "iterate"), "init(key) and iterate(state)")

    def policy_class(self, name: Any) -> Any:
        """The class of a policy: one of `policies`, that of `auto`, or a user's `module:Class`."""
        if name in AUTO:
            return policies.Auto
        try:
            return self._class("policy", name, policies, ("place",), "place(roles, devices)")
        except UnknownNameError:
            raise unknown_name("policy", name, (*policies.names(), *AUTO)) from None

    def environment(self, text: Any) -> tuple[str, dict[str, Any]]:
        """The name and the parameters of an environment, for `envs.make`."""
        name, parameters = envs.parse(text)
        if self.file is not None and (self.named or {}).get("env") != text:
            parameters = {**parameters, **copied_env_files(self.file.parent, name, parameters)}
        if not self._is_named("env", text) and (reason := envs.beyond_registries(name, parameters)):
            raise self._refused("env", text, reason)
        return name, parameters

    def kept(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """An algorithm's fields, with a data set replaced by its copy in the run directory."""
        if self.file is None or (self.named or {}).get("dataset") == values.get("dataset"):
            return dict(values)  # the caller's, or none
        return {**values, **copied_dataset(self.file.parent, values)}

    def check_fields(self, cls: Any, values: Mapping[str, Any]) -> None:
        """Refuses values of an algorithm's fields that would import a module."""
        holds = {field.name: field.metadata.get("holds") for field in dataclass_fields(cls)}

        def imports(name: str, text: str) -> bool:
            of_optimizer = holds.get(name) == "optimizer" and ":" in text
            return holds.get(name) == "network" or of_optimizer or _MODULE.match(text) is not None

        for name, value in values.items():
            texts = [one for one in jax.tree.leaves(value) if isinstance(one, str)]
            bad = next((one for one in texts if imports(name, one)), None)
            if bad is not None and not self._is_named(name, value):
                raise self._refused(name, value, _imports(bad))

    def check_trackers(self, values: Mapping[str, Any]) -> None:
        """Refuses to send metrics to a service that only a file names."""
        for name in _TRACKERS:
            value = values.get(name)
            if value is not None and not self._is_named(name, value):
                raise self._refused(name, value, "sends metrics to a service")

    def check_searched(self, algorithm: Any, text: str, space: Space) -> None:
        """Refuses a search over networks that only a file names."""
        if not self._is_named("search", text):
            for choices in (one for one in space if isinstance(one, Choices)):
                self.check_fields(type(without_sweep(algorithm)), {choices.name: choices.values})

    def _class(self, field: str, name: Any, registry: Any, methods: tuple[str, ...], signatures: str) -> Any:
        if not isinstance(name, str):
            where = "" if self.file is None else f"{self.file}: "
            raise FdgError(f"{where}{field} {name!r:.60} is not a name")
        if ":" not in name:
            return registry.get(name)
        for known in map(registry.get, registry.names()):
            if name == f"{known.__module__}:{known.__qualname__}":
                return known
        if not self._is_named(field, name):
            raise self._refused(field, name, _imports(name))
        kind = {"algo": "algorithm"}.get(field, field)
        found = user_code.found(kind, name, _has(methods))
        if not _has(methods)(found):
            article = "an" if kind == "algorithm" else "a"
            raise FdgError(
                f"--{field} {name}: {article} {kind} is a class with {signatures}, and this is not one"
            )
        return found

    def _is_named(self, field: str, value: Any) -> bool:
        return self.file is None or self.trust or (self.named or {}).get(field) == value

    def _refused(self, field: str, value: Any, reason: str) -> FdgError:
        has_flag = self.named is not None and (self.flags is None or field in self.flags)
        name = "" if not has_flag else f"pass --{field.replace('_', '-')} {value!s:.200} too, or "
        return FdgError(
            f"{self.file} has {field} = {value!s:.200}, which {reason}; a file alone may not ask for"
            f" that: {name}pass --trust (Python: trust=True)"
        )


CALLER = NameResolver()


def _imports(name: str) -> str:
    return f"imports the module {name.partition(':')[0].strip():.60}"


def _has(methods: tuple[str, ...]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)
    )
