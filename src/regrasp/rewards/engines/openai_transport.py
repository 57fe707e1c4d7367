"""Requests to an OpenAI-compatible server: retried where that can help, and refused in words where it cannot."""

import asyncio
import email.utils
import logging
import os
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regrasp.rewards.engine import EngineError, EngineUnavailable, RequestTooLong

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

API_KEY_VARIABLES = ("REGRASP_JUDGE_API_KEY", "OPENAI_API_KEY")
"""Where the key is looked for, in this order."""
RETRIED_STATUS = frozenset({429, *range(500, 600)})
"""Too many requests, and the server's own failures. Anything else would only fail again."""
BUSY_STATUS = frozenset({429, 503})
"""The server knows the request and has no time; 500 is also how some say that they do not know a field."""
PROBE = "probe"
"""The id of requests that find out what a server does."""
CONTEXT = re.compile(
    r"context (length|size|window)|max_model_len|maximum (input|prompt|model) length|prompt is too long|too many tokens"
    r"|longer than the maximum|exceeds? the (model'?s )?max|maximum number of tokens",
    re.IGNORECASE,
)
"""How servers say that a prompt does not fit."""
NOT_FINITE = re.compile(r"not JSON compliant|out of range float|\bnan\b", re.IGNORECASE)
"""How servers say that log-probabilities are NaN."""


@dataclass(kw_only=True)
class Usage:
    """What a server was asked for so far."""

    requests: int = 0
    """Answered with a reply."""
    retries: int = 0
    """Attempts that had to be repeated."""
    prompt_tokens: int = 0
    """As the server counts them."""
    completion_tokens: int = 0
    """As the server counts them."""

    def spend(self, price_in: float, price_out: float) -> float:
        """Return what this cost, at prices per million tokens."""
        return (self.prompt_tokens * price_in + self.completion_tokens * price_out) / 1e6


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How often and how patiently an attempt is repeated."""

    attempts: int = 6
    """In all, the first included."""
    first_wait_s: float = 1.0
    """Before the second attempt, about; it doubles each time."""
    longest_wait_s: float = 60.0
    """A wait of our own choice is never longer."""
    longest_retry_after_s: float = 600.0
    """A server that asks for more than this is not waited for."""

    def wait_s(self, failures: int, draw: float) -> float:
        """Return the wait after this many failures: doubling, and spread by ``draw`` in [0, 1) so that clients part."""
        return min(self.first_wait_s * 2 ** (failures - 1), self.longest_wait_s) * (0.5 + draw)


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """Why an attempt failed, and how long the server asks to wait."""

    reason: str
    retry_after_s: float | None = None
    refused: bool = False


class Transport:
    """One server, its key and its connections.

    Args:
        base_url: Up to and including ``/v1``.
        timeout_s: For one answer, from sending to the last byte.
        retries: When to give up.
        client: Replaces the connections, for tests.
    """

    def __init__(
        self, base_url: str, timeout_s: float, retries: Retries, client: "httpx.AsyncClient | None" = None
    ) -> None:
        import httpx

        self._url = httpx.URL(base_url.rstrip("/") + "/")
        self._key = next((os.environ[name] for name in API_KEY_VARIABLES if os.environ.get(name)), None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s), pool=None)
        self._client = client or httpx.AsyncClient(timeout=timeout, limits=limits)
        self._retries = retries
        self.usage = Usage()

    @property
    def shown_url(self) -> str:
        """The server's address without a name, password or query that it may hold."""
        return str(self._url.copy_with(userinfo=b"", query=None)).rstrip("/")

    def redact(self, text: str) -> str:
        """Return a text without the key and without anything from the address that may be secret."""
        for secret in (self._key, self._url.password):
            if secret:
                text = text.replace(secret, "***")
        return text.replace(str(self._url).rstrip("/"), self.shown_url)

    async def get(self, path: str) -> "httpx.Response":
        """Ask once, and return whatever status comes; an ``EngineUnavailable`` where nothing answers."""
        return await self._once("GET", path, None, "")

    async def try_post(self, path: str, body: Mapping[str, Any]) -> "httpx.Response":
        """Send something that the server may not know, and return whatever status comes but "busy".

        Raises:
            EngineUnavailable: Nothing answers, or the server stays busy.
        """
        failures = 0
        while True:
            response = await self._once("POST", path, body, PROBE)
            if response.status_code not in BUSY_STATUS:
                return response
            failures += 1
            failure = self._failure(response, refused=True)
            self._give_up(failure, failures, PROBE)
            await self._pause(failure, failures, PROBE)

    async def post(self, path: str, body: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        """Send until it succeeds or trying again cannot help.

        Returns:
            The server's JSON object, whatever it holds.

        Raises:
            EngineUnavailable: Nothing listens, or the key or the model is wrong.
            RequestTooLong: The prompt does not fit the model's context.
            EngineError: Anything else, after the last attempt where it was worth more than one.
        """
        failures = 0
        while True:
            outcome = await self._attempt(path, body, request_id)
            if isinstance(outcome, dict):
                self.usage.requests += 1
                return outcome
            failures += 1
            self._give_up(outcome, failures, request_id)
            await self._pause(outcome, failures, request_id)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _pause(self, failure: _Failure, failures: int, request_id: str) -> None:
        wait_s = failure.retry_after_s
        wait_s = self._retries.wait_s(failures, random.random()) if wait_s is None else wait_s
        log.info("%s: %s; again in %.1f s", request_id, failure.reason, wait_s)
        self.usage.retries += 1
        await asyncio.sleep(wait_s)

    def _give_up(self, failure: _Failure, failures: int, request_id: str) -> None:
        """Raise where another attempt is one too many, or the server asks for too long a wait."""
        limit = self._retries.longest_retry_after_s
        if failure.retry_after_s is not None and failure.retry_after_s > limit:
            raise EngineUnavailable(
                f"{request_id!r}: the server at {self.shown_url} asks to wait {failure.retry_after_s:.0f} s"
                f" ({failure.reason}), more than the {limit:.0f} s that are waited for. Lower the concurrency, or run"
                " the same command again later: what is already answered is kept."
            )
        if failures >= self._retries.attempts:
            kind = EngineUnavailable if failure.refused else EngineError
            raise kind(
                f"{request_id!r} got no answer from the server at {self.shown_url} in {failures} attempts; the last:"
                f" {failure.reason}. See whether it runs and how busy it is; lower the concurrency, and run the same"
                " command again: what is already answered is kept."
            )

    async def _attempt(self, path: str, body: Mapping[str, Any], request_id: str) -> "dict[str, Any] | _Failure":
        import httpx

        try:
            response = await self._send("POST", path, body, request_id)
        except httpx.TransportError as error:
            refused = isinstance(error, httpx.ConnectError)
            return _Failure(reason=self._transport_words(error), refused=refused)
        if response.status_code in RETRIED_STATUS and not NOT_FINITE.search(response.text):
            return self._failure(response)
        if response.status_code >= 400:
            raise self.refusal(response, str(body.get("model", "")), request_id)
        try:
            payload = response.json()
        except ValueError:
            payload = None
        if not isinstance(payload, dict):
            raise EngineError(
                f"{request_id!r}: the server at {self.shown_url} answered HTTP {response.status_code} with something"
                f" that is not a JSON object: {self.redact(response.text[:200])!r}. See whether the address is that of"
                " an OpenAI-compatible server, up to and including /v1."
            )
        return payload

    def _failure(self, response: "httpx.Response", *, refused: bool = False) -> _Failure:
        words = self.redact(server_words(response))
        reason = f"HTTP {response.status_code}: {words}"
        return _Failure(reason=reason, retry_after_s=retry_after_s(response), refused=refused)

    async def _once(self, method: str, path: str, body: Mapping[str, Any] | None, request_id: str) -> "httpx.Response":
        import httpx

        try:
            return await self._send(method, path, body, request_id)
        except (httpx.TransportError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise EngineUnavailable(
                f"No judge answers at {self.shown_url} ({self._transport_words(error)}). Start the server, or give the"
                " address of one that runs, up to and including /v1."
            ) from None

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None, request_id: str) -> "httpx.Response":
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        if request_id:
            headers["X-Request-Id"] = re.sub(r"[^ -~]", "?", request_id)
        return await self._client.request(method, self._url.join(path), json=body, headers=headers)

    def _transport_words(self, error: Exception) -> str:
        return self.redact(f"{type(error).__name__} {error}".strip())

    def refusal(self, response: "httpx.Response", model: str, request_id: str) -> EngineError:
        """Return the error that a refused request becomes: what was wrong and what to change."""
        status, words = response.status_code, self.redact(server_words(response))
        at = f"the server at {self.shown_url}"
        if status in (401, 403):
            held = "the key that was sent" if self._key else "a request without a key"
            return EngineUnavailable(
                f"{at} refuses {held} (HTTP {status}: {words}). Set {' or '.join(API_KEY_VARIABLES)} to a key that it"
                " accepts."
            )
        if status == 404:
            return EngineUnavailable(
                f"{at} does not know the model {model!r} or has no chat completions (HTTP 404: {words}). Give --model"
                " the name that the server lists under /v1/models."
            )
        if CONTEXT.search(words):
            return RequestTooLong(
                f"{request_id!r} does not fit the context of {model!r} (HTTP {status}: {words}). Lower the number of"
                " frames, their size or the tokens of a reply, or serve the model with a longer context."
            )
        if NOT_FINITE.search(words):
            return EngineError(
                f"{request_id!r}: the log-probabilities of {model!r} are not finite (HTTP {status}: {words}); its"
                " replies would mean nothing. Serve it in another precision, or with another engine."
            )
        return EngineError(f"{request_id!r} was refused by {at} (HTTP {status}: {words}).")


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
    value = response.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    date = email.utils.parsedate_tz(value) if value else None
    if date is None:
        return None
    return max(0.0, email.utils.mktime_tz(date) - (time.time() if now is None else now))
