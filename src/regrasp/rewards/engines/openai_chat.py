"""Chat completions in words of the protocol: a request's body, and a reply read from whatever came back."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from regrasp.rewards.engine import EngineError, Reply, Request
from regrasp.rewards.engines.frames import media_kwargs

Spelling = Literal["structured_outputs", "guided_regex", "regex", "response_format"]
SPELLINGS: dict[Spelling, str] = {
    "structured_outputs": "vLLM since 0.11",
    "guided_regex": "vLLM before 0.12, which later ones ignore without a word",
    "regex": "SGLang",
    "response_format": "OpenAI's own, and llama.cpp: the reply is the one field of a JSON object",
}
"""How a server is asked for a reply that matches a regular expression."""
_FIELD = "reply"
JSON_TOKENS = 32
"""How many tokens more a reply takes as a field of a JSON object, about."""
CUT_OFF_FLAG = "a reply was cut off at the most tokens"
THOUGHT_END = "</think>"
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""A reply that ends within a character may hold one; no row and no request takes it."""
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
    limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """How it is told the most tokens of a reply."""
    seed: bool = False
    """It takes a seed."""
    template_kwargs: bool = False
    """It passes arguments on to the chat template."""
    reasoning: bool = False
    """It gives thinking apart from the answer, and constrains the answer alone."""
    video_frames: bool = False
    """It takes lists of frames with their own times, and was seen to tell the model these times."""
    several_frames: bool = False
    """It takes several lists of frames in one request."""
    several: bool = False
    """It takes several videos, as lists of frames or as images."""


def constrained(spelling: Spelling, pattern: str) -> dict[str, Any]:
    """Return the fields that ask for a reply which matches a regular expression."""
    if spelling == "structured_outputs":
        return {"structured_outputs": {"regex": pattern}}
    if spelling != "response_format":
        return {spelling: pattern}
    schema = {
        "type": "object",
        "properties": {_FIELD: {"type": "string", "pattern": f"^({pattern})$"}},
        "required": [_FIELD],
        "additionalProperties": False,
    }
    wanted = {"name": "answer", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


def unwrapped(text: str, spelling: Spelling | None) -> str:
    """Return what a constrained reply says, without the JSON object around it; a text that is none stays as it is."""
    if spelling != "response_format":
        return text
    try:
        said = json.loads(text)[_FIELD]
    except (ValueError, TypeError, KeyError):
        return text
    return said if isinstance(said, str) else text


def opening(spelling: Spelling | None, spoken: str) -> str:
    """Return the regular expression of what stands before a constrained reply that begins with some words."""
    before = rf'\s*\{{\s*"{_FIELD}"\s*:\s*"' if spelling == "response_format" else ""
    return before + re.escape(spoken)


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
        dialect.limit: request.max_tokens,
        "temperature": request.temperature,
    }
    if request.n > 1:
        body["n"] = request.n
    if request.prefill and dialect.prefill:
        messages.append({"role": "assistant", "content": request.prefill})
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.seed is not None and dialect.seed:
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
    for choice in _in_order(choices):
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict):
            raise _not_a_completion(payload, request_id)
        text = _text(message.get("content") or message.get("refusal"))
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
        prompt_tokens=token_count(usage.get("prompt_tokens")),
        completion_tokens=token_count(usage.get("completion_tokens")),
    )


def _in_order(choices: list[Any]) -> list[Any]:
    """Choices by their own numbers, where they have any."""
    numbered = all(isinstance(choice, dict) and isinstance(choice.get("index"), int) for choice in choices)
    return sorted(choices, key=lambda choice: choice["index"]) if numbered else choices


def token_alternatives(payload: Mapping[str, Any], skip: str = "") -> dict[str, float] | None:
    """Return the alternatives of the first token after ``skip``, a regular expression, with their log-probabilities.

    None where the reply holds none, does not begin with ``skip``, or has no token that starts right after it. Of two
    tokens with one spelling the more probable counts.
    """
    try:
        tokens = payload["choices"][0]["logprobs"]["content"]
        passed = ""
        for token in tokens:
            if re.fullmatch(skip, passed):
                listed = sorted(token["top_logprobs"], key=lambda item: float(item["logprob"]))
                return {str(item["token"]): float(item["logprob"]) for item in listed} or None
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
    """Their sum before, of those that the server showed."""
    unseen: float
    """The most that the others may have: as much each as the least of all that was shown."""
    missing: tuple[str, ...]
    """Those that the server did not show; they count as 0."""
    odd: str | None
    """What keeps the server's log-probabilities from being those of a distribution, in words."""

    @property
    def finite(self) -> bool:
        """Whether they can be used."""
        return self.odd is None


_WHOLE = 1.01
"""The most that probabilities sum to, with what rounding adds."""


def score_probabilities(alternatives: Mapping[str, float], tokens: Sequence[str]) -> TokenScores:
    """Return P(token) for each score token among a position's alternatives; none of it where they sum to over 1."""
    raw = {token: alternatives.get(token, -math.inf) for token in tokens}
    odd = None
    if any(math.isnan(value) or value == math.inf for value in alternatives.values()):
        odd = NOT_FINITE_FLAG
    elif sum(math.exp(min(value, 1.0)) for value in alternatives.values()) > _WHOLE:
        odd = "log-probabilities of more than 1 in all"
    weights = {token: math.exp(min(value, 0.0)) if value == value else math.nan for token, value in raw.items()}
    mass = sum(weights.values())
    usable = odd is None and mass > 0
    missing = tuple(token for token in tokens if token not in alternatives)
    least = math.exp(min(0.0, min(alternatives.values()))) if odd is None and alternatives else math.nan
    return TokenScores(
        probabilities={token: weight / mass if usable else math.nan for token, weight in weights.items()},
        mass=mass if odd is None else math.nan,
        unseen=len(missing) * least,
        missing=missing,
        odd=odd,
    )


def _text(content: object) -> str | None:
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    return _HALF_CHARACTER.sub("\ufffd", content) if isinstance(content, str) else None


def token_count(value: object) -> int:
    """Return a number of tokens; 0 where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _not_a_completion(payload: Mapping[str, Any], request_id: str) -> EngineError:
    return EngineError(
        f"{request_id!r}: the server's answer is not a chat completion with choices[].message.content as text; it"
        f" begins {str(payload)[:200]!r}. Update the server, or use another."
    )
