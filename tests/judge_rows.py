"""Rows of a judge, written by hand."""

import json
from pathlib import Path

from regrasp.data.dataset import open_dataset


def write_rows(dataset: Path, signal: str, tag: str, fields: dict[int, dict]) -> None:
    """Write rows as `regrasp annotate` keeps them."""
    fingerprint = open_dataset(dataset).index().fingerprint
    question = {"signal": signal, "config": "c", "job": "j", "control": None}
    rows = [
        {"id": f"d/{number}", **question, "dataset": {"fingerprint": fingerprint, "episode_index": number}, **own}
        for number, own in fields.items()
    ]
    (dataset / f"meta/{signal}_{tag}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
