"""A small judge of one task, learned from attempts whose outcomes are known, behind an OpenAI-compatible server.

    python benchmarks/recap/frame_judge.py train DATASET --camera observation.images.front --output judge.pt
    python benchmarks/recap/frame_judge.py serve judge.pt --port 8000

It looks at the last frame of the video that a request carries, and knows no other task than its own: under any other
instruction the answer is 1. Its probability p of success becomes that of each score by Binomial(4, p), so that the
expected score is 1 + 4p and `progress` is p.
"""

import argparse
import base64
import io
import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, interpolate, pad

from regrasp.core.outcome import Outcome
from regrasp.data.dataset import open_dataset
from regrasp.data.frames import iter_episode_frames
from regrasp.data.outcomes import read_outcomes

SIZE = 96
"""Height and width of what the network sees."""
STRIDE = 6
"""Every so many frames an earlier one is learnt from as well: at that time nothing had succeeded."""
MARGIN = 12
"""Frames before a success that are left out: they look like it."""
SHIFT = 4
"""Pixels by which training pictures are moved."""


class Network(nn.Module):
    """Whether a picture shows the task done: a logit."""

    def __init__(self) -> None:
        super().__init__()
        widths = (5, 16, 32, 64)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(8, after), nn.SiLU()]
        self.look = nn.Sequential(*layers, nn.Conv2d(64, 64, 3, padding=1), nn.SiLU())
        self.say = nn.Sequential(nn.Dropout(0.3), nn.Linear(128, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return logits [B] of pictures in [0, 1], [B, 3, SIZE, SIZE]."""
        line = torch.linspace(-1, 1, SIZE)
        place = torch.stack(torch.meshgrid(line, line, indexing="ij")).expand(len(pictures), -1, -1, -1)
        found = self.look(torch.cat([pictures * 2 - 1, place], dim=1))
        return self.say(torch.cat([found.mean((2, 3)), found.amax((2, 3))], dim=1))[:, 0]


def as_pictures(frames: np.ndarray) -> torch.Tensor:
    """Return uint8 frames [B, H, W, 3] as the network sees them."""
    pictures = torch.tensor(frames).permute(0, 3, 1, 2).float() / 255
    return interpolate(pictures, (SIZE, SIZE), mode="area")


def read_pictures(path: Path, camera: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]:
    """Return the last frames of all attempts, their outcomes, earlier frames, and the attempts' task."""
    dataset = open_dataset(path)
    index, outcomes = dataset.index(), read_outcomes(dataset).by_episode
    last, success, earlier = [], [], []
    for number, length in zip(index.episode_index.tolist(), index.length.tolist(), strict=True):
        frames = list(iter_episode_frames(dataset, camera, number))
        done = outcomes[number] is Outcome.SUCCESS
        last.append(frames[-1])
        success.append(float(done))
        earlier += frames[: length - MARGIN : STRIDE]
    (task,) = set(index.task)
    return as_pictures(np.stack(last)), torch.tensor(success), as_pictures(np.stack(earlier)), task


def moved(pictures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return pictures shifted by a few pixels and made brighter or darker, each in its own way."""
    padded = pad(pictures, (SHIFT,) * 4, mode="replicate")
    at = torch.randint(0, 2 * SHIFT + 1, (len(pictures), 2), generator=generator).tolist()
    cut = [one[:, y : y + SIZE, x : x + SIZE] for one, (y, x) in zip(padded, at, strict=True)]
    return (torch.stack(cut) * (0.9 + 0.2 * torch.rand(len(pictures), 1, 1, 1, generator=generator))).clamp(0, 1)


def train(options: argparse.Namespace) -> None:
    """Learn from half last frames, as many of successes as of failures, and half earlier ones; write the network."""
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    last, success, earlier, task = read_pictures(options.dataset, options.camera)
    groups = [last[success == 1], last[success == 0], earlier]
    shares = (options.batch // 4, options.batch // 4, options.batch // 2)
    said = torch.cat([torch.full((count,), float(place == 0)) for place, count in enumerate(shares)])
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=options.steps, pct_start=0.1)
    losses = []
    for step in range(1, options.steps + 1):
        drawn = [
            group[torch.randint(0, len(group), (count,), generator=generator)]
            for group, count in zip(groups, shares, strict=True)
        ]
        loss = binary_cross_entropy_with_logits(network(moved(torch.cat(drawn), generator)), said)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 0:
            print(f"step {step}: loss {np.mean(losses[-100:]):.3f}", flush=True)
    torch.save({"task": task, "weights": network.state_dict()}, options.output)
    print(f"{len(last)} attempts, {int(success.sum())} successes; wrote '{options.output}'")


class Judge:
    """The network and its task; answers a chat completion's messages with the probability of each score."""

    def __init__(self, path: Path) -> None:
        held = torch.load(path, weights_only=True)
        self._task, self._lock = held["task"], threading.Lock()
        self._network = Network().eval()
        self._network.load_state_dict(held["weights"])

    def scores(self, messages: list[dict[str, Any]]) -> list[float]:
        """Return P(1) to P(5)."""
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        text = " ".join(part["text"] for part in parts if part["type"] == "text")
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        p = self._success(urls[-1]) if urls and f'"{self._task}"' in text else 0.0
        return [math.comb(4, k) * p**k * (1 - p) ** (4 - k) for k in range(5)]

    @torch.inference_mode()
    def _success(self, url: str) -> float:
        jpeg = base64.b64decode(url.partition("base64,")[2])
        frame = np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))
        with self._lock:
            return float(torch.sigmoid(self._network(as_pictures(frame[None])))[0])


class Handler(BaseHTTPRequestHandler):
    """Chat completions of one token, a score."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    judge: Judge

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """List the one model."""
        listed = {"object": "list", "data": [{"id": "frame-judge", "object": "model", "owned_by": "benchmarks"}]}
        self._answer(200, listed) if self.path == "/v1/models" else self._answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        """Score the frames of a request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        videos = any(
            part["type"] == "video_url"
            for message in body.get("messages", ())
            if isinstance(message["content"], list)
            for part in message["content"]
        )
        if self.path != "/v1/chat/completions":
            self._answer(404, {"detail": "Not Found"})
        elif videos:
            self._answer(400, {"error": {"message": "This model takes images, not lists of frames."}})
        else:
            self._answer(200, completion(self.judge.scores(body["messages"]), body))

    def _answer(self, status: int, payload: dict[str, Any]) -> None:
        content = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def completion(scores: list[float], body: dict[str, Any]) -> dict[str, Any]:
    """Return a reply of one token, the most probable score."""
    listed = [
        {"token": str(score), "logprob": math.log(max(share, 1e-30)), "bytes": None}
        for score, share in sorted(enumerate(scores, 1), key=lambda one: -one[1])
    ]
    content = [{**listed[0], "top_logprobs": listed[: body.get("top_logprobs", 0)]}]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": listed[0]["token"]},
        "finish_reason": "stop",
        "logprobs": {"content": content} if body.get("logprobs") else None,
    }
    usage = {"prompt_tokens": len(json.dumps(body["messages"])) // 4, "completion_tokens": 1}
    return {"object": "chat.completion", "model": "frame-judge", "choices": [choice], "usage": usage}


def serve(options: argparse.Namespace) -> None:
    """Serve until stopped; the first line printed is the address."""
    handler = type("JudgeHandler", (Handler,), {"judge": Judge(options.weights)})
    server = ThreadingHTTPServer(("127.0.0.1", options.port), handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
    server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(required=True)
    learn = ways.add_parser("train", help="learn from a dataset whose outcomes are known")
    learn.add_argument("dataset", type=Path)
    learn.add_argument("--camera", required=True)
    learn.add_argument("--output", type=Path, required=True)
    learn.add_argument("--steps", type=int, default=400)
    learn.add_argument("--batch", type=int, default=32)
    learn.add_argument("--seed", type=int, default=0)
    learn.set_defaults(act=train)
    answer = ways.add_parser("serve", help="answer requests on loopback")
    answer.add_argument("weights", type=Path)
    answer.add_argument("--port", type=int, default=0)
    answer.set_defaults(act=serve)
    torch.set_num_threads(1)
    options = parser.parse_args()
    options.act(options)


if __name__ == "__main__":
    main()
