"""Questions and answers of the three signals, and the profiles that word them."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from regrasp.core.errors import ConfigError
from regrasp.rewards.dense import DenseSignal, WindowReply, dense_fields, parse_window, window_pattern
from regrasp.rewards.engine import Capabilities, MissingCapability, Reply, Request
from regrasp.rewards.jobs import Grade, Job, RubricStep
from regrasp.rewards.judging import Exchange, Judged, Signal
from regrasp.rewards.profiles import BUILT_IN, fill, read_profile
from regrasp.rewards.rubric import RubricSignal, Sample, answer_pattern, parse_answer, rubric_fields
from regrasp.rewards.terminal import TerminalSignal, score_fields, truth_fields
from regrasp.rewards.views import Views
from regrasp.rewards.windows import plan_windows
from tests.judge_engine import ABLE, ScriptedEngine, write_gray

GENERIC = read_profile("generic")
STEPS = (
    RubricStep(action="grasp", grading=(Grade(label="no", points=0.0), Grade(label="yes", points=0.4))),
    RubricStep(action="lift", grading=tuple(Grade(label=str(p), points=p) for p in (0.0, 0.1, 0.6))),
)


class PlainDesk:
    """Asks at once."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine

    async def ask(self, build: Callable[[], Request], *after: Callable[[Request, Reply], Request]) -> list[Exchange]:
        request, exchanges = build(), []
        for follow in [None, *after]:
            request = follow(request, exchanges[-1].reply) if follow else request
            reply = await self.engine.judge(request)
            exchanges.append(Exchange(prompt=request.prompt, seed=request.seed, frames=(), reply=reply))
        return exchanges


def job_of(*videos: Path, rubric: tuple[RubricStep, ...] = ()) -> Job:
    return Job(id="a", task="lift {the} cup", videos=videos, rubric=rubric)


def judge(signal: Signal, job: Job, engine: ScriptedEngine, able: Capabilities = ABLE) -> Judged:
    return asyncio.run(signal.judge(job, Views(job), PlainDesk(engine), able))


def test_a_score_is_the_most_probable_one_with_its_expectation():
    # E = 1*.1 + 2*.1 + 3*.2 + 4*.5 + 5*.1 = 3.4; progress = 2.4/4
    shares = dict(zip("12345", [0.1, 0.1, 0.2, 0.5, 0.1], strict=True))
    found = score_fields(Reply(texts=("4",), probabilities=shares, mass=0.99))
    assert (found["score"], found["flags"]) == (4, [])
    assert found["expected_score"] == pytest.approx(3.4)
    assert found["progress"] == pytest.approx(0.6)


def test_a_score_without_finite_probabilities_is_invalid():
    broken = dict.fromkeys("12345", math.nan)
    found = score_fields(Reply(texts=("3",), probabilities=broken))
    assert (found["invalid"], found["raw"]) == (True, "3")
    assert "score" not in found
    assert score_fields(Reply(texts=("3",)))["invalid"]


def test_probability_mass_elsewhere_and_a_reply_of_its_own_mind_are_flagged():
    shares = dict(zip("12345", [0.1, 0.1, 0.2, 0.5, 0.1], strict=True))
    flags = score_fields(Reply(texts=("2",), probabilities=shares, mass=0.007))["flags"]
    assert flags == ["probability mass outside 1-5: 0.993", "the reply says 2, and 4 is more probable"]


def test_the_probability_of_true_is_among_all_tokens():
    # 0.8 of a mass of 0.5: P("True") = 0.4
    found = truth_fields(Reply(texts=(" True",), probabilities={" True": 0.8, " False": 0.2}, mass=0.5))
    assert found["log_probability"] == pytest.approx(math.log(0.4))
    assert (found["score"], found["progress"]) == (None, 0.8)
    assert truth_fields(Reply(texts=("",), probabilities={"True": 0.8, "False": 0.2}))["log_probability"] is None
    assert truth_fields(Reply(texts=("Yes",)))["invalid"]


def test_the_terminal_question_begins_its_answer_at_the_score(tmp_path: Path):
    job = job_of(write_gray(tmp_path / "a.mp4", [200] * 30))
    request = TerminalSignal(ask=GENERIC.ask("terminal")).first_request(job, Views(job))
    assert (request.prefill, request.constraint, request.score_tokens) == ("ANSWER: ", "[1-5]", tuple("12345"))
    assert (request.max_tokens, request.temperature, request.n) == (1, 0.0, 1)
    assert "lift {the} cup" in request.prompt
    assert "3.0 seconds" in request.prompt
    (video,) = request.videos
    assert len(video.frames) == 30  # 3 s at 10 per second
    assert video.timestamps_s[[0, -1]].tolist() == pytest.approx([0, 2.9])


def test_reasons_come_before_the_score_in_two_calls(tmp_path: Path):
    engine = ScriptedEngine()
    signal = TerminalSignal(ask=GENERIC.ask("terminal"), with_rationale=True)
    judged = judge(signal, job_of(write_gray(tmp_path / "a.mp4", [200] * 5)), engine)
    first, second = engine.asked
    assert (first.prefill, first.score_tokens) == ("REASON: ", None)
    assert second.prefill == "REASON: it looks as it looks\nANSWER: "
    assert judged.fields["rationale"] == "it looks as it looks"
    assert judged.fields["score"] == 4


def test_without_prefill_the_digit_is_asked_for_alone(tmp_path: Path):
    engine, signal = ScriptedEngine(), TerminalSignal(ask=GENERIC.ask("terminal"))
    able = replace(ABLE, prefill=False, constraint=False)
    judged = judge(signal, job_of(write_gray(tmp_path / "a.mp4", [200] * 5)), engine, able)
    assert (engine.asked[0].prefill, engine.asked[0].constraint) == (None, None)
    assert engine.asked[0].prompt.endswith("digit alone.")
    assert judged.fields["score"] == 4


def test_an_engine_without_what_a_signal_needs_is_refused(tmp_path: Path):
    one, two = (write_gray(tmp_path / f"{name}.mp4", [9]) for name in "ab")
    terminal = TerminalSignal(ask=GENERIC.ask("terminal"))
    with pytest.raises(MissingCapability, match="log-probabilities"):
        terminal.check(replace(ABLE, logprobs=False), [job_of(one)])
    with pytest.raises(MissingCapability, match="--with-rationale"):
        replace(terminal, with_rationale=True).check(replace(ABLE, prefill=False), [job_of(one)])
    rubric, able = RubricSignal(ask=GENERIC.ask("rubric")), replace(ABLE, several_videos=False)
    rubric.check(able, [job_of(one, rubric=STEPS)])
    with pytest.raises(MissingCapability, match="several videos"):
        rubric.check(able, [job_of(one, two, rubric=STEPS)])


def test_windows_are_asked_with_absolute_time_and_64_frames(tmp_path: Path):
    job = job_of(write_gray(tmp_path / "a.mp4", [200] * 300))  # 30 s: windows at 0, 10 and 14 s
    engine = ScriptedEngine()
    judged = judge(DenseSignal(ask=GENERIC.ask("dense"), frame_scores=True), job, engine)
    asked = sorted(engine.asked, key=lambda request: float(request.videos[0].timestamps_s[0]))
    assert [len(request.videos[0].frames) for request in asked] == [64, 64, 64]
    # at 10 frames per second, 14.25 s lies between two frames and takes the earlier, 14.2 s
    assert asked[2].videos[0].timestamps_s[:3].tolist() == pytest.approx([14.0, 14.2, 14.5])
    assert "14.0 s to 30.0 s" in asked[2].prompt
    assert [r.constraint.startswith("[123]{32}") for r in asked if r.constraint] == [True] * 3
    fields = judged.fields
    assert (len(fields["half_seconds"]), len(fields["per_second"]), len(fields["frame_scores"])) == (60, 30, 300)  # type: ignore[arg-type]
    assert fields["segments"] == [{"start": 0.0, "end": 30.0, "score": 3}]
    assert (fields["worst_score"], fields["mean_score"], fields["retrospective"]) == (3, 3.0, True)


def test_a_window_reply_is_read_with_its_reasons():
    window = plan_windows(2.0)[0]
    found = parse_window("33 1,1\n1.0-2.0: it dropped\nnonsense\n0.0 s - 0.5 s: slow", window)
    assert found.scores == (3, 3, 1, 1)
    assert [(r.start_s, r.end_s, r.text) for r in found.reasons] == [(1.0, 2.0, "it dropped"), (0.0, 0.5, "slow")]


@pytest.mark.parametrize("text", ["", "333", "33333", "3334", "3330", "good", "reasons first\n3333"])
def test_a_window_reply_that_does_not_parse_is_no_score(text: str):
    found = parse_window(text, plan_windows(2.0)[0])
    assert (found.scores, found.raw) == (None, text)


def test_windows_sum_up_to_segments_shares_and_the_mean():
    # 1.8 s: half seconds of 0.5, 0.5, 0.5 and 0.3 s with 3, 1, 1 and 2. mean = (1.5 + 0.5 + 0.5 + 0.6)/1.8
    windows = plan_windows(1.8)
    fields = dense_fields(1.8, windows, [parse_window("3112\n0.5-1.5: it fell", windows[0])])
    assert fields["per_second"] == [1, 1]
    assert fields["mean_score"] == pytest.approx(3.1 / 1.8)
    assert fields["fraction"] == pytest.approx({"1": 1 / 1.8, "2": 0.3 / 1.8, "3": 0.5 / 1.8})
    assert fields["worst_score"] == 1
    assert fields["segments"] == [
        {"start": 0.0, "end": 0.5, "score": 3},
        {"start": 0.5, "end": 1.5, "score": 1, "reason": "it fell"},
        {"start": 1.5, "end": 1.8, "score": 2, "reason": None},
    ]


def test_an_invalid_window_leaves_its_half_seconds_without_a_score():
    windows = plan_windows(26.0)  # the first window's are 0 to 12 s, the second's 12 to 26 s
    good = WindowReply(scores=(2,) * 32, reasons=(), raw="")
    fields = dense_fields(26.0, windows, [good, parse_window("what?", windows[1])])
    assert fields["half_seconds"] == [2] * 24 + [None] * 28
    assert fields["invalid_clips"] == [{"start": 10.0, "end": 26.0, "raw": "what?"}]
    assert (fields["invalid"], fields["mean_score"]) == (False, 2.0)
    nothing = dense_fields(26.0, windows, [parse_window("", w) for w in windows])
    assert (nothing["invalid"], nothing["mean_score"], nothing["worst_score"]) == (True, None, None)


def test_the_constraints_allow_what_is_read():
    import re

    assert re.fullmatch(window_pattern(4), "3112\n0.5-1.5: it fell")
    assert not re.fullmatch(window_pattern(4), "311")
    assert answer_pattern(STEPS) == r"ANSWER: \[(0\.0|0\.4), (0\.0|0\.1|0\.6)\]"
    assert re.fullmatch(answer_pattern(STEPS), "ANSWER: [0.4, 0.1]")


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("ANSWER: [0.4, 0.6]", (0.4, 0.6)),
        ("I thought ANSWER: [0, 0] first.\nANSWER: [0.40,0.1]", (0.4, 0.1)),
        ("ANSWER: [0.10000000000000001]", None),
        ("ANSWER: [0.4, 0.10000000000000001]", (0.4, 0.1)),
        ("ANSWER: [0.4, 0.2]", None),
        ("ANSWER: [0.4, nan]", None),
        ("ANSWER: [0.4, lots]", None),
        ("ANSWER: [0.4, 0.6", None),
        ("0.4, 0.6", None),
    ],
)
def test_an_answer_is_read_only_if_every_number_is_allowed(text: str, points: tuple[float, ...] | None):
    assert parse_answer(text, STEPS) == points


def test_samples_sum_up_to_their_medoid():
    points = [None, (0.4, 0.0), (0.4, 0.1), (0.0, 0.1)]  # of the valid ones, (0.4, 0.1) is 0.1 and 0.4 from the others
    samples = [Sample(points=p, text=str(p), thinking="hm") for p in points]
    fields = rubric_fields(STEPS, samples, keep_thinking=True)
    assert (fields["points"], fields["medoid"], fields["valid_samples"]) == ([0.4, 0.1], 2, 3)
    assert fields["spread"] == pytest.approx(0.25)
    assert (fields["total"], fields["raw"]) == (0.5, ["None"])
    assert fields["thinking"] == ["hm"] * 4
    none = rubric_fields(STEPS, samples[:1], keep_thinking=False)
    assert none["invalid"]
    assert "points" not in none


def test_every_camera_is_a_video_of_its_own_at_2_per_second(tmp_path: Path):
    videos = [write_gray(tmp_path / f"{name}.mp4", [200] * 100) for name in "ab"]  # 10 s
    job, engine = job_of(*videos, rubric=STEPS), ScriptedEngine()
    judged = judge(RubricSignal(ask=GENERIC.ask("rubric")), job, engine)
    (request,) = engine.asked
    assert (request.n, request.temperature, request.thinking) == (9, 1.0, True)
    assert [video.timestamps_s.tolist() for video in request.videos] == [pytest.approx([k / 2 for k in range(20)])] * 2
    assert "   0.4 = yes" in request.prompt
    assert (judged.fields["points"], judged.flags) == ([0.4, 0.6], [])


def test_long_videos_give_166_frames(tmp_path: Path):
    job = job_of(write_gray(tmp_path / "a.mp4", [90] * 200, fps=2), rubric=STEPS)  # 100 s
    request = RubricSignal(ask=GENERIC.ask("rubric")).first_request(job, Views(job))
    assert len(request.videos[0].frames) == 166
    assert request.videos[0].timestamps_s[-1] == pytest.approx(99.5)


def test_an_attempt_is_also_marked_cut_off_at_moments(tmp_path: Path):
    # 3 s that turn bright after the first: cut off at 1, 2 and 3 quarters of 30 frames, that is 8, 15 and 22
    job = job_of(write_gray(tmp_path / "a.mp4", [20] * 10 + [230] * 20), rubric=STEPS)
    engine, signal = ScriptedEngine(), RubricSignal(ask=GENERIC.ask("rubric"), num_samples=2, moments=3)
    fields = judge(signal, job, engine).fields
    low, high = [0.0, 0.0], [0.4, 0.6]
    assert fields["moments"] == [
        {"frames": 8, "points": low},
        {"frames": 15, "points": high},
        {"frames": 22, "points": high},
    ]
    assert fields["points"] == high
    assert sorted(request.videos[0].duration_s for request in engine.asked) == [0.8, 1.5, 2.2, 3.0]
    assert len({request.seed for request in engine.asked}) == 4
    assert "moments" not in judge(RubricSignal(ask=GENERIC.ask("rubric")), job, ScriptedEngine()).fields
    assert "moments" not in RubricSignal(ask=GENERIC.ask("rubric")).settings()


def test_samples_are_drawn_one_by_one_where_n_is_missing(tmp_path: Path):
    job, engine = job_of(write_gray(tmp_path / "a.mp4", [200] * 5), rubric=STEPS), ScriptedEngine()
    able = replace(ABLE, n=False)
    judged = judge(RubricSignal(ask=GENERIC.ask("rubric"), num_samples=3), job, engine, able)
    assert [request.n for request in engine.asked] == [1, 1, 1]
    assert len({request.seed for request in engine.asked}) == 3
    assert judged.fields["valid_samples"] == 3
    assert judged.flags == ["identical samples at temperature above 0"]


def test_a_model_whose_thinking_a_constraint_would_suppress_thinks_first(tmp_path: Path):
    def answer(request: Request) -> Reply:
        if request.constraint is None:
            return Reply(texts=("it grasped.\nANSWER: [9, 9]",))
        assert request.constraint == r"(0\.0|0\.4), (0\.0|0\.1|0\.6)\]"
        return Reply(texts=("0.4, 0.0]",))

    job, engine = job_of(write_gray(tmp_path / "a.mp4", [200] * 5), rubric=STEPS), ScriptedEngine(answer)
    signal = RubricSignal(ask=GENERIC.ask("rubric"), num_samples=2, keep_thinking=True)
    judged = judge(signal, job, engine, replace(ABLE, thinking=False))
    assert [r.prefill for r in engine.asked if r.constraint] == ["it grasped.\nANSWER: ["] * 2
    assert judged.fields["points"] == [0.4, 0.0]
    assert judged.fields["thinking"] == ["it grasped.\nANSWER: [9, 9]"] * 2


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_profiles_are_whole(name: str):
    profile = read_profile(name)
    assert profile.name == name
    assert profile.ask("terminal").prefill
    assert len(profile.digest) == 32


def test_a_users_own_profile_is_read_by_its_path_and_its_words_are_hashed(tmp_path: Path):
    path = tmp_path / "own.yaml"
    path.write_text('name: own\nversion: 3\nterminal:\n  prompt: "Did it {task}?"\n  prefill: "A: "\n')
    profile = read_profile(str(path))
    assert (profile.name, profile.version, profile.ask("terminal").prompt) == ("own", 3, "Did it {task}?")
    path.write_text(path.read_text().replace("Did", "Has"))
    assert read_profile(str(path)).digest != profile.digest
    with pytest.raises(ConfigError, match="does not ask for 'dense'"):
        profile.ask("dense")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: a\nversion: 1\n", "asks for nothing"),
        ("name: a\nversion: 1\nterminl: {}\n", "Did you mean 'terminal'"),
        ("name: a\nversion: one\nterminal: {prompt: x}\n", "whole-numbered version"),
        ("name: a\nversion: 1\nterminal: {promt: x}\n", "Did you mean 'prompt'"),
        ("name: a\nversion: 1\nterminal: {system: x}\n", "prompt: Field required"),
        ('name: a\nversion: 1\nterminal: {prompt: "{tsk}"}\n', "Did you mean 'task'"),
        ("name: a\nversion: 1\nterminal: {prompt: x, most_frames: 0}\n", "above 0"),
        ("name: a\nversion: 1\nterminal: {prompt: x, frames_per_second: .nan}\n", "above 0"),
        ("name: a\nversion: 1\nterminal: {prompt: x, temperature: .inf}\n", "above 0"),
        ("- a", "found no table"),
        ("a: [", "not YAML"),
    ],
)
def test_a_profile_that_cannot_be_understood_is_refused(tmp_path: Path, text: str, words: str):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_profile(str(tmp_path / "own.yaml"))
    with pytest.raises(ConfigError, match="Did you mean 'generic'"):
        read_profile("genric")


def test_places_are_filled_once():
    assert fill("{task} {task} {other}", {"task": "{start}", "start": 3}) == "{start} {start} {other}"
