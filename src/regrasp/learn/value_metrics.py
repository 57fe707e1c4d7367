"""How well a value model predicts returns, frame by frame and episode by episode.

All values and targets are in the unit [-1, 0]; ``width`` turns an error into reward units, which are frames where the
reward is -1 a frame. Nothing here knows a network.
"""

from dataclasses import dataclass, field, fields

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from scipy.stats import rankdata

from regrasp.rl.categorical import expectation, two_hot

MOMENTS = ("start", "middle", "end")
"""The frames of an episode at which success is told from V: its first, its middle and its last evaluated one."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The frames that a model is judged on, episode after episode.

    Attributes:
        target: G of each frame, in the unit.
        width: The width of its task's return scale.
        episode: Which episode it belongs to, from 0, ascending.
        elapsed: Frames since the episode's start.
        success: Whether each episode succeeded.
        task: The number of each episode's task; all the same where it is left out.
    """

    target: Float[np.ndarray, " n"]
    width: Float[np.ndarray, " n"]
    episode: Int[np.ndarray, " n"]
    elapsed: Int[np.ndarray, " n"]
    success: Bool[np.ndarray, " E"]
    task: Int[np.ndarray, " E"] | None = None

    @property
    def frame_task(self) -> Int[np.ndarray, " n"]:
        """The number of each frame's task."""
        return np.zeros(len(self.episode), dtype=np.int64) if self.task is None else self.task[self.episode]


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What a model, or a baseline, says of those frames.

    Attributes:
        value: V, in the unit.
        cross_entropy: Against the two-hot target, in nats.
        best: Whether the likeliest atom is the target's heavier one.
        neighbor: Whether it is either of the target's two; of a target on an atom, that one.
    """

    value: Float[np.ndarray, " n"]
    cross_entropy: Float[np.ndarray, " n"]
    best: Bool[np.ndarray, " n"]
    neighbor: Bool[np.ndarray, " n"]

    @classmethod
    def of(
        cls,
        log_probabilities: Float[np.ndarray, "n 201"],
        target: Float[np.ndarray, " n"],
        value: Float[np.ndarray, " n"] | None = None,
    ) -> "Predictions":
        """Compare distributions with targets; ``value`` is their expectation unless it is given."""
        lower, weight = two_hot(target)
        row = np.arange(len(target))
        likeliest = log_probabilities.argmax(axis=1)
        near = log_probabilities[row, lower], log_probabilities[row, lower + 1]
        return cls(
            value=expectation(np.exp(log_probabilities.astype(np.float64))) if value is None else value,
            cross_entropy=-((1 - weight) * near[0] + np.where(weight > 0, weight * near[1], 0.0)).astype(np.float64),
            best=likeliest == lower + (weight > 0.5),
            neighbor=((likeliest == lower) & (weight < 1)) | ((likeliest == lower + 1) & (weight > 0)),
        )

    @classmethod
    def joined(cls, parts: "list[Predictions]") -> "Predictions":
        """Put batches one after the other."""
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class ValueMetrics:
    """Averages over held-out frames; NaN where one is not defined, with the reason in ``undefined``."""

    cross_entropy: float
    """In nats; uniform logits have ln 201 = 5.3033."""
    cat_acc_best: float
    """The share of frames whose likeliest atom is the target's heavier one."""
    cat_acc_neighbor: float
    """The share of frames whose likeliest atom is one of the target's two, or the one on which it lies."""
    mae_unit: float
    """Mean |V - G|, in the unit."""
    mae_frames: float
    """Mean |V - G|, in reward units: frames where the reward is -1 a frame."""
    spearman: float
    """Rank correlation of V and G over all frames, ties averaged."""
    spearman_episodes: float
    """The mean of the same within each episode, over those in which it is defined."""
    spearman_undefined: int
    """Episodes in which V or G does not vary, so that it is not."""
    auroc_start: float
    """The chance that V at the first frame is higher in a success than in a failure."""
    auroc_middle: float
    """The same at the middle frame."""
    auroc_end: float
    """The same at the last frame."""
    frames: int
    episodes: int
    undefined: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return JSON values; None for NaN."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {key: None if isinstance(value, float) and np.isnan(value) else value for key, value in values.items()}


def evaluate(predictions: Predictions, held_out: HeldOut) -> ValueMetrics:
    """Compute every metric of a model, or of a baseline, on the held-out frames."""
    error = np.abs(predictions.value - held_out.target)
    edges = np.flatnonzero(np.diff(held_out.episode)) + 1
    values, targets = np.split(predictions.value, edges), np.split(held_out.target, edges)
    within = np.array([spearman(v, g) for v, g in zip(values, targets, strict=True)])
    defined = within[~np.isnan(within)]
    undefined = {}
    moments = {
        "start": [v[0] for v in values],
        "middle": [v[len(v) // 2] for v in values],
        "end": [v[-1] for v in values],
    }
    areas = {moment: auroc(np.array(moments[moment]), held_out.success) for moment in MOMENTS}
    overall = spearman(predictions.value, held_out.target)
    if np.isnan(overall):
        undefined["spearman"] = "the values or the returns are all equal"
    if not len(defined):
        undefined["spearman_episodes"] = "in no episode do both values and returns vary"
    if np.isnan(areas["start"]):
        kind = "successes" if held_out.success.all() else "failures"
        undefined["auroc"] = f"all {len(held_out.success)} held-out episodes are {kind}"
    return ValueMetrics(
        cross_entropy=float(predictions.cross_entropy.mean()),
        cat_acc_best=float(predictions.best.mean()),
        cat_acc_neighbor=float(predictions.neighbor.mean()),
        mae_unit=float(error.mean()),
        mae_frames=float((error * held_out.width).mean()),
        spearman=overall,
        spearman_episodes=float(defined.mean()) if len(defined) else float("nan"),
        spearman_undefined=int(np.isnan(within).sum()),
        **{f"auroc_{moment}": area for moment, area in areas.items()},
        frames=len(error),
        episodes=len(values),
        undefined=undefined,
    )


def spearman(first: Shaped[np.ndarray, " n"], second: Shaped[np.ndarray, " n"]) -> float:
    """Spearman's rank correlation, ties averaged; NaN where either does not vary."""
    if len(first) < 2:
        return float("nan")
    a, b = (rankdata(x) - (len(first) + 1) / 2 for x in (first, second))
    scale = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / scale) if scale > 0 else float("nan")


def auroc(score: Float[np.ndarray, " E"], positive: Bool[np.ndarray, " E"]) -> float:
    """The chance that a positive scores above a negative, a tie counting half; NaN with one class only."""
    wins, positives = rankdata(score)[positive].sum(), int(positive.sum())
    pairs = positives * (len(score) - positives)
    return float((wins - positives * (positives + 1) / 2) / pairs) if pairs else float("nan")


@dataclass(frozen=True)
class Verdict:
    """Whether a value model is worth more than not looking at the robot."""

    beats_baselines: bool
    losses: tuple[str, ...]
    """Each comparison that the model did not win, in words."""
    wins_mae: bool
    """Whether its MAE is below every baseline's."""

    @property
    def warning(self) -> str | None:
        """What every later use of the model should say, or None."""
        if self.beats_baselines:
            return None
        found = "; ".join(self.losses)
        if self.wins_mae:
            return (
                f"This value model beats the baselines that see no frame in MAE, but not in everything: {found}. Where "
                "failures end at a common time limit, a clock knows to the frame how much is left of them, and no "
                "frame shows it; elsewhere: more episodes, --steps, or other --cameras."
            )
        return (
            f"This value model does not beat the baselines that see no frame, on held-out episodes: {found}. "
            "Advantages from it are not better than a clock's. Mend: more episodes, --steps, or other --cameras."
        )


def judge(model: ValueMetrics, baselines: dict[str, ValueMetrics]) -> Verdict:
    """Decide whether a model beats its baselines: strictly lower cross-entropy and strictly lower MAE than each.

    Both count because they fail apart: a model can rank distributions well around biased means, or have good means
    with overconfident distributions. MAE is compared in the unit, in which every task weighs the same.
    """
    losses = []
    for name, baseline in baselines.items():
        for metric, label in (("cross_entropy", "cross-entropy"), ("mae_unit", "MAE")):
            mine, theirs = getattr(model, metric), getattr(baseline, metric)
            if not mine < theirs:
                losses.append(f"{label} {mine:.4g} against {theirs:.4g} of the {name} baseline")
    wins_mae = all(model.mae_unit < baseline.mae_unit for baseline in baselines.values())
    return Verdict(not losses, tuple(losses), wins_mae)
