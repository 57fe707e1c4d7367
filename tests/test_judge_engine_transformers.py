"""A tiny random Qwen3-VL judges in process: what it is shown, what it is kept to, and what is said of it."""

import asyncio
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from regrasp.core.errors import ConfigError
from regrasp.rewards.engine import EngineError, EngineUnavailable, Reply, Request, RequestTooLong, VideoInput
from regrasp.rewards.engines import build_engine
from regrasp.rewards.engines.constrained import Pattern, Vocabulary, Writer
from regrasp.rewards.engines.transformers_engine import LoadedModel, TransformersConfig, TransformersEngine
from tests.judge_engine_contract import keeps_the_contract
from tests.tiny_judge import PLAIN_TEMPLATE, build_tokenizer, write_tiny_judge

DENSE = r"[123]{32}(\n[0-9.]{1,5}-[0-9.]{1,5}: [^\n]{1,20}){0,2}"
RUBRIC = r"ANSWER: \[(0\.0|0\.1|0\.2), (0\.0|0\.4|0\.8)\]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_judge(tmp_path_factory.mktemp("tiny_judge"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TransformersEngine]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield TransformersEngine(TransformersConfig(model=str(folder), device="cpu"))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return LoadedModel(TransformersConfig(model=str(folder), device="cpu"))


def clip(times: list[float], *, duration: float = 60.0, seed: int = 0) -> VideoInput:
    frames = np.random.default_rng(seed).integers(0, 255, (len(times), 64, 64, 3), dtype=np.uint8)
    return VideoInput(frames=frames, timestamps_s=np.asarray(times), duration_s=duration)


def question(**fields: object) -> Request:
    usual: dict = {"id": "one", "system": None, "prompt": "How far?", "videos": (clip([0.0, 0.5]),), "max_tokens": 8}
    return Request(**usual | fields)


def judge(engine: TransformersEngine, request: Request) -> Reply:
    async def once() -> Reply:
        return await TransformersEngine.judge(engine, request)

    return asyncio.run(once())


def prompt_text(loaded: LoadedModel, request: Request) -> str:
    made = loaded.prepare(request)
    return loaded.prompts._processor.tokenizer.decode(made.inputs["input_ids"][0])


def test_a_score_comes_with_the_models_own_probabilities(engine: TransformersEngine, loaded: LoadedModel):
    scores = ("1", "2", "3", "4", "5")
    asked = question(prefill="ANSWER: ", constraint="[1-5]", score_tokens=scores, max_tokens=1)
    reply = judge(engine, asked)
    # the obvious way: one forward pass, and a softmax over the whole vocabulary
    made = loaded.prepare(asked)
    with torch.inference_mode():
        logits = loaded.network(**made.inputs).logits[0, -1].double()
    ids = [loaded.prompts._processor.tokenizer.convert_tokens_to_ids(score) for score in scores]
    share = torch.softmax(logits, -1)[ids]
    assert reply.probabilities == pytest.approx(dict(zip(scores, (share / share.sum()).tolist(), strict=True)))
    assert reply.mass == pytest.approx(float(share.sum()))
    assert reply.texts == (scores[int(share.argmax())],)
    assert reply.prompt_tokens == made.tokens
    assert reply.completion_tokens == 1
    assert reply.flags == ()


def test_a_window_of_32_marks_parses(engine: TransformersEngine):
    window = clip([10 + 0.25 * frame for frame in range(64)])
    reply = judge(engine, question(videos=(window,), constraint=DENSE, max_tokens=110))
    assert re.fullmatch(DENSE, reply.texts[0]) or reply.finish == ("length",)
    assert re.match("[123]{32}", reply.texts[0])


def test_three_samples_of_a_rubric_parse_and_repeat_by_seed(engine: TransformersEngine):
    two_cameras = (clip([0.0, 0.5, 1.0, 1.5]), clip([0.0, 0.5, 1.0, 1.5], seed=1))
    asked = question(videos=two_cameras, constraint=RUBRIC, n=3, temperature=1.0, seed=5, max_tokens=40)
    reply = judge(engine, asked)
    assert len(reply.texts) == 3
    assert all(re.fullmatch(RUBRIC, text) for text in reply.texts)
    assert reply.finish == ("stop",) * 3
    assert judge(engine, asked) == reply
    many = judge(engine, replace(asked, n=12, seed=6))
    assert len(set(many.texts)) > 1


def test_samples_side_by_side_are_those_drawn_alone(engine: TransformersEngine):
    asked = question(constraint=RUBRIC, n=2, temperature=1.0, seed=11, max_tokens=40)
    together = judge(engine, asked)
    alone = judge(engine, replace(asked, n=1))
    assert together.texts[0] == alone.texts[0]


def test_every_pair_of_frames_stands_under_its_absolute_time(loaded: LoadedModel):
    window = clip([10 + 0.25 * frame for frame in range(8)])
    text = prompt_text(loaded, question(videos=(window,)))
    # pairs (10.0, 10.25), (10.5, 10.75), … have their middle at 10.125, 10.625, …: printed to a tenth
    assert re.findall(r"<(\d+\.\d) seconds>", text) == ["10.1", "10.6", "11.1", "11.6"]
    assert text.count("<|vision_start|>") == 4


def test_one_frame_and_odd_counts_are_filled_with_the_last(loaded: LoadedModel):
    for times, stamps in (([3.0], ["3.0"]), ([3.0, 4.0, 5.0], ["3.5", "5.0"])):
        text = prompt_text(loaded, question(videos=(clip(times),)))
        assert re.findall(r"<(\d+\.\d) seconds>", text) == stamps


def test_two_cameras_are_two_videos_with_the_same_times(loaded: LoadedModel):
    times = [1.0, 1.5, 2.0, 2.5]
    text = prompt_text(loaded, question(videos=(clip(times), clip(times, seed=1))))
    assert re.findall(r"<(\d+\.\d) seconds>", text) == ["1.2", "2.2"] * 2


def test_the_prefill_is_the_end_of_the_prompt(loaded: LoadedModel):
    text = prompt_text(loaded, question(system="Be sober.", prefill="ANSWER: "))
    assert text.startswith("<|im_start|>system\nBe sober.<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("How far?<|im_end|>\n<|im_start|>assistant\nANSWER: ")


def test_images_with_their_times_in_words_where_videos_are_not_wanted(folder: Path):
    engine = TransformersEngine(TransformersConfig(model=str(folder), device="cpu", frames_as="images"))
    loaded = asyncio.run(engine._load())
    asked = question(videos=(clip([1.0, 2.0, 3.0]),), constraint="[1-5]")
    text = prompt_text(loaded, asked)
    assert re.findall(r"<(\d+\.\d) seconds><\|vision_start\|>", text) == ["1.0", "2.0", "3.0"]
    assert re.fullmatch("[1-5]", judge(engine, asked).texts[0])


def test_words_of_one_token_score_and_words_of_several_are_refused(engine: TransformersEngine):
    words = (" True", " False")
    reply = judge(engine, question(prefill="The answer is:", score_tokens=words, max_tokens=1))
    assert reply.probabilities is not None
    assert sum(reply.probabilities.values()) == pytest.approx(1)
    with pytest.raises(EngineError, match="is not one token"):
        judge(engine, question(prefill="The answer is: ", score_tokens=("True",), max_tokens=1))


def test_a_prompt_that_does_not_fit_says_what_to_lower(engine: TransformersEngine):
    with pytest.raises(RequestTooLong, match="Lower the number of frames, their size or the tokens of a reply"):
        judge(engine, question(max_tokens=20_000))


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    engine = TransformersEngine(TransformersConfig(model=str(tmp_path), device="cpu"))
    with pytest.raises(EngineUnavailable, match="cannot be loaded as a vision-language model"):
        asyncio.run(engine.probe())


def test_logits_that_are_not_numbers_are_flagged(folder: Path):
    engine = TransformersEngine(TransformersConfig(model=str(folder), device="cpu"))
    loaded = asyncio.run(engine._load())
    with torch.no_grad():
        loaded.network.get_output_embeddings().weight.mul_(math.nan)
    reply = judge(engine, question(constraint="[1-5]", score_tokens=("1", "2"), max_tokens=1))
    assert reply.flags == ("non-finite log-probabilities",)
    assert reply.probabilities is not None
    assert all(math.isnan(value) for value in reply.probabilities.values())
    assert reply.mass is None


def test_a_prompt_without_videos_is_read_the_same_after_one_with_them(engine: TransformersEngine):
    plain = question(videos=(), constraint="[a-z]{12}", max_tokens=12)
    first = judge(engine, plain)
    judge(engine, question())
    assert judge(engine, plain) == first


def test_thinking_is_kept_apart_and_cut_so_that_the_answer_fits(tmp_path: Path):
    settings = {"model": str(write_tiny_judge(tmp_path, thinking=True)), "device": "cpu", "answer_tokens": 40}
    engine = build_engine("transformers", settings)
    assert isinstance(engine, TransformersEngine)
    assert asyncio.run(engine.probe()).thinking
    reply = judge(engine, question(constraint=RUBRIC, n=2, temperature=1.0, seed=1, max_tokens=90, thinking=True))
    assert all(re.fullmatch(RUBRIC, text) for text in reply.texts)
    assert len(reply.thinking) == 2
    assert all(reply.thinking)


def test_what_it_can_do_and_what_it_is_are_said(engine: TransformersEngine):
    able = asyncio.run(engine.probe())
    assert able.constraint
    assert able.logprobs
    assert not able.thinking
    assert re.fullmatch(r"transformers \d+\.\d+\.\S+, model [0-9a-f]{12}", engine.version)


def test_settings_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="no setting 'modle'"):
        build_engine("transformers", {"modle": "x"})
    with pytest.raises(ConfigError, match="Did you mean 'openai'"):
        build_engine("openia", {"model": "x"})


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = build_tokenizer(PLAIN_TEMPLATE)
    return Vocabulary(tokenizer, {tokenizer.eos_token_id})


def test_a_draw_under_a_constraint_has_the_models_proportions(vocabulary: Vocabulary):
    tokenizer = build_tokenizer(PLAIN_TEMPLATE)
    logits = torch.zeros(len(tokenizer))
    one, two, other = (tokenizer.convert_tokens_to_ids(token) for token in ("1", "2", "x"))
    logits[one], logits[two], logits[other] = math.log(3.0), 0.0, 9.0
    pattern = Pattern("[12]", vocabulary)
    draws = []
    for seed in range(2000):
        writer = Writer(vocabulary, pattern, temperature=1.0, seed=seed, limit=1)
        writer.write(logits)
        draws.append(writer.text)
    # P(1) = 3/4 among the two that fit; the standard error of 2000 draws is 0.0097
    assert draws.count("1") / 2000 == pytest.approx(0.75, abs=0.04)
    assert set(draws) == {"1", "2"}


def test_a_complete_reply_ends_without_another_token(vocabulary: Vocabulary):
    size = len(build_tokenizer(PLAIN_TEMPLATE))
    writer = Writer(vocabulary, Pattern(r"ok(\.)?", vocabulary), temperature=0.0, seed=0, limit=9)
    falling = -torch.arange(size, dtype=torch.float32)
    while not writer.finish:
        writer.write(falling)
    # "." stands before the end of the turn in the vocabulary, so it is the more probable of the two
    assert writer.text == "ok."
    assert (writer.finish, writer.written) == ("stop", 3)


def test_characters_of_several_bytes_are_written_whole(vocabulary: Vocabulary):
    writer = Writer(vocabulary, Pattern(r".{1,4}\n", vocabulary), temperature=1.0, seed=3, limit=40)
    while not writer.finish:
        writer.write(torch.zeros(len(build_tokenizer(PLAIN_TEMPLATE))))
    assert re.fullmatch(r".{1,4}\n", writer.text)


def test_it_keeps_what_every_engine_keeps_to(folder: Path):
    able = asyncio.run(keeps_the_contract(TransformersEngine(TransformersConfig(model=str(folder), device="cpu"))))
    assert able.constraint
