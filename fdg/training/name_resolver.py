"""Resolves the names in configurations, without importing code that only an untrusted file names.

A run directory, a `--config` file and a `--from` run may come from another person, so their content is data:
numbers, strings, and names in the registries `algos`, `policies` and `envs`. Two kinds of values can do more:
`module:name`, which imports a user's module, and values that act outside this program (a Ray cluster, an
experiment tracker). They are accepted only if the caller gives the same value for the same field, or trusts
the file. A module that is already imported needs this permission too, because the file would choose the
arguments of its functions. All code that reads such files resolves names here; see docs/security.md.
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
from fdg.training.sweep import unwrap_sweep

_MODULE = re.compile(r"[\w.\s-]+:")  # the module of `module:name`
_TRACKERS = ("wandb", "mlflow")  # settings that send metrics to a service
_PRESET_VALUES = ("algos.explorers:SWINGING",)  # names in fdg's presets, which import only modules of fdg


@dataclasses.dataclass(frozen=True)
class NameResolver:
    """Resolves the names from one source: the caller (the default), or a file."""

    # the source; None for the caller (command line or Python), who may name anything
    file: Path | None = None
    # values that the caller gave, by field (`algo`, `env`, `policy`, a hyperparameter); None if the caller
    # cannot give values
    caller_values: Mapping[str, Any] | None = None
    trust: bool = False  # whether the caller trusts the file, which may then name anything
    # fields for which the caller has a flag that messages may name; None: all fields
    flags: Collection[str] | None = None

    def algorithm_class(self, name: Any) -> Any:
        """The class of an algorithm: from `algos`, or a user's `module:Class`."""
        return self._find_class("algo", name, algos, ("init", "iterate"), "init(key) and iterate(state)")

    def policy_class(self, name: Any) -> Any:
        """The class of a policy: from `policies` (with `auto`), or a user's `module:Class`."""
        if name in AUTO:
            return policies.Auto
        try:
            return self._find_class("policy", name, policies, ("place",), "place(roles, devices)")
        except UnknownNameError:
            raise unknown_name("policy", name, (*policies.names(), *AUTO)) from None

    def environment(self, text: Any) -> tuple[str, dict[str, Any]]:
        """The name and the parameters of an environment, for `envs.make`."""
        name, parameters = envs.parse(text)
        if self.file is not None and (self.caller_values or {}).get("env") != text:
            parameters = {**parameters, **copied_env_files(self.file.parent, name, parameters)}
        if not self._is_permitted("env", text) and (reason := envs.trust_reason(name, parameters)):
            raise self._refusal_error("env", text, reason)
        return name, parameters

    def with_dataset_of_run_directory(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """An algorithm's fields, with the run directory's copy of the data set in place of the data set."""
        if self.file is None or (self.caller_values or {}).get("dataset") == values.get("dataset"):
            return dict(values)  # the caller gave the data set, or there is none
        return {**values, **copied_dataset(self.file.parent, values)}

    def check_fields(self, cls: Any, values: Mapping[str, Any]) -> None:
        """Refuses values of an algorithm's fields that would import a module without permission."""
        content_kind = {field.name: field.metadata.get("holds") for field in dataclass_fields(cls)}

        def imports(name: str, text: str) -> bool:
            is_optimizer = content_kind.get(name) == "optimizer" and ":" in text
            return content_kind.get(name) == "network" or is_optimizer or _MODULE.match(text) is not None

        for name, value in values.items():
            texts = [x for x in jax.tree.leaves(value) if isinstance(x, str) and x not in _PRESET_VALUES]
            forbidden = next((text for text in texts if imports(name, text)), None)
            if forbidden is not None and not self._is_permitted(name, value):
                raise self._refusal_error(name, value, _import_reason(forbidden))

    def check_trackers(self, values: Mapping[str, Any]) -> None:
        """Refuses to send metrics to a service that only a file names."""
        for name in _TRACKERS:
            value = values.get(name)
            if value is not None and not self._is_permitted(name, value):
                raise self._refusal_error(name, value, "sends metrics to a service")

    def check_searched(self, algorithm: Any, text: str, space: Space) -> None:
        """Refuses a search over networks that only a file names."""
        if not self._is_permitted("search", text):
            for choices in (x for x in space if isinstance(x, Choices)):
                self.check_fields(type(unwrap_sweep(algorithm)), {choices.name: choices.values})

    def _find_class(self, field: str, name: Any, registry: Any, methods: tuple[str, ...], form: str) -> Any:
        """A class by its name in a registry or by `module:Class`; errors write its `methods` as `form`."""
        if not isinstance(name, str):
            prefix = "" if self.file is None else f"{self.file}: "
            raise FdgError(f"{prefix}{field} {name!r:.60} is not a name")
        if ":" not in name:
            return registry.get(name)
        for cls in map(registry.get, registry.names()):
            if name == f"{cls.__module__}:{cls.__qualname__}":
                return cls
        if not self._is_permitted(field, name):
            raise self._refusal_error(field, name, _import_reason(name))
        kind = {"algo": "algorithm"}.get(field, field)
        user_class = user_code.import_attribute(kind, name, _has_methods(methods))
        if not _has_methods(methods)(user_class):
            article = "an" if kind == "algorithm" else "a"
            raise FdgError(f"--{field} {name}: {article} {kind} is a class with {form}, and this is not one")
        return user_class

    def _is_permitted(self, field: str, value: Any) -> bool:
        """Whether the source may name a value: the caller gives the same value, or trusts the source."""
        return self.file is None or self.trust or (self.caller_values or {}).get(field) == value

    def _refusal_error(self, field: str, value: Any, reason: str) -> FdgError:
        has_flag = self.caller_values is not None and (self.flags is None or field in self.flags)
        fix = "" if not has_flag else f"pass --{field.replace('_', '-')} {value!s:.200} too, or "
        return FdgError(
            f"{self.file} has {field} = {value!s:.200}, which {reason}; a file alone may not ask for"
            f" that: {fix}pass --trust (Python: trust=True)"
        )


PERMIT_ALL = NameResolver()  # for names that the caller gives: it permits all of them


def _import_reason(name: str) -> str:
    return f"imports the module {name.partition(':')[0].strip():.60}"


def _has_methods(methods: tuple[str, ...]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)
    )
