"""Cameras of one job: synchronised or refused, frames by timestamp, and the collage."""

import struct
from pathlib import Path

import numpy as np
import pytest

from regrasp.core.errors import ConfigError, VideoError
from regrasp.data.dataset import open_dataset
from regrasp.rewards.engine import Request, VideoInput
from regrasp.rewards.jobs import Job, episode_jobs
from regrasp.rewards.pictures import save_pictures
from regrasp.rewards.views import Views, fit, nearest_frames, uniform_frames
from tests.dataset_pixels import read_pixels
from tests.datasets import EpisodeSpec, write_dataset
from tests.judge_engine import write_gray, write_numbered


def views_of(*videos: Path) -> Views:
    return Views(Job(id="a", task="t", videos=videos))


@pytest.mark.parametrize("codec", ["h264", "av1"])
def test_frames_come_by_number_whatever_the_codec(tmp_path: Path, codec: str):
    views = views_of(*(write_numbered(tmp_path / f"{c}.mp4", 25, camera=c, codec=codec) for c in (0, 1)))
    assert (len(views.timestamps), views.duration_s, round(views.fps, 6)) == (25, 2.5, 10)
    numbers = np.array([24, 3, 3, 0])
    for camera in (0, 1):
        frames = views.frames(camera, numbers, (48, 72))
        assert [read_pixels(frame) for frame in frames] == [(camera, 0, n) for n in numbers]


def test_a_variable_frame_rate_is_told_by_its_own_times(tmp_path: Path):
    times = [0.0, 0.1, 0.2, 1.0, 1.1, 4.0]
    views = views_of(write_numbered(tmp_path / "a.mp4", 6, times=times))
    assert views.timestamps.round(4).tolist() == times
    # 5 intervals in 4.0 s are 0.8 s each, which the last frame lasts too
    assert views.duration_s == pytest.approx(4.8)
    wanted = views.nearest(np.array([0.16, 0.59, 0.61, 3.0]))
    assert wanted.tolist() == [2, 2, 3, 5]
    assert [read_pixels(f)[2] for f in views.frames(0, wanted, (48, 72))] == [2, 2, 3, 5]


def test_a_late_start_in_the_file_is_time_0_of_the_episode(tmp_path: Path):
    late = [2.0 + k / 10 for k in range(5)]
    views = views_of(*(write_numbered(tmp_path / f"{c}.mp4", 5, camera=c, times=late) for c in (0, 1)))
    assert views.timestamps[0] == 0
    assert [read_pixels(f)[2] for f in views.frames(1, np.arange(5), (48, 72))] == [0, 1, 2, 3, 4]


def test_cameras_that_are_not_synchronised_are_refused_with_the_figures(tmp_path: Path):
    first = write_numbered(tmp_path / "first.mp4", 20)
    slow = write_numbered(tmp_path / "slow.mp4", 20, fps=5)
    short = write_numbered(tmp_path / "short.mp4", 19)
    late = write_numbered(tmp_path / "late.mp4", 20, times=[1 + k / 10 for k in range(20)])
    drift = [k / 10 for k in range(20)]
    drift[7] += 0.06
    wandering = write_numbered(tmp_path / "wandering.mp4", 20, times=drift)
    for other, figures in (
        (slow, "10.000 and 5.000 frames per second"),
        (short, "20 and 19 frames"),
        (late, "a start at 0.000 s and at 1.000 s"),
        (wandering, "frame 7 at 0.700 s and at 0.760 s"),
    ):
        with pytest.raises(VideoError, match=figures):
            views_of(first, other)


@pytest.mark.parametrize("content", [None, b"", b"no video at all"])
def test_a_video_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None):
    if content is not None:
        (tmp_path / "bad.mp4").write_bytes(content)
    with pytest.raises(VideoError, match=r"bad\.mp4.*cannot be judged.*Mend"):
        views_of(tmp_path / "bad.mp4")


@pytest.mark.parametrize(
    ("name", "words"),
    [("x" * 300, "File name too long"), ("a\0b", "null"), (".", "it is no file"), ("left.mp4/x", "Not a directory")],
)
def test_a_path_that_cannot_be_looked_up_is_named(tmp_path: Path, name: str, words: str):
    (tmp_path / "left.mp4").write_bytes(b"")
    job = Job(id="a", task="t", videos=(tmp_path / name,))
    assert job.digest
    with pytest.raises(VideoError, match=rf"cannot be judged: .*{words}.*Mend"):
        Views(job)


@pytest.mark.parametrize("name", ["..", ".", "../up", "/etc", "机器人 😀" * 50, "a" * 500])
def test_pictures_stay_in_their_folder_whatever_the_job_is_called(tmp_path: Path, name: str):
    frames = np.zeros((1, 4, 6, 3), dtype=np.uint8)
    video = VideoInput(frames=frames, timestamps_s=np.zeros(1), duration_s=0.1)
    request = Request(id=name, system=None, prompt="p", videos=(video,), max_tokens=1)
    own = save_pictures(tmp_path / "seen", Job(id=name, task="t"), request)
    assert own.resolve().parent == (tmp_path / "seen").resolve()
    assert sorted(path.name for path in own.iterdir()) == ["prompt.txt", "video1_000_0.000s.png"]


@pytest.mark.parametrize(
    ("matrix", "turns"),
    [
        # rows (a, b) and (c, d) of the display matrix in 16.16: x' = a x + c y, y' = b x + d y, with y downwards
        ((0, 1, -1, 0), -1),  # the picture's right becomes its bottom: a quarter to the right
        ((-1, 0, 0, -1), 2),
        ((0, -1, 1, 0), 1),
    ],
)
def test_a_camera_held_on_its_side_is_shown_upright(tmp_path: Path, matrix: tuple[int, ...], turns: int):
    plain = write_numbered(tmp_path / "plain.mp4", 5)
    content = bytearray(plain.read_bytes())
    place = content.index(b"tkhd") + 4 + 40  # of version 0
    a, b, c, d = (65536 * number for number in matrix)
    content[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    (tmp_path / "turned.mp4").write_bytes(content)
    views, upright = views_of(tmp_path / "turned.mp4"), views_of(plain)
    assert views.sizes == [upright.sizes[0][::-1] if turns % 2 else upright.sizes[0]]
    numbers = np.array([3, 0, 3])
    expected = np.rot90(upright.frames(0, numbers, (48, 72)), turns, axes=(1, 2))
    assert (views.frames(0, numbers, expected.shape[1:3]) == expected).all()


def test_one_frame_is_an_episode_too(tmp_path: Path):
    views = views_of(write_numbered(tmp_path / "one.mp4", 1))
    assert (views.timestamps.tolist(), views.duration_s) == ([0.0], 0.1)
    assert views.nearest(np.array([0.0, 0.25])).tolist() == [0, 0]
    assert uniform_frames(views.timestamps, per_second=10.0, most=64, duration_s=0.1).tolist() == [0]


def test_views_stand_in_the_collage_in_their_order(tmp_path: Path):
    videos = [write_gray(tmp_path / f"{n}.mp4", [60 * n + 20] * 3) for n in range(4)]
    for count, places in (
        (1, [(0, 0)]),
        (2, [(0, 0), (0, 1)]),
        (3, [(0, 0), (0, 1), (0, 2)]),
        (4, [(0, 0), (0, 1), (1, 0), (1, 1)]),
    ):
        views = views_of(*videos[:count])
        (picture,) = views.collage(np.array([1]), 48)
        assert picture.shape[:2] == views.collage_size(48)
        for view, (row, column) in enumerate(places):
            cell = picture[row * 48 : row * 48 + 48, column * 64 : column * 64 + 64]
            assert abs(float(cell.mean()) - (60 * view + 20)) < 4
    (tmp_path / "fifth.mp4").write_bytes(videos[0].read_bytes())
    with pytest.raises(ConfigError, match="5 views"):
        views_of(*videos, tmp_path / "fifth.mp4")


def test_a_collage_shrinks_views_and_never_enlarges_them(tmp_path: Path):
    views = views_of(write_gray(tmp_path / "a.mp4", [9]))
    assert views.collage_size(24) == (24, 32)
    assert views.collage_size(480) == (48, 64)
    assert fit((48, 64), (48, 40)) == (30, 40)


def test_uniform_frames_take_the_first_and_the_last():
    at = np.arange(300) / 30  # 10 s
    assert len(uniform_frames(at, per_second=10.0, most=64, duration_s=10.0)) == 64
    short = uniform_frames(at[:60], per_second=10.0, most=64, duration_s=2.0)  # about 10 per second
    assert (len(short), short[0], short[-1]) == (20, 0, 59)
    assert uniform_frames(at[:3], per_second=10.0, most=64, duration_s=0.1).tolist() == [2]


def test_the_earlier_of_two_equally_near_frames_is_taken():
    assert nearest_frames(np.array([0.0, 1.0, 2.0]), np.array([-1.0, 0.5, 0.51, 1.5, 9.0])).tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
@pytest.mark.parametrize("kind", ["video", "image"])
def test_an_episode_of_a_dataset_is_seen_like_a_file(tmp_path: Path, layout: str, kind: str):
    cameras = {"observation.images.a": (48, 72), "observation.images.b": (48, 72)}
    episodes = [EpisodeSpec(9), EpisodeSpec(12)]
    path = write_dataset(tmp_path / "d", layout=layout, camera_kind=kind, cameras=cameras, episodes=episodes)
    job = episode_jobs(open_dataset(path), ["observation.images.b", "observation.images.a"], [1])[0]
    views = Views(job)
    assert (len(views.timestamps), views.duration_s) == (12, pytest.approx(12 / 30, abs=1e-5))
    frames = views.frames(0, np.array([11, 2]), (48, 72))
    assert [read_pixels(frame) for frame in frames] == [(1, 1, 11), (1, 1, 2)]
