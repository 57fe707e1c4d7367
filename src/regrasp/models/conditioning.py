"""Advantage conditioning of any LeRobot policy, as a step of its preprocessor.

The step is saved in a checkpoint by its class path, ``regrasp.models.conditioning.AdvantageConditionStep``, so a
robot that runs the checkpoint needs ``pip install regrasp`` and no flag. It is left out of LeRobot's registry on
purpose: a registered step is found only after its module was imported.

Source: RECAP, arXiv:2511.14759; LeRobot's processor pipeline.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from lerobot.configs import PipelineFeatureType, PolicyFeature
from lerobot.lerobot_types import EnvTransition, TransitionKey
from lerobot.processor import DataProcessorPipeline, ProcessorStep

from regrasp.core.errors import ConfigError, MissingSidecar
from regrasp.models.label_table import LabelTable, read_label_table
from regrasp.rl.condition import (
    INDICATOR_KEY,
    INDICATORS,
    UNCONDITIONAL,
    conditioned_text,
    hashed_dropout,
)


@dataclass
class AdvantageConditionStep(ProcessorStep):
    r"""Says to the policy whether the actions at hand are better than usual: ``task\nAdvantage: positive``.

    The condition of each sample is, in this order: ``observation.advantage`` in the batch (+1, -1 or 0), which
    Regrasp's loop fills; in training the label of the frame's ``index`` in the table; at inference, where there is no
    action, ``condition``. With probability ``dropout`` a training sample gets none.
    """

    labels: str | None = None
    """The advantages sidecar of the dataset. Read when the first training batch comes, so never on a robot."""

    dropout: float = 0.3
    """Share of training samples whose text says nothing. Set it to 0 for a held-out loss."""

    negatives: str = "labelled"
    """What frames labelled negative are trained as: labelled, or unconditional."""

    seed: int | None = None
    """Leave out the same frames at every visit, chosen by ``index`` and this number. None: torch's random numbers."""

    write: str = "task"
    """task: say it in the task text. indicator: in ``observation.advantage``, for a policy that reads no text.

    Such a policy, as ``FlowPolicy``, has a dropout of its own, and at inference a condition of its own.
    """

    condition: str = "positive"
    """What to ask for at inference: positive, negative or none."""

    _table: LabelTable | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing.

        Raises:
            ConfigError: Naming the setting and what is possible.
        """
        possible = {
            "negatives": ("labelled", "unconditional"),
            "write": ("task", "indicator"),
            "condition": tuple(INDICATORS),
        }
        for name, values in possible.items():
            if getattr(self, name) not in values:
                message = f"The condition step's {name} is one of {', '.join(values)}; found {getattr(self, name)!r}."
                raise ConfigError(message)
        if not 0.0 <= self.dropout <= 1.0:
            message = f"The condition step's dropout is a probability; found {self.dropout}."
            raise ConfigError(message)

    def __call__(self, transition: EnvTransition) -> EnvTransition:
        """Condition one batch or one sample.

        Raises:
            ConfigError: Where a training batch says neither its labels nor its ``index``, or there is no task text.
            SidecarError: Where the table has no label for a frame, or is of another dataset.
        """
        observation = dict(transition.get(TransitionKey.OBSERVATION) or {})
        extra = dict(transition.get(TransitionKey.COMPLEMENTARY_DATA) or {})
        training = transition.get(TransitionKey.ACTION) is not None
        conditions = self._training_conditions(observation, extra) if training else self._asked_for(observation)
        if self.write == "task":
            observation.pop(INDICATOR_KEY, None)
            extra["task"] = _conditioned_task(extra.get("task"), conditions)
        elif training:
            observation[INDICATOR_KEY] = torch.from_numpy(conditions)
        changed = {TransitionKey.OBSERVATION: observation, TransitionKey.COMPLEMENTARY_DATA: extra}
        return transition | changed  # type: ignore[return-value]

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, for ``policy_preprocessor.json``."""
        names = ("labels", "dropout", "negatives", "seed", "write", "condition")
        return {name: getattr(self, name) for name in names}

    def transform_features(
        self, features: dict[PipelineFeatureType, dict[str, PolicyFeature]]
    ) -> dict[PipelineFeatureType, dict[str, PolicyFeature]]:
        """Return ``features``: the condition is not a feature of the robot's."""
        return features

    def _asked_for(self, observation: dict[str, Any]) -> Float[np.ndarray, " B"]:
        """What the observation asks for, or one condition for the whole batch."""
        if observation.get(INDICATOR_KEY) is not None:
            return _numbers(observation[INDICATOR_KEY]).astype(np.float32)
        return np.array([INDICATORS[self.condition]], dtype=np.float32)

    def _training_conditions(self, observation: dict[str, Any], extra: dict[str, Any]) -> Float[np.ndarray, " B"]:
        """What each sample is trained under."""
        index = _whole_numbers(extra.get("index"))
        if observation.get(INDICATOR_KEY) is not None:
            found = _numbers(observation[INDICATOR_KEY])
        elif index is not None:
            found = self._loaded_table().look_up(index, _whole_numbers(extra.get("episode_index")))
        else:
            message = (
                f"Advantage conditioning needs each training sample's label: '{INDICATOR_KEY}', or LeRobot's 'index' "
                "to find it by; the batch has neither. Keep 'index' in the batch."
            )
            raise ConfigError(message)
        if self.negatives == "unconditional":
            found = np.maximum(found, UNCONDITIONAL)
        if self.write == "task" and self.dropout > 0.0:
            found = np.where(self._left_out(index, len(found)), UNCONDITIONAL, found)
        return found.astype(np.float32)

    def _left_out(self, index: np.ndarray | None, count: int) -> np.ndarray:
        if self.seed is None:
            return (torch.rand(count) < self.dropout).numpy()
        if index is None:
            message = (
                "The condition step's seed leaves out frames by their 'index', which the batch lacks; set it to null."
            )
            raise ConfigError(message)
        return hashed_dropout(index, self.dropout, self.seed)

    def _loaded_table(self) -> LabelTable:
        if self._table is None:
            if self.labels is None:
                message = (
                    "Advantage conditioning needs the labels of the dataset it trains on and was given none. Label the "
                    "dataset with regrasp advantages, and set the condition step's 'labels' to the sidecar."
                )
                raise MissingSidecar(message)
            self._table = read_label_table(Path(self.labels))
        return self._table


def add_condition_step(preprocessor: DataProcessorPipeline, step: AdvantageConditionStep) -> None:
    """Put ``step`` into a policy's preprocessor, in place of one that is there already.

    It stands first, after the stock step that renames observations, and so before everything that reads the task.
    """
    steps = [other for other in preprocessor.steps if not isinstance(other, AdvantageConditionStep)]
    renames = [
        i for i, other in enumerate(steps) if getattr(other, "_registry_name", "") == "rename_observations_processor"
    ]
    at = renames[0] + 1 if renames else 0
    preprocessor.steps = [*steps[:at], step, *steps[at:]]


def _conditioned_task(task: str | list[str] | None, conditions: Float[np.ndarray, " B"]) -> str | list[str]:
    if task is None:
        message = (
            "Advantage conditioning of a language policy extends the task text, and the observation has no 'task'."
        )
        raise ConfigError(message)
    if isinstance(task, str):
        return conditioned_text(task, float(conditions[0]))
    conditions = np.broadcast_to(conditions, len(task)) if len(conditions) == 1 else conditions
    return [conditioned_text(text, float(condition)) for text, condition in zip(task, conditions, strict=True)]


def _numbers(value: object) -> np.ndarray:
    return torch.as_tensor(value).detach().cpu().numpy().reshape(-1)


def _whole_numbers(value: object) -> np.ndarray | None:
    """A batch's ``index`` as an array, one entry per sample."""
    return None if value is None else _numbers(value).astype(np.int64)
