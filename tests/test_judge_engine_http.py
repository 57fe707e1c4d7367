"""The `openai` engine against a server on loopback that has the oddities real ones were seen to have."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from regrasp.core.errors import ConfigError
from regrasp.rewards.engine import (
    Capabilities,
    EngineError,
    EngineUnavailable,
    JudgeEngine,
    Metered,
    MissingCapability,
    Preparing,
    Reply,
    Request,
    RequestTooLong,
)
from regrasp.rewards.engines import build_engine
from regrasp.rewards.engines.openai_chat import score_probabilities
from regrasp.rewards.engines.openai_http import MASS_TOLERANCE, OpenAIConfig, OpenAIEngine
from regrasp.rewards.engines.openai_transport import API_KEY_VARIABLES, Retries
from tests.judge_engine_contract import RUBRIC, SCORES, clip, keeps_the_contract, question, score_question
from tests.judge_stub import KNOWN, Call, Fault, Quirks, Stub
from tests.judge_stub_model import score_shares

QUICK = Retries(first_wait_s=0.01)
KEY = "sk-correct-horse-battery"
VLLM = Quirks(thinking="reasoning")
OLD_VLLM = Quirks(constraints=("guided_regex",), video_frames="resampled")
SGLANG = Quirks(constraints=("regex",), video_frames="refused", top_logprobs=20)
HOSTED = Quirks(constraints=("response_format",), only=KNOWN, prefill=False, video_frames="refused", refusal=400)
SERVE = Quirks(
    constraints=(), only=KNOWN | {"seed"}, top_logprobs=0, n=False, prefill=False, video_frames="refused", videos=0
)
"""`transformers serve`: some wishes are ignored, others refused."""


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sends a key that this machine may have."""
    for name in API_KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stub() -> Iterator[Stub]:
    """A server that does all that vLLM does."""
    with Stub(replace(VLLM)) as server:
        yield server


def connect(stub: Stub, **settings: Any) -> OpenAIEngine:
    return OpenAIEngine(OpenAIConfig(**{"model": "judge", "base_url": stub.url, "retries": QUICK} | settings))


def probe(stub: Stub, **settings: Any) -> Capabilities:
    async def run() -> Capabilities:
        engine = connect(stub, **settings)
        try:
            return await engine.probe()
        finally:
            await engine.close()

    return asyncio.run(run())


def judge(stub: Stub, *requests: Request, engine: OpenAIEngine | None = None, **settings: Any) -> list[Reply]:
    async def run() -> list[Reply]:
        own = engine or connect(stub, **settings)
        try:
            return list(await asyncio.gather(*map(own.judge, requests)))
        finally:
            await own.close()

    return asyncio.run(run())


def at_first(fault: Fault, *, times: int = 1) -> Callable[[Call], Fault | None]:
    """The fault in the first attempts of every request that is no probe."""
    return lambda call: fault if not call.probe and call.attempt <= times else None


# What servers do


@pytest.mark.parametrize(
    "quirks", [VLLM, OLD_VLLM, SGLANG, HOSTED, SERVE], ids=["vllm", "old", "sglang", "hosted", "serve"]
)
def test_the_engine_keeps_the_contract_with_every_kind_of_server(quirks: Quirks):
    with Stub(replace(quirks)) as stub:
        engine = connect(stub)
        assert isinstance(engine, JudgeEngine)
        able = asyncio.run(keeps_the_contract(engine))
    constrains = quirks is not SERVE
    assert able == Capabilities(
        constraint=constrains,
        logprobs=constrains,
        several_videos=True,
        timestamps=True,
        prefill=constrains,
        n=True,
        thinking=quirks is VLLM,
    )


def test_a_constraint_that_is_ignored_without_a_word_counts_as_none(stub: Stub):
    stub.quirks.constraints = ()
    assert not probe(stub).constraint
    with pytest.raises(MissingCapability, match="a constraint on the reply"):
        judge(stub, question(constraint=RUBRIC))
    assert stub.paid == []


def test_the_new_spelling_is_used_where_both_are_obeyed(stub: Stub):
    stub.quirks.constraints = ("guided_regex", "structured_outputs")
    judge(stub, question(constraint=RUBRIC, max_tokens=40))
    assert "structured_outputs" in stub.asked[0].body
    assert "guided_regex" not in stub.asked[0].body


def test_the_spelling_of_openai_puts_the_reply_into_json_and_takes_it_out_again():
    with Stub(replace(HOSTED)) as stub:
        dense, scored = judge(stub, question(constraint="[123]{4}(\nx){0,2}"), score_question())
    assert dense.texts == ("3333",) or set(dense.texts[0]) <= set("123")
    schema = next(call for call in stub.asked if call.id == "one").body["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["reply"]["pattern"].startswith("^(")
    # the digit stands after '{ "reply": "ANSWER: ' there, and has the same probabilities
    assert scored.probabilities == pytest.approx(score_shares(128 / 255), abs=1e-6)
    assert scored.mass is None


def test_the_mass_is_that_before_a_constraint(stub: Stub):
    (reply,) = judge(stub, score_question())
    assert reply.probabilities == pytest.approx(score_shares(128 / 255), abs=1e-6)
    assert reply.mass == pytest.approx(0.9)
    assert len(stub.asked) == 1  # all five scores were among the free alternatives: nothing else is asked
    assert "structured_outputs" not in stub.asked[0].body


def test_scores_that_are_not_among_the_alternatives_are_asked_for_under_a_constraint(stub: Stub):
    stub.quirks.top_logprobs = 5
    dark = score_question(videos=(clip([0.0, 0.5], level=0),))
    (reply,) = judge(stub, dark)
    assert [("structured_outputs" in call.body) for call in stub.asked] == [False, True]
    assert reply.probabilities == pytest.approx(score_shares(0.0), abs=1e-6)
    assert reply.mass is not None
    assert reply.mass < 0.9 + 1e-6
    assert reply.prompt_tokens == 2 * judge(stub, replace(dark, constraint=None))[0].prompt_tokens


def test_a_mass_that_may_be_hidden_among_what_is_not_shown_is_not_given():
    # of 5 scores one is shown, with 0.3; the four others may have up to 0.1 each, or up to 0.01 each
    for least, known in ((0.1, False), (0.01, True)):
        shown = {"1": math.log(0.3), "x": math.log(0.2), "y": math.log(least)}
        found = score_probabilities(shown, SCORES)
        assert (found.mass, found.missing) == (pytest.approx(0.3), ("2", "3", "4", "5"))
        assert found.unseen == pytest.approx(4 * least)
        assert (found.unseen <= MASS_TOLERANCE) is known


def test_without_a_prefill_the_constraint_has_the_model_say_the_words(stub: Stub):
    stub.quirks.prefill = False
    reply, rubric = judge(
        stub, score_question(), question(prefill="ANSWER: [", constraint=r"(0\.0|0\.4)\]", max_tokens=6)
    )
    assert reply.probabilities == pytest.approx(score_shares(128 / 255), abs=1e-6)
    assert reply.texts == ("3",)
    assert rubric.texts[0] in ("0.0]", "0.4]")
    assert {call.body["structured_outputs"]["regex"] for call in stub.asked} == {
        r"ANSWER: ([1-5])",
        r"ANSWER: \[((0\.0|0\.4)\])",
    }


@pytest.mark.parametrize(
    ("odd", "flag"),
    [
        ("nan", "non-finite log-probabilities"),
        ("zeros", "log-probabilities of more than 1 in all"),
        ("null", "no log-probabilities at the score's position"),
        ("text", "no log-probabilities at the score's position"),
        ("empty", "no log-probabilities at the score's position"),
    ],
)
def test_odd_log_probabilities_are_flagged_and_never_become_a_score(stub: Stub, odd: Any, flag: str):
    engine = connect(stub)
    asyncio.run(engine.probe())  # they were well then
    stub.quirks.odd_logprobs = odd
    (reply,) = judge(stub, score_question(), engine=connect_again(engine, stub))
    assert flag in reply.flags
    assert reply.probabilities is None or all(math.isnan(value) for value in reply.probabilities.values())


def connect_again(engine: OpenAIEngine, stub: Stub) -> OpenAIEngine:
    """An engine that knows what another found out."""
    other = connect(stub)
    other._dialect = engine._dialect
    return other


def test_a_server_that_cannot_send_nan_is_told_of_in_words_and_not_asked_again(stub: Stub):
    engine = connect(stub)
    asyncio.run(engine.probe())
    stub.quirks.odd_logprobs = "refused nan"
    with pytest.raises(EngineError, match="log-probabilities of 'judge' are not finite"):
        judge(stub, score_question(), engine=connect_again(engine, stub))
    assert len(stub.asked) == 1


def test_samples_are_drawn_one_by_one_where_n_is_ignored_and_bounded_all_the_same(stub: Stub):
    stub.quirks.n, stub.quirks.latency_s = False, 0.05
    asked = [question(id=f"q{k}", constraint=RUBRIC, n=9, temperature=1.0, seed=k, max_tokens=40) for k in range(2)]
    replies = judge(stub, *asked, concurrency=4)
    assert [len(reply.texts) for reply in replies] == [9, 9]
    assert len(stub.paid) == 18
    assert {call.body["seed"] for call in stub.asked if call.id == "q1"} == set(range(1, 10))
    assert most_at_once(stub) == 4


def most_at_once(stub: Stub) -> int:
    edges = sorted([(c.started, 1) for c in stub.asked] + [(c.ended, -1) for c in stub.asked])
    return int(np.cumsum([step for _, step in edges]).max())


def test_frame_lists_are_used_only_where_their_times_arrive(stub: Stub):
    late = question(videos=(clip([10.0, 10.25, 10.5, 10.75]),))
    judge(stub, late)
    assert stub.asked[0].body["media_io_kwargs"]["video"]["frames_indices"] == [10000, 10250, 10500, 10750]
    stub.quirks.video_frames = "resampled"
    judge(stub, late)
    parts = stub.asked[1].body["messages"][0]["content"]
    assert "media_io_kwargs" not in stub.asked[1].body
    assert [part["text"] for part in parts if part["type"] == "text"][:4] == [
        "<10.0 seconds>",
        "<10.2 seconds>",
        "<10.5 seconds>",
        "<10.8 seconds>",
    ]


def test_two_cameras_go_as_images_where_the_server_takes_one_video(stub: Stub):
    stub.quirks.videos = 1
    one = question(videos=(clip([0.0, 0.5]),))
    two = question(id="two", videos=(clip([0.0, 0.5]), clip([0.0, 0.5], level=9)))
    assert probe(stub).several_videos
    judge(stub, one, two)
    kinds = {call.id: [part["type"] for part in call.body["messages"][0]["content"]] for call in stub.asked}
    assert kinds["one"] == ["video_url", "text"]
    assert kinds["two"].count("image_url") == 4
    assert "media_io_kwargs" not in next(call for call in stub.asked if call.id == "two").body


@pytest.mark.parametrize("spelling", ["reasoning", "reasoning_content"])
def test_thinking_comes_apart_from_the_answer(stub: Stub, spelling: Any):
    stub.quirks.thinking = spelling
    (reply,) = judge(stub, question(constraint=RUBRIC, thinking=True, n=2, temperature=1.0, seed=3, max_tokens=40))
    assert reply.thinking == ("thought 0 of 3", "thought 1 of 3")
    assert all(text.startswith("ANSWER") for text in reply.texts)


def test_thinking_in_the_text_is_taken_out_and_a_constraint_that_would_suppress_it_is_refused(stub: Stub):
    stub.quirks.thinking = "inline"
    (reply,) = judge(stub, question(thinking=True, max_tokens=40))
    assert (reply.thinking, reply.texts) == (("thought 0 of None",), ("It looks as it looks.",))
    assert not probe(stub).thinking
    with pytest.raises(MissingCapability, match="a constraint after thinking"):
        judge(stub, question(thinking=True, constraint=RUBRIC))


def test_a_cut_reply_says_so(stub: Stub):
    cut, whole = judge(stub, question(max_tokens=6), question(max_tokens=60))
    assert (cut.texts, cut.finish, cut.flags) == (("It loo",), ("length",), ("a reply was cut off at the most tokens",))
    assert (whole.finish, whole.flags) == (("stop",), ())


def test_a_server_that_wants_the_newer_name_of_the_limit_gets_it():
    with Stub(replace(HOSTED, only=KNOWN - {"max_tokens"})) as stub:
        stub.quirks.fault = lambda call: (
            Fault(status=400, body='{"error": {"message": "use max_completion_tokens"}}')
            if "max_tokens" in call.body
            else None
        )
        (reply,) = judge(stub, question(max_tokens=60))
    assert reply.texts == ("It looks as it looks.",)


# What goes wrong on the way


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=500),
        Fault(status=503, headers={"Retry-After": "0"}),
        Fault(status=429),
        Fault(status=502, body="<html>Bad gateway</html>"),
        Fault(reset=True),
        Fault(cut=True),
    ],
    ids=["500", "503", "429", "502", "reset", "cut"],
)
def test_a_passing_fault_is_tried_again(stub: Stub, fault: Fault):
    stub.quirks.fault = at_first(fault, times=2)
    engine = connect(stub)
    (reply,) = judge(stub, score_question(), engine=engine)
    assert reply.texts == ("3",)
    assert [call.attempt for call in stub.asked] == [1, 2, 3]
    assert engine.usage.retries == 2


def test_a_slow_answer_is_given_up_and_asked_for_again(stub: Stub):
    stub.quirks.fault = at_first(Fault(delay_s=2.0))
    (reply,) = judge(stub, question(max_tokens=60), timeout_s=0.5)
    assert reply.texts == ("It looks as it looks.",)


def test_a_server_that_keeps_failing_is_given_up_after_the_last_attempt(stub: Stub):
    stub.quirks.fault = at_first(Fault(status=500), times=99)
    with pytest.raises(
        EngineError, match=r"'one' got no answer .* in 7 attempts; the last: HTTP 500: stub fault 500"
    ) as e:
        judge(stub, question())
    assert not isinstance(e.value, EngineUnavailable)  # the next job may fare better
    assert len(stub.asked) == 7


@pytest.mark.parametrize(
    "body",
    [
        "it works!",
        "[]",
        "null",
        '{"choices": []}',
        '{"choices": [{"message": "3"}]}',
        '{"choices": [{"message": {"content": 3}}]}',
        '{"choices": "3"}',
        '{"choices": [{"message": {"content": "3"}',
    ],
)
def test_an_answer_of_another_kind_is_refused_in_words_and_not_paid_for_again(stub: Stub, body: str):
    stub.quirks.fault = at_first(Fault(body=body), times=99)
    with pytest.raises(EngineError, match=r"not a (JSON object|chat completion)"):
        judge(stub, question())
    assert len(stub.asked) == 1


def test_half_a_character_in_a_reply_does_no_harm(stub: Stub):
    stub.quirks.fault = at_first(Fault(body='{"choices": [{"message": {"content": "3\\ud83d"}}]}'), times=99)
    (reply,) = judge(stub, question())
    assert reply.texts == ("3\ufffd",)


def test_other_wrong_types_do_no_harm(stub: Stub):
    body = (
        '{"choices": [{"index": "x", "message": {"content": [{"type": "text", "text": "3"}]}, "finish_reason": null}],'
        ' "usage": {"prompt_tokens": "many", "completion_tokens": -3}}'
    )
    stub.quirks.fault = at_first(Fault(body=body), times=99)
    (reply,) = judge(stub, question())
    assert (reply.texts, reply.finish) == (("3",), ("",))
    assert (reply.prompt_tokens, reply.completion_tokens) == (0, 0)


def test_replies_come_in_their_own_order(stub: Stub):
    choices = ", ".join(f'{{"index": {k}, "message": {{"content": "{k}"}}}}' for k in (2, 0, 1))
    stub.quirks.fault = at_first(Fault(body=f'{{"choices": [{choices}]}}'), times=99)
    (reply,) = judge(stub, question(n=3))
    assert reply.texts == ("0", "1", "2")
    (short,) = judge(stub, question(n=4))
    assert short.flags == ("3 replies came where 4 were asked for",)


def test_a_refusal_of_the_model_is_kept_as_its_text(stub: Stub):
    stub.quirks.fault = at_first(Fault(body='{"choices": [{"message": {"content": null, "refusal": "I must not."}}]}'))
    (reply,) = judge(stub, question())
    assert reply.texts == ("I must not.",)


def test_a_server_that_asks_to_wait_is_left_alone_by_all_requests(stub: Stub):
    limited = {"until": 0.0, "early": 0, "answered": 0}

    def three_a_second(call: Call) -> Fault | None:
        if call.probe:
            return None
        now = time.monotonic()
        limited["early"] += now < limited["until"] - 0.02
        limited["answered"] += 1
        if limited["answered"] % 4:
            return None
        limited["until"] = now + 1
        return Fault(status=429, headers={"Retry-After": "1"})

    stub.quirks.fault = three_a_second
    engine = connect(stub, concurrency=1)
    replies = judge(stub, *(question(id=f"q{k}", max_tokens=60) for k in range(8)), engine=engine)
    assert len(replies) == 8
    assert limited["early"] == 0
    assert engine.usage.retries == 2
    assert len(stub.paid) == len(set(stub.paid)) == 8


def test_requests_that_had_not_begun_wait_too(stub: Stub):
    stub.quirks.fault = at_first(Fault(status=429, headers={"Retry-After": "0.6"}))
    engine = connect(stub)

    async def run() -> None:
        await engine.probe()
        first = asyncio.create_task(engine.judge(question(id="first", max_tokens=60)))
        await asyncio.sleep(0.2)
        await asyncio.gather(first, engine.judge(question(id="later", max_tokens=60)))
        await engine.close()

    asyncio.run(run())
    first, *rest = stub.asked
    assert min(call.started for call in rest) >= first.ended + 0.55


def test_waits_that_are_asked_for_do_not_use_up_the_attempts(stub: Stub):
    stub.quirks.fault = at_first(Fault(status=429, headers={"retry-after-ms": "5"}), times=20)
    (reply,) = judge(stub, question(max_tokens=60))
    assert reply.texts == ("It looks as it looks.",)
    assert len(stub.asked) == 21


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(status=429, headers={"Retry-After": "3600"}), "asks to wait, 3600 s in all"),
        (
            Fault(status=429, body='{"error": {"code": "insufficient_quota", "message": "insufficient_quota"}}'),
            "no credit",
        ),
    ],
)
def test_a_wait_that_is_too_long_or_useless_ends_the_run_at_once(stub: Stub, fault: Fault, words: str):
    stub.quirks.fault = at_first(fault, times=99)
    with pytest.raises(EngineUnavailable, match=words):
        judge(stub, question())
    assert len(stub.asked) == 1


def test_faults_while_the_server_is_tried_do_not_look_like_missing_abilities(stub: Stub):
    seen: list[str] = []

    def every_other(call: Call) -> Fault | None:
        seen.append(call.id)
        return (Fault(status=500), Fault(reset=True), Fault(status=503))[len(seen) // 2 % 3] if len(seen) % 2 else None

    stub.quirks.fault = every_other
    able = probe(stub)
    assert able == Capabilities(
        constraint=True, logprobs=True, several_videos=True, timestamps=True, prefill=True, n=True, thinking=True
    )


# What the user is told


def test_a_context_that_is_too_long_says_what_to_lower(stub: Stub):
    stub.quirks.context = 200
    long = question(prompt="x" * 300)
    with pytest.raises(RequestTooLong, match=r"maximum context length is 200 .*Lower `most_frames`, `cell_height` or"):
        judge(stub, long)
    assert len(stub.asked) == 1
    stub.quirks.fault = at_first(Fault(status=413, body="<html>Request Entity Too Large</html>"))
    with pytest.raises(RequestTooLong, match="413"):
        judge(stub, question())


def test_a_model_that_the_server_does_not_have_is_named_with_those_it_has(stub: Stub):
    stub.quirks.models = ("judge", "qwen3-vl-8b")
    with pytest.raises(
        EngineUnavailable, match=r"no model 'qwen3-vl-4b'; it has judge, qwen3-vl-8b. Did you mean 'qwen3"
    ):
        probe(stub, model="qwen3-vl-4b")
    stub.quirks.lists_models = False
    with pytest.raises(EngineUnavailable, match=r"does not know the model 'qwen3-vl-4b'"):
        probe(stub, model="qwen3-vl-4b")


def test_the_name_that_the_server_answers_by_is_kept_where_it_is_another(stub: Stub):
    async def version() -> str:
        engine = connect(stub)
        await engine.probe()
        await engine.close()
        return engine.version

    assert asyncio.run(version()) == "stub 1.2"
    stub.quirks.alias = "judge-2026-11-30"
    assert asyncio.run(version()) == "stub 1.2, answering as judge-2026-11-30"


def test_an_address_without_v1_is_told_the_right_one(stub: Stub):
    with pytest.raises(EngineUnavailable, match=rf"answers under another path\. Give --base-url {stub.url}\."):
        probe(stub, base_url=stub.url.removesuffix("/v1"))
    with pytest.raises(EngineUnavailable, match="has no chat completions there"):
        probe(stub, base_url=stub.url.removesuffix("/v1") + "/api")


@pytest.mark.parametrize(
    "url", ["localhost:8000/v1", "ftp://x/v1", "http://x:port/v1", "http://[::1/v1", "http:///v1", ""]
)
def test_an_address_that_is_none_is_refused_before_anything_is_asked(url: str):
    with pytest.raises(ConfigError, match="--base-url"):
        build_engine("openai", {"model": "m", "base_url": url})
    with pytest.raises(ConfigError, match="leave out what follows"):
        build_engine("openai", {"model": "m", "base_url": "http://x/v1/chat/completions"})


def test_a_server_that_is_down_is_an_error_at_once():
    with Stub() as stub:
        url = stub.url
    started = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"No judge answers at http://127.0.0.1:\d+/v1 .*Start the server"):
        asyncio.run(build_engine("openai", {"model": "m", "base_url": url}).probe())
    assert time.monotonic() - started < 5


# The key


def test_the_key_comes_from_the_environment_and_the_projects_own_first(stub: Stub, monkeypatch: pytest.MonkeyPatch):
    stub.quirks.key = KEY
    with pytest.raises(
        EngineUnavailable, match=r"refuses a request without a key.*Set REGRASP_JUDGE_API_KEY or OPENAI_API_KEY"
    ):
        probe(stub)
    monkeypatch.setenv("OPENAI_API_KEY", "another-one-altogether")
    with pytest.raises(EngineUnavailable, match="refuses the key that was sent"):
        probe(stub)
    monkeypatch.setenv("REGRASP_JUDGE_API_KEY", f" {KEY}\n")
    assert probe(stub).logprobs


def test_a_key_is_never_repeated(stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("REGRASP_JUDGE_API_KEY", KEY)
    stub.quirks.echo_key = True
    stub.quirks.fault = at_first(Fault(status=500))
    engine = connect(stub)
    (reply,) = judge(stub, question(max_tokens=60), engine=engine)
    assert reply.texts == ("It looks as it looks. You sent Bearer ***.",)
    stub.quirks.key = "sk-another-one"
    with pytest.raises(EngineUnavailable) as refused:
        probe(stub)
    stub.quirks.key = None
    stub.quirks.fault = at_first(Fault(body=f'{{"choices": "Bearer {KEY}"}}'), times=99)
    with pytest.raises(EngineError) as odd:
        judge(stub, question())
    stub.quirks.fault = at_first(Fault(status=500), times=99)
    with pytest.raises(EngineError) as broken:
        judge(stub, question())
    told = [str(error.value) for error in (refused, odd, broken)]
    assert any("You sent Bearer ***" in text for text in told)
    assert all(KEY not in text for text in [*told, caplog.text, repr(engine), repr(vars(engine._transport))])
    assert "again in" in caplog.text


def test_a_password_in_the_address_is_used_and_never_shown(stub: Stub, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    url = stub.url.replace("http://", "http://ada:lovelace-1815@")
    stub.quirks.fault = at_first(Fault(status=500), times=99)
    with pytest.raises(EngineError) as error:
        judge(stub, question(), base_url=url)
    assert stub.asked[0].headers["Authorization"].startswith("Basic ")
    assert "lovelace" not in str(error.value) + caplog.text
    with pytest.raises(ConfigError) as bad:
        OpenAIConfig(model="m", base_url="ftp://ada:lovelace-1815@x/v1")
    assert "lovelace" not in str(bad.value)


def test_a_key_that_cannot_be_one_is_refused_without_showing_it(stub: Stub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret…pasted")
    with pytest.raises(ConfigError, match="OPENAI_API_KEY holds no key") as error:
        probe(stub)
    assert "secret" not in str(error.value)


# Counting, and readiness


def test_tokens_of_all_requests_are_counted_probes_and_lost_answers_included(stub: Stub):
    stub.quirks.fault = at_first(Fault(body='{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}'))
    engine = connect(stub)
    assert isinstance(engine, Metered)
    asyncio.run(engine.probe())
    tried = replace(engine.usage)
    assert tried.requests == len(stub.calls) > 8
    assert tried.prompt_tokens > 0
    counting = connect_again(engine, stub)
    with pytest.raises(EngineError):
        judge(stub, question(max_tokens=60), engine=counting)
    assert (counting.usage.prompt_tokens, counting.usage.completion_tokens) == (7, 5)
    counting = connect_again(engine, stub)
    (reply,) = judge(stub, question(max_tokens=60), engine=counting)
    assert counting.usage.prompt_tokens == reply.prompt_tokens > 0
    assert counting.usage.completion_tokens == reply.completion_tokens == len("It looks as it looks.")
    # 2 a million read, 8 a million written
    spent = (2 * reply.prompt_tokens + 8 * reply.completion_tokens) / 1e6
    assert counting.usage.spend(2.0, 8.0) == pytest.approx(spent)


def test_a_request_that_was_made_ready_is_sent_as_it_is(stub: Stub, monkeypatch: pytest.MonkeyPatch):
    engine = connect(stub)
    assert isinstance(engine, Preparing)

    async def run() -> Reply:
        ready = await engine.prepare(question(max_tokens=60))
        monkeypatch.setattr(engine, "_parts", None)
        try:
            return await engine.judge(ready)
        finally:
            await engine.close()

    assert asyncio.run(run()).texts == ("It looks as it looks.",)
    judge(stub, question(max_tokens=60))
    first, second = (call.body for call in stub.asked)
    assert first == second


def test_any_text_can_be_an_id(stub: Stub):
    judge(stub, *(question(id=name, max_tokens=60) for name in ("näh 袋 🧵\n", " padded ", "", "x" * 500)))
    assert {call.id for call in stub.asked} == {"n h", "padded", "", "x" * 128}
