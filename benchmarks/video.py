"""What looking at every frame of a dataset's videos costs, beside decoding alone.

    python benchmarks/video.py [--dataset DIR …] [--size 96] [--repeats 3] [--work-dir runs/bench]

Each side is a fresh process with one thread, the sides run in turn, and the table gives medians of the CPU time per
frame, start-up not included. Without --dataset a synthetic AV1 recording is made (``make_video.py``).
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import measure

if TYPE_CHECKING:
    from lerobot.datasets import LeRobotDataset

SIDES = ("decode only", "episode pass, resized", "LeRobotDataset[i], in order")
LEROBOT_FRAMES = 150
"""Enough of the slowest side."""
STEPS = 20
"""Of the value model's training: how good it is does not change what it costs."""


def decode(path: Path, size: int) -> int:
    """Decode every frame with PyAV, one thread, and look at none."""
    import av

    frames = 0
    for file in sorted(path.glob("videos/**/*.mp4")):
        with av.open(str(file)) as container:
            container.streams.video[0].thread_count = 1
            frames += sum(1 for _ in container.decode(video=0))
    return frames


def episode_pass(path: Path, size: int) -> int:
    """Take every frame of every episode through Regrasp's own door, resized."""
    from regrasp.data.dataset import open_dataset
    from regrasp.data.frames import iter_episode_frames

    dataset = open_dataset(path)
    frames = 0
    for camera in dataset.cameras:
        for episode in dataset.index().episode_index.tolist():
            frames += sum(1 for _ in iter_episode_frames(dataset, camera, episode, (size, size)))
    return frames


def items(path: Path, size: int) -> int:
    """Ask LeRobot's dataset for the first rows in order, and resize nothing."""
    dataset = opened_by_lerobot(path)
    for row in range(LEROBOT_FRAMES):
        dataset[row]
    return LEROBOT_FRAMES


def opened_by_lerobot(path: Path) -> "LeRobotDataset":
    """Open a dataset with LeRobot; PyAV decodes, so that both sides use one decoder."""
    from lerobot.datasets import LeRobotDataset

    return LeRobotDataset("benchmark/video", root=path, video_backend="pyav", return_uint8=True)


PASSES: dict[str, Callable[[Path, int], int]] = dict(zip(SIDES, (decode, episode_pass, items), strict=True))


def run_side(side: str, path: Path, size: int) -> None:
    """Time one side in this process; prints frames, CPU and wall seconds. What is imported first is not counted."""
    import torch

    torch.set_num_threads(1)
    if side == SIDES[2]:
        opened_by_lerobot(path)[0]
    else:
        import av  # noqa: F401

        import regrasp.data.frames  # noqa: F401
    cpu, wall = time.process_time(), time.perf_counter()
    frames = PASSES[side](path, size)
    print(json.dumps([frames, time.process_time() - cpu, time.perf_counter() - wall]))


def measure_side(side: str, path: Path, size: int) -> tuple[float, float]:
    """CPU and wall milliseconds per frame of a side, in a fresh process."""
    arguments = [__file__, "--side", side, "--dataset", str(path), "--size", str(size)]
    _, output = measure.run(measure.python(*arguments))
    frames, cpu, wall = json.loads(output.strip().splitlines()[-1])
    return cpu / frames * 1e3, wall / frames * 1e3


class Inference:
    """``regrasp value predict`` on the synthetic recording, and on one of two short episodes for the start-up."""

    def __init__(self, recording: Path, work: Path, size: int) -> None:
        """Make the short recording, and fit a value model to the long one for a few steps."""
        self.sidecars = work / "sidecars"
        self.recording, self.short = recording, recording.with_name("video_short")
        if not self.short.exists():
            measure.run(measure.python("benchmarks/make_video.py", str(self.short), "--episodes", "2", "--length", "4"))
        self.checkpoint = work / f"value_{size}"
        self.stage(recording, "returns", "--tag", "bench", "--overwrite")
        training = ["--steps", str(STEPS), "--checkpoint-every", str(STEPS), "--holdout", "0.5", "--workers", "1"]
        output = ["--output", str(self.checkpoint), "--image-size", str(size), "--overwrite"]
        self.stage(recording, "value", "fit", "--returns", "bench", *training, *output)

    def stage(self, dataset: Path, *words: str) -> measure.Cost:
        """Run a stage on a dataset; its cost."""
        where = ["--rollouts", str(dataset), "--sidecars", str(self.sidecars)]
        return measure.run([str(Path(sys.executable).with_name("regrasp")), *words, *where])[0]

    def measure(self) -> tuple[float, float]:
        """CPU and wall milliseconds per frame, the start-up taken off."""
        costs = []
        for dataset in (self.recording, self.short):
            (self.sidecars / dataset.name / "values_bench.parquet").unlink(missing_ok=True)
            words = ["--checkpoint", str(self.checkpoint), "--tag", "bench", "--workers", "1"]
            costs.append(self.stage(dataset, "value", "predict", *words))
        frames = total_frames(self.recording) - total_frames(self.short)
        return (costs[0].cpu_s - costs[1].cpu_s) / frames * 1e3, (costs[0].wall_s - costs[1].wall_s) / frames * 1e3


def total_frames(dataset: Path) -> int:
    """The frames of a dataset, by its metadata."""
    return json.loads((dataset / "meta/info.json").read_text())["total_frames"]


def report(name: str, found: dict[str, list[tuple[float, float]]]) -> str:
    """The table of one dataset."""
    medians = {side: [statistics.median(times) for times in zip(*each, strict=True)] for side, each in found.items()}
    least = medians[SIDES[0]]
    rows = []
    for side, (cpu, wall) in medians.items():
        cells = [f"{cpu:.2f}", f"{1e3 / cpu:.0f}", f"{least[0] / cpu:.2f}", f"{wall:.2f}", f"{least[1] / wall:.2f}"]
        rows.append([side, *cells])
    header = [
        "",
        "ms CPU a frame",
        "frames a CPU second",
        "of decoding alone (CPU)",
        "ms wall",
        "of decoding alone (wall)",
    ]
    return f"{name}\n\n" + measure.table(header, rows)


def main() -> None:
    """Measure and print one table for each dataset."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", type=Path, nargs="*", default=[], help="recordings beside the synthetic one")
    parser.add_argument("--size", type=int, default=96, help="height and width that frames are resized to")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work-dir", type=Path, default=Path("runs/bench"))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_side(options.side, options.dataset[0], options.size)
        return
    recording = options.work_dir / "video"
    if not recording.exists():
        measure.run(measure.python("benchmarks/make_video.py", str(recording)))
    inference = Inference(recording, options.work_dir, options.size)
    found = {path: defaultdict(list) for path in [recording, *options.dataset]}
    for _ in range(options.repeats):
        for path, times in found.items():
            for side in SIDES:
                times[side].append(measure_side(side, path, options.size))
            if path == recording:
                times["value inference, decoding included"].append(inference.measure())
    for path, times in found.items():
        print(report(path.name, times), end="\n\n")


if __name__ == "__main__":
    main()
