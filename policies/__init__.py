"""Distribution policies: small values that map each role to devices. Each policy has its own file."""

import dataclasses
import re
from typing import Any

from fdg.aliases import not_a_policy
from fdg.arguments import checked_names, explain_frozen, quoted
from fdg.errors import FdgError, unknown_name
from fdg.public_names import explain_calls, no_attribute
from policies.auto import Auto, auto
from policies.central import Central
from policies.colocated import Colocated
from policies.environments import Environments
from policies.gpu_only import GPUOnly
from policies.multi_learner import MultiLearner
from policies.parameters import fsdp
from policies.single_learner_coarse import SingleLearnerCoarse
from policies.single_learner_fine import SingleLearnerFine
from policies.split import Split
from policies.standalone import Standalone
from policies.workers import Workers

__all__ = [
    "Auto",
    "Central",
    "Colocated",
    "Environments",
    "GPUOnly",
    "MultiLearner",
    "SingleLearnerCoarse",
    "SingleLearnerFine",
    "Split",
    "Standalone",
    "Workers",
    "auto",
    "fsdp",
    "get",
    "names",
]

_POLICIES = (
    GPUOnly,
    MultiLearner,
    SingleLearnerCoarse,
    SingleLearnerFine,
    Environments,
    Central,
    Workers,
    Colocated,
    Split,
    Standalone,
)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


for _policy in (*_POLICIES, Auto):
    explain_frozen(_policy, "policy")

_BY_NAME = {_snake_case(policy.__name__): policy for policy in _POLICIES}

explain_calls(__name__, {name: policy.__name__ for name, policy in _BY_NAME.items()})


def __getattr__(name: str) -> Any:
    raise no_attribute(__name__, name, __all__)


def names() -> tuple[str, ...]:
    """The names of all policies.

    >>> names()
    ('gpu_only', 'multi_learner', 'single_learner_coarse', 'single_learner_fine', 'environments', 'central',
     'workers', 'colocated', 'split', 'standalone')
    """
    return tuple(_BY_NAME)


@checked_names
def get(name: str) -> type:
    """The policy class with this name, in snake case or spelled as the class.

    Raises:
      FdgError: the name belongs to another library's policy network.
      UnknownNameError: no policy has this name; the message has the most similar names.

    >>> get("gpu_only")()
    GPUOnly()
    """
    name = name if isinstance(name, str) else quoted(name)
    if network := not_a_policy(name):
        raise FdgError(f"policy {network} (a policy of fdg maps fragments to devices)")
    policy = _BY_NAME.get(_snake_case(name))
    if policy is None:
        raise unknown_name("policy", name, _BY_NAME)
    assert dataclasses.is_dataclass(policy)
    return policy
