"""Any OpenAI-compatible server as a judge: vLLM, SGLang, llama.cpp, ``transformers serve`` or a host.

Frames are encoded here, in threads, while other requests wait for the server. How many requests are under way at once
is the caller's to bound.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from regrasp.core.errors import ConfigError
from regrasp.rewards.engine import Capabilities, MissingCapability, Reply, Request, Usage, VideoInput
from regrasp.rewards.engines.frames import as_image_parts, as_video_parts
from regrasp.rewards.engines.openai_chat import (
    CUT_OFF_FLAG,
    JSON_TOKENS,
    Dialect,
    TokenScores,
    chat_body,
    opening,
    read_reply,
    score_probabilities,
    token_alternatives,
    unwrapped,
)
from regrasp.rewards.engines.openai_probe import Prober, find_model
from regrasp.rewards.engines.openai_transport import Retries, Transport

if TYPE_CHECKING:
    import httpx


MASS_TOLERANCE = 0.05
"""The most of the score tokens' mass that may be hidden among what a server does not show, for the rest to be given."""


@dataclass(frozen=True, kw_only=True)
class OpenAIConfig:
    """Which server, and how to talk to it. The key comes from the environment, never from here."""

    model: str
    """The name by which the server knows the model."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """Up to and including ``/v1``."""
    timeout_s: float = 600.0
    """The longest wait for one answer."""
    concurrency: int = 64
    """The most requests under way at once, also where several are needed for one question."""
    retries: Retries = field(default_factory=Retries)
    """When to give up."""
    frames_as: Literal["auto", "images"] = "auto"
    """Auto: lists of frames where the server is seen to keep their times, else images with their times in words."""
    jpeg_quality: int = 92
    """Of the frames, 1 to 95."""

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        if not self.model:
            raise ConfigError("A judge needs a model: give --model, or set REGRASP_JUDGE_MODEL.")
        _check_address(self.base_url)
        if not 1 <= self.jpeg_quality <= 95:
            raise ConfigError(f"A JPEG quality lies in 1 to 95; {self.jpeg_quality} was given.")
        if min(self.retries.attempts, self.concurrency) < 1 or self.timeout_s <= 0:
            raise ConfigError("A judge needs at least one attempt, one request at a time, and a time limit above 0 s.")


class OpenAIEngine:
    """An OpenAI-compatible server behind the engines' interface."""

    name = "openai"

    def __init__(self, config: OpenAIConfig, client: "httpx.AsyncClient | None" = None) -> None:
        self.model = config.model
        self.version = "unknown server"
        self._config = config
        self._transport = Transport(
            config.base_url, config.timeout_s, config.retries, concurrency=config.concurrency, client=client
        )
        self._dialect: Dialect | None = None
        self._probing = asyncio.Lock()

    @property
    def usage(self) -> Usage:
        """Requests, retries and tokens so far."""
        return self._transport.usage

    async def probe(self) -> Capabilities:
        """Ask the server a dozen small questions whose answers show what it obeys."""
        dialect = await self._known()
        constraint = dialect.spelling is not None
        return Capabilities(
            constraint=constraint,
            logprobs=dialect.top_logprobs > 0,
            several_videos=dialect.several,
            timestamps=True,  # one way or the other: see ``frames_as``
            prefill=dialect.prefill or constraint,
            n=True,  # several requests where the server gives one reply each
            thinking=dialect.reasoning,
        )

    async def judge(self, request: Request) -> Reply:
        """Answer one request.

        Raises:
            MissingCapability: The request needs what the server does not do.
            EngineError: The server did not answer or refused, after all attempts that made sense.
        """
        dialect = _dialect_for(request, await self._known())
        self._check(request, dialect)
        parts = request.ready
        if not isinstance(parts, list):
            parts = await asyncio.to_thread(self._parts, request.videos, dialect)
        if request.score_tokens:
            return await self._score(request, parts, dialect)
        return await self._draw(request, parts, dialect)

    async def prepare(self, request: Request) -> Request:
        """Encode a request's frames, so that its turn is not spent on it."""
        dialect = _dialect_for(request, await self._known())
        return replace(request, ready=await asyncio.to_thread(self._parts, request.videos, dialect))

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def _known(self) -> Dialect:
        async with self._probing:
            if self._dialect is None:
                owner = await find_model(self._transport, self.model)
                prober = Prober(
                    self._transport,
                    self.model,
                    frames_as=self._config.frames_as,
                    jpeg_quality=self._config.jpeg_quality,
                )
                self._dialect = await prober.dialect()
                self.version = await self._server_version(owner)
                if prober.answers_as not in (None, self.model):
                    self.version += f", answering as {prober.answers_as}"
        return self._dialect

    async def _server_version(self, owner: str | None) -> str:
        """The software and its version, where the server tells (vLLM has /version)."""
        response = await self._transport.get("../version")
        try:
            version = str(response.json()["version"]) if response.status_code == 200 else ""
        except (ValueError, KeyError, TypeError):
            version = ""
        return f"{owner or 'unknown server'} {version}".strip()

    def _check(self, request: Request, dialect: Dialect) -> None:
        wanted = {
            "a constraint on the reply": (request.constraint is not None, dialect.spelling is not None),
            "log-probabilities": (bool(request.score_tokens), dialect.top_logprobs > 0),
            "a reply that goes on from given words": (
                bool(request.prefill),
                dialect.prefill or (dialect.spelling is not None and not request.thinking),
            ),
            "a constraint after thinking": (
                request.thinking and request.constraint is not None,
                dialect.reasoning,
            ),
        }
        for what, (needed, has) in wanted.items():
            if needed and not has:
                raise MissingCapability(
                    f"{request.id!r} needs {what}, which the server at {self._transport.shown_url} does not do: it was"
                    " tried when the run began. Serve the model with vLLM, or use the engine 'transformers'."
                )

    def _parts(self, videos: Sequence[VideoInput], dialect: Dialect) -> list[dict]:
        encode = as_video_parts if dialect.video_frames else as_image_parts
        return encode(videos, self._config.jpeg_quality)

    async def _send(
        self, request: Request, parts: list[dict], dialect: Dialect, *, constraint: str | None, logprobs: bool = False
    ) -> tuple[dict[str, Any], Reply]:
        body = chat_body(self.model, request, parts, dialect, constraint=constraint, logprobs=logprobs)
        payload = await self._transport.post("chat/completions", body, request.id)
        reply = read_reply(payload, request.id)
        if constraint is not None:
            reply = replace(reply, texts=tuple(unwrapped(text, dialect.spelling) for text in reply.texts))
        flags = [CUT_OFF_FLAG] if "length" in reply.finish and not logprobs else []
        if len(reply.texts) != request.n:
            flags.append(f"{len(reply.texts)} replies came where {request.n} were asked for")
        return payload, replace(reply, flags=tuple(flags))

    async def _draw(self, request: Request, parts: list[dict], dialect: Dialect) -> Reply:
        """All replies of a request: in one call, or in one each where the server gives but one."""
        request, constraint, spoken = _spoken_prefill(request, dialect)
        if request.n == 1 or dialect.n:
            _, reply = await self._send(request, parts, dialect, constraint=constraint)
        else:
            singles = [
                replace(request, n=1, seed=None if request.seed is None else request.seed + number)
                for number in range(request.n)
            ]
            async with asyncio.TaskGroup() as group:
                sent = [group.create_task(self._send(one, parts, dialect, constraint=constraint)) for one in singles]
            reply = _joined([task.result()[1] for task in sent])
        return replace(reply, texts=tuple(text.removeprefix(spoken) for text in reply.texts))

    async def _score(self, request: Request, parts: list[dict], dialect: Dialect) -> Reply:
        """Probabilities of the score tokens, with their share of all probability.

        A constraint hides that share, since it acts before log-probabilities are taken. So the free request comes
        first. Where it shows every score token, what a constrained one would say follows from it; else that is asked
        too.
        """
        tokens = request.score_tokens or ()
        free_scores, reply = None, None
        if dialect.prefill or not request.prefill:
            payload, reply = await self._send(request, parts, dialect, constraint=None, logprobs=True)
            free_scores = _scores(payload, tokens, "")
            whole = free_scores is not None and (not free_scores.finite or not free_scores.missing)
            if request.constraint is None or (whole and _is_choice(request, tokens)):
                return _scored(reply, free_scores, free_scores, request)
        asked, constraint, spoken = _spoken_prefill(request, dialect)
        payload, forced = await self._send(asked, parts, dialect, constraint=constraint, logprobs=True)
        scores = _scores(payload, tokens, opening(dialect.spelling if constraint is not None else None, spoken))
        forced = replace(forced, texts=tuple(text.removeprefix(spoken) for text in forced.texts))
        if reply is not None:
            forced = replace(
                forced,
                prompt_tokens=forced.prompt_tokens + reply.prompt_tokens,
                completion_tokens=forced.completion_tokens + reply.completion_tokens,
            )
        return _scored(forced, scores, free_scores, request, forced=True)


def _check_address(text: str) -> None:
    """Refuse what is no server's address, without repeating it: it may hold a password."""
    path = ""
    try:
        address = urlsplit(text)
        path = address.path.rstrip("/")
        usable = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            "--base-url is a server's address such as http://localhost:8000/v1: http:// or https://, a name, a port"
            " where it is not the usual one, and the path up to and including /v1."
        )
    if path.endswith("/completions"):
        raise ConfigError("--base-url ends with /v1. Mend: leave out what follows it.")


def _dialect_for(request: Request, dialect: Dialect) -> Dialect:
    """Several videos go as images where the server takes but one list of frames."""
    if len(request.videos) > 1 and dialect.video_frames and not dialect.several_frames:
        return replace(dialect, video_frames=False)
    return dialect


def _scores(payload: dict[str, Any], tokens: Sequence[str], before: str) -> TokenScores | None:
    alternatives = token_alternatives(payload, before)
    return None if alternatives is None else score_probabilities(alternatives, tokens)


def _is_choice(request: Request, tokens: Sequence[str]) -> bool:
    """Whether the constrained reply is one greedily chosen score token: then it is the most probable of them."""
    pattern = request.constraint or ""
    return request.temperature == 0 and request.max_tokens == 1 and all(re.fullmatch(pattern, one) for one in tokens)


def _scored(
    reply: Reply, scores: TokenScores | None, free: TokenScores | None, request: Request, *, forced: bool = False
) -> Reply:
    """Return a reply with the probabilities that were read, and with what is odd about them."""
    if scores is None:
        return replace(reply, flags=(*reply.flags, "no log-probabilities at the score's position"))
    flags = list(reply.flags)
    odd = scores.odd or (None if free is None else free.odd)
    if odd is not None:
        flags.append(odd)
    elif scores.missing:
        flags.append(f"not among the server's alternatives: {', '.join(scores.missing)}")
    texts = reply.texts
    if request.constraint is not None and not forced and scores.finite:
        texts = (max(scores.probabilities, key=lambda token: scores.probabilities[token]),)
    known = free is not None and free.finite and free.unseen <= MASS_TOLERANCE
    mass = free.mass if free is not None and known else None
    return replace(reply, texts=texts, probabilities=scores.probabilities, mass=mass, flags=tuple(flags))


def _spoken_prefill(request: Request, dialect: Dialect) -> tuple[Request, str | None, str]:
    """Where a server has no prefill, have the constraint make the model say it: the words and what follows are alike.

    Returns:
        The request to send, its constraint, and the words that the reply begins with.
    """
    says_more = request.constraint is not None or bool(request.prefill and not dialect.prefill)
    in_json = dialect.spelling == "response_format" and says_more
    if in_json:
        request = replace(request, max_tokens=request.max_tokens + JSON_TOKENS)
    if not request.prefill or (dialect.prefill and not in_json):
        return request, request.constraint, ""
    literal = re.sub(r"([][\\^$.|?*+(){}])", r"\\\1", request.prefill)
    rest = request.constraint if request.constraint is not None else r"[\s\S]*"
    spoken = replace(request, prefill=None, max_tokens=request.max_tokens + len(request.prefill.encode()))
    return spoken, f"{literal}({rest})", request.prefill


def _joined(replies: Sequence[Reply]) -> Reply:
    """Return replies to the same request, drawn one by one, as one."""
    return Reply(
        texts=tuple(text for reply in replies for text in reply.texts),
        thinking=tuple(thought for reply in replies for thought in (reply.thinking or ("",)))
        if any(reply.thinking for reply in replies)
        else (),
        finish=tuple(end for reply in replies for end in reply.finish),
        prompt_tokens=sum(reply.prompt_tokens for reply in replies),
        completion_tokens=sum(reply.completion_tokens for reply in replies),
        flags=tuple(dict.fromkeys(flag for reply in replies for flag in reply.flags)),
    )
