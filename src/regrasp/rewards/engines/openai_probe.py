"""What a server really does: many accept fields that they do not know, and answer as if they had not been there.

Each question is put so that the answer shows whether it was obeyed. A server that refuses a field, or gives no sign,
counts as not having it.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrasp.core.errors import nearest
from regrasp.rewards.engine import EngineError, EngineUnavailable, Request
from regrasp.rewards.engines.frames import as_image_parts, as_video_parts, expected_stamps, probe_clip
from regrasp.rewards.engines.openai_chat import (
    JSON_TOKENS,
    SPELLINGS,
    Dialect,
    Spelling,
    chat_body,
    constrained,
    read_reply,
    token_alternatives,
    unwrapped,
)
from regrasp.rewards.engines.openai_transport import PROBE, Transport

if TYPE_CHECKING:
    import httpx

UNLIKELY = r"zq[0-7]{3}xv"
"""No model says this on its own."""
QUESTION = Request(id=PROBE, system=None, prompt="Reply with one word: hello.", videos=(), max_tokens=12)
LOGPROB_COUNTS = (20, 5)
"""vLLM's and OpenAI's limit, and that of some hosts."""


async def find_model(transport: Transport, model: str) -> str | None:
    """Make sure that a server is there and knows the model.

    A folder here need not be listed: ``transformers serve`` takes any, and lists the hub's models alone.

    Returns:
        The server's software, where it is said.

    Raises:
        EngineUnavailable: Nothing answers, the key is refused, the model is not listed, or the address lacks /v1.
    """
    response = await transport.get("models")
    if response.status_code in (401, 403):
        raise transport.refusal(response, model, PROBE)
    listed = _listed(response)
    if listed is None:
        if response.status_code == 404 and (await transport.get("v1/models")).status_code != 404:
            raise EngineUnavailable(
                f"The server at {transport.shown_url} answers under another path. Give --base-url"
                f" {transport.shown_url}/v1."
            )
        return response.headers.get("server")  # it lists nothing; the first request will tell
    if listed and model not in listed and not Path(model).is_dir():
        raise EngineUnavailable(
            f"The server at {transport.shown_url} has no model {model!r}; it has {', '.join(sorted(listed)[:8])}."
            f"{nearest(model, listed)} Give --model or REGRASP_JUDGE_MODEL one of these names."
        )
    owner = listed.get(model, {}).get("owned_by")
    return owner if isinstance(owner, str) else response.headers.get("server")


def _listed(response: "httpx.Response") -> dict[str, dict[str, Any]] | None:
    """The models of a server's list, by name; None where this is no such list."""
    try:
        return {str(entry["id"]): dict(entry) for entry in response.json()["data"]}
    except (ValueError, KeyError, TypeError):
        return None


class Prober:
    """Puts the questions, one after the other, and writes down what the server understands."""

    def __init__(self, transport: Transport, model: str, *, frames_as: str, jpeg_quality: int) -> None:
        self._transport = transport
        self._model = model
        self._frames_as = frames_as
        self._quality = jpeg_quality
        self.answers_as: str | None = None
        """What the server calls the model in its answers."""

    async def dialect(self) -> Dialect:
        """Return all that was found; an ``EngineError`` where not even a plain question is answered."""
        dialect = await self._plain()
        dialect = replace(dialect, seed=await self._ask(dialect, seed=1) is not None)
        # not refused is enough: templates that know no thinking ignore it
        thoughtless = await self._ask(dialect, chat_template_kwargs={"enable_thinking": False})
        dialect = replace(dialect, template_kwargs=thoughtless is not None)
        dialect = replace(dialect, spelling=await self._spelling(dialect))
        dialect = replace(
            dialect,
            top_logprobs=await self._top_logprobs(dialect),
            n=await self._n(dialect),
            prefill=await self._prefill(dialect),
            reasoning=await self._reasoning(dialect),
        )
        if self._frames_as != "images" and await self._video_frames(dialect):
            dialect = replace(dialect, video_frames=True)
            dialect = replace(dialect, several_frames=await self._several(dialect))
        several = dialect.several_frames or await self._several(replace(dialect, video_frames=False))
        return replace(dialect, several=several)

    async def _ask(self, dialect: Dialect, request: Request = QUESTION, **fields: object) -> dict[str, Any] | None:
        """One attempt; None for anything but a JSON object with status 200."""
        parts = (as_video_parts if dialect.video_frames else as_image_parts)(request.videos, self._quality)
        body = chat_body(self._model, request, parts, dialect, constraint=None, logprobs=False)
        response = await self._transport.try_post("chat/completions", body | fields)
        if response.status_code != 200:
            return None
        try:
            payload = response.json()
        except ValueError:
            return None
        return payload if isinstance(payload, dict) else None

    async def _plain(self) -> Dialect:
        """A plain question, with the newer name of the limit where the server asks for it."""
        newer = Dialect(limit="max_completion_tokens")
        for dialect in (Dialect(), newer):
            body = chat_body(self._model, QUESTION, (), dialect, constraint=None, logprobs=False)
            try:
                payload = await self._transport.post("chat/completions", body, PROBE)
                read_reply(payload, PROBE)
            except EngineError as error:
                if dialect is newer or newer.limit not in str(error):
                    raise
            else:
                self.answers_as = str(payload["model"]) if payload.get("model") else None
                return dialect
        raise AssertionError

    async def _spelling(self, dialect: Dialect) -> Spelling | None:
        for spelling in SPELLINGS:
            longer = replace(QUESTION, max_tokens=QUESTION.max_tokens + JSON_TOKENS)
            payload = await self._ask(dialect, longer, **constrained(spelling, UNLIKELY))
            if payload is not None:
                text = unwrapped(read_reply(payload, PROBE).texts[0], spelling)
                if re.fullmatch(UNLIKELY, text):
                    return spelling
        return None

    async def _top_logprobs(self, dialect: Dialect) -> int:
        for count in LOGPROB_COUNTS:
            payload = await self._ask(dialect, logprobs=True, top_logprobs=count, max_tokens=1)
            alternatives = token_alternatives(payload) if payload is not None else None
            if alternatives is not None and len(alternatives) > 1:
                return count
        return 0

    async def _n(self, dialect: Dialect) -> bool:
        payload = await self._ask(dialect, n=2, temperature=1.0, max_tokens=2)
        return payload is not None and len(read_reply(payload, PROBE).texts) == 2

    async def _prefill(self, dialect: Dialect) -> bool:
        """Obeyed, the same words take fewer tokens: neither an end of the turn nor the start of another is added."""
        request = replace(QUESTION, prefill="zq", max_tokens=1)
        going_on = await self._ask(replace(dialect, prefill=True), request)
        flags = {"continue_final_message": False, "add_generation_prompt": True}
        closed = await self._ask(replace(dialect, prefill=True), request, **flags)
        if going_on is None or closed is None:
            return False
        counts = [read_reply(payload, PROBE).prompt_tokens for payload in (going_on, closed)]
        return 0 < counts[0] < counts[1]

    async def _reasoning(self, dialect: Dialect) -> bool:
        """Thinking comes apart from the answer, and a constraint (where there is one) holds for the answer alone."""
        if not dialect.template_kwargs:
            return False
        fields = {} if dialect.spelling is None else constrained(dialect.spelling, UNLIKELY)
        payload = await self._ask(dialect, replace(QUESTION, thinking=True, max_tokens=1024), **fields)
        if payload is None:
            return False
        reply = read_reply(payload, PROBE)
        text = unwrapped(reply.texts[0], dialect.spelling)
        return bool(reply.thinking) and (not fields or re.fullmatch(UNLIKELY, text) is not None)

    async def _video_frames(self, dialect: Dialect) -> bool:
        """Whether frames from ten seconds on reach the model with these times: the prompt that it saw is read."""
        video = probe_clip()
        request = replace(QUESTION, videos=(video,), max_tokens=1)
        payload = await self._ask(replace(dialect, video_frames=True), request, return_token_ids=True)
        tokens = (payload or {}).get("prompt_token_ids")
        if not isinstance(tokens, list):
            return False
        response = await self._transport.try_post("../detokenize", {"model": self._model, "tokens": tokens})
        try:
            prompt = str(response.json()["prompt"])
        except (ValueError, KeyError, TypeError):
            return False
        return re.findall(r"<\d+\.\d seconds>", prompt) == expected_stamps(video)

    async def _several(self, dialect: Dialect) -> bool:
        """Whether a second video makes the prompt longer."""
        counts = []
        for number in (1, 2):
            request = replace(QUESTION, videos=(probe_clip(),) * number, max_tokens=1)
            payload = await self._ask(dialect, request)
            counts.append(0 if payload is None else read_reply(payload, PROBE).prompt_tokens)
        return 0 < counts[0] < counts[1]
