"""Copies of an environment spread over worker processes, one thread each.

Each copy belongs to one worker for good, and all copies take a chunk of actions before the next begins, so that
results depend on the seeds and the actions only. Simulators are deterministic: when a worker dies, its copies'
episodes are run again from their seeds with the actions that they were given, and nobody above notices.
"""

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from regrasp.collect.environment import (
    ChunkResult,
    EnvironmentSpec,
    Observation,
    Simulator,
    Slot,
    check_actions,
    empty_observations,
    empty_result,
)
from regrasp.collect.environments import start_simulator
from regrasp.core.errors import InternalError, listing

_LOG = logging.getLogger("regrasp")
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")

Episode = tuple[int | None, list[np.ndarray]]
"""A copy's seed (None before its first reset) and the chunks of actions [N, A] it was given since."""


class _Died(Exception):
    """A worker's process ended before it had answered."""

    def __init__(self, worker: "_Worker") -> None:
        super().__init__(worker.number)
        self.worker = worker


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Let processes that start here use one thread: numerical libraries read this when they are imported."""
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(connection: Connection, start: Callable[[EnvironmentSpec], Simulator], spec: EnvironmentSpec) -> None:
    """Run a worker: answer messages until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    slots: list[Slot] = []
    try:
        while True:
            command, argument = connection.recv()
            try:
                connection.send((True, _COMMANDS[command](slots, argument, start, spec)))
            except Exception as error:  # every failure belongs to the process that asked
                connection.send((False, error))
    except (EOFError, OSError):
        pass  # the other end is gone, and with it the reason to run
    finally:
        for slot in slots:
            slot.simulator.close()


def _begin(slots: list[Slot], argument: Any, start: Any, spec: EnvironmentSpec) -> None:  # noqa: ANN401
    """Start one simulator per episode and bring each to where its actions lead."""
    for seed, chunks in argument:
        slot = Slot(start(spec))
        slots.append(slot)
        if seed is not None:
            slot.reset(seed)
        for chunk in chunks:
            slot.run(chunk, empty_result(spec, 1, len(chunk)), 0)


def _reset(slots: list[Slot], argument: Any, _start: Any, spec: EnvironmentSpec) -> Observation:  # noqa: ANN401
    batch = empty_observations(spec, len(slots))
    for row, (slot, seed) in enumerate(zip(slots, argument, strict=True)):
        if seed is not None:
            for key, value in slot.reset(seed).items():
                batch[key][row] = value
    return batch


def _step(slots: list[Slot], argument: Any, _start: Any, spec: EnvironmentSpec) -> ChunkResult:  # noqa: ANN401
    result = empty_result(spec, len(slots), argument.shape[1])
    for row, slot in enumerate(slots):
        slot.run(argument[row], result, row)
    return result


_COMMANDS: dict[str, Callable[..., Any]] = {"begin": _begin, "reset": _reset, "step": _step}


@dataclass
class _Worker:
    """One process and the copies it runs."""

    number: int
    rows: slice
    process: BaseProcess
    connection: Connection
    episodes: list[Episode] = field(default_factory=list)

    def send(self, command: str, argument: Any) -> None:  # noqa: ANN401
        try:
            self.connection.send((command, argument))
        except OSError as error:
            raise _Died(self) from error

    def receive(self) -> Any:  # noqa: ANN401
        try:
            fine, answer = self.connection.recv()
        except (EOFError, OSError) as error:
            raise _Died(self) from error
        if not fine:
            raise answer
        return answer

    def describe(self) -> str:
        """Return its number, process, copies and seeds, for a message."""
        self.process.join(timeout=5.0)
        code = self.process.exitcode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        seeds = [seed for seed, _ in self.episodes if seed is not None]
        ran = f"which ran the episodes of seeds {listing(seeds)}" if seeds else "which had not begun an episode"
        return f"worker {self.number} (process {self.process.pid}, {how}), {ran}"


class WorkerEnvironment:
    """Copies of one environment in worker processes; see ``Environment``."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        *,
        copies: int,
        workers: int,
        start: Callable[[EnvironmentSpec], Simulator] = start_simulator,
    ) -> None:
        """Start ``workers`` processes with ``copies`` of the environment between them.

        Args:
            spec: of the environment.
            copies: B.
            workers: at most ``copies``.
            start: makes one copy in the worker; must be importable there.
        """
        self._spec, self._copies, self._start = spec, copies, start
        self._context = get_context("spawn")
        self._workers: list[_Worker] = []
        bounds = np.linspace(0, copies, workers + 1).round().astype(int).tolist()
        try:
            for number, (first, end) in enumerate(pairwise(bounds)):
                episodes: list[Episode] = [(None, []) for _ in range(end - first)]
                self._workers.append(self._launch(number, slice(first, end), episodes))
            for worker in self._workers:
                worker.send("begin", worker.episodes)
            for worker in self._workers:
                worker.receive()
        except _Died as died:
            message = f"{spec.name} could not be started: {died.worker.describe()}, ended. Its own message is above."
            self.close()
            raise InternalError(message) from None
        except BaseException:
            self.close()
            raise

    @property
    def spec(self) -> EnvironmentSpec:
        """What the environment is."""
        return self._spec

    @property
    def copies(self) -> int:
        """B, the number of copies."""
        return self._copies

    @property
    def processes(self) -> list[int]:
        """The workers' process ids."""
        return [worker.process.pid or 0 for worker in self._workers]

    def _launch(self, number: int, rows: slice, episodes: list[Episode]) -> _Worker:
        here, there = self._context.Pipe()
        name = f"regrasp-environment-{number}"
        process = self._context.Process(target=_serve, args=(there, self._start, self._spec), name=name, daemon=True)
        with _single_threaded():
            process.start()
        there.close()
        return _Worker(number, rows, process, here, episodes)

    def reset(self, seeds: Sequence[int | None]) -> Observation:
        """Start an episode in each copy that has a seed; see ``Environment.reset``."""
        if len(seeds) != self._copies:
            raise InternalError(f"{self._copies} copies need {self._copies} seeds; found {len(seeds)}.")
        parts = self._all("reset", [list(seeds[worker.rows]) for worker in self._workers])
        for worker in self._workers:
            for i, seed in enumerate(seeds[worker.rows]):
                if seed is not None:
                    worker.episodes[i] = (seed, [])
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    def step(self, actions: np.ndarray) -> ChunkResult:
        """Run a chunk of actions; see ``Environment.step``."""
        actions = check_actions(actions, self._spec, self._copies)
        parts: list[ChunkResult] = self._all("step", [actions[worker.rows] for worker in self._workers])
        for worker, part in zip(self._workers, parts, strict=True):
            for i, (_, chunks) in enumerate(worker.episodes):
                if part.count[i]:
                    chunks.append(actions[worker.rows][i, : part.count[i]])
        return ChunkResult(
            observations={
                key: np.concatenate([part.observations[key] for part in parts]) for key in parts[0].observations
            },
            rewards=np.concatenate([part.rewards for part in parts]),
            success=np.concatenate([part.success for part in parts]),
            truncated=np.concatenate([part.truncated for part in parts]),
            count=np.concatenate([part.count for part in parts]),
        )

    def _all(self, command: str, arguments: list[Any]) -> list[Any]:
        """Ask every worker at once and return the answers; a worker that died is replaced and asked again."""
        asked = []
        for worker, argument in zip(self._workers, arguments, strict=True):
            try:
                worker.send(command, argument)
                asked.append(True)
            except _Died:
                asked.append(False)
        answers = []
        for number, argument in enumerate(arguments):
            try:
                if not asked[number]:
                    raise _Died(self._workers[number])
                answers.append(self._workers[number].receive())
            except _Died:
                answers.append(self._again(number, command, argument))
        return answers

    def _again(self, number: int, command: str, argument: Any) -> Any:  # noqa: ANN401
        """Replace a dead worker, run its episodes again, and ask once more."""
        dead = self._workers[number]
        _LOG.warning("%s: %s, ended; these episodes are run again.", self._spec.name, dead.describe())
        dead.connection.close()
        worker = self._launch(number, dead.rows, dead.episodes)
        self._workers[number] = worker
        try:
            worker.send("begin", worker.episodes)
            worker.receive()
            worker.send(command, argument)
            return worker.receive()
        except _Died:
            message = (
                f"{self._spec.name}: {worker.describe()}, ended, and so did the one before it at the same place. If it "
                f"was killed by signal 9, the machine may be out of memory: use fewer copies or workers."
            )
            self.close()
            raise InternalError(message) from None

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(timeout=5.0)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []
