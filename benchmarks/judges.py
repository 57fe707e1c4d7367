"""What judging costs beside decoding, and how long a server waits for frames.

    python benchmarks/judges.py [--latency 0.5] [--jobs 100] [--cameras 1] [--work-dir runs/bench]

Clips are ten seconds of AV1 at 640 x 480, as LeRobot records. Preparing is timed in one thread. Then `regrasp annotate
terminal` judges the jobs through a stub of a server (`tests.judge_stub`, in its own process) that answers after
--latency; the stub's own clock says when it had nothing to do.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import measure

CLIPS = 4
SECONDS = 10
CONCURRENCY = (1, 8, 32)


def make_clips(folder: Path) -> None:
    """Write the clips of two cameras, with LeRobot's settings of the encoder."""
    import av
    import numpy as np
    from make_video import FPS, HEIGHT, WIDTH, footage

    folder.mkdir(parents=True)
    for number in range(CLIPS):
        for camera in range(2):
            frames = footage(FPS * SECONDS, np.random.default_rng([number, camera]))
            with av.open(str(folder / f"{number}_{camera}.mp4"), "w") as container:
                stream = container.add_stream("libsvtav1", rate=FPS, options={"g": "2", "crf": "30"})
                stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
                for frame in frames:
                    container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
                container.mux(stream.encode())


def time_preparing(clips: Path, cameras: int) -> None:
    """Print, for each step of preparing, the CPU seconds and the frames it was for: decoding is the floor."""
    import av
    import numpy as np

    from regrasp.rewards.engines.frames import as_video_parts
    from regrasp.rewards.jobs import Job
    from regrasp.rewards.judging import collage_video
    from regrasp.rewards.profiles import read_profile
    from regrasp.rewards.terminal import TerminalSignal
    from regrasp.rewards.views import Views

    ask = read_profile("generic").ask("terminal")
    signal = TerminalSignal(ask=ask)
    spent: dict[str, list[float]] = {"decode": [0.0, 0], "look": [0.0, 0], "encode": [0.0, 0]}
    for number in range(CLIPS):
        videos = tuple(clips / f"{number}_{camera}.mp4" for camera in range(cameras))
        started = time.process_time()
        for path in videos:
            with av.open(str(path)) as container:
                container.streams.video[0].thread_count = 1
                spent["decode"][1] += sum(1 for _ in container.decode(video=0))
        decoded = time.process_time()
        views = Views(Job(id="a", task="b", videos=videos))
        numbers: np.ndarray = signal.frames(views)
        video = collage_video(views, numbers, ask)
        looked = time.process_time()
        as_video_parts([video], 92)
        encoded = time.process_time()
        for name, took in (("decode", decoded - started), ("look", looked - decoded), ("encode", encoded - looked)):
            spent[name][0] += took
        spent["look"][1] += len(numbers) * cameras
        spent["encode"][1] += len(numbers) * cameras
    print(json.dumps(spent))


@contextlib.contextmanager
def stub(latency_s: float) -> Iterator[str]:
    """A server in its own process; its address."""
    words = measure.python("-m", "tests.judge_stub", "--latency", str(latency_s))
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def calls_of(url: str) -> list[tuple[float, float]]:
    """When each of the server's calls began and ended, probes left out."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/calls") as answer:
        return [(started, ended) for started, ended in json.load(answer)]


def waiting(calls: list[tuple[float, float]]) -> tuple[float, float, float]:
    """From the first call to the last answer: seconds, the share without any call, and calls at once on average."""
    calls = sorted(calls)
    begin, end = calls[0][0], max(ended for _, ended in calls)
    idle, busy_until = 0.0, begin
    for started, ended in calls:
        idle += max(0.0, started - busy_until)
        busy_until = max(busy_until, ended)
    return end - begin, idle / (end - begin), sum(ended - started for started, ended in calls) / (end - begin)


def judge(jobs: Path, concurrency: int, latency_s: float, output: Path) -> list[str]:
    """Judge all jobs at one concurrency; the row of the table."""
    output.unlink(missing_ok=True)
    with stub(latency_s) as url:
        words = ["annotate", "terminal", "--jobs", str(jobs), "--output", str(output), "--model", "judge"]
        program = str(Path(sys.executable).with_name("regrasp"))
        cost, _ = measure.run([program, *words, "--base-url", url, "--concurrency", str(concurrency)])
        calls = calls_of(url)
    wall_s, idle, at_once = waiting(calls)
    least_s = len(calls) * latency_s / concurrency
    return [
        str(concurrency),
        str(len(calls)),
        f"{wall_s:.1f}",
        f"{least_s:.1f}",
        f"{idle:.1%}",
        f"{at_once:.1f}",
        f"{cost.cpu_s:.1f}",
        f"{cost.cpu_s / cost.wall_s:.2f}",
        f"{cost.peak_mib:.0f}",
    ]


def preparing_table(runs: list[dict[str, list[float]]]) -> str:
    """What a job costs, step by step, beside decoding its clips alone."""

    def cells(name: str, frames: float, cpu_ms: float) -> list[str]:
        return [name, f"{frames:.0f}", f"{cpu_ms:.0f}", f"{cpu_ms / frames:.2f}", f"{cpu_ms / each['decode']:.2f}"]

    each = {name: statistics.median(1e3 * run[name][0] / CLIPS for run in runs) for name in runs[0]}
    shown = {name: took[1] / CLIPS for name, took in runs[0].items()}
    rows = [
        cells("decode every frame and look at none (PyAV)", shown["decode"], each["decode"]),
        cells("find, decode, resize, join in a collage", shown["look"], each["look"]),
        cells("JPEG and base64", shown["encode"], each["encode"]),
        cells("ready to send", shown["look"], each["look"] + each["encode"]),
    ]
    header = ["a job, one thread", "frames", "CPU ms", "CPU ms a frame", "of decoding alone"]
    return measure.table(header, rows)


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--latency", type=float, default=0.5, help="seconds that the stub takes for an answer")
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--concurrency", type=int, nargs="*", default=CONCURRENCY)
    parser.add_argument("--cameras", type=int, default=1, choices=(1, 2))
    parser.add_argument("--repeats", type=int, default=3, help="of the preparing")
    parser.add_argument("--work-dir", type=Path, default=Path("runs/bench"))
    parser.add_argument("--step", choices=("clips", "prepare"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    clips = options.work_dir / "judges"
    if options.step == "clips":
        make_clips(clips)
        return
    if options.step == "prepare":
        time_preparing(clips, options.cameras)
        return
    own = [__file__, "--work-dir", str(options.work_dir), "--cameras", str(options.cameras)]
    if not clips.exists():
        measure.run(measure.python(*own, "--step", "clips"))
    runs = [measure.run(measure.python(*own, "--step", "prepare"))[1].splitlines()[-1] for _ in range(options.repeats)]
    print(preparing_table([json.loads(run) for run in runs]), end="\n\n")
    jobs = clips / f"jobs_{options.cameras}.jsonl"
    with jobs.open("w") as file:
        for number in range(options.jobs):
            videos = [f"{number % CLIPS}_{camera}.mp4" for camera in range(options.cameras)]
            file.write(
                json.dumps({"id": f"job {number}", "task": "Put the block in the box.", "videos": videos}) + "\n"
            )
    output = options.work_dir / "judges_rows.jsonl"
    rows = [judge(jobs, concurrency, options.latency, output) for concurrency in options.concurrency]
    header = ["concurrency", "jobs", "s", "s at least", "server waits", "calls at once", "CPU s", "cores got", "MiB"]
    print(measure.table(header, rows))


if __name__ == "__main__":
    main()
