"""The flags of a job: those that every job has, as tables, and those of its algorithm and policy."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fdg.commands import presets, sweeping
from fdg.commands.flags import Flag, Parser, add_aliases, add_flag, fields_of

NAMES = (
    Flag("algo", str, "ppo", "an algorithm, or path.to.module:Class for one of your own"),
    Flag(
        "env",
        str,
        "CartPole-v1",
        "an environment, with parameters as in CartPole-v1?gravity=9.0; path.to.module:factory for your own;"
        " without it one that the algorithm can act in",
    ),
    Flag(
        "policy",
        str,
        "auto",
        "a distribution policy: which devices each fragment runs on; auto: the one that is"
        " predicted to be quickest; auto:measure: of the best three, the one that is",
    ),
)
STALENESS = Flag("staleness", int, 0, "iterations by which the actors' parameters lag; 0: synchronous")
RUN = (
    Flag(
        "devices",
        int | None,
        None,
        "how many to use, in all processes (None: all; one process on a CPU: as many, up to its cores, as are"
        " predicted to be fastest); on a CPU, so many host devices are made",
    ),
    Flag(
        "env_workers",
        int | None,
        None,
        "workers of an environment of ray: or gymnasium: (None: as many as there are cores for)",
    ),
    Flag("seed", int, 0, "of all random numbers"),
    Flag("num_seeds", int | None, None, "agents in one program, of seeds SEED, SEED+1, ... (None: one)"),
    *sweeping.FLAGS,
    Flag(
        "eval_episodes",
        int | None,
        None,
        "episodes of the evaluation after training; 0: none (None: 128; of a file each held-out row once)",
    ),
    Flag(
        "checkpoint_every",
        int | None,
        None,
        "iterations from checkpoint to checkpoint, at least (None: a twentieth of all; more where writing"
        " them would take over 1% of the time)",
    ),
    Flag(
        "on_nan",
        Literal["stop", "warn"],
        "stop",
        "what to do once a loss is infinite or not a number: end the run, or say so and go on",
    ),
    Flag(
        "eval_every",
        int | None,
        None,
        "iterations from one evaluation during training to the next, greedy and sampled; the best state is"
        " kept beside the last (None: none)",
    ),
    Flag("stop_at", float | None, None, "end once such an evaluation returns this much (None: never)"),
    Flag("tensorboard", bool, False, "also write TensorBoard's event files, into the run directory"),
    Flag("wandb", str | None, None, "also log to this project of Weights & Biases (None: do not)"),
    Flag("mlflow", str | None, None, "also log to this experiment of MLflow (None: do not)"),
    Flag(
        "profile",
        bool,
        False,
        "say after training where the time of an iteration goes, and trace one (in the run directory)",
    ),
    Flag(
        "timeline",
        bool,
        False,
        "draw after training which group ran what when, over six iterations (in the run directory)",
    ),
    Flag("out", str | None, None, "the run directory (None: runs/ENV-ALGO-SEED-TIME)"),
)
MACHINE = (
    Flag(
        "trust",
        bool,
        False,
        "import the modules that only the config.json of a resumed run names: they are code, and are run",
    ),
    Flag(
        "program_cache",
        str | None,
        None,
        "where compiled programs are kept for the next start; off: nowhere (None: JAX_COMPILATION_CACHE_DIR,"
        " or fdg/ in the user's cache directory)",
    ),
    Flag(
        "xla_options",
        str | None,
        None,
        "for XLA's compiler: 'preset' for those in fdg/running/xla_options.py, or NAME=VALUE,NAME=VALUE"
        " (None: none)",
    ),
)
PROCESSES = (
    Flag(
        "coordinator_address",
        str | None,
        None,
        "HOST:PORT at which process 0 can be reached (None: one process)",
    ),
    Flag("num_processes", int | None, None, "how many processes there are (None: one)"),
    Flag("process_id", int | None, None, "which of them this is, from 0 (None: 0)"),
    Flag("distributed", bool, False, "take these three from the cluster: SLURM, MPI, Kubernetes, TPU pod"),
)
DEVICES_CHOSEN = Flag("devices_chosen", int | None, None, "how many an earlier sitting of the run chose")
TOTAL_STEPS = Flag("total_steps", int, 500_000, "environment steps of each agent")
# Those that change how a run is carried out, not what it computes: a resumed run may change them.
FREE_ON_RESUME = {
    *(
        "policy",
        "devices",
        "env_workers",
        "eval_episodes",
        "checkpoint_every",
        "on_nan",
        "profile",
        "timeline",
        "out",
        "resume",
    ),
    # Or what it does beside that, and how long it is.
    *("eval_every", "stop_at", "tensorboard", "wandb", "mlflow", "total_steps"),
    *("optuna", "halving"),
}


def add_flags(parser: Any, flags: Sequence[Flag]) -> None:
    """Adds flags to a parser or to a group of one; beside --out those that name an earlier run."""
    for flag in flags:
        add_flag(parser, flag)
        if flag.name == "out":
            text = "go on with the run in DIR (or in --out), exactly where it was; needs no other flag"
            parser.add_argument("--resume", nargs="?", const="", metavar="DIR", help=text)
            text = "begin a new run with the weights of the run in DIR, and its flags but for those given"
            parser.add_argument("--from", dest="start_from", metavar="DIR", help=text)
            text = "take the flags of a run's config.json, but for those given"
            parser.add_argument("--config", metavar="FILE", help=text)


@dataclasses.dataclass(frozen=True)
class JobFlags:
    """All flags of a job of one algorithm under one policy.

    Attributes:
      policy: fields of the policy.
      run: of the run.
      own: hyperparameters of the algorithm, with the values of its preset as defaults.
    """

    policy: Sequence[Flag]
    run: Sequence[Flag]
    own: Sequence[Flag]

    @classmethod
    def of(cls, algorithm: type, policy: type, is_auto: bool, preset: Mapping[str, Any]) -> "JobFlags":
        """The flags of an algorithm's class and a policy's.

        Args:
          algorithm: a class with `init` and `iterate`.
          policy: a class with `place`.
          is_auto: whether the policy is to be chosen, by a name that says how.
          preset: values that take the place of the algorithm's defaults.
        """
        fields = fields_of(algorithm)
        run = RUN if any(flag.name == "total_steps" for flag in fields) else (TOTAL_STEPS, *RUN)
        placing = [
            flag
            for flag in fields_of(policy)
            if flag.name != "staleness" and not (is_auto and flag.name == "measure")
        ]
        common = {
            flag.name for flag in (*NAMES, *presets.FLAGS, STALENESS, *run, *placing, *MACHINE, *PROCESSES)
        }
        own = [
            dataclasses.replace(flag, default=preset.get(flag.name, flag.default))
            for flag in fields
            if flag.name not in common
        ]
        return cls(placing, run, own)

    @property
    def groups(self) -> Mapping[str, Sequence[Flag]]:
        """All of them, by the titles under which `--help` has them; the algorithm's own under none."""
        return {
            "what to train, and where": [*NAMES, *presets.FLAGS, STALENESS, *self.policy],
            "the run": self.run,
            "this machine": MACHINE,
            "several processes": PROCESSES,
            "": self.own,
        }

    def parser(self, own_title: str, **settings: Any) -> Parser:
        """A parser of them and of their aliases.

        Args:
          own_title: of the algorithm's own.
          settings: of `argparse.ArgumentParser`.
        """
        parser = Parser(usage="%(prog)s [flags]", allow_abbrev=False, **settings)
        for title, flags in self.groups.items():
            add_flags(parser.add_argument_group(title or own_title), flags)
        add_aliases(parser, [*NAMES, *self.policy, *self.run, *self.own])
        return parser
