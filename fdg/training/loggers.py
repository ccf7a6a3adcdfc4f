"""Experiment trackers: TensorBoard, Weights & Biases, MLflow; each is an extra."""

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fdg.errors import FdgError, RunError, one_line
from fdg.training.run_directory import read_config
from fdg.training.settings import flatten_config

Status = Literal["FINISHED", "FAILED", "KILLED"]  # of a session that ended, as MLflow calls them


class Logger(NamedTuple):
    """Receives metrics besides the run directory."""

    log: Callable[[int, Mapping[str, float]], object]  # arguments: steps (or responses) of one agent; metrics
    close: Callable[[Status], object]  # writes pending metrics and ends the connection


def open_loggers(
    targets: Mapping[str, Any], path: Path, config: Mapping[str, Any], steps: int
) -> list[Logger]:
    """Opens the trackers of a job (`Job.loggers`); `steps` is the number of one agent's earlier steps."""
    loggers: list[Logger] = []
    for kind, target in targets.items():
        package, (_, opener) = import_tracker(kind), TRACKERS[kind]
        try:
            with _reporting(kind, FdgError):
                log, close = opener(package, path, target, flatten_config(config), steps)
        except FdgError:
            for logger in loggers:
                logger.close("FAILED")
            raise
        reporting = _reporting(kind, RunError)
        loggers.append(Logger(reporting(log), reporting(close)))
    return loggers


@contextlib.contextmanager
def _reporting(kind: str, error_type: type[FdgError]) -> Iterator[None]:
    """Raises `error_type` for an error of a tracker: of the network, the service, or its settings."""
    try:
        yield
    except Exception as error:
        raise error_type(f"--{kind}: cannot log there: {one_line(error)}") from error


def _open_tensorboard(package: Any, path: Path, target: str | None, config: Any, steps: int) -> Logger:
    """Event files in `RUN/tensorboard`, by tensorboardX, which needs no TensorFlow."""
    # Entries that an earlier session logged after its last checkpoint (or before the first) are dropped.
    writer = package.SummaryWriter(str(path / "tensorboard"), purge_step=steps + 1)
    summary = importlib.import_module(f"{package.__name__}.proto.summary_pb2").Summary

    def log(env_steps: int, metrics: Mapping[str, float]) -> None:
        # One event per row: an `add_scalar` for each number takes twelve times as long.
        values = [summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer.file_writer.add_summary(summary(value=values), env_steps)

    return Logger(log, lambda status: writer.close())


def _open_wandb(package: Any, path: Path, target: str | None, config: Any, steps: int) -> Logger:
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it in `RUN/wandb` for `wandb sync`."""
    name, project = path.name, target or "fdg"
    # Another run's folder may have the same name; W&B drops steps below those that an id has logged.
    run_id = read_config(path).get("id") or name
    run = package.init(project=project, name=name, id=run_id, resume="allow", dir=str(path), config=config)
    return Logger(
        lambda env_steps, metrics: run.log(dict(metrics), step=env_steps),
        lambda status: run.finish(exit_code=int(status == "FAILED")),
    )


def _open_mlflow(package: Any, path: Path, target: str | None, config: Any, steps: int) -> Logger:
    """A run of an MLflow experiment; without `MLFLOW_TRACKING_URI`, in `RUN/mlruns`."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        # Plain files need no database; without this variable, MLflow demands one of its newer stores.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = (path.absolute() / "mlruns").as_uri()  # escapes characters such as `#` and `?`
    client, entities, name = package.MlflowClient(tracking_uri=uri), package.entities, target or "fdg"
    existing = client.get_experiment_by_name(name)
    experiment = existing.experiment_id if existing else client.create_experiment(name)
    # The run's id is a tag, since another run's folder may have the same name.
    tags = {"fdg_run": read_config(path).get("id") or path.name}
    earlier = client.search_runs([experiment], f"tags.fdg_run = '{tags['fdg_run']}'", max_results=1)
    run = earlier[0] if earlier else client.create_run(experiment, run_name=path.name, tags=tags)
    run_id = run.info.run_id
    if not earlier:
        parameters = [entities.Param(key, str(value)) for key, value in config.items()]
        client.log_batch(run_id, params=parameters)
    logged = client.get_metric_history(run_id, "iteration") if earlier else []
    last_step = max((metric.step for metric in logged), default=0)

    def log(env_steps: int, metrics: Mapping[str, float]) -> None:
        if env_steps <= last_step:  # an earlier session logged this row after its last checkpoint
            return
        now = int(time.time() * 1000)
        batch = [entities.Metric(name, value, now, env_steps) for name, value in metrics.items()]
        client.log_batch(run_id, metrics=batch)

    return Logger(log, lambda status: client.set_terminated(run_id, status))


# Name -> (package, function that opens the tracker). Its arguments: the imported package, the run directory,
# the project or experiment, the flat configuration, the number of one agent's earlier steps.
TRACKERS: Mapping[str, tuple[str, Callable[..., Logger]]] = {
    "tensorboard": ("tensorboardX", _open_tensorboard),
    "wandb": ("wandb", _open_wandb),
    "mlflow": ("mlflow", _open_mlflow),
}


def import_tracker(kind: str) -> Any:
    """Imports the package of a tracker; raises `FdgError` if it is not installed or cannot be imported."""
    package, _ = TRACKERS[kind]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == package
        problem = "is not installed" if is_absent else f"cannot be imported ({one_line(error)})"
        raise FdgError(
            f"--{kind} needs {package}, which {problem}: install it with pip install 'fdg[{kind}]'"
        ) from error
