"""A request as the inputs of a model in this process, with every frame at its own absolute time."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regrasp.rewards.engine import EngineError, Request, RequestTooLong, VideoInput
from regrasp.rewards.engines.frames import (
    TICKS_PER_S,
    duration_ticks,
    expected_stamps,
    in_pairs,
    probe_clip,
    ticks,
    time_label,
)


@dataclass(frozen=True, kw_only=True)
class LocalPrompt:
    """What the model is given."""

    inputs: dict[str, torch.Tensor]
    tokens: int
    thinking: bool
    """Whether the reply begins with thinking."""


class PromptMaker:
    """Writes requests for a processor of transformers.

    Args:
        processor: With a chat template and a tokenizer.
        frames_as: "auto" gives videos where the processor is seen to write their times, else images.
    """

    def __init__(self, processor: Any, *, frames_as: str) -> None:  # noqa: ANN401 - every model family has its own class
        self._processor = processor
        self._knows_thinking = "enable_thinking" in str(processor.chat_template or processor.tokenizer.chat_template)
        self.video_options = _video_options(processor)
        self.as_videos = frames_as == "auto" and self._tells_times()

    @cached_property
    def template_thinks(self) -> bool:
        """Whether the chat template knows of thinking, or always opens it."""
        request = Request(id="probe", system=None, prompt="Hello.", videos=())
        with_it, without = (self.text(request, thinking=thinking) for thinking in (True, False))
        return with_it != without or with_it.rstrip().endswith("<think>")

    def make(self, request: Request, *, thinking: bool) -> LocalPrompt:
        """Return the inputs for a request; an ``EngineError`` where the processor does not keep every frame."""
        text = self.text(request, thinking=thinking)
        if not request.videos:
            inputs = self._processor(text=[text], return_tensors="pt")
        elif self.as_videos:
            inputs = self._with_videos(text, [in_pairs(video) for video in request.videos], request.id)
        else:
            images = [frame for video in request.videos for frame in video.frames]
            inputs = self._processor(text=[text], images=images, return_tensors="pt")
        tensors = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}
        return LocalPrompt(inputs=tensors, tokens=int(tensors["input_ids"].shape[1]), thinking=thinking)

    def _with_videos(self, text: str, videos: Sequence[VideoInput], request_id: str) -> Mapping[str, Any]:
        inputs = self._processor(
            text=[text],
            videos=[torch.from_numpy(np.ascontiguousarray(video.frames.transpose(0, 3, 1, 2))) for video in videos],
            video_metadata=[video_metadata(video) for video in videos],
            do_sample_frames=False,
            return_tensors="pt",
            **self.video_options,
        )
        grid = inputs.get("video_grid_thw")
        if grid is not None:
            pairs, planned = grid[:, 0].tolist(), [len(video.frames) // 2 for video in videos]
            if pairs != planned:
                raise EngineError(
                    f"{request_id!r}: the model's processor made {pairs} pairs of frames of {planned}; its answers"
                    " would be about other times. Use another version of transformers, or frames as images."
                )
        return inputs

    def text(self, request: Request, *, thinking: bool) -> str:
        """Return the prompt in words, with a mark where each video or frame stands, up to the prefill."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": request.system}] if request.system else []
        content = [*self._places(request.videos), {"type": "text", "text": request.prompt}]
        messages.append({"role": "user", "content": content})
        options = {"enable_thinking": thinking} if self._knows_thinking else {}
        text = self._processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
        return text if thinking else text + (request.prefill or "")

    def _places(self, videos: Sequence[VideoInput]) -> list[dict[str, str]]:
        """Where the videos or their frames stand in the message."""
        if self.as_videos:
            return [{"type": "video"} for _ in videos]
        places = []
        for number, video in enumerate(videos, start=1):
            if len(videos) > 1:
                places.append({"type": "text", "text": f"Video {number}:"})
            for time in video.timestamps_s:
                places += [{"type": "text", "text": time_label(float(time))}, {"type": "image"}]
        return places

    def _tells_times(self) -> bool:
        """Whether the prompt of a short clip, ten seconds into an episode, holds its times."""
        if getattr(self._processor, "video_processor", None) is None:
            return False
        video = probe_clip()
        self.as_videos = True
        try:
            made = self.make(Request(id="probe", system=None, prompt="Hello.", videos=(video,)), thinking=False)
        except (ValueError, TypeError, KeyError, EngineError):
            return False
        prompt = self._processor.tokenizer.decode(made.inputs["input_ids"][0])
        return re.findall(r"<\d+\.\d seconds>", prompt) == expected_stamps(video)


def video_metadata(video: VideoInput) -> dict[str, Any]:
    """Return what a processor is told of a video of an even number of frames, each at its absolute time."""
    count, height, width, _ = video.frames.shape
    assert count % 2 == 0, count
    return {
        "total_num_frames": duration_ticks(video),
        "fps": float(TICKS_PER_S),
        "frames_indices": ticks(video),
        "width": width,
        "height": height,
        "duration": video.duration_s,
    }


def _video_options(processor: Any) -> dict[str, Any]:  # noqa: ANN401 - every model family has its own class
    """Settings whose default differs between versions, as the older ones have it."""
    valid = getattr(getattr(processor, "video_processor", None), "valid_kwargs", None)
    known = getattr(valid, "__annotations__", {})
    return {"cap_pixels_per_frame": False} if "cap_pixels_per_frame" in known else {}


def too_long(request: Request, tokens: int, holds: str, *, mend: str = "") -> RequestTooLong:
    """Return the error of a request that does not fit a model's context.

    Args:
        request: What was asked.
        tokens: Of its prompt.
        holds: What holds how many, in words.
        mend: What may be changed besides the request.
    """
    frames = sum(len(video.frames) for video in request.videos)
    return RequestTooLong(
        f"{request.id!r} takes {tokens} tokens for {frames} frames and the text, and up to {request.max_tokens} for the"
        f" reply; {holds}. Lower the number of frames, their size or the tokens of a reply{mend}."
    )


def score_ids(tokenizer: Any, request: Request, model: str) -> dict[str, int]:  # noqa: ANN401 - any of transformers
    """Return each score token's id.

    Raises:
        EngineError: It is not one token, or not one any more after the prefill.
    """

    def text(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    before = tokenizer.encode(request.prefill or "", add_special_tokens=False)
    ids = {}
    for token in request.score_tokens or ():
        together = tokenizer.encode((request.prefill or "") + token, add_special_tokens=False)
        if together[:-1] != before or text(together[-1:]) != token:
            raise EngineError(
                f"{request.id!r} wants the probability of {token!r} after {request.prefill or ''!r}, but there it is"
                f" not one token of {model!r}: it is {[text([one]) for one in together[-3:]]}. Move the space between"
                " the two to the other side in the profile."
            )
        ids[token] = together[-1]
    return ids


def model_fingerprint(model: str, config: object) -> str:
    """Return the hub's revision, or a digest of a folder's file names and sizes and its small files."""
    revision = getattr(config, "_commit_hash", None)
    if revision:
        return str(revision)[:12]
    digest = hashlib.sha256()
    for file in sorted(Path(model).glob("*")):
        if file.is_file():
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            digest.update(file.read_bytes() if size < 1 << 24 else b"")
    return digest.hexdigest()[:12]
