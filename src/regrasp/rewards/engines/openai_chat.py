"""Chat completions in words of the protocol: a request's body, and a reply read from whatever came back."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from regrasp.rewards.engine import EngineError, Reply, Request
from regrasp.rewards.engines.frames import media_kwargs

Spelling = Literal["structured_outputs", "guided_regex", "regex"]
SPELLINGS: dict[Spelling, str] = {
    "structured_outputs": "vLLM since 0.11",
    "guided_regex": "vLLM before 0.12, which later ones ignore without a word",
    "regex": "SGLang",
}
"""How a server is asked for a reply that matches a regular expression."""
THOUGHT_END = "</think>"
NOT_FINITE_FLAG = "non-finite log-probabilities"


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """What one server was seen to understand; requests are written for it."""

    spelling: Spelling | None = None
    """How it takes a regular expression, if it obeys one."""
    top_logprobs: int = 0
    """The most alternatives of a token that it gives."""
    prefill: bool = False
    """It goes on from the last message of the assistant."""
    n: bool = False
    """It gives several replies to one request."""
    template_kwargs: bool = False
    """It passes arguments on to the chat template."""
    reasoning: bool = False
    """It gives thinking apart from the answer, and constrains the answer alone."""
    video_frames: bool = False
    """It takes lists of frames with their own times, and was seen to tell the model these times."""
    several: bool = False
    """It takes several videos, in the form that is used."""
    context: int | None = None
    """The most tokens of prompt and reply together, where it says."""


def constrained(spelling: Spelling, pattern: str) -> dict[str, Any]:
    """Return the fields that ask for a reply which matches a regular expression."""
    return {"structured_outputs": {"regex": pattern}} if spelling == "structured_outputs" else {spelling: pattern}


def chat_body(
    model: str, request: Request, parts: Sequence[dict], dialect: Dialect, *, constraint: str | None, logprobs: bool
) -> dict[str, Any]:
    """Return the body of a chat completion.

    Args:
        model: The name by which the server knows the model.
        request: What is asked.
        parts: Its videos, already as chat parts.
        dialect: What the server understands.
        constraint: Used in place of the request's.
        logprobs: Whether the alternatives of the first token are wanted.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": request.system}] if request.system else []
    messages.append({"role": "user", "content": [*parts, {"type": "text", "text": request.prompt}]})
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "n": request.n,
    }
    if request.prefill and dialect.prefill:
        messages.append({"role": "assistant", "content": request.prefill})
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.seed is not None:
        body["seed"] = request.seed
    if constraint is not None and dialect.spelling is not None:
        body |= constrained(dialect.spelling, constraint)
    if logprobs:
        body |= {"logprobs": True, "top_logprobs": dialect.top_logprobs}
    if dialect.template_kwargs:
        body["chat_template_kwargs"] = {"enable_thinking": request.thinking}
    if dialect.video_frames and request.videos:
        body["media_io_kwargs"] = media_kwargs(request.videos)
    return body


def read_reply(payload: Mapping[str, Any], request_id: str) -> Reply:
    """Read a chat completion's texts, thinking, ends and tokens.

    Raises:
        EngineError: It is not a chat completion, or has fields of other types.
    """
    choices = payload.get("choices")
    if not isinstance(choices, list) or not choices:
        raise _not_a_completion(payload, request_id)
    texts, thoughts, ends = [], [], []
    for choice in choices:
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict):
            raise _not_a_completion(payload, request_id)
        text = _text(message.get("content"))
        thought = _text(message.get("reasoning") or message.get("reasoning_content"))
        if text is None or thought is None:
            raise _not_a_completion(payload, request_id)
        if not thought and THOUGHT_END in text:
            thought, _, text = text.partition(THOUGHT_END)
        texts.append(text.lstrip() if thought else text)
        thoughts.append(thought.removeprefix("<think>").strip())
        ends.append(str(choice.get("finish_reason") or ""))
    usage = payload.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return Reply(
        texts=tuple(texts),
        thinking=tuple(thoughts) if any(thoughts) else (),
        finish=tuple(ends),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
    )


def token_alternatives(payload: Mapping[str, Any], skip: str = "") -> dict[str, float] | None:
    """Return the alternatives of the first token after ``skip``, with their log-probabilities.

    None where the reply holds none, does not begin with ``skip``, or has no token that starts right after it.
    """
    try:
        tokens = payload["choices"][0]["logprobs"]["content"]
        passed = ""
        for token in tokens:
            if passed == skip:
                return {str(item["token"]): float(item["logprob"]) for item in token["top_logprobs"]} or None
            passed += str(token["token"])
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return None


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """The probabilities of score tokens, as far as a server shows them."""

    probabilities: dict[str, float]
    """Summing to 1; NaN where the log-probabilities were not finite or there is none at all."""
    mass: float
    """Their sum before."""
    missing: tuple[str, ...]
    """Those that the server did not show; they count as 0."""
    finite: bool


def score_probabilities(alternatives: Mapping[str, float], tokens: Sequence[str]) -> TokenScores:
    """Return P(token) for each score token among a position's alternatives."""
    raw = {token: alternatives.get(token, -math.inf) for token in tokens}
    finite = not any(math.isnan(value) or value == math.inf for value in alternatives.values())
    weights = {token: math.exp(min(value, 0.0)) if value == value else math.nan for token, value in raw.items()}
    mass = sum(weights.values())
    usable = finite and mass > 0
    return TokenScores(
        probabilities={token: weight / mass if usable else math.nan for token, weight in weights.items()},
        mass=mass if finite else math.nan,
        missing=tuple(token for token in tokens if token not in alternatives),
        finite=finite,
    )


def _text(content: object) -> str | None:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    return None


def _count(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _not_a_completion(payload: Mapping[str, Any], request_id: str) -> EngineError:
    return EngineError(
        f"{request_id!r}: the server's answer is not a chat completion with choices[].message.content as text; it"
        f" begins {str(payload)[:200]!r}. Update the server, or use another."
    )
