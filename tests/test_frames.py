"""Frames come from the right place, at the right time, with the same pixels through every door."""

import logging
import multiprocessing
import os
from pathlib import Path

import av
import numpy as np
import pytest

from regrasp.core.errors import DatasetError, VideoError
from regrasp.data import dataset as dataset_module
from regrasp.data import frames as frames_module
from regrasp.data import video as video_module
from regrasp.data.dataset import Dataset, open_dataset
from regrasp.data.frames import FrameReader, episode_timestamps, iter_episode_frames
from regrasp.data.video import torchcodec_decoder
from tests.dataset_pixels import ENCODERS, encode_video, frame_pixels, read_pixels
from tests.datasets import EpisodeSpec, write_dataset

CAMERA = "observation.images.top"
REAL = Path(__file__).resolve().parents[2] / "shared" / "data"
EPISODES = [EpisodeSpec(11), EpisodeSpec(7, success=False), EpisodeSpec(9)]


def dataset_with_video(path: Path, **options: object) -> Dataset:
    settings = {"layout": "v3.0", "episodes": EPISODES, "cameras": {CAMERA: (48, 64)}} | options
    return open_dataset(write_dataset(path, **settings))


def numbers(frames: object) -> list[tuple[int, int]]:
    """(episode, frame) of each picture."""
    return [read_pixels(picture)[1:] for picture in frames]


@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
@pytest.mark.parametrize("codec", ["h264", "av1"])
@pytest.mark.parametrize("gop", [2, 250])
def test_each_frame_of_each_episode_is_its_own(tmp_path: Path, layout: str, codec: str, gop: int) -> None:
    dataset = dataset_with_video(tmp_path / "a", layout=layout, codec=codec, gop=gop)
    for episode, spec in enumerate(EPISODES):
        expected = [(episode, frame) for frame in range(spec.length)]
        assert numbers(iter_episode_frames(dataset, CAMERA, episode)) == expected
        assert numbers(iter_episode_frames(dataset, CAMERA, episode, (24, 36))) == expected


def test_uneven_presentation_times_are_followed_and_not_the_frame_rate(tmp_path: Path) -> None:
    dataset = dataset_with_video(tmp_path / "a", jitter=0.8)
    assert numbers(iter_episode_frames(dataset, CAMERA, 2)) == [(2, frame) for frame in range(9)]
    at = episode_timestamps(dataset, 2)
    assert not np.allclose(np.diff(at), 1 / 30)
    assert numbers(FrameReader(dataset, CAMERA, (24, 36)).read(2, at[[7, 1]])) == [(2, 7), (2, 1)]


def test_the_nearest_frame_is_chosen_and_half_an_interval_is_the_limit(tmp_path: Path) -> None:
    # Frames at k/30 s. 4/30 + 0.4/30 is nearest to frame 4, 4/30 + 0.6/30 to frame 5; 10.6/30 is past frame 10 by
    # more than half an interval.
    reader = FrameReader(dataset_with_video(tmp_path / "a", layout="v2.1"), CAMERA, (24, 36))
    assert numbers(reader.read(0, [4.4 / 30, 4.6 / 30, 10.4 / 30])) == [(0, 4), (0, 5), (0, 10)]
    with pytest.raises(VideoError, match=r"last frame is at 0.333 s.*goes on to 0.353 s"):
        reader.read(0, [10.6 / 30])


@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
def test_random_access_gives_the_pixels_of_the_ordered_pass(tmp_path: Path, layout: str) -> None:
    dataset = dataset_with_video(tmp_path / "a", layout=layout, codec="av1")
    for size in ((24, 36), None):
        reader = FrameReader(dataset, CAMERA, size)
        for episode in (2, 0):
            ordered = np.stack(list(iter_episode_frames(dataset, CAMERA, episode, size)))
            at = episode_timestamps(dataset, episode)
            rows = np.random.default_rng(0).integers(0, len(at), 20)
            assert np.array_equal(reader.read(episode, at[rows]), ordered[rows])


@pytest.mark.parametrize("size", [(24, 36), None])
def test_images_in_parquet_read_as_video_does(tmp_path: Path, size: tuple[int, int] | None) -> None:
    dataset = dataset_with_video(tmp_path / "a", camera_kind="image", layout="v2.1")
    ordered = list(iter_episode_frames(dataset, CAMERA, 1, size))
    assert numbers(ordered) == [(1, frame) for frame in range(7)]
    assert ordered[0].shape == (*(size or (48, 64)), 3)
    at = episode_timestamps(dataset, 1)
    assert np.array_equal(FrameReader(dataset, CAMERA, size).read(1, at[[5, 2]]), np.stack([ordered[5], ordered[2]]))


def test_an_image_and_a_video_are_resized_by_the_same_rule(tmp_path: Path) -> None:
    # 48 x 64 to 12 x 16 averages 4 x 4 pixels. Blocks of the test picture are 12 rows high and 10 or 11 columns wide,
    # so area averages leave each block's middle at its own level.
    dataset = dataset_with_video(tmp_path / "a", camera_kind="image")
    picture = next(iter(iter_episode_frames(dataset, CAMERA, 1, (12, 16))))
    exact = frame_pixels(1, 0, 48, 64).reshape(12, 4, 16, 4, 3).mean(axis=(1, 3))
    assert np.abs(picture.astype(float) - exact).max() <= 2


def test_rows_choose_frames_without_decoding_any_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = dataset_with_video(tmp_path / "a", layout="v2.1")
    decoded = []
    original = video_module.VideoCursor._decode

    def counted(self: video_module.VideoCursor):
        for item in original(self):
            decoded.append(item[0])
            yield item

    monkeypatch.setattr(video_module.VideoCursor, "_decode", counted)
    assert numbers(iter_episode_frames(dataset, CAMERA, 0, rows=slice(None, None, 3))) == [(0, f) for f in (0, 3, 6, 9)]
    # every second frame is a key frame: 3 is decoded after 2, 9 after 8, and 1, 4, 5 and 7 not at all
    assert [round(time_s * 30) for time_s in decoded] == [0, 2, 3, 6, 8, 9]


@pytest.mark.parametrize("order", ["bframes=0", "bframes=3", "bframes=3:open-gop=1", "bframes=3:b-pyramid=normal"])
def test_frames_far_apart_are_those_of_a_full_pass_in_whatever_order_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    settings = {"preset": "medium", "crf": "23", "x264-params": f"{order}:scenecut=0:keyint=7:min-keyint=7"}
    monkeypatch.setitem(ENCODERS, "h264", ("libx264", settings))
    dataset = dataset_with_video(tmp_path / "a", codec="h264", gop=7, episodes=[EpisodeSpec(60), EpisodeSpec(45)])
    at = episode_timestamps(dataset, 1)
    full = list(iter_episode_frames(dataset, CAMERA, 1))
    assert numbers(full) == [(1, frame) for frame in range(45)]
    chance = np.random.default_rng(0)
    for count in (1, 2, 3, 5, 9, 20, 44):
        rows = np.sort(chance.choice(45, count, replace=False))
        apart = FrameReader(dataset, CAMERA, None).read(1, at[rows])
        assert all(np.array_equal(picture, full[row]) for picture, row in zip(apart, rows, strict=True))
    for step in (2, 6, 7, 8, 20):
        apart = list(iter_episode_frames(dataset, CAMERA, 1, rows=slice(1, None, step)))
        assert all(np.array_equal(picture, full[1 + k * step]) for k, picture in enumerate(apart))


def test_a_missing_video_names_file_camera_episode_and_what_goes_on(tmp_path: Path) -> None:
    dataset = dataset_with_video(tmp_path / "a", layout="v2.1")
    path = dataset.video_span(CAMERA, 1).path
    path.unlink()
    with pytest.raises(VideoError) as caught:
        list(iter_episode_frames(dataset, CAMERA, 1))
    for part in (str(path), CAMERA, "episode 1", "no such file", "--cameras none", "advantages"):
        assert part in str(caught.value)
    assert numbers(iter_episode_frames(dataset, CAMERA, 0))[0] == (0, 0)


@pytest.mark.parametrize("content", [b"", b"not a video at all" * 50])
def test_a_file_that_is_no_video_is_named(tmp_path: Path, content: bytes) -> None:
    dataset = dataset_with_video(tmp_path / "a", layout="v2.1")
    path = dataset.video_span(CAMERA, 1).path
    path.write_bytes(content)
    with pytest.raises(VideoError, match="cannot be opened"):
        list(iter_episode_frames(dataset, CAMERA, 1, (24, 36)))
    with pytest.raises(VideoError, match="cannot be"):
        FrameReader(dataset, CAMERA).read(1, [0.0])


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    dataset = dataset_with_video(tmp_path / "a", layout="v2.1")
    path = dataset.video_span(CAMERA, 0).path
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(VideoError, match="episode_000000"):
        list(iter_episode_frames(dataset, CAMERA, 0))


def test_a_video_that_ends_before_its_episode_gives_both_times(tmp_path: Path) -> None:
    dataset = dataset_with_video(tmp_path / "a", layout="v2.1")
    path = dataset.video_span(CAMERA, 0).path
    encode_video(path, [(k / 30, frame_pixels(0, k, 48, 64)) for k in range(5)], fps=30, height=48, width=64)
    with pytest.raises(VideoError, match=r"last frame is at 0\.133 s .* goes on to 0\.333 s"):
        list(iter_episode_frames(dataset, CAMERA, 0))


def test_a_gap_in_a_video_is_an_error_and_not_its_neighbour(tmp_path: Path) -> None:
    dataset = dataset_with_video(tmp_path / "a", layout="v2.1")
    path = dataset.video_span(CAMERA, 0).path
    kept = [k for k in range(11) if k not in (4, 5)]
    encode_video(path, [(k / 30, frame_pixels(0, k, 48, 64)) for k in kept], fps=30, height=48, width=64)
    with pytest.raises(VideoError, match=r"no frame lies within 16\.7 ms of 0\.133 s"):
        list(iter_episode_frames(dataset, CAMERA, 0))


def test_an_episode_longer_than_its_span_does_not_borrow_the_next_ones_frames(tmp_path: Path) -> None:
    dataset = dataset_with_video(tmp_path / "a", layout="v3.0")
    with pytest.raises(VideoError, match=r"metadata end it at 0.367 s"):
        FrameReader(dataset, CAMERA, (24, 36)).read(0, [14 / 30])


def test_an_unknown_camera_is_named_with_those_there_are(tmp_path: Path) -> None:
    dataset = dataset_with_video(tmp_path / "a")
    with pytest.raises(DatasetError, match=r"no camera 'front'.*observation.images.top"):
        list(iter_episode_frames(dataset, "front", 0))


def _read_after_fork(reader: FrameReader, wanted: list[float], queue: "multiprocessing.Queue") -> None:
    queue.put((os.getpid(), reader.read(0, wanted)))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_reader_used_before_it_goes_to_another_process_opens_its_files_anew(tmp_path: Path, start: str) -> None:
    dataset = dataset_with_video(tmp_path / "a", layout="v2.1", gop=250)
    reader = FrameReader(dataset, CAMERA, (24, 36))
    assert numbers(reader.read(0, [5 / 30])) == [(0, 5)]
    context = multiprocessing.get_context(start)
    queue = context.Queue()
    child = context.Process(target=_read_after_fork, args=(reader, [9 / 30, 1 / 30], queue))
    child.start()
    process, pictures = queue.get(timeout=60)
    child.join()
    assert process != os.getpid()
    assert numbers(pictures) == [(0, 9), (0, 1)]
    assert numbers(reader.read(0, [6 / 30, 2 / 30])) == [(0, 6), (0, 2)]


def test_one_thread_decodes(tmp_path: Path) -> None:
    dataset = dataset_with_video(tmp_path / "a", layout="v2.1", codec="av1")
    cursor = video_module.VideoCursor(frames_module.footage(dataset, CAMERA, 0), None)
    stream = cursor._container.streams.video[0]
    assert stream.codec_context.thread_count == 1
    assert str(stream.thread_type).rsplit(".", maxsplit=1)[-1] == "NONE"


def test_where_torchcodec_cannot_load_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchcodec.decoders", None)
    torchcodec_decoder.cache_clear()
    reader = FrameReader(dataset_with_video(tmp_path / "a"), CAMERA)
    with caplog.at_level(logging.WARNING):
        assert numbers(reader.read(1, [3 / 30])) == [(1, 3)]
        assert numbers(reader.read(2, [3 / 30])) == [(2, 3)]
    torchcodec_decoder.cache_clear()
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]
    assert "PyAV decodes instead" in caplog.text


@pytest.mark.parametrize("jitter", [0.0, 0.8])
def test_torchcodec_gives_the_frames_that_pyav_gives(tmp_path: Path, jitter: float) -> None:
    if torchcodec_decoder() is None:
        pytest.skip("torchcodec cannot load on this machine (no FFmpeg)")
    dataset = dataset_with_video(tmp_path / "a", jitter=jitter)
    at = episode_timestamps(dataset, 2)
    rows = [8, 0, 3, 3, 5]
    ordered = np.stack(list(iter_episode_frames(dataset, CAMERA, 2)))
    assert np.abs(FrameReader(dataset, CAMERA).read(2, at[rows]).astype(int) - ordered[rows]).max() <= 1


@pytest.mark.skipif(not REAL.is_dir(), reason="the shared recordings are not on this machine")
def test_the_two_layouts_of_a_real_recording_hold_the_same_pixels() -> None:
    camera, rows = "observation.images.cam_high", slice(None, 60)
    old, new = (open_dataset(REAL / name) for name in ("g1_bottle_v21", "g1_bottle_v30"))
    for one, other in zip(
        iter_episode_frames(old, camera, 3, (48, 64), rows=rows),
        iter_episode_frames(new, camera, 3, (48, 64), rows=rows),
        strict=True,
    ):
        assert np.array_equal(one, other)


@pytest.mark.skipif(not REAL.is_dir(), reason="the shared recordings are not on this machine")
def test_a_real_recording_decodes_as_a_plain_loop_over_its_file_does() -> None:
    dataset = open_dataset(REAL / "g1_bottle_v21")
    camera = "observation.images.cam_high"
    ours = iter_episode_frames(dataset, camera, 6, rows=slice(None, 40))
    with av.open(str(dataset.video_span(camera, 6).path)) as container:
        for ours_frame, frame in zip(ours, container.decode(video=0), strict=False):
            assert np.array_equal(ours_frame, frame.to_ndarray(format="rgb24"))


@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
def test_one_episode_s_images_are_read_without_the_others(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = dataset_with_video(tmp_path / "a", camera_kind="image", layout=layout)
    dataset.index()
    read = []
    original = dataset_module.read_blocks

    def counted(path: Path, *arguments: object, **options: object):
        for table in original(path, *arguments, **options):
            read.append(table.num_rows)
            yield table

    monkeypatch.setattr(dataset_module, "read_blocks", counted)
    assert numbers(FrameReader(dataset, CAMERA).read(1, [0.0, 6 / 30])) == [(1, 0), (1, 6)]
    assert read == [7, 7]  # once for the timestamps, once for the images
