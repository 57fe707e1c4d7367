"""Requests to an OpenAI-compatible server: retried where that can help, and refused in words where it cannot."""

import asyncio
import base64
import email.utils
import json
import logging
import os
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from regrasp.core.errors import ConfigError
from regrasp.rewards.engine import EngineError, EngineUnavailable, RequestTooLong, Usage
from regrasp.rewards.engines.openai_chat import token_count

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

API_KEY_VARIABLES = ("REGRASP_JUDGE_API_KEY", "OPENAI_API_KEY")
"""Where the key is looked for, in this order."""
RETRIED_STATUS = frozenset({429, *range(500, 600)})
"""Too many requests, and the server's own failures. Anything else would only fail again."""
BUSY_STATUS = frozenset({429, 502, 503, 504})
"""The server has no time or is not reached; 500 is also how some say that they do not know a field."""
_LEAST_SECRET = 8
"""Shorter keys, such as "EMPTY" or "x", are there for show; hiding them would hide parts of words."""
PROBE = "probe"
"""The id of requests that find out what a server does."""
CONTEXT = re.compile(
    r"context (length|size|window)|max_model_len|maximum (input|prompt|model) length|prompt is too long|too many tokens"
    r"|longer than the maximum|exceeds? the (model'?s )?max|maximum number of tokens",
    re.IGNORECASE,
)
"""How servers say that a prompt does not fit."""
NO_CREDIT = re.compile(r"insufficient_quota|exceeded your current quota|insufficient (credits|balance)", re.IGNORECASE)
"""How hosts say that waiting will not help."""
NOT_FINITE = re.compile(r"not JSON compliant|out of range float|\bnan\b", re.IGNORECASE)
"""How servers say that log-probabilities are NaN."""


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How often and how patiently an attempt is repeated."""

    attempts: int = 7
    """In all, the first included; a wait that the server asked for is none."""
    first_wait_s: float = 1.0
    """Before the second attempt, about; it doubles each time."""
    longest_wait_s: float = 60.0
    """A wait of our own choice is never longer."""
    longest_retry_after_s: float = 600.0
    """A server that asks for more than this, at once or in sum for one request, is not waited for."""
    most_asked_waits: int = 100
    """So many waits that a server asks for, and one request is given up."""

    def wait_s(self, failures: int, draw: float) -> float:
        """Return the wait after this many failures: doubling, and spread by ``draw`` in [0, 1) so that clients part."""
        return min(self.first_wait_s * 2 ** (failures - 1), self.longest_wait_s) * (0.5 + draw)


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """Why an attempt failed, and how long the server asks to wait."""

    reason: str
    retry_after_s: float | None = None
    refused: bool = False


@dataclass(kw_only=True)
class _Patience:
    """What one request has been through."""

    failures: int = 0
    asked_waits: int = 0
    asked_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Credentials:
    """What a server is shown of who asks."""

    header: str | None = field(repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)


class Transport:
    """One server, its key and its connections.

    Args:
        base_url: Up to and including ``/v1``.
        timeout_s: For one answer, from sending to the last byte.
        retries: When to give up.
        concurrency: The most requests under way at once.
        client: Replaces the connections, for tests.

    Raises:
        ConfigError: The address or the key cannot be one.
    """

    def __init__(
        self,
        base_url: str,
        timeout_s: float,
        retries: Retries,
        *,
        concurrency: int = 64,
        client: "httpx.AsyncClient | None" = None,
    ) -> None:
        import httpx

        try:
            url = httpx.URL(base_url.rstrip("/") + "/")
        except httpx.InvalidURL as error:
            raise ConfigError(f"A judge's address is not a URL ({error}). Mend: correct --base-url.") from None
        self._credentials = _credentials(url.username, url.password)
        self._url = url.copy_with(userinfo=b"", query=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s), pool=None)
        self._client = client or httpx.AsyncClient(timeout=timeout, limits=limits)
        self._retries = retries
        self._slots = asyncio.Semaphore(concurrency)
        self._resume_at = 0.0
        self.usage = Usage()

    @property
    def shown_url(self) -> str:
        """The server's address without a name, password or query that was given with it."""
        return str(self._url).rstrip("/")

    def redact(self, text: str) -> str:
        """Return a text without the key."""
        for secret in self._credentials.secrets:
            text = text.replace(secret, "***")
        return text

    async def get(self, path: str) -> "httpx.Response":
        """Ask for something, and return whatever status comes.

        Raises:
            EngineUnavailable: Nothing listens, or nothing answers after the last attempt.
        """
        patience = _Patience()
        while True:
            outcome = await self._send("GET", path, None, "")
            if not isinstance(outcome, _Failure):
                return outcome
            if outcome.refused:
                raise EngineUnavailable(
                    f"No judge answers at {self.shown_url} ({outcome.reason}). Start the server, or give --base-url"
                    " the address of one that runs, up to and including /v1."
                )
            await self._pause(outcome, patience, path)

    async def try_post(self, path: str, body: Mapping[str, Any]) -> "httpx.Response":
        """Send something that the server may not know, and return whatever status comes but "busy".

        A status of 500 is believed when it comes twice.

        Raises:
            EngineUnavailable: Nothing answers, or the server stays busy.
        """
        patience, content, broken = _Patience(), encoded(body), False
        while True:
            outcome = await self._send("POST", path, content, PROBE)
            if isinstance(outcome, _Failure):
                await self._pause(outcome, patience, PROBE)
            elif outcome.status_code in BUSY_STATUS:
                await self._pause(self._failure(outcome, refused=True), patience, PROBE)
            elif outcome.status_code == 500 and not broken:
                broken = True
            else:
                self._count(self._payload(outcome))
                return outcome

    async def post(self, path: str, body: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        """Send until it succeeds or trying again cannot help.

        Returns:
            The server's JSON object, whatever it holds, without the key.

        Raises:
            EngineUnavailable: Nothing listens, or the key or the model is wrong.
            RequestTooLong: The prompt does not fit the model's context.
            EngineError: Anything else, after the last attempt where it was worth more than one.
        """
        content = await asyncio.to_thread(encoded, body)
        patience = _Patience()
        async with self._slots:
            while True:
                outcome = await self._attempt(path, content, request_id, str(body.get("model", "")))
                if isinstance(outcome, dict):
                    self._count(outcome)
                    return outcome
                await self._pause(outcome, patience, request_id)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _count(self, payload: Mapping[str, Any] | None) -> None:
        """Note what an answer took, as the server counts it."""
        used = payload.get("usage") if payload is not None else None
        if payload is not None and "choices" in payload:
            self.usage.requests += 1
        if isinstance(used, dict):
            self.usage.prompt_tokens += token_count(used.get("prompt_tokens"))
            self.usage.completion_tokens += token_count(used.get("completion_tokens"))

    async def _pause(self, failure: _Failure, patience: _Patience, request_id: str) -> None:
        """Wait before the next attempt; a wait that the server asks for holds back all requests.

        Raises:
            EngineUnavailable: The server asks for too long a wait, or nothing listens any more.
            EngineError: That was the last attempt.
        """
        if failure.retry_after_s is None:
            patience.failures += 1
            wait_s = self._retries.wait_s(patience.failures, random.random())
        else:
            wait_s = failure.retry_after_s
            patience.asked_waits += 1
            patience.asked_s += wait_s
            self._resume_at = max(self._resume_at, time.monotonic() + wait_s)
        self._give_up(failure, patience, request_id)
        log.info("%s: %s; again in %.1f s", request_id, failure.reason, wait_s)
        self.usage.retries += 1
        await asyncio.sleep(wait_s)

    def _give_up(self, failure: _Failure, patience: _Patience, request_id: str) -> None:
        """Raise where another attempt is one too many, or the server asks for too long a wait."""
        limits, at = self._retries, f"the server at {self.shown_url}"
        if patience.asked_s > limits.longest_retry_after_s or patience.asked_waits > limits.most_asked_waits:
            raise EngineUnavailable(
                f"{request_id!r}: {at} asks to wait, {patience.asked_s:.0f} s in all ({failure.reason}); at most"
                f" {limits.longest_retry_after_s:.0f} s are waited. Lower --concurrency, or run the same command again"
                " later: what is already answered is kept."
            )
        if patience.failures >= limits.attempts:
            kind = EngineUnavailable if failure.refused else EngineError
            raise kind(
                f"{request_id!r} got no answer from {at} in {patience.failures} attempts; the last: {failure.reason}."
                " See whether it runs and how busy it is; lower --concurrency, and run the same command again: what is"
                " already answered is kept."
            )

    async def _attempt(self, path: str, content: bytes, request_id: str, model: str) -> "dict[str, Any] | _Failure":
        response = await self._send("POST", path, content, request_id)
        if isinstance(response, _Failure):
            return response
        status = response.status_code
        if status == 429 and NO_CREDIT.search(response.text):
            raise self.refusal(response, model, request_id)
        hopeless = status != 429 and (NOT_FINITE.search(response.text) or CONTEXT.search(response.text))
        if status in RETRIED_STATUS and not hopeless:
            return self._failure(response)
        if status >= 400:
            raise self.refusal(response, model, request_id)
        payload = self._payload(response)
        if payload is None:
            raise EngineError(
                f"{request_id!r}: the server at {self.shown_url} answered HTTP {status} with something that is not a"
                f" JSON object: {self.redact(response.text[:200])!r}. See whether --base-url is the address of an"
                " OpenAI-compatible server, up to and including /v1."
            )
        return payload

    def _payload(self, response: "httpx.Response") -> dict[str, Any] | None:
        """An answer's JSON object without the key; None where it is none."""
        try:
            payload = json.loads(self.redact(response.text))
        except ValueError:
            return None
        return payload if isinstance(payload, dict) else None

    def _failure(self, response: "httpx.Response", *, refused: bool = False) -> _Failure:
        words = self.redact(server_words(response))
        reason = f"HTTP {response.status_code}: {words}"
        return _Failure(reason=reason, retry_after_s=retry_after_s(response), refused=refused)

    async def _send(
        self, method: str, path: str, content: bytes | None, request_id: str
    ) -> "httpx.Response | _Failure":
        """One attempt, begun when the server has no wait outstanding."""
        import httpx

        headers = {} if self._credentials.header is None else {"Authorization": self._credentials.header}
        name = re.sub(r"[^!-~]", " ", request_id)[:128].strip()
        headers |= {"X-Request-Id": name} if name else {}
        headers |= {} if content is None else {"Content-Type": "application/json"}
        while (left_s := self._resume_at - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
        try:
            return await self._client.request(method, self._url.join(path), content=content, headers=headers)
        except httpx.RequestError as error:
            refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol)
            return _Failure(reason=self.redact(f"{type(error).__name__} {error}".strip()), refused=refused)

    def refusal(self, response: "httpx.Response", model: str, request_id: str) -> EngineError:
        """Return the error that a refused request becomes: what was wrong and what to change."""
        status, words = response.status_code, self.redact(server_words(response))
        at, said = f"The server at {self.shown_url}", f"HTTP {status}: {words}"
        if status in (401, 403):
            held = "the key that was sent" if self._credentials.header else "a request without a key"
            return EngineUnavailable(
                f"{at} refuses {held} ({said}). Set {' or '.join(API_KEY_VARIABLES)} to a key that it accepts."
            )
        if status == 429:
            return EngineUnavailable(f"{at} says that there is no credit left ({said}). Mend: see the account there.")
        if status in (404, 405):
            return EngineUnavailable(
                f"{at} does not know the model {model!r}, or has no chat completions there ({said}). Give --model the"
                " name that the server lists under /v1/models, and --base-url its address up to and including /v1."
            )
        if status == 413 or CONTEXT.search(words):
            return RequestTooLong(
                f"{request_id!r} is too long for {model!r} as it is served ({said}). Lower `most_frames`,"
                " `cell_height` or `max_tokens` in the --profile, or serve the model with a longer context."
            )
        if NOT_FINITE.search(words):
            return EngineError(
                f"{request_id!r}: the log-probabilities of {model!r} are not finite ({said}); its replies would mean"
                " nothing. Serve it in another precision, or with another engine."
            )
        return EngineError(f"{request_id!r} was refused by the server at {self.shown_url} ({said}).")


def encoded(body: Mapping[str, Any]) -> bytes:
    """Return a body as JSON."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _credentials(user: str, password: str) -> _Credentials:
    """The key of the environment, or else the name and password of the address.

    Raises:
        ConfigError: The key has characters that no key has; it is not shown.
    """
    name = next((name for name in API_KEY_VARIABLES if os.environ.get(name, "").strip()), None)
    if name is None and not user:
        return _Credentials(header=None)
    if name is None:
        pair = base64.b64encode(f"{user}:{password}".encode()).decode()
        return _Credentials(header=f"Basic {pair}", secrets=(pair, password) if password else (pair,))
    key = os.environ[name].strip()
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"{name} holds no key: one has printable ASCII characters and no spaces. Mend: set it again.")
    return _Credentials(header=f"Bearer {key}", secrets=(key,) if len(key) >= _LEAST_SECRET else ())


def server_words(response: "httpx.Response") -> str:
    """Return what a server says about an error, in one line, from whichever field it uses."""
    try:
        payload = response.json()
    except ValueError:
        payload = None
    words: Any = payload
    for key in ("error", "message", "detail"):
        if isinstance(words, dict) and key in words:
            words = words[key]
    text = response.text if words is None else str(words)
    return " ".join(text.split())[:400] or "no explanation"


def retry_after_s(response: "httpx.Response", now: float | None = None) -> float | None:
    """Return the seconds that a server asks to wait, from a number or a date; None where it does not say."""
    precise = response.headers.get("Retry-After-Ms", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", precise):
        return float(precise) / 1e3
    value = response.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    date = email.utils.parsedate_tz(value) if value else None
    if date is None:
        return None
    return max(0.0, email.utils.mktime_tz(date) - (time.time() if now is None else now))
