"""The terminal signal: how far an attempt had come when it ended, 1 to 5, with the probability of each."""

import math
import re
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from regrasp.rewards.engine import Capabilities, Reply, Request
from regrasp.rewards.jobs import Job
from regrasp.rewards.judging import (
    MASS_OUTSIDE,
    Desk,
    Judged,
    camera_words,
    collage_video,
    need,
    seconds,
    seed_of,
)
from regrasp.rewards.profiles import Ask, fill
from regrasp.rewards.views import Views, uniform_frames

SCORES = ("1", "2", "3", "4", "5")
TRUTH = (" True", " False")
"""With the space that belongs to the token after a colon."""
_REASON = r"[^\n]{1,400}"
_SCORE = re.compile(r"\s*([1-5])(?![0-9])")


@dataclass(frozen=True, kw_only=True)
class TerminalSignal:
    """Scores of whole attempts.

    The reply is greedy and begins at the score, so that the score's own position gives the probability of every
    score. ``progress`` = (E - 1)/4 ranks attempts; it is not a calibrated probability of success.
    """

    ask: Ask
    with_rationale: bool = False
    name: str = "terminal"

    def settings(self) -> dict[str, object]:
        """What decides the rows besides the profile."""
        return {"with_rationale": self.with_rationale}

    def check(self, capabilities: Capabilities, jobs: list[Job]) -> None:
        """Refuse an engine without log-probabilities; reasons also need replies that go on from given words."""
        why = "the terminal signal reads its score from"
        need(capabilities.logprobs, "log-probabilities of tokens", why, "serve the model with vLLM")
        if self.with_rationale:
            why = "--with-rationale needs to put the score after the reasons"
            need(capabilities.prefill, "replies that go on from given words", why, "leave it out")

    def describe(self, job: Job, views: Views) -> str:
        """Say how many frames of which size are shown."""
        height, width = views.collage_size(self.ask.cell_height)
        return f"{len(self.frames(views))} frames, {len(views.names)} views as one picture of {width}x{height}"

    def frames(self, views: Views) -> Int[np.ndarray, " n"]:
        """Which frames are shown: uniform over the episode, first and last among them."""
        return uniform_frames(
            views.timestamps,
            per_second=self.ask.frames_per_second,
            most=self.ask.most_frames,
            duration_s=views.duration_s,
        )

    def first_request(self, job: Job, views: Views) -> Request:
        """The question as an engine that can do everything is asked."""
        return self._reasons(job, views) if self.with_rationale else self._score(job, views, prefill=True, regex=True)

    async def judge(self, job: Job, views: Views, desk: Desk, capabilities: Capabilities) -> Judged:
        """Ask for the score; with reasons, for these first and then for the score that follows them."""
        able = {"prefill": capabilities.prefill, "regex": capabilities.constraint}
        if not self.with_rationale:
            exchanges = await desk.ask(lambda: self._score(job, views, **able))
            return Judged(fields=self._fields(exchanges[-1].reply), exchanges=exchanges, flags=[])

        def score_after(request: Request, reply: Reply) -> Request:
            return self._after_reasons(request, _first_line(reply), regex=capabilities.constraint)

        reasons = self._reasons
        exchanges = await desk.ask(lambda: reasons(job, views, regex=capabilities.constraint), score_after)
        fields = self._fields(exchanges[-1].reply) | {"rationale": _first_line(exchanges[0].reply)}
        return Judged(fields=fields, exchanges=exchanges)

    def _prompt(self, job: Job, views: Views, frames: int) -> str:
        places = {
            "task": job.task,
            "duration": seconds(views.duration_s),
            "cameras": camera_words(job, views, collage=True),
            "frames": frames,
        }
        return fill(self.ask.prompt, places)

    def _score(self, job: Job, views: Views, *, prefill: bool, regex: bool) -> Request:
        numbers = self.frames(views)
        prompt = self._prompt(job, views, len(numbers))
        scored = self.ask.readout == "score"
        tokens = SCORES if scored else (TRUTH if prefill else tuple(token.strip() for token in TRUTH))
        if not prefill:
            prompt += "\nReply with the " + ("digit" if scored else "word") + " alone."
        return Request(
            id=job.id,
            system=self.ask.system,
            prompt=prompt,
            videos=(collage_video(views, numbers, self.ask),),
            prefill=self.ask.prefill if prefill else None,
            constraint="[1-5]" if scored and regex else None,  # a mask would hide how probable "True" was
            score_tokens=tokens,
            max_tokens=1,
            seed=seed_of(job, self.name),
        )

    def _reasons(self, job: Job, views: Views, *, regex: bool = True) -> Request:
        numbers = self.frames(views)
        return Request(
            id=job.id,
            system=self.ask.system,
            prompt=self._prompt(job, views, len(numbers)) + "\nFirst give your reasons in one line.",
            videos=(collage_video(views, numbers, self.ask),),
            prefill=self.ask.rationale_prefill,
            constraint=_REASON if regex else None,
            max_tokens=self.ask.max_tokens,
            seed=seed_of(job, self.name),
        )

    def _after_reasons(self, request: Request, reasons: str, *, regex: bool) -> Request:
        return Request(
            id=request.id,
            system=request.system,
            prompt=request.prompt,
            videos=request.videos,
            prefill=f"{request.prefill or ''}{reasons}\n{self.ask.prefill or ''}",
            constraint="[1-5]" if regex and self.ask.readout == "score" else None,
            score_tokens=SCORES if self.ask.readout == "score" else TRUTH,
            max_tokens=1,
            seed=request.seed,
        )

    def _fields(self, reply: Reply) -> dict[str, object]:
        return score_fields(reply) if self.ask.readout == "score" else truth_fields(reply)


def _first_line(reply: Reply) -> str:
    return reply.texts[0].strip().partition("\n")[0].strip()


def score_fields(reply: Reply) -> dict[str, object]:
    """Read a score from a reply: the most probable one, which is what a greedy reply of one digit says.

    Returns:
        ``score``, ``probabilities``, ``expected_score`` and ``progress``; or ``invalid`` with ``raw`` and ``reason``.
    """
    text, found = reply.texts[0] if reply.texts else "", reply.probabilities
    probabilities = [math.nan] * 5 if found is None else [float(found.get(token, math.nan)) for token in SCORES]
    if not all(math.isfinite(p) for p in probabilities):
        reason = "the probabilities of 1 to 5 are not finite numbers" if found else "no probabilities came back"
        return {"invalid": True, "raw": text, "reason": reason}
    expected = sum(p * score for score, p in enumerate(probabilities, 1))
    score = 1 + max(range(5), key=lambda place: probabilities[place])
    flags = []
    if reply.mass is not None and reply.mass < MASS_OUTSIDE:
        flags.append(f"probability mass outside 1-5: {1 - reply.mass:.3f}")
    said = _SCORE.match(text)
    if said and int(said[1]) != score:
        flags.append(f"the reply says {said[1]}, and {score} is more probable")
    return {
        "score": score,
        "probabilities": dict(zip(SCORES, probabilities, strict=True)),
        "expected_score": expected,
        "progress": (expected - 1) / 4,
        "mass": reply.mass,
        "flags": flags,
    }


def truth_fields(reply: Reply) -> dict[str, object]:
    """Read the probability of "True" from a reply.

    Returns:
        ``log_probability`` of "True" among all tokens (None where the engine cannot tell), ``probabilities`` of True
        and False to each other, and the first of them as ``progress``. There is no score from 1 to 5.
    """
    found = {token.strip(): float(p) for token, p in (reply.probabilities or {}).items()}
    if set(found) != {"True", "False"} or not all(math.isfinite(p) for p in found.values()):
        text = reply.texts[0] if reply.texts else ""
        return {"invalid": True, "raw": text, "reason": "no finite probability of True and False came back"}
    among_all = None if reply.mass is None else found["True"] * reply.mass
    flags = []
    if reply.mass is not None and reply.mass < MASS_OUTSIDE:
        flags.append(f"probability mass outside True and False: {1 - reply.mass:.3f}")
    return {
        "score": None,
        "probabilities": found,
        "log_probability": math.log(among_all) if among_all else None,
        "progress": found["True"],
        "mass": reply.mass,
        "flags": flags,
    }
