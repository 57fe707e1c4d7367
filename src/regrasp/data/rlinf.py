"""The files that RLinf keeps beside its sidecars: ``stats.json`` and ``mixture_config.yaml``."""

import json
from pathlib import Path
from typing import Any

from regrasp.core.errors import DatasetError
from regrasp.data.dataset import Dataset
from regrasp.data.storage import Transaction

MIXTURE_FILE = "mixture_config.yaml"


def write_stats(transaction: Transaction, dataset: Dataset, statistics: dict[str, dict[str, float]]) -> None:
    """Put RLinf's ``return`` and ``reward`` statistics into the dataset's ``meta/stats.json``.

    RLinf also lists the two as features in ``info.json``. That is left undone: the data files have no such columns,
    and stock LeRobot then gives None for them, on which an ordinary trainer fails.
    """
    path = dataset.path / "meta" / "stats.json"
    try:
        stats = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DatasetError(_unusable(path, f"is not valid JSON ({error})")) from None
    if not isinstance(stats, dict):
        raise DatasetError(_unusable(path, "holds no object"))
    stats |= {name: {key: float(value) for key, value in values.items()} for name, values in statistics.items()}
    transaction.create(path).write((json.dumps(stats, indent=2) + "\n").encode())


def _unusable(path: Path, why: str) -> str:
    return f"'{path}' {why}, so nothing can be added to it. Mend: restore it, or leave --update-meta off."


def read_mixture(dataset: Dataset) -> dict[str, Any]:
    """Read a dataset's ``mixture_config.yaml``; empty where there is none."""
    path = dataset.sidecar_dir / MIXTURE_FILE
    if not path.is_file():
        return {}
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = f"'{path}' is not YAML: {' '.join(str(error).split())}. Mend: restore or remove it."
        raise DatasetError(message) from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not isinstance(content.get("tags") or {}, dict):
        message = f"'{path}' does not hold what RLinf keeps there. Mend: restore or remove it."
        raise DatasetError(message)
    return content


def mixture_with(old: dict[str, Any], run: dict[str, Any], tag: str, entry: dict[str, Any]) -> bytes:
    """The content of ``mixture_config.yaml`` after a tag was added.

    Args:
        old: What it held before; other tags stay.
        run: ``global_return_min``, ``global_return_max`` and ``datasets`` of this run.
        tag: The tag of the advantages.
        entry: Its thresholds and fraction.
    """
    import yaml

    tags = {**(old.get("tags") or {}), tag: entry}
    return yaml.safe_dump({**old, **run, "tags": tags}, sort_keys=False, allow_unicode=True).encode()
