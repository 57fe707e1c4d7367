"""The `vllm` engine with vLLM's classes stood in for, as they are spelt in 0.32 and 0.33.

What vLLM itself does is tested in tests/vllm_real.py, where it is installed.
"""

import asyncio
import importlib
import importlib.metadata
import re
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import AutoProcessor

from regrasp.core.errors import ConfigError
from regrasp.rewards.engine import EngineError, EngineUnavailable, MissingCapability, Request, RequestTooLong
from regrasp.rewards.engines.local_prompt import PromptMaker
from regrasp.rewards.engines.openai_probe import UNLIKELY
from regrasp.rewards.engines.vllm_request import prompt_of, read_output, sampling_fields, with_scores
from tests.judge_engine_contract import clip, question, score_question
from tests.tiny_judge import CONTEXT, write_tiny_judge


class Parameters:
    """Sampling parameters, which keep whatever they are given."""

    logprob_token_ids = None

    def __init__(self, **fields: Any) -> None:
        self.__dict__ |= fields


SAMPLING = SimpleNamespace(
    SamplingParams=Parameters,
    RequestOutputKind=SimpleNamespace(FINAL_ONLY="final"),
    StructuredOutputsParams=lambda regex: ("structured", regex),
)
OLD_SAMPLING = SimpleNamespace(
    SamplingParams=object,
    RequestOutputKind=SimpleNamespace(FINAL_ONLY="final"),
    GuidedDecodingParams=lambda regex: ("guided", regex),
)


def output(*texts: str, prompt: int = 9, finish: str = "stop", logprobs: Any = None) -> SimpleNamespace:
    """What vLLM answers."""
    outputs = [
        SimpleNamespace(text=text, token_ids=[1] * len(text), finish_reason=finish, logprobs=logprobs) for text in texts
    ]
    return SimpleNamespace(outputs=outputs, prompt_token_ids=list(range(prompt)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_judge(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def prompts(folder: Path) -> PromptMaker:
    return PromptMaker(AutoProcessor.from_pretrained(folder), frames_as="auto")


def test_videos_go_as_frames_that_say_their_own_times(prompts: PromptMaker):
    asked = question(videos=(clip([10.0, 10.25, 10.5]), clip([3.0])), prefill="ANSWER: ")
    prompt = prompt_of(prompts, asked, thinking=False)
    assert prompt["prompt"].count("<|video_pad|>") == 2
    assert prompt["prompt"].endswith("<|im_start|>assistant\nANSWER: ")
    (frames, told), (_, other) = prompt["multi_modal_data"]["video"]
    # an odd count is filled with the last frame; a clock of a thousand ticks a second; the episode lasts 60 s
    assert frames.shape == (4, 64, 64, 3)
    assert (told["frames_indices"], told["fps"]) == ([10000, 10250, 10500, 10500], 1000.0)
    assert (told["total_num_frames"], told["duration"], told["do_sample_frames"]) == (60000, 60.0, False)
    assert other["frames_indices"] == [3000, 3000]
    assert "multi_modal_data" not in prompt_of(prompts, question(videos=()), thinking=False)


def test_images_stand_behind_their_times_in_words(prompts: PromptMaker):
    prompts.as_videos = False
    prompt = prompt_of(prompts, question(videos=(clip([1.0, 2.0, 3.0]),)), thinking=False)
    assert re.findall(r"<(\d+\.\d) seconds><\|vision_start\|>", prompt["prompt"]) == ["1.0", "2.0", "3.0"]
    assert len(prompt["multi_modal_data"]["image"]) == 3


def test_a_constraint_and_log_probabilities_are_asked_for_as_each_version_spells_it():
    asked = question(n=3, temperature=1.0, seed=5, max_tokens=40)
    fields = sampling_fields(asked, (), "[1-5]", SAMPLING)
    usual = {"n": 3, "temperature": 1.0, "max_tokens": 40, "seed": 5, "output_kind": "final"}
    assert fields == usual | {"structured_outputs": ("structured", "[1-5]")}
    assert sampling_fields(asked, (), "[1-5]", OLD_SAMPLING) == usual | {"guided_decoding": ("guided", "[1-5]")}
    assert sampling_fields(asked, (7, 8), None, SAMPLING) == usual | {"logprob_token_ids": [7, 8]}
    assert sampling_fields(asked, (7, 8), None, OLD_SAMPLING) == usual | {"logprobs": -1}


def test_thoughts_are_given_apart_and_a_cut_off_reply_is_flagged():
    reply = read_output(output("<think>\nit fell</think>\n\nANSWER: [0]", "ANSWER: [1]"), thinking=True)
    assert (reply.texts, reply.thinking) == (("ANSWER: [0]", "ANSWER: [1]"), ("it fell", ""))
    plain = read_output(output("a</think>b", finish="length"), thinking=False)
    assert (plain.texts, plain.thinking, plain.completion_tokens) == (("a</think>b",), (), 10)
    assert plain.flags == ("a reply was cut off at the most tokens",)


def test_probabilities_are_those_of_the_free_reply_and_the_text_is_the_best_of_them():
    # P(1) = 0.1, P(2) = 0.3, and 0.6 on something else: 0.25 and 0.75 of the 0.4 that is asked about
    shown = [{1: SimpleNamespace(logprob=-2.302585), 2: SimpleNamespace(logprob=-1.203973)}]
    answer = output("x", finish="length", logprobs=shown)
    reply = with_scores(read_output(answer, thinking=False), answer, {"1": 1, "2": 2}, choose=True)
    assert reply.probabilities == pytest.approx({"1": 0.25, "2": 0.75})
    assert reply.mass == pytest.approx(0.4)
    assert (reply.texts, reply.flags) == (("2",), ())
    assert with_scores(read_output(answer, thinking=False), answer, {"1": 1, "2": 2}, choose=False).texts == ("x",)
    lacking = with_scores(read_output(answer, thinking=False), answer, {"1": 1, "3": 3}, choose=True)
    assert lacking.flags == ("no log-probability of 3",)
    shown[0][1].logprob = float("nan")
    odd = with_scores(read_output(answer, thinking=False), answer, {"1": 1, "2": 2}, choose=True)
    assert (odd.flags, odd.mass, odd.texts) == (("non-finite log-probabilities",), None, ("x",))


@dataclass
class FakeLLM:
    """An AsyncLLM that answers by a function."""

    arguments: Any
    errored: bool = False
    closed: bool = False
    model_config: Any = field(default_factory=lambda: SimpleNamespace(max_model_len=CONTEXT))
    error: Exception | None = None
    asked: list[tuple[dict, Any]] = field(default_factory=list)

    @classmethod
    def from_engine_args(cls, arguments: Any) -> "FakeLLM":
        made.append(cls(arguments))
        return made[-1]

    async def generate(self, prompt: dict, parameters: Any, request_id: str) -> AsyncIterator[Any]:
        self.asked.append((prompt, parameters))
        if self.error is not None:
            raise self.error
        constraint = getattr(parameters, "structured_outputs", ("", ""))[1]
        ids = getattr(parameters, "logprob_token_ids", None) or []
        shown = [{number: SimpleNamespace(logprob=-1.0 - place) for place, number in enumerate(ids)}]
        text = "zq123xv" if constraint == UNLIKELY else "1"
        yield output(*[text] * parameters.n, prompt=20, logprobs=shown if ids else None)

    def shutdown(self) -> None:
        self.closed = True


made: list[FakeLLM] = []


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The engine's module, as if vLLM were installed."""
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.32.0" if name == "vllm" else version(name))
    for variable in ("VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(variable, "set by the test")
    parts = {
        "vllm.sampling_params": vars(SAMPLING),
        "vllm.engine.arg_utils": {"AsyncEngineArgs": lambda **fields: fields},
        "vllm.v1.engine.async_llm": {"AsyncLLM": FakeLLM},
    }
    for name in ("vllm", "vllm.engine", "vllm.v1", "vllm.v1.engine", *parts):
        module = ModuleType(name)
        module.__dict__.update(parts.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    made.clear()
    yield importlib.import_module("regrasp.rewards.engines.vllm_engine")
    del sys.modules["regrasp.rewards.engines.vllm_engine"]


def test_it_says_what_it_can_do_and_passes_its_settings_on(vllm: Any, folder: Path):
    settings = {"tensor_parallel": 2, "context": 4096, "arguments": {"dtype": "bfloat16"}}
    engine = vllm.VllmEngine(vllm.VllmConfig(model=str(folder), **settings))
    able = asyncio.run(engine.probe())
    assert able.constraint
    assert able.logprobs
    assert not able.several_videos  # it says that two videos are as long as one
    assert not able.thinking
    (llm,) = made
    assert llm.arguments["tensor_parallel_size"] == 2
    assert llm.arguments["max_model_len"] == 4096
    assert llm.arguments["dtype"] == "bfloat16"
    assert "reasoning_parser" not in llm.arguments
    # what it was told of times did not come back, so it is shown images
    assert "image" in llm.asked[-1][0]["multi_modal_data"]
    assert re.fullmatch(r"vllm 0\.32\.0, model [0-9a-f]{12}", engine.version)
    asyncio.run(engine.close())
    assert llm.closed


def test_a_score_takes_one_free_token(vllm: Any, folder: Path):
    engine = vllm.VllmEngine(vllm.VllmConfig(model=str(folder)))
    reply = asyncio.run(engine.judge(score_question()))
    assert reply.texts == ("1",)
    assert list(reply.probabilities) == ["1", "2", "3", "4", "5"]
    _, parameters = made[0].asked[-1]
    assert parameters.max_tokens == 1
    assert not hasattr(parameters, "structured_outputs")


@pytest.mark.parametrize(
    ("error", "errored", "kind", "words"),
    [
        (ValueError("This model's maximum context length is 8"), False, RequestTooLong, "Lower the number of frames"),
        (ValueError("no such field"), False, EngineError, "was refused by vLLM"),
        (RuntimeError("EngineCore encountered an issue"), True, EngineUnavailable, "vLLM has ended"),
    ],
)
def test_errors_say_what_to_do(
    vllm: Any, folder: Path, error: Exception, errored: bool, kind: type[Exception], words: str
):
    engine = vllm.VllmEngine(vllm.VllmConfig(model=str(folder)))
    asyncio.run(engine.judge(question()))
    made[0].error, made[0].errored = error, errored
    with pytest.raises(kind, match=words):
        asyncio.run(engine.judge(question()))


def test_a_reply_that_could_not_have_been_written_to_its_end_is_refused(vllm: Any, folder: Path):
    engine = vllm.VllmEngine(vllm.VllmConfig(model=str(folder)))
    with pytest.raises(RequestTooLong, match=rf"takes 20 tokens .* up to {CONTEXT} for the reply"):
        asyncio.run(engine.judge(question(max_tokens=CONTEXT)))


def test_an_answer_is_constrained_after_thinking_only_where_vllm_is_told_how_the_model_thinks(
    vllm: Any, tmp_path: Path
):
    folder = str(write_tiny_judge(tmp_path, thinking=True))
    asked: Request = question(thinking=True, constraint="[1-5]")
    with pytest.raises(MissingCapability, match="reasoning_parser=NAME"):
        asyncio.run(vllm.VllmEngine(vllm.VllmConfig(model=folder)).judge(asked))
    engine = vllm.VllmEngine(vllm.VllmConfig(model=folder, reasoning_parser="qwen3"))
    assert asyncio.run(engine.probe()).thinking
    asyncio.run(engine.judge(asked))
    assert made[-1].arguments["reasoning_parser"] == "qwen3"
    assert made[-1].asked[-1][0]["prompt"].endswith("<think>\n")


def test_settings_out_of_range_are_refused(vllm: Any):
    for settings in ({"tensor_parallel": 0}, {"context": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            vllm.VllmConfig(model="m", **settings)
