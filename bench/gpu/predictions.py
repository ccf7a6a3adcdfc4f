"""Calibrates the machine, and compares the cost model's predictions with measurements."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import jax

import fdg
from bench.gpu.measuring import Figures, Measurement, Settings
from fdg.costs import machine
from fdg.costs.calibration import calibrate
from fdg.costs.candidate_times import iteration_seconds
from fdg.costs.prediction import predict
from fdg.training.reference_jobs import REFERENCE_JOBS, ReferenceJob, fit_to_jobs, time_reference_jobs

_FILE = "calibration.json"


def measurements(settings: Settings) -> list[Measurement]:
    """The calibration, then jobs that it was not fitted to."""
    file = settings.out / _FILE
    sizes = settings.full_or_tiny((4096, 16384, 65536), (16,))
    jobs = [_job("PPO", "CartPole-v1", size, num_steps=32) for size in sizes]
    if not settings.tiny:
        jobs += [
            _job("PPO", "Breakout-MinAtar", 4096, num_steps=32),
            _job("PPO", "Pendulum-v1", 4096, num_steps=16, hidden=(256, 256)),
            _job("PQN", "Breakout-MinAtar", 4096, num_steps=32),
            _job("A2C", "Acrobot-v1", 16384, num_steps=8),
            _job("DQN", "CartPole-v1", 128, learning_starts=1024),
        ]
    measure, title = partial(measure_calibration, file, not settings.tiny), "Seconds of an iteration"
    return [
        Measurement("Calibration", "this machine", measure, seconds=200, limit=400),
        *(
            Measurement(title, str(job), partial(compare_prediction, job, file), seconds=25, limit=90)
            for job in jobs
        ),
    ]


def _job(algorithm: str, env: str, num_envs: int, **fields: object) -> ReferenceJob:
    return ReferenceJob(algorithm, env, (("num_envs", num_envs), *fields.items()), "GPUOnly", (), 1)


def measure_calibration(file: Path, fit: bool) -> Figures:
    """Calibrates the first device, as `python -m fdg.calibrate` does, and writes the calibration to `file`.

    With `fit`, the calibration is also fitted to timed reference jobs. Returns the seconds of calibration,
    the number of these jobs, and the median spread of measurements.
    """
    devices = jax.local_devices()[:1]

    def time_jobs() -> Mapping[str, float]:
        return {job.key: s for job, s in time_reference_jobs(REFERENCE_JOBS, devices, print).items()}

    calibration = fit_to_jobs(calibrate(devices, print, time_jobs)) if fit else calibrate(devices, print)
    file.write_text(json.dumps(calibration.as_json(), indent=1) + "\n")
    return {"s": calibration.seconds, "jobs": len(calibration.jobs), "noise": calibration.noise}


def compare_prediction(job: ReferenceJob, file: Path) -> Figures:
    """The time of an iteration of a job, predicted by the calibration in `file`, and measured.

    Raises:
      FdgError: there is no calibration.
    """
    cluster = machine.read(file).cluster(1)
    algorithm, policy = job.build()
    devices = jax.devices()[:1]
    predicted = predict(fdg.place(algorithm, policy, devices), cluster).seconds
    seconds = iteration_seconds(algorithm, policy, devices)
    return {"predicted ms": 1e3 * predicted, "measured ms": 1e3 * seconds, "ratio": predicted / seconds}
