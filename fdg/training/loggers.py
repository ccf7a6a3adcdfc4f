"""Experiment trackers: TensorBoard, Weights & Biases, MLflow; each is an extra."""

import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fdg.errors import FdgError, one_line
from fdg.training.job import MLFLOW, TENSORBOARD, WANDB, Tracker
from fdg.training.settings import flat

_PACKAGES = {TENSORBOARD: "tensorboardX", WANDB: "wandb", MLFLOW: "mlflow"}


class Logger(Protocol):
    """Receives metrics besides the run directory."""

    def log(self, env_steps: int, metrics: Mapping[str, float]) -> None:
        """Logs metrics at a number of steps of one agent (responses for language models)."""

    def close(self) -> None:
        """Writes pending metrics and ends the connection."""


def check_installed(wanted: Sequence[Tracker]) -> None:
    """Checks that the packages of trackers are installed, before anything slow starts."""
    for kind, _ in wanted:
        _package(kind)


def open_loggers(
    wanted: Sequence[Tracker], path: Path, config: Mapping[str, Any], steps: int
) -> list[Logger]:
    """Opens the trackers of a job.

    `steps` are those of one agent at the start or resume.
    """
    makers: dict[str, Callable[..., Logger]] = {
        TENSORBOARD: TensorBoard,
        WANDB: WeightsAndBiases,
        MLFLOW: MLflow,
    }
    loggers: list[Logger] = []
    for kind, target in wanted:
        package = _package(kind)
        try:
            loggers.append(makers[kind](package, path, target, flat(config), steps))
        except Exception as error:  # of the network, of the service, of its settings
            for other in loggers:
                other.close()
            raise FdgError(f"--{kind}: cannot log there: {one_line(error)}") from error
    return loggers


def close_all(loggers: Sequence[Logger]) -> None:
    """Closes all loggers, even if one raises."""
    for logger in loggers:
        logger.close()


class TensorBoard:
    """Event files in `RUN/tensorboard`, by tensorboardX, which needs no TensorFlow."""

    def __init__(self, package: Any, path: Path, target: str | None, config: Any, steps: int):
        where = str(path / TENSORBOARD)
        # Of a resumed run, what an earlier sitting logged after its last checkpoint counts for nothing.
        self._writer = package.SummaryWriter(where, purge_step=steps + 1 if steps else None)
        self._summary = importlib.import_module(f"{package.__name__}.proto.summary_pb2").Summary

    def log(self, env_steps: int, metrics: Mapping[str, float]) -> None:
        """See `Logger`."""
        # A row as one event: an `add_scalar` for each number takes twelve times as long.
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.file_writer.add_summary(self._summary(value=values), env_steps)

    def close(self) -> None:
        """See `Logger`."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it in `RUN/wandb` for `wandb sync`."""

    def __init__(self, package: Any, path: Path, target: str | None, config: Any, steps: int):
        self._run = package.init(
            project=target or "fdg",
            name=path.name,
            id=path.name,
            resume="allow",
            dir=str(path),
            config=config,
        )

    def log(self, env_steps: int, metrics: Mapping[str, float]) -> None:
        """See `Logger`."""
        self._run.log(dict(metrics), step=env_steps)

    def close(self) -> None:
        """See `Logger`."""
        self._run.finish()


class MLflow:
    """A run of an MLflow experiment; without `MLFLOW_TRACKING_URI`, in `RUN/mlruns`."""

    def __init__(self, package: Any, path: Path, target: str | None, config: Any, steps: int):
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # Plain files, which need no database; MLflow has newer stores, and asks whether they are meant.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = f"file:{path.absolute() / 'mlruns'}"
        self._client = package.MlflowClient(tracking_uri=uri)
        self._entities = package.entities
        name = target or "fdg"
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        before = self._client.search_runs([experiment], f"tags.mlflow.runName = '{path.name}'", max_results=1)
        self._id = (
            before[0].info.run_id
            if before and steps
            else self._client.create_run(experiment, run_name=path.name).info.run_id
        )
        if not steps:
            parameters = [self._entities.Param(key, str(value)) for key, value in config.items()]
            self._client.log_batch(self._id, params=parameters)

    def log(self, env_steps: int, metrics: Mapping[str, float]) -> None:
        """See `Logger`."""
        now = int(time.time() * 1000)
        batch = [self._entities.Metric(name, value, now, env_steps) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=batch)

    def close(self) -> None:
        """See `Logger`."""
        self._client.set_terminated(self._id)


def _package(kind: str) -> Any:
    try:
        return importlib.import_module(_PACKAGES[kind])
    except ImportError as error:
        raise FdgError(
            f"--{kind} needs {_PACKAGES[kind]}, which is not installed ({error}): pip install 'fdg[{kind}]'"
        ) from error
