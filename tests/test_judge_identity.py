"""When a judge is another one, so that its rows are asked for anew."""

from pathlib import Path

from regrasp.rewards.bench import config_digest
from regrasp.rewards.engines import engine_settings, judge_identity
from regrasp.rewards.profiles import read_profile
from regrasp.rewards.terminal import TerminalSignal


def digest_of(engine: str, model: str, *options: str) -> str:
    profile = read_profile("generic")
    judge = judge_identity(engine, engine_settings(model, None, options))
    return config_digest(TerminalSignal(ask=profile.ask("terminal")), profile, engine, model, judge)


def test_a_model_that_was_trained_on_in_its_folder_is_another_judge(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"1" * 100_000)
    first = digest_of("transformers", str(tmp_path))
    assert digest_of("transformers", str(tmp_path)) == first
    (tmp_path / "model.safetensors").write_bytes(b"2" * 100_000)
    assert digest_of("transformers", str(tmp_path)) != first
    # a server has a name for its model, which may be that of a folder here
    assert judge_identity("openai", {"model": str(tmp_path)}) == []


def test_settings_that_change_answers_make_another_judge_and_others_do_not():
    plain = digest_of("openai", "m")
    assert digest_of("openai", "m", "jpeg_quality=40") != plain
    assert digest_of("openai", "m", "frames_as=images") != plain
    assert digest_of("openai", "m", "timeout_s=5") == plain
    assert digest_of("vllm", "m", "tensor_parallel=2", "arguments={gpu_memory_utilization: 0.8}") == digest_of(
        "vllm", "m"
    )
    assert digest_of("vllm", "m", "reasoning_parser=qwen3") != digest_of("vllm", "m")
