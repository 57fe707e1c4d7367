"""Write a dataset with one camera as LeRobot records it: 640 x 480, 30 fps, its default encoder (AV1, g=2, crf 30).

    python benchmarks/make_video.py OUT_DIR [--episodes 4] [--length 300]

The footage is synthetic: a still textured background, moving blocks and sensor noise. Noise makes the frames heavier to
decode than most real cameras' are.
"""

import argparse
import logging
import os
from pathlib import Path

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("SVT_LOG", "1")

HEIGHT, WIDTH, FPS = 480, 640, 30
CAMERA = "observation.images.top"
FEATURES = {
    CAMERA: {"dtype": "video", "shape": (HEIGHT, WIDTH, 3), "names": ["height", "width", "channel"]},
    "observation.state": {"dtype": "float32", "shape": (6,), "names": None},
    "action": {"dtype": "float32", "shape": (6,), "names": None},
    "next.success": {"dtype": "bool", "shape": (1,), "names": None},
}


def background(rng: np.random.Generator) -> np.ndarray:
    """Make a texture with detail at several sizes: float32 [HEIGHT, WIDTH, 3]."""
    image = np.full((HEIGHT, WIDTH, 3), 120, dtype=np.float32)
    for size in (8, 16, 80):
        patches = rng.normal(0, 10, size=(HEIGHT // size, WIDTH // size, 3)).astype(np.float32)
        image += np.kron(patches, np.ones((size, size, 1), dtype=np.float32))
    return image


def footage(length: int, rng: np.random.Generator) -> np.ndarray:
    """Film one episode: uint8 [length, HEIGHT, WIDTH, 3]."""
    scene = background(rng)
    noise = rng.normal(0, 2.0, size=(8, HEIGHT, WIDTH, 1)).astype(np.float32)
    phase, colours = rng.uniform(0, 6, size=(5, 2)), rng.uniform(20, 235, size=(5, 3))
    frames = np.empty((length, HEIGHT, WIDTH, 3), dtype=np.uint8)
    for frame in range(length):
        picture = scene + np.roll(noise[frame % 8], 37 * frame, axis=1)
        for (a, b), colour in zip(phase, colours, strict=True):
            y = int((0.5 + 0.4 * np.sin(a + frame / 40)) * (HEIGHT - 60))
            x = int((0.5 + 0.4 * np.sin(b + frame / 55)) * (WIDTH - 60))
            picture[y : y + 60, x : x + 60] += colour - 120
        frames[frame] = np.clip(picture, 0, 255)
    return frames


def make_video(root: Path, episodes: int, length: int, seed: int = 0) -> None:
    """Write the dataset with LeRobot's own writer."""
    import av
    import datasets

    logging.getLogger("lerobot").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    av.logging.set_libav_level(av.logging.ERROR)
    from lerobot.datasets import LeRobotDataset

    dataset = LeRobotDataset.create(
        f"benchmark/{root.name}",
        fps=FPS,
        features=FEATURES,
        root=root,
        robot_type="synthetic",
        streaming_encoding=True,
        encoder_queue_maxsize=length,
    )
    for episode in range(episodes):
        rng = np.random.default_rng([seed, episode])
        for frame, picture in enumerate(footage(length, rng)):
            state = rng.normal(frame / length, 0.1, size=6).astype(np.float32)
            success = np.array([frame == length - 1 and episode % 2 == 0])
            numbers = {"observation.state": state, "action": state, "next.success": success}
            dataset.add_frame({CAMERA: picture, **numbers, "task": "put the block in the box"})
        dataset.save_episode()
    dataset.finalize()


def main() -> None:
    """Write one dataset."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--length", type=int, default=300)
    options = parser.parse_args()
    make_video(options.out_dir, options.episodes, options.length)


if __name__ == "__main__":
    main()
