"""Write made-up values for a dataset that has returns: the return in [-1, 0], shrunk and with noise.

python benchmarks/make_values.py DATASET SIDECARS RETURNS_TAG TAG
"""

import sys
from pathlib import Path

import numpy as np

from regrasp.core.provenance import Provenance
from regrasp.core.scale import ScaleSet
from regrasp.data.dataset import open_dataset
from regrasp.data.sidecar import SidecarWriter, open_sidecar, sidecar_path
from regrasp.data.storage import Transaction

EPISODES = 1000
"""Written at a time."""


def make_values(path: Path, sidecars: Path, returns_tag: str, tag: str) -> None:
    """Write ``values_{tag}.parquet`` on the scale of the returns, which the provenance carries on."""
    dataset = open_dataset(path, sidecars=sidecars)
    index = dataset.index()
    returns = open_sidecar(dataset, "returns", returns_tag, reader="advantages")
    assert returns.provenance is not None
    assert returns.provenance.scale is not None
    scales = ScaleSet.from_json(returns.provenance.scale)
    stream = returns.stream(["return"], np.arange(len(index.length)))
    rng = np.random.default_rng(0)
    with Transaction() as transaction:
        writer = SidecarWriter(transaction, sidecar_path(dataset, "values", tag), "values")
        for start in range(0, len(index.length), EPISODES):
            positions = np.arange(start, min(start + EPISODES, len(index.length)))
            length = index.length[positions]
            low = np.repeat([scales.for_task(index.task[position]).low for position in positions], length)
            unit = -stream.take(int(length.sum()))["return"].astype(np.float64) / low
            value = np.clip(0.8 * unit - 0.1 + 0.05 * rng.standard_normal(len(unit)), -1, 0).astype(np.float32)
            episode, frame = index.keys(positions)
            writer.write({"episode_index": episode, "frame_index": frame, "value": value})
        provenance = Provenance(
            stage="value predict",
            config={"made_up": True},
            fingerprint=index.fingerprint,
            scale=returns.provenance.scale,
        )
        writer.close(provenance)
        transaction.commit()


if __name__ == "__main__":
    make_values(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
