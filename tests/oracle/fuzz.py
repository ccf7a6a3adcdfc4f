"""Fuzzes the engine with random programs: `make fuzz ARGS="--programs 1500 --jobs 2"`.

Each seed gives a program and at least three placements; every tenth program also runs in float64. Failures
are printed with their seed; `--seed N` replays and shrinks one. Programs run in worker processes, which are
restarted if they hang or crash.
"""

import argparse
import collections
import dataclasses
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from typing import Any

from tests.oracle.breakage import BREAKAGES
from tests.oracle.compare import Verdict
from tests.oracle.program import Program, text
from tests.oracle.shrink import shrunk
from tests.oracle.worker import environment, run_worker

FLOAT64_EVERY = 10  # programs
START_SECONDS = 600  # long, since the machine may be busy


class Worker:
    """A process that runs programs. Started on first use, and restarted after a hang or a crash."""

    def __init__(self, deadline: float, breakage: str | None = None, x64: bool = False):
        self.deadline, self.breakage, self.x64 = deadline, breakage, x64
        self._process: Any = None
        self._log = tempfile.NamedTemporaryFile(prefix="oracle-", suffix=".log")  # noqa: SIM115

    def _start(self) -> None:
        self._log.truncate(0)
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(
            target=run_worker, args=(child_end, self.x64, self.breakage, self._log.name), daemon=True
        )
        self._process.start()
        child_end.close()
        if not self._connection.poll(START_SECONDS) or self._connection.recv() != "ready":
            raise RuntimeError(f"no worker: {self._log_tail()}")

    def run(self, task: Any) -> tuple[Program, tuple, list[tuple[Verdict, float]]]:
        """Returns (program, placements, [(verdict, seconds) of each placement]).

        A task is a seed or a pair (program, placements). Verdicts end with the first hang or crash.
        """
        if self._process is None or not self._process.is_alive():
            self._start()
        found: list[tuple[Verdict, float]] = []
        started = time.perf_counter()
        program, placements = (None, ()) if isinstance(task, int) else task
        try:
            self._connection.send(task)
            while True:
                left = self.deadline - (time.perf_counter() - started)
                if not self._connection.poll(max(left, 0)):
                    stack = self._stack()
                    self.stop()
                    found.append((Verdict("hang", f"after {self.deadline:.0f} s: {stack}"), self.deadline))
                    break
                answer = self._connection.recv()
                if answer is None:
                    break
                if isinstance(answer[0], Program):
                    program, placements = answer
                else:
                    found.append(answer)
        except (EOFError, ConnectionError):
            self._process.join(10)
            code = self._process.exitcode
            self._process = None
            found.append((Verdict("crash", f"exit status {code}: {self._log_tail()}"), 0.0))
        if program is None:  # the generator failed
            raise RuntimeError(f"no program from seed {task}: {found}")
        return program, placements, found

    def _stack(self) -> str:
        """The Python stack of the process."""
        os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self._log_tail()

    def _log_tail(self) -> str:
        with open(self._log.name, errors="replace") as log:
            lines = [line.strip() for line in log.read().splitlines() if line.strip()]
        return " | ".join(lines[-8:])[-600:]

    def stop(self) -> None:
        """Kills the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


@dataclasses.dataclass
class Tally:
    """Counts of verdicts by kind, refusals by message, and failures as (seed, kind)."""

    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    refusals: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    failures: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def fuzz(
    seeds: range, jobs: int, deadline: float, breakage: str | None, stop_early: bool, minutes: float
) -> Tally:
    """Runs all seeds and prints failures as they occur."""
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in seeds:
        todo.put(seed)
    tally, lock, stopping = Tally(), threading.Lock(), threading.Event()
    started = time.perf_counter()

    def run_seeds() -> None:
        # `other` repeats failures: in float64, or with the unbroken engine.
        worker, other = Worker(deadline, breakage), Worker(deadline, x64=breakage is None)
        while not stopping.is_set() and time.perf_counter() - started < 60 * minutes:
            try:
                seed = todo.get_nowait()
            except queue.Empty:
                break
            program, placements, found = worker.run(seed)
            if found[-1][0].kind == "hang" and breakage is None:
                found = found[:-1] + _retry_slowly(program, placements[len(found) - 1 :], deadline)
            verdicts = []
            for placement, (verdict, seconds) in zip(placements, found, strict=False):
                if breakage is None and verdict.kind == "wrong":
                    verdict = _recheck_in_float64(other, program, placement, verdict)
                elif verdict.is_bad and breakage is not None:
                    verdict = _recheck_unbroken(other, program, placement, verdict)
                verdicts.append((placement, verdict, seconds))
            if breakage is None and seed % FLOAT64_EVERY == 0:
                _, placements, found = other.run((program, placements))
                for placement, (verdict, seconds) in zip(placements, found, strict=False):
                    verdict = dataclasses.replace(verdict, detail=f"in float64: {verdict.detail}")
                    verdicts.append((placement, verdict, seconds))
            with lock:
                _count(tally, seed, verdicts)
                if stop_early and tally.failures:
                    stopping.set()
        worker.stop()
        other.stop()

    threads = [threading.Thread(target=run_seeds) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:  # threads finish their programs, then the results are printed
        stopping.set()
        for thread in threads:
            thread.join()
    tally.seconds = time.perf_counter() - started
    return tally


def _retry_slowly(program: Program, placements: tuple, deadline: float) -> list[tuple[Verdict, float]]:
    """Repeats placements that timed out, with eight times the deadline: the machine may be busy."""
    worker = Worker(8 * deadline)
    _, _, found = worker.run((program, placements))
    worker.stop()
    return found


def _recheck_in_float64(worker: Worker, program: Program, placement: Any, verdict: Verdict) -> Verdict:
    """A difference that disappears in float64 is rounding."""
    _, _, found = worker.run((program, (placement,)))
    again = found[0][0]
    if again.kind == "right" and "differs by" in verdict.detail:
        return Verdict("rounding", verdict.detail)
    return dataclasses.replace(verdict, detail=f"{verdict.detail} (float64: {again.kind} {again.detail})")


def _recheck_unbroken(unbroken: Worker, program: Program, placement: Any, verdict: Verdict) -> Verdict:
    """Discards failures that the unbroken engine has too."""
    _, _, found = unbroken.run((program, (placement,)))
    again = found[0][0]
    found = verdict.kind in ("wrong", "error") and not again.is_bad
    return verdict if found else Verdict("unclear", f"{again.kind} anyway")


def _count(tally: Tally, seed: int, verdicts: list[tuple[Any, Verdict, float]]) -> None:
    tally.counts["programs"] += 1
    if tally.counts["programs"] % 100 == 0:
        print(f"after seed {seed}: {dict(tally.counts)}", flush=True)
    for k, (placement, verdict, _) in enumerate(verdicts):
        tally.counts[verdict.kind] += 1
        if verdict.kind == "refused":
            tally.refusals[_message_template(verdict.detail)] += 1
        if verdict.kind == "rounding":
            print(f"seed {seed} placement {k}: rounding: {verdict.detail}", flush=True)
        elif verdict.is_bad:
            tally.failures.append((seed, verdict.kind))
            print(f"seed {seed} placement {k} ({placement}): {verdict.kind}: {verdict.detail}", flush=True)


def _message_template(message: str) -> str:
    """The message without names and numbers."""
    words = [w for w in message.split() if not any(c.isdigit() or c in "'()=," for c in w)]
    return " ".join(words)[:90]


def replay(seed: int, deadline: float, breakage: str | None, shrink: bool) -> bool:
    """Runs and prints one seed, and shrinks its failures. True if there are none."""
    worker = Worker(deadline, breakage)
    program, placements, found = worker.run(seed)
    print(text(program))
    passed = True
    for placement, (verdict, seconds) in zip(placements, found, strict=False):
        print(f"\n{placement}\n  {verdict.kind}: {verdict.detail} ({seconds:.1f} s)", flush=True)
        if not verdict.is_bad:
            continue
        passed = False
        if shrink:

            def fails(candidate: Program, placement: Any = placement, verdict: Verdict = verdict) -> bool:
                _, _, again = worker.run((candidate, (placement,)))
                return _same_failure(again[0][0], verdict)

            small = shrunk(program, fails)
            print("  smallest that fails alike:\n" + text(small), flush=True)
    worker.stop()
    return passed


def _same_failure(a: Verdict, b: Verdict) -> bool:
    """True if both have the same kind and, for errors, the same start of the message."""
    return a.kind == b.kind and (
        a.kind != "error" or a.detail.split("(")[0][:40] == b.detail.split("(")[0][:40]
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=100, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no program after this time")
    parser.add_argument("--deadline", type=float, default=180, help="seconds per program, for all placements")
    parser.add_argument("--seed", type=int, help="replay and shrink this seed")
    parser.add_argument("--no-shrink", action="store_true", help="replay without shrinking")
    parser.add_argument("--break", dest="breakage", choices=sorted(BREAKAGES),
                        help="break the engine on purpose, and stop at the first failure")  # fmt: skip
    args = parser.parse_args()
    os.environ.update(environment())
    if args.seed is not None:
        return 0 if replay(args.seed, args.deadline, args.breakage, not args.no_shrink) else 1
    seeds = range(args.first, args.first + args.programs)
    tally = fuzz(seeds, args.jobs, args.deadline, args.breakage, bool(args.breakage), args.minutes)
    programs = tally.counts.pop("programs")
    print(f"{programs} programs, {sum(tally.counts.values())} placements: {dict(tally.counts)}")
    for message, count in tally.refusals.most_common():
        print(f"  refused {count} times: {message}")
    print(f"failures: {sorted(tally.failures) or 'none'}")
    print(f"{tally.seconds:.0f} s, {tally.seconds / max(programs, 1):.2f} s a program with {args.jobs} jobs")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
