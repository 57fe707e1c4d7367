"""What the tabular stages cost, beside the least that reading and writing cost.

    python benchmarks/tabular.py [--frames 1000000 10000000] [--repeats 3] [--work-dir runs/bench]

Every figure is of a fresh process with one thread, files in the page cache; the sides of a ratio run in turn,
and the table gives medians. Start-up is the same command on a dataset of 3,000 frames.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import measure
from make_synthetic import make_synthetic

KEYS = "episode_index,frame_index"
COLUMNS = f"{KEYS},task_index,next.success"
"""What returns needs."""
ALL_COLUMNS = f"{KEYS},timestamp,task_index,next.success"
"""What is read, since the fingerprint covers timestamps."""
TINY = 3_000
Costs = dict[str, list[measure.Cost]]


class Bench:
    """The commands of one dataset."""

    def __init__(self, work: Path, frames: int) -> None:
        """Make the dataset, if it is not there, and leave its sidecars in a folder of their own."""
        self.dataset = work / f"synthetic_{frames}"
        if not self.dataset.exists():
            make_synthetic(self.dataset, frames)
        self.frames = frames
        self.sidecars = work / "sidecars"
        self.folder = self.sidecars / self.dataset.name
        self.folder.mkdir(parents=True, exist_ok=True)

    def stage(self, name: str, *flags: str) -> list[str]:
        """The command of a stage."""
        where = ["--rollouts", str(self.dataset), "--sidecars", str(self.sidecars)]
        return [str(Path(measure.sys.executable).with_name("regrasp")), name, *where, *flags]

    def commands(self) -> dict[str, tuple[list[str], Path]]:
        """Each stage's command and its output."""
        returns, values = ["--returns", "bench"], ["--values", "bench"]
        relabel = ["--source", "bench", "--positive-fraction", "0.2", "--tag"]
        return {
            "returns": (self.stage("returns", "--tag", "bench"), self.file("returns")),
            "advantages": (self.stage("advantages", *returns, *values, "--tag", "bench"), self.file("advantages")),
            "relabel, threshold": (self.stage("relabel", *relabel, "q20"), self.file("advantages", "q20")),
            "relabel, lookahead": (
                self.stage("relabel", *relabel, "n20", "--lookahead", "20"),
                self.file("advantages", "n20"),
            ),
        }

    def file(self, kind: str, tag: str = "bench") -> Path:
        """Where a sidecar lies."""
        return self.folder / f"{kind}_{tag}.parquet"

    def floors(self) -> dict[str, list[str]]:
        """The commands that merely read a stage's columns and write its output."""
        output = ["benchmarks/floor.py", str(self.dataset)]
        ready = [str(self.folder / "floor.parquet"), "--ready"]
        rewards = ["--sidecar", str(self.file("returns")), f"{KEYS},return,reward"]
        values = ["--sidecar", str(self.file("values")), f"{KEYS},value"]
        labels = [*rewards, *values, str(self.file("advantages"))]
        return {
            "floor of returns, 4 columns": [*output, COLUMNS, *ready, str(self.file("returns"))],
            "floor of returns, 5 columns": [*output, ALL_COLUMNS, *ready, str(self.file("returns"))],
            "floor of advantages": [*output, ALL_COLUMNS, *ready, labels[-1], *labels[:-1]],
        }

    def run_once(self, costs: Costs) -> None:
        """Run every command once, each stage after its floor."""
        for name, command in self.floors().items():
            cost, output = measure.run(measure.python(*command))
            parts = [float(part) for part in output.split()]
            costs[name].append(measure.Cost(sum(parts), cost.wall_s, cost.peak_mib))
            for part, seconds in zip(("start", "read", "write"), parts, strict=True):
                costs[f"{name}: {part}"].append(measure.Cost(seconds, 0, 0))
        for name, (command, output) in self.commands().items():
            output.unlink(missing_ok=True)
            costs[name].append(measure.run(command)[0])

    def prepare(self) -> None:
        """Run every stage once, which also warms the page cache, and make values up."""
        for name, (command, output) in self.commands().items():
            if name == "advantages":
                arguments = [str(self.dataset), str(self.sidecars), "bench", "bench"]
                self.file("values").unlink(missing_ok=True)
                measure.run(measure.python("benchmarks/make_values.py", *arguments))
            output.unlink(missing_ok=True)
            measure.run(command)


def report(bench: Bench, costs: Costs, tiny: Costs) -> str:
    """The table of one dataset."""
    least = measure.median(costs["floor of returns, 5 columns"]).cpu_s
    rows = []
    for name, found in costs.items():
        cost = measure.median(found)
        if cost.wall_s == 0:
            continue
        start = measure.median(tiny[name]).cpu_s
        each = (cost.cpu_s - start) / bench.frames * 1e6
        ratio = f"{cost.cpu_s / least:.2f}" if "returns" in name else ""
        parts = [
            f"{measure.median(costs[f'{name}: {part}']).cpu_s:.2f}" for part in ("read", "write") if "floor" in name
        ]
        cells = [f"{cost.cpu_s:.2f}", measure.spread(found), f"{cost.wall_s:.2f}", f"{start:.2f}", f"{each:.3f}"]
        rows.append([name, *cells, " + ".join(parts), ratio, f"{cost.peak_mib:.0f}" if "floor" not in name else ""])
    header = ["", "CPU s", "least-most", "wall s", "of it start-up", "µs CPU a frame after start-up", "read + write"]
    return f"{bench.frames:,} frames\n\n" + measure.table([*header, "to the floor (5 columns)", "peak MiB"], rows)


def main() -> None:
    """Measure and print one table for each size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--frames", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work-dir", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    benches = [Bench(options.work_dir, frames) for frames in (TINY, *options.frames)]
    costs: list[Costs] = [defaultdict(list) for _ in benches]
    for bench in benches:
        bench.prepare()
    for _ in range(options.repeats):
        for bench, found in zip(benches, costs, strict=True):
            bench.run_once(found)
    for bench, found in zip(benches[1:], costs[1:], strict=True):
        print(report(bench, found, costs[0]), end="\n\n")


if __name__ == "__main__":
    main()
