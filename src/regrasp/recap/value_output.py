"""What a value fit leaves behind: its checkpoint, its pictures, and the record by which it can be resumed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regrasp.core.errors import listing
from regrasp.learn.value_metrics import HeldOut, Predictions, ValueMetrics, Verdict
from regrasp.recap.fit_folder import deciding
from regrasp.recap.value_data import FitEpisodes, episodes_by_dataset
from regrasp.report.value_plots import Curve, draw_calibration, draw_value_curves

if TYPE_CHECKING:
    from regrasp.learn.image_cache import Images
    from regrasp.learn.loop import TrainResult
    from regrasp.recap.value_fit import ValueFitConfig

_ROWS = (
    ("cross-entropy", "cross_entropy", "{:.4f}"),
    ("MAE, unit", "mae_unit", "{:.4f}"),
    ("MAE, frames", "mae_frames", "{:.2f}"),
    ("cat_acc_best", "cat_acc_best", "{:.3f}"),
    ("cat_acc_neighbor", "cat_acc_neighbor", "{:.3f}"),
    ("Spearman, all frames", "spearman", "{:.3f}"),
    ("Spearman, mean of episodes", "spearman_episodes", "{:.3f}"),
    ("AUROC of success, start", "auroc_start", "{:.3f}"),
    ("AUROC of success, middle", "auroc_middle", "{:.3f}"),
    ("AUROC of success, end", "auroc_end", "{:.3f}"),
)


def fit_settings(
    config: "ValueFitConfig", found: FitEpisodes, cameras: tuple[str, ...], vectors: tuple[str, ...]
) -> dict[str, Any]:
    """Return everything that decides what is learnt."""
    return deciding(config) | {
        "cameras": list(cameras),
        "vectors": list(vectors),
        "datasets": {d.name: [d.index().fingerprint, d.weight] for d in found.datasets},
        "returns_ids": {d.name: sidecar.id for d, sidecar in zip(found.datasets, found.returns, strict=True)},
    }


def save(
    config: "ValueFitConfig",
    found: FitEpisodes,
    model: Any,  # noqa: ANN401 - a ValueModel, which is also a torch module
    result: "TrainResult",
    *,
    vectors: tuple[str, ...],
    strides: tuple[int | None, int],
    metrics: ValueMetrics,
    baselines: dict[str, ValueMetrics],
    verdict: Verdict,
) -> list[Path]:
    """Publish the checkpoint with everything that a later reader has to know of it."""
    from safetensors.torch import save as to_safetensors

    from regrasp.learn.value_checkpoint import save_value_checkpoint
    from regrasp.models.registry import config_to_json

    tensors = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
    record = {
        "tasks": sorted({episode.task for episode in found.episodes}),
        "gamma": found.gamma,
        "vectors": list(vectors),
        "datasets": _dataset_records(found, vectors),
        "mixture": "a dataset is drawn with probability proportional to weight x frames, then a frame uniformly",
        "training": {
            "steps": config.steps,
            "best_step": result.best_step,
            "batch_size": config.batch_size,
            "learning_rate": config.learning_rate,
            "weight_decay": config.weight_decay,
            "ema_decay": config.ema_decay,
            "seed": config.seed,
            "frame_stride": strides[0] or 1,
        },
        "held_out": metrics.to_json() | {"frame_stride": strides[1], "selected_on": "cross_entropy of these frames"},
        "baselines": {name: baseline.to_json() for name, baseline in baselines.items()},
        "verdict": {
            "beats_baselines": verdict.beats_baselines,
            "losses": list(verdict.losses),
            "warning": verdict.warning,
        },
    }
    return save_value_checkpoint(
        config.output,
        weights=to_safetensors(tensors),
        model=config_to_json(model.config),
        scale=found.scales,
        record=record,
    )


def _dataset_records(found: FitEpisodes, vectors: tuple[str, ...]) -> list[dict[str, Any]]:
    held_out = episodes_by_dataset(found, held_out=True)
    return [
        {
            "name": dataset.name,
            "source": dataset.source.value,
            "fingerprint": dataset.index().fingerprint,
            "weight": dataset.weight,
            "state": dataset.vector_columns(vectors),
            "returns": {"tag": sidecar.tag, "id": sidecar.id},
            "held_out_episodes": held_out[dataset.name],
        }
        for dataset, sidecar in zip(found.datasets, found.returns, strict=True)
    ]


def draw_pictures(output: Path, found: FitEpisodes, held_out: HeldOut, predictions: Predictions) -> list[Path]:
    """Draw V and G over the held-out episodes, and G against V."""
    curves = []
    for place, episode in enumerate(found.part(held_out=True)):
        rows = np.flatnonzero(held_out.episode == place)
        curves.append(
            Curve(
                title=f"{found.datasets[episode.dataset].name} {episode.episode_index}",
                success=episode.success,
                frame=held_out.elapsed[rows],
                value=predictions.value[rows],
                target=held_out.target[rows],
            )
        )
    paths = [output / "value_curves.png", output / "calibration.png"]
    draw_value_curves(paths[0], curves)
    draw_calibration(paths[1], predictions.value, held_out.target)
    return paths


def report_lines(
    found: FitEpisodes,
    images: "Images",
    vectors: tuple[str, ...],
    strides: tuple[int | None, int],
    result: "TrainResult",
    metrics: ValueMetrics,
    baselines: dict[str, ValueMetrics],
    verdict: Verdict,
) -> list[str]:
    """Say what was learnt from what, and how good it is beside the baselines."""
    counts = [len(found.part(held_out=held)) for held in (False, True)]
    names = listing(
        [f"{name} {listing(map(str, e), 6)}" for name, e in episodes_by_dataset(found, True).items() if e], 6
    )
    cameras = listing(images.cameras) or "none"
    seen = f"every {strides[0]}. frame" if strides[0] and strides[0] > 1 else "every frame"
    how = "" if strides[0] is not None or not images.cameras else ", read from the videos (the cache would be too big)"
    resumed = f", resumed from step {result.resumed_from}" if result.resumed_from else ""
    judged = "all frames" if strides[1] == 1 else f"every {strides[1]}. frame"
    columns = {"model": metrics, **baselines}
    lines = [
        f"Episodes: {counts[0]} for training, {counts[1]} held out ({names})",
        f"Cameras: {cameras}; state: {listing(vectors) or 'none'}; trained on {seen}{how}{resumed}",
        f"Held-out metrics of the best checkpoint (step {result.best_step}), over {judged} of the held-out episodes:",
        f"  {'':<28}" + "".join(f"{name:>14}" for name in columns),
    ]
    for label, name, form in _ROWS:
        cells = [getattr(column, name) for column in columns.values()]
        lines.append(f"  {label:<28}" + "".join(f"{'-' if np.isnan(c) else form.format(c):>14}" for c in cells))
    lines += [f"  {name}: not defined, since {reason}" for name, reason in metrics.undefined.items()]
    lines.append(verdict.warning or "The model beats both baselines in cross-entropy and MAE.")
    return lines
