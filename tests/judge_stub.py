"""An OpenAI-compatible server on loopback, with a scripted model and the oddities that real servers were seen to have.

    python -m tests.judge_stub --latency 0.5      prints its address, and serves until it is stopped

The model scores by how bright the last picture is, so that an answer shows which pictures arrived. Every request is
kept, with what became of it: one that the model worked on was paid for, whether or not its answer arrived.
"""

import argparse
import base64
import io
import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from tests.judge_stub_model import PICTURE, Written, written

KNOWN = frozenset(
    [
        "model",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "n",
        "seed",
        "logprobs",
        "top_logprobs",
        "response_format",
    ]
)
"""Fields of OpenAI's own protocol, for a server that refuses others."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with one request."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None
    """Sent in place of the answer."""
    reset: bool = False
    """The connection is reset before anything is sent, once the model has worked."""
    cut: bool = False
    """The connection ends in the middle of the answer."""
    delay_s: float = 0.0


@dataclass(kw_only=True)
class Call:
    """One request for a completion, and what became of it."""

    id: str
    """The client's own name for it."""
    attempt: int
    """1 for the first request of this id and content."""
    body: dict[str, Any]
    headers: dict[str, str]
    started: float
    ended: float = 0.0
    status: int = 0
    paid: bool = False

    @property
    def probe(self) -> bool:
        """Whether the client only tries what the server does."""
        return self.id == "probe"


def no_fault(call: Call) -> Fault | None:
    """Nothing goes wrong."""
    return None


@dataclass(kw_only=True)
class Quirks:
    """What the server does and does not do; by default all that vLLM does."""

    models: tuple[str, ...] = ("judge",)
    alias: str | None = None
    """What the model is called in answers, where that is not the name asked for."""
    lists_models: bool = True
    prefix: str = "/v1"
    key: str | None = None
    """The only key that is accepted."""
    echo_key: bool = False
    """The server repeats the key, in errors and in replies."""
    constraints: tuple[str, ...] = ("structured_outputs",)
    """The fields that constrain; others are ignored without a word."""
    only: frozenset[str] | None = None
    """The fields that are known; a request with another is refused."""
    refusal: int = 422
    """With which status it is refused."""
    top_logprobs: int = 20
    """0 ignores the wish; asking for more than this is refused."""
    odd_logprobs: Literal["", "nan", "null", "text", "zeros", "empty", "refused nan"] = ""
    n: bool = True
    prefill: bool = True
    template_kwargs: bool = True
    thinking: Literal["", "reasoning", "reasoning_content", "inline"] = ""
    video_frames: Literal["kept", "resampled", "refused"] = "kept"
    videos: int = 99
    """The most videos of a request."""
    pictures: bool = True
    context: int | None = None
    free_text: str = "It looks as it looks."
    """What the model says where nothing constrains it."""
    latency_s: float = 0.0
    fault: Callable[[Call], Fault | None] = no_fault


class Stub:
    """The server, in a thread, as a context manager.

    Attributes:
        quirks: May be changed while it serves.
        calls: All requests for completions, in the order of their arrival.
    """

    def __init__(self, quirks: Quirks | None = None, port: int = 0) -> None:
        self.quirks = quirks or Quirks()
        self.calls: list[Call] = []
        self.lock = threading.Lock()
        self._seen: Counter[tuple[str, bytes]] = Counter()
        handler = type("Handler", (_Handler,), {"stub": self})
        self._server = _Server(("127.0.0.1", port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        """The address to give a client."""
        return f"http://127.0.0.1:{self._server.server_address[1]}{self.quirks.prefix}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def asked(self) -> list[Call]:
        """The requests that were no probes."""
        return [call for call in self.calls if not call.probe]

    @property
    def paid(self) -> list[str]:
        """The ids of the requests that the model worked on, probes left out."""
        return [call.id for call in self.asked if call.paid]

    def enter(self, body: bytes, headers: dict[str, str]) -> Call:
        """Note a request."""
        name = headers.get("X-Request-Id", "")
        with self.lock:
            self._seen[name, body] += 1
            fields = json.loads(body)
            attempt = self._seen[name, body]
            call = Call(id=name, attempt=attempt, body=fields, headers=headers, started=time.monotonic())
            self.calls.append(call)
        return call


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class Refusal(Exception):
    """The server refuses a request."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    stub: Stub

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        quirks = self.stub.quirks
        if self.path == "/calls":
            self.answer(200, [[call.started, call.ended] for call in self.stub.asked])
        elif self.path == "/version":
            self.answer(200, {"version": "1.2"})
        elif self.path != f"{quirks.prefix}/models" or not quirks.lists_models:
            self.answer(404, {"detail": "Not Found"})
        elif quirks.key is not None and self.headers.get("Authorization") != f"Bearer {quirks.key}":
            self.answer(401, {"error": {"message": "Incorrect API key provided." + self.echo()}})
        else:
            models = [{"id": name, "owned_by": "stub", "max_model_len": quirks.context} for name in quirks.models]
            self.answer(200, {"object": "list", "data": models})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/detokenize":
            self.answer(200, {"prompt": "".join(map(chr, json.loads(raw)["tokens"]))})
        elif self.path == f"{self.stub.quirks.prefix}/chat/completions":
            call = self.stub.enter(raw, dict(self.headers))
            try:
                self.complete(call)
            finally:
                call.ended = time.monotonic()
        else:
            self.answer(404, {"detail": "Not Found"})

    def complete(self, call: Call) -> None:
        """Answer a request for a completion."""
        quirks = self.stub.quirks
        fault = quirks.fault(call) or Fault()
        call.status = fault.status
        time.sleep(fault.delay_s)
        if fault.status != 200:
            words = {"error": {"message": f"stub fault {fault.status}" + self.echo(), "type": "fault"}}
            self.answer(fault.status, words if fault.body is None else fault.body, fault.headers)
            return
        try:
            payload = completion(call.body, self.headers.get("Authorization"), quirks, self.echo())
        except Refusal as refusal:
            call.status = refusal.status
            self.answer(refusal.status, {"error": {"message": str(refusal), "code": refusal.status}})
            return
        time.sleep(0 if call.probe else quirks.latency_s)
        call.paid = True
        if fault.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        self.answer(200, payload if fault.body is None else fault.body, cut=fault.cut)

    def echo(self) -> str:
        """What a careless server adds to its words."""
        return f" You sent {self.headers.get('Authorization')}." if self.stub.quirks.echo_key else ""

    def answer(self, status: int, body: Any, headers: dict[str, str] | None = None, *, cut: bool = False) -> None:
        """Send a JSON value, or a text as it is."""
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True


def completion(body: dict[str, Any], authorization: str | None, quirks: Quirks, echo: str = "") -> dict[str, Any]:
    """Answer a request as the server with these quirks would, or raise a Refusal."""
    if quirks.key is not None and authorization != f"Bearer {quirks.key}":
        raise Refusal(401, "Incorrect API key provided." + echo)
    unknown = set(body) - (quirks.only if quirks.only is not None else set(body))
    if unknown:
        raise Refusal(quirks.refusal, f"Unexpected fields in the request: {sorted(unknown)}")
    if body["model"] not in quirks.models:
        raise Refusal(404, f"The model `{body['model']}` does not exist.")
    if quirks.top_logprobs and body.get("top_logprobs", 0) > quirks.top_logprobs:
        raise Refusal(400, f"top_logprobs is at most {quirks.top_logprobs}")
    prompt, level = read_prompt(body, quirks)
    limit = body.get("max_tokens") or body.get("max_completion_tokens") or 16
    if quirks.context is not None and len(prompt) + limit > quirks.context:
        raise Refusal(
            400,
            f"This model's maximum context length is {quirks.context} tokens. However, your request has {len(prompt)}"
            f" input tokens and asks for {limit}.",
        )
    if body.get("logprobs") and quirks.odd_logprobs == "refused nan":
        raise Refusal(400, "Out of range float values are not JSON compliant: nan")
    count = body.get("n", 1) if quirks.n else 1
    texts = [
        written(body, prompt, level, limit, number, quirks.constraints, quirks.free_text) for number in range(count)
    ]
    answered = {
        "object": "chat.completion",
        "model": quirks.alias or body["model"],
        "choices": [choice(number, text, body, quirks, echo) for number, text in enumerate(texts)],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": sum(len(text.tokens) for text in texts)},
    }
    return answered | ({"prompt_token_ids": list(map(ord, prompt))} if body.get("return_token_ids") else {})


def choice(number: int, text: Written, body: dict[str, Any], quirks: Quirks, echo: str) -> dict[str, Any]:
    """One reply in the protocol's words."""
    message: dict[str, Any] = {"role": "assistant", "content": text.text + echo}
    if body.get("chat_template_kwargs", {}).get("enable_thinking") and quirks.template_kwargs:
        thought = f"thought {number} of {body.get('seed')}"
        if quirks.thinking == "inline" and not text.constrained:
            message["content"] = f"<think>\n{thought}\n</think>\n\n{text.text}"
        elif quirks.thinking.startswith("reasoning"):
            message[quirks.thinking] = thought
    found: dict[str, Any] = {"index": number, "message": message, "finish_reason": text.finish, "logprobs": None}
    if body.get("logprobs") and quirks.top_logprobs:
        found["logprobs"] = {"content": [logprobs_at(place, body, quirks) for place in text.tokens]}
        if quirks.odd_logprobs == "empty":
            found["logprobs"]["content"] = []
    return found


def logprobs_at(place: tuple[str, dict[str, float]], body: dict[str, Any], quirks: Quirks) -> dict[str, Any]:
    """A token and its alternatives, the most probable first."""
    token, shares = place
    odd: dict[str, Any] = {"nan": float("nan"), "null": None, "text": "high", "zeros": 0.0}
    most = sorted(shares.items(), key=lambda item: -item[1])[: body.get("top_logprobs", 0)]
    listed = [
        {"token": name, "logprob": odd.get(quirks.odd_logprobs, float(np.log(share))), "bytes": None}
        for name, share in most
    ]
    return {"token": token, "logprob": float(np.log(shares[token])), "bytes": None, "top_logprobs": listed}


def read_prompt(body: dict[str, Any], quirks: Quirks) -> tuple[str, float]:
    """The prompt as the model reads it, one character a token, and how bright the last picture is, 0 to 1."""
    goes_on = quirks.prefill and body.get("continue_final_message")
    text, pictures, videos = "", [], 0
    for message in body["messages"]:
        parts = message["content"]
        text += f"<{message['role']}>"
        for part in [{"type": "text", "text": parts}] if isinstance(parts, str) else parts:
            if part["type"] == "text":
                text += part["text"]
            elif part["type"] == "image_url" and quirks.pictures:
                pictures.append(part["image_url"]["url"].partition("base64,")[2])
                text += PICTURE
            elif part["type"] == "video_url" and quirks.video_frames != "refused":
                frames = part["video_url"]["url"].partition("base64,")[2].split(",")
                videos += 1
                pictures.append(frames[-1])
                text += "".join(f"<{time_s:.1f} seconds>{PICTURE}" for time_s in pair_times(len(frames), body, quirks))
            else:
                raise Refusal(400, f"At most 0 {part['type']}(s) may be provided in one prompt.")
        text += "</end>"
    if videos > quirks.videos:
        raise Refusal(400, f"At most {quirks.videos} video(s) may be provided in one prompt.")
    text = text.removesuffix("</end>") if goes_on else text + "<assistant>"
    return text, brightness(pictures[-1]) if pictures else 0.5


def pair_times(frames: int, body: dict[str, Any], quirks: Quirks) -> list[float]:
    """When each pair of a video's frames is: as the client says, or a second apart where the server does not listen."""
    kwargs = body.get("media_io_kwargs", {}).get("video")
    if quirks.video_frames == "resampled" or kwargs is None:
        return [pair + 0.5 for pair in range(min(frames, 32) // 2)]
    times = [index / kwargs["fps"] for index in kwargs["frames_indices"]]
    assert len(times) == frames, (len(times), frames)
    return [(first + last) / 2 for first, last in zip(times[::2], times[1::2], strict=True)]


def brightness(jpeg: str) -> float:
    """The mean of a picture."""
    from PIL import Image

    return float(np.asarray(Image.open(io.BytesIO(base64.b64decode(jpeg)))).mean()) / 255


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    with Stub(Quirks(latency_s=options.latency), port=options.port) as stub:
        print(stub.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
