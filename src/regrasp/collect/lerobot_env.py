"""Any environment that LeRobot has a config for: LeRobot makes it, and prepares what it shows and is given.

It is named ``lerobot:TYPE`` or ``lerobot:TYPE,SETTING=VALUE,...``, as in
``lerobot:pusht,obs_type=environment_state_agent_pos``: what LeRobot's own commands take as ``--env.type`` and
``--env.SETTING``. Types of installed ``lerobot_env_...`` packages are among them.
"""

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from regrasp.collect.environment import STATE, CameraSpec, EnvironmentSpec, Observation, Step, camera_name
from regrasp.collect.rendering import choose_backend
from regrasp.core.errors import ConfigError, listing, nearest, one_line

_LOG = logging.getLogger("regrasp")
FAMILY = "lerobot"
WATCHED = "render"
"""A camera of this name is what the environment's ``render`` draws for a person."""
_NOT_SETTINGS = frozenset({"features", "features_map", "max_parallel_tasks"})
_SETTING = re.compile(r",(?=\w+=)")


def environment_config(text: str, max_episode_steps: int | None = None) -> Any:  # noqa: ANN401 - LeRobot's EnvConfig
    """Return LeRobot's config for ``TYPE,SETTING=VALUE,...``.

    Args:
        text: what follows ``lerobot:``. A value is read as YAML; it may hold commas.
        max_episode_steps: the config's own ``episode_length`` if not given.

    Raises:
        ConfigError: unknown type or setting, with the nearest known one, or a value that LeRobot refuses.
    """
    import draccus
    import yaml
    from lerobot.envs import EnvConfig
    from lerobot.utils.import_utils import register_third_party_plugins

    register_third_party_plugins()
    kind, *parts = _SETTING.split(text)
    types = sorted(EnvConfig.get_known_choices())
    if kind not in types:
        raise ConfigError(
            f"LeRobot has no environment of type {kind!r}.{nearest(kind, types)} Known are: {listing(types, 40)}. "
            f"Write lerobot:TYPE or lerobot:TYPE,SETTING=VALUE."
        )
    config_type: Any = EnvConfig.get_choice_class(kind)
    known = [one.name for one in fields(config_type) if one.name not in _NOT_SETTINGS]
    settings: dict[str, Any] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in known:
            raise ConfigError(
                f"LeRobot's environment {kind!r} has no setting {name!r}.{nearest(name, known)} It has: "
                f"{listing(known, 40)}."
            )
        with contextlib.suppress(yaml.YAMLError):
            value = yaml.safe_load(value)
        settings[name] = value
    if max_episode_steps is not None and "episode_length" in known:
        settings["episode_length"] = max_episode_steps
    with _explained(text):
        return draccus.decode(config_type, settings)


@contextlib.contextmanager
def _explained(text: str, doing: str = "make") -> Iterator[None]:
    """Tell what LeRobot or the simulator says as a mistake in the name, without what they print meanwhile."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ConfigError:
        raise
    except Exception as error:  # every simulator has its own kinds
        said = one_line(error).rstrip(".") or "no reason is given"
        raise ConfigError(
            f"LeRobot cannot {doing} the environment '{FAMILY}:{text}': {type(error).__name__}: {said}."
            f"{_mend(error, text.partition(',')[0])}"
        ) from error


def _mend(error: Exception, kind: str) -> str:
    import gymnasium

    if isinstance(error, ImportError):
        return f" Mend: install what LeRobot's documentation of {kind!r} says; pip install 'lerobot[{kind}]' for some."
    if isinstance(error, gymnasium.error.NameNotFound):
        known = [name.rpartition("/")[2] for name in gymnasium.registry if name.startswith(f"gym_{kind}/")]
        wrong = re.search(r"gym_\w+/([\w-]+)", str(error))
        return f"{nearest(wrong[1], known) if wrong else ''} Its tasks are: {listing(known)}."
    return " Mend: check its task and its other settings." if isinstance(error, KeyError) else ""


class _Made:
    """One environment as LeRobot makes it, with LeRobot's processors around it."""

    def __init__(self, text: str, config: Any) -> None:  # noqa: ANN401
        from lerobot.envs import make_env

        self._text = text
        choose_backend()  # before a simulator imports MuJoCo
        with _explained(text):
            suites: Mapping[str, Mapping[int, Any]] = make_env(config, n_envs=1)
            self._before, self._after = config.get_env_processors()
        every = [(suite, number, one) for suite, tasks in suites.items() for number, one in tasks.items()]
        if len(every) != 1:
            names = listing(f"{suite} {number}" for suite, number, _ in every)
            for _, _, one in every:
                one.close()
            raise ConfigError(
                f"'{FAMILY}:{text}' names {len(every)} tasks ({names}), and rollouts are of one. Name it by LeRobot's "
                f"own settings, such as task=NAME, or task_ids=[0] for a suite."
            )
        self._env: Any = every[0][2]
        self._tells_success = False
        self.task: str = next((found for name in ("task_description", "task") if (found := self._own(name))), "")

    @property
    def action_size(self) -> int:
        shape = tuple(self._env.single_action_space.shape or ())
        if len(shape) != 1:
            raise ConfigError(f"'{FAMILY}:{self._text}' takes actions of shape {list(shape)}; one vector is needed.")
        return int(shape[0])

    @property
    def steps(self) -> int | None:
        """After how many steps it ends an episode itself."""
        found = self._own("_max_episode_steps")
        return None if found is None else int(found)

    def _own(self, name: str) -> Any:  # noqa: ANN401
        try:
            return self._env.call(name)[0]
        except (AttributeError, RuntimeError):
            return None

    def reset(self, seed: int) -> Observation:
        from lerobot.envs.utils import NEW_ROLLOUT_OPTION

        with _explained(self._text, "reset"):
            if self._own("init_state_id") is not None:  # LIBERO counts its initial states; here the seed names one
                self._env.set_attr("init_state_id", [seed])
            raw, info = self._env.reset(seed=[seed], options={NEW_ROLLOUT_OPTION: True})
        self._success(info)
        return self._seen(raw)

    def step(self, action: np.ndarray) -> Step:
        import torch

        given = self._after({"action": torch.from_numpy(np.array(action, np.float32))[None]})["action"]
        with _explained(self._text, "step"):
            raw, reward, terminated, truncated, info = self._env.step(given.numpy())
        ended = bool(terminated[0] or truncated[0])
        success = self._success(info)
        if ended and not self._tells_success:
            raise ConfigError(
                f"'{FAMILY}:{self._text}' ended an episode and has no 'is_success' in its info, so its outcome is not "
                f"known. Mend: report it in the environment's info, as LeRobot's evaluation needs it too."
            )
        last = info.get("final_obs")  # where the environment was reset at once, raw is the next episode's
        return Step(self._seen(raw if last is None else _batched(last[0])), float(reward[0]), success, ended)

    def _success(self, info: Mapping[str, Any]) -> bool:
        for found in (info.get("final_info"), info):
            found = found[0] if isinstance(found, list | tuple | np.ndarray) else found
            if isinstance(found, Mapping) and "is_success" in found:
                self._tells_success = True
                return bool(np.asarray(found["is_success"]).reshape(-1)[0])
        return False

    def _seen(self, raw: Any) -> Observation:  # noqa: ANN401
        """What LeRobot's policies are shown: vectors float32 [D] and images uint8 [H, W, 3], by their keys."""
        import torch
        from lerobot.envs import preprocess_observation

        if not isinstance(raw, Mapping):
            raise ConfigError(
                f"'{FAMILY}:{self._text}' shows a bare array, which LeRobot's policies cannot read either. Mend: "
                f"choose another obs_type, such as pixels_agent_pos or environment_state_agent_pos."
            )
        batch = self._before({**preprocess_observation(dict(raw)), "task": [self.task]})
        seen: Observation = {}
        for key, value in batch.items():
            if not (key.startswith("observation.") and isinstance(value, torch.Tensor)):
                continue
            if value.ndim == 4:
                seen[key] = (value[0] * 255.0).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
            elif value.ndim == 2:
                seen[key] = value[0].float().numpy()
        return seen

    def render(self) -> np.ndarray:
        """What a person is shown, uint8 [H, W, 3], cut to even sides for a video."""
        with _explained(self._text, "draw"):
            pixels = np.asarray(self._env.call("render")[0])
        return np.ascontiguousarray(pixels[: pixels.shape[0] // 2 * 2, : pixels.shape[1] // 2 * 2], np.uint8)

    def close(self) -> None:
        self._env.close()


def _batched(value: Any) -> Any:  # noqa: ANN401 - nested dicts of arrays
    if isinstance(value, Mapping):
        return {key: _batched(item) for key, item in value.items()}
    return np.asarray(value)[None]


@dataclass(frozen=True)
class _Found:
    """What an environment turned out to be when it was started."""

    vectors: dict[str, int]
    cameras: dict[str, CameraSpec]
    action_size: int
    steps: int
    task: str
    fps: float


@lru_cache(maxsize=64)
def _look_at(text: str, max_episode_steps: int | None) -> _Found:
    """Start an environment once and see what it shows: configs of LeRobot state sizes that are not always kept."""
    config = environment_config(text, max_episode_steps)
    made = _Made(text, config)
    try:
        seen, again = made.reset(0), made.reset(0)
        if any(_differ(seen[key], again[key]) for key in seen):
            _LOG.warning(
                "'%s:%s' does not start the same episode from the same seed: policies are not compared on equal "
                "initial states in it, and an episode cannot be run again.",
                FAMILY,
                text,
            )
        limit = made.steps or getattr(config, "episode_length", None) or None
        steps = limit if max_episode_steps is None else max_episode_steps
        if steps is None or steps < 1 or (limit is not None and steps > limit):
            raise ConfigError(
                f"An episode of '{FAMILY}:{text}' has 1 to {limit or 'any number of'} steps; --max-episode-steps is "
                f"{'not given' if steps is None else steps}."
            )
        return _Found(
            vectors={key: len(value) for key, value in seen.items() if value.ndim == 1},
            cameras={
                key: CameraSpec(name=camera_name(key), height=value.shape[0], width=value.shape[1])
                for key, value in seen.items()
                if value.ndim == 3
            },
            action_size=made.action_size,
            steps=int(steps),
            task=made.task or str(config.task or text),
            fps=float(config.fps),
        )
    finally:
        made.close()


def _differ(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two observations are of different scenes; what a renderer or a solver leaves open does not count."""
    limit = 1.0 if one.ndim == 3 else 1e-3
    return bool(np.abs(one.astype(np.float64) - other).mean() > limit)


def lerobot_spec(
    text: str, *, max_episode_steps: int | None = None, cameras: tuple[CameraSpec, ...] = ()
) -> EnvironmentSpec:
    """Return what an environment of LeRobot is; it is started once to see.

    Its task text is the environment's ``task_description`` or ``task``, as for LeRobot's evaluation; where it has
    neither, the config's name of the task.

    Args:
        text: what follows ``lerobot:``.
        max_episode_steps: the environment's own limit if not given, and at most that.
        cameras: which of its cameras are used, by name. Their sizes are the environment's own.

    Raises:
        ConfigError: unknown type, setting, or camera, with the nearest known one; or it cannot be made.
    """
    found = _look_at(text, max_episode_steps)
    unknown = [camera.name for camera in cameras if camera.key not in found.cameras]
    if unknown:
        known = [camera.name for camera in found.cameras.values()]
        raise ConfigError(
            f"'{FAMILY}:{text}' shows no camera {unknown[0]!r}.{nearest(unknown[0], known)} It shows: "
            f"{listing(known) or 'none'}. Which it shows follows from its settings, such as obs_type."
        )
    return EnvironmentSpec(
        name=f"{FAMILY}:{text}",
        task=found.task,
        state_size=found.vectors.get(STATE, 0),
        action_size=found.action_size,
        max_episode_steps=found.steps,
        fps=found.fps,
        robot_type=text.partition(",")[0],
        vectors=tuple((key, size) for key, size in found.vectors.items() if key != STATE),
        cameras=tuple(found.cameras[camera.key] for camera in cameras),
    )


def watched_camera(spec: EnvironmentSpec) -> CameraSpec:
    """Return the camera that an environment is watched through: its ``render``, at its own size."""
    text = spec.name.partition(":")[2]
    made = _Made(text, environment_config(text, spec.max_episode_steps))
    try:
        made.reset(0)
        pixels = made.render()
    finally:
        made.close()
    return CameraSpec(name=WATCHED, height=pixels.shape[0], width=pixels.shape[1])


class LeRobotSimulator:
    """One copy of an environment of LeRobot."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        """Make the environment that ``spec`` (of ``lerobot_spec``) names.

        Raises:
            ConfigError: LeRobot cannot make it.
        """
        self.spec = spec
        text = spec.name.partition(":")[2]
        self._made = _Made(text, environment_config(text, spec.max_episode_steps))
        self._keys = [STATE] if spec.state_size else []
        self._keys += [key for key, _ in spec.vectors]
        self._keys += [camera.key for camera in spec.cameras if camera.name != WATCHED]
        self._watched = next((camera.key for camera in spec.cameras if camera.name == WATCHED), None)

    def reset(self, seed: int) -> Observation:
        """Start the episode of ``seed``; see ``Simulator.reset``."""
        return self._chosen(self._made.reset(seed))

    def step(self, action: np.ndarray) -> Step:
        """Apply one action, as the policy gives it; LeRobot's processor of the environment comes between."""
        step = self._made.step(action)
        return Step(self._chosen(step.observation), step.reward, step.success, step.ended)

    def close(self) -> None:
        """Close the environment."""
        self._made.close()

    def _chosen(self, seen: Observation) -> Observation:
        observation = {key: seen[key] for key in self._keys}
        if self._watched is not None:
            observation[self._watched] = self._made.render()
        return observation
