"""Scripted experts of chosen quality, for demonstrations that a policy can be better than.

An expert is one of Meta-World's scripted policies with a style: how fast it moves, how far off it sees the object,
how much its hand shakes, and how often it hesitates. Each episode draws a style from a mix, so that a dataset holds
demonstrators of several kinds, as real ones do.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regrasp.collect.environment import STATE, EnvironmentSpec, Observation
from regrasp.core.errors import ConfigError, nearest

_STREAM = 0x45585045  # keeps an episode's expert apart from whatever else is drawn from its seed
_OBJECT = slice(4, 7)


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one demonstrator works. The defaults are Meta-World's own expert."""

    name: str
    gain: float = 1.0
    """Factor on the hand's motion: 0.5 takes about twice as long."""
    offset: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Metres by which the expert sees the object beside its place, in every episode."""
    bias: float = 0.0
    """Standard deviation, in metres and per axis in the plane, of a further such error drawn for each episode."""
    noise: float = 0.0
    """Standard deviation of the hand's shaking, an Ornstein-Uhlenbeck process, in the action's unit."""
    noise_steps: float = 5.0
    """Steps over which the shaking forgets: 1/e after this many."""
    pause: float = 0.0
    """Probability of starting to hesitate, per step."""
    pause_steps: float = 10.0
    """How long a hesitation lasts on average, in steps."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Styles, and how often each is drawn."""

    styles: tuple[Style, ...]
    weights: tuple[float, ...]

    def draw(self, generator: np.random.Generator) -> Style:
        """Return one style."""
        weights = np.asarray(self.weights, float)
        return self.styles[int(generator.choice(len(self.styles), p=weights / weights.sum()))]


CLEAN = Style(name="clean")
GOOD = Style(name="good", bias=0.003, noise=0.05)
SLOW = Style(name="slow", gain=0.5, bias=0.003, noise=0.1, pause=0.02)
OFFSET = Style(name="offset", offset=(0.014, 0.0, 0.0), bias=0.004, gain=0.7, noise=0.1, noise_steps=15.0)
HESITANT = Style(name="hesitant", gain=0.75, bias=0.003, noise=0.05, pause=0.05)
BESIDE = Style(name="beside", offset=(0.014, 0.0, 0.0), bias=0.004, gain=0.8, noise=0.05, noise_steps=15.0)
FAR_BESIDE = Style(name="far beside", offset=(0.018, 0.0, 0.0), bias=0.004, gain=0.8, noise=0.05, noise_steps=15.0)
SHAKY = Style(name="shaky", bias=0.008, noise=0.4, noise_steps=8.0)
CARELESS = Style(name="careless", bias=0.014, noise=0.2, noise_steps=8.0)

MIXES: dict[str, Mix] = {
    "clean": Mix(styles=(CLEAN,), weights=(1.0,)),
    "shaky": Mix(styles=(GOOD, SHAKY, CARELESS), weights=(1.0, 2.0, 2.0)),
    "offset": Mix(styles=(GOOD, OFFSET), weights=(1.0, 3.0)),
    "slow": Mix(styles=(GOOD, SLOW, OFFSET), weights=(1.0, 4.0, 3.0)),
    "hesitant": Mix(styles=(GOOD, HESITANT, BESIDE), weights=(1.0, 3.0, 4.0)),
    "biased": Mix(styles=(GOOD, HESITANT, FAR_BESIDE), weights=(1.0, 2.0, 5.0)),
}
"""Mixes by name. ``shaky``: errors of zero mean, which a policy averages away by itself. ``offset``: most err to one
side, so that imitation copies the error. ``slow``: most succeed but take long, in the tasks in which a slow hand can.
``hesitant``: three in eight pause and half err to one side, and succeed in most tasks; the demo's. ``biased``: five in
eight err so far to one side that many of their attempts fail and imitation of the rest does too; the benchmark's."""


def find_mix(name: str) -> Mix:
    """Return the mix of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in MIXES:
        raise ConfigError(f"There is no mix of experts {name!r}.{nearest(name, MIXES)} Known are: {', '.join(MIXES)}.")
    return MIXES[name]


class Demonstrator:
    """One episode's expert: a scripted policy, a style, and the style's state."""

    def __init__(self, script: Any, style: Style, generator: np.random.Generator) -> None:  # noqa: ANN401
        """Draw what the style leaves to chance for one episode.

        Args:
            script: a policy of ``metaworld.policies``.
            style: how the expert works.
            generator: the episode's own.
        """
        self._script, self.style, self._generator = script, style, generator
        self._error = np.array(style.offset)
        self._error[:2] += generator.normal(0.0, style.bias, 2) if style.bias else 0.0
        self._shake = generator.normal(0.0, style.noise, 3) if style.noise else np.zeros(3)
        self._pause_left = 0

    def act(self, state: np.ndarray) -> np.ndarray:
        """Return the action float32 [4], within [-1, 1], for a state [39]."""
        style, generator = self.style, self._generator
        seen = state.astype(np.float64)
        seen[_OBJECT] += self._error
        action = np.clip(self._script.get_action(seen), -1.0, 1.0).astype(np.float64)
        action[:3] *= style.gain
        if style.noise:
            keep = np.exp(-1.0 / style.noise_steps)
            self._shake = keep * self._shake + np.sqrt(1.0 - keep**2) * generator.normal(0.0, style.noise, 3)
        if style.pause and self._pause_left == 0 and generator.random() < style.pause:
            self._pause_left = int(generator.geometric(1.0 / style.pause_steps))
        if self._pause_left:
            self._pause_left -= 1
            action[:3] = 0.0
        action[:3] += self._shake
        return np.clip(action, -1.0, 1.0).astype(np.float32)


class ExpertPolicy:
    """Demonstrators for a batch of episodes; a ``RolloutPolicy``. An episode's expert depends on its seed alone."""

    def __init__(self, spec: EnvironmentSpec, mix: Mix) -> None:
        """Prepare experts for the environment.

        Raises:
            ConfigError: the environment has no scripted expert.
        """
        family, _, task = spec.name.partition(":")
        if family != "metaworld":
            raise ConfigError(
                f"There is no scripted expert for {spec.name!r}; Meta-World's tasks have one. Record demonstrations of "
                f"this environment with LeRobot's tools, and give the dataset to Regrasp."
            )
        from metaworld.policies import ENV_POLICY_MAP

        warnings.filterwarnings("ignore", message=r"Constant\(s\) may be too high")
        self._script, self._mix = ENV_POLICY_MAP[task](), mix
        self._experts: list[Demonstrator] = []

    def reset(self, seeds: Sequence[int]) -> None:
        """Draw an expert for each episode of a new batch."""
        self._experts = []
        for seed in seeds:
            generator = np.random.default_rng([_STREAM, seed])
            self._experts.append(Demonstrator(self._script, self._mix.draw(generator), generator))

    def act(self, observations: Observation) -> np.ndarray:
        """Return one action for each episode, float32 [B, 1, 4]."""
        states = observations[STATE]
        return np.stack([expert.act(state) for expert, state in zip(self._experts, states, strict=True)])[:, None]

    def notes(self) -> list[dict[str, str]]:
        """The style of each episode's expert, by the name under which it is recorded."""
        return [{"style": expert.style.name} for expert in self._experts]
