"""The environments that can be named on the command line and in recipes."""

from collections.abc import Callable
from dataclasses import dataclass

from regrasp.collect.environment import CameraSpec, Environment, EnvironmentSpec, SerialEnvironment, Simulator
from regrasp.core.errors import ConfigError, nearest
from regrasp.core.processors import usable_cores

DEFAULT_COPIES = 32
"""Copies that run together. Fixed, and not the number of cores, so that results are the same on every machine."""


@dataclass(frozen=True)
class Family:
    """Environments of one package: how to describe one and how to start it."""

    spec: Callable[[str, int | None, tuple[CameraSpec, ...]], EnvironmentSpec]
    start: Callable[[EnvironmentSpec], Simulator]
    tasks: Callable[[], tuple[str, ...]]
    """The names after the colon; empty for an environment without tasks."""


def _metaworld_spec(task: str, steps: int | None, cameras: tuple[CameraSpec, ...]) -> EnvironmentSpec:
    from regrasp.collect.metaworld_fast import metaworld_spec

    return metaworld_spec(task, max_episode_steps=steps, cameras=cameras)


def _metaworld(spec: EnvironmentSpec) -> Simulator:
    from regrasp.collect.metaworld_fast import FastMetaworld

    return FastMetaworld(spec)


def _metaworld_tasks() -> tuple[str, ...]:
    from regrasp.collect.metaworld_tasks import TASK_RULES

    return tuple(TASK_RULES)


def _pusht_spec(_task: str, steps: int | None, cameras: tuple[CameraSpec, ...]) -> EnvironmentSpec:
    from regrasp.collect.pusht import pusht_spec

    return pusht_spec(max_episode_steps=steps, cameras=cameras)


def _pusht(spec: EnvironmentSpec) -> Simulator:
    from regrasp.collect.pusht import PushT

    return PushT(spec)


FAMILIES: dict[str, Family] = {
    "metaworld": Family(_metaworld_spec, _metaworld, _metaworld_tasks),
    "pusht": Family(_pusht_spec, _pusht, tuple),
}


def parse_environment(name: str) -> tuple[str, str]:
    """Return the family and the task that ``metaworld:pick-place-v3`` or ``pusht`` names.

    Raises:
        ConfigError: unknown, with the nearest known name.
    """
    family, _, task = name.partition(":")
    if family not in FAMILIES:
        raise ConfigError(
            f"There is no environment {name!r}.{nearest(family, FAMILIES)} Known are 'metaworld:TASK', such as "
            f"'metaworld:pick-place-v3', and 'pusht'."
        )
    tasks = FAMILIES[family].tasks()
    if not tasks and task:
        raise ConfigError(f"The environment {family!r} has no tasks to choose from; found {name!r}. Write {family!r}.")
    if tasks and task not in tasks:
        full = [f"{family}:{known}" for known in tasks]
        raise ConfigError(
            f"There is no environment {name!r}.{nearest(name, full)} {family} has {len(tasks)} tasks, from "
            f"{full[0]!r} to {full[-1]!r}."
        )
    return family, task


def describe_environment(
    name: str, *, max_episode_steps: int | None = None, cameras: tuple[CameraSpec, ...] = ()
) -> EnvironmentSpec:
    """Return what is known of an environment without starting it.

    Args:
        name: such as ``metaworld:pick-place-v3``.
        max_episode_steps: the environment's own if not given.
        cameras: what to render besides the state.

    Raises:
        ConfigError: unknown name, or settings that the environment does not have.
    """
    family, task = parse_environment(name)
    return FAMILIES[family].spec(task, max_episode_steps, cameras)


def start_simulator(spec: EnvironmentSpec) -> Simulator:
    """Start one copy of the environment that ``spec`` describes."""
    family, _ = parse_environment(spec.name)
    return FAMILIES[family].start(spec)


def start_environment(
    spec: EnvironmentSpec, *, copies: int = DEFAULT_COPIES, workers: int | None = None
) -> Environment:
    """Start copies of an environment, spread over worker processes.

    Args:
        spec: of ``describe_environment``.
        copies: how many run together. The same seeds give the same episodes for any number.
        workers: processes. 0 runs all copies in this one; one per core, at most one per copy, if not given.

    Raises:
        ConfigError: fewer than one copy, or the environment cannot be started.
    """
    if copies < 1 or (workers or 0) < 0:
        raise ConfigError(f"An environment needs at least 1 copy and 0 or more workers; found {copies} and {workers}.")
    if workers is None:
        workers = usable_cores()
    if workers == 0:
        return SerialEnvironment([start_simulator(spec) for _ in range(copies)])
    from regrasp.collect.workers import WorkerEnvironment

    return WorkerEnvironment(spec, copies=copies, workers=min(workers, copies))
