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
    tasks: Callable[[], tuple[str, ...]] | None
    """The names after the colon; empty for an environment without tasks, None where ``spec`` reads them itself."""
    watch: Callable[[EnvironmentSpec], CameraSpec]
    """What a person watches it through."""


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


def _lerobot_spec(text: str, steps: int | None, cameras: tuple[CameraSpec, ...]) -> EnvironmentSpec:
    from regrasp.collect.lerobot_env import lerobot_spec

    return lerobot_spec(text, max_episode_steps=steps, cameras=cameras)


def _lerobot(spec: EnvironmentSpec) -> Simulator:
    from regrasp.collect.lerobot_env import LeRobotSimulator

    return LeRobotSimulator(spec)


def _lerobot_watched(spec: EnvironmentSpec) -> CameraSpec:
    from regrasp.collect.lerobot_env import watched_camera

    return watched_camera(spec)


def _through(name: str) -> Callable[[EnvironmentSpec], CameraSpec]:
    return lambda _spec: CameraSpec(name=name, height=320, width=320)


FAMILIES: dict[str, Family] = {
    "metaworld": Family(_metaworld_spec, _metaworld, _metaworld_tasks, _through("front")),
    "pusht": Family(_pusht_spec, _pusht, tuple, _through("top")),
    "lerobot": Family(_lerobot_spec, _lerobot, None, _lerobot_watched),
}


def parse_environment(name: str) -> tuple[str, str]:
    """Return the family and the task that ``metaworld:pick-place-v3``, ``pusht`` or ``lerobot:aloha`` names.

    Raises:
        ConfigError: unknown, with the nearest known name. What follows ``lerobot:`` is checked when it is described.
    """
    family, _, task = name.partition(":")
    if family not in FAMILIES:
        raise ConfigError(
            f"There is no environment {name!r}.{nearest(family, FAMILIES)} Known are 'metaworld:TASK', such as "
            f"'metaworld:pick-place-v3', 'pusht', and 'lerobot:TYPE' with a type of LeRobot's environments."
        )
    known_tasks = FAMILIES[family].tasks
    if known_tasks is None:
        return family, task
    tasks = known_tasks()
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


def watching_camera(spec: EnvironmentSpec) -> CameraSpec:
    """Return the camera that a person watches an environment through."""
    family, _ = parse_environment(spec.name)
    return FAMILIES[family].watch(spec)


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
