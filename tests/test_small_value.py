"""The small value model: what it sees, what it does not, and that its text needs no tokenizer."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regrasp.core.errors import CheckpointError, ConfigError
from regrasp.models.registry import build_value_model, config_to_json, value_model_config
from regrasp.models.small_value import SmallValue, SmallValueConfig
from regrasp.models.task_text import hashed_text
from regrasp.models.value_model import ValueInputs

CAMERAS = ("top", "wrist")


def small(cameras: tuple[str, ...] = CAMERAS, state: int = 3) -> SmallValue:
    torch.manual_seed(0)
    config = SmallValueConfig(
        cameras=cameras,
        image_size=(32, 48),
        state_mean=(1.0,) * state,
        state_std=(2.0,) * state,
        width=16,
        channels=(4, 8, 8),
        text_buckets=64,
    )
    return SmallValue(config).eval()


def inputs(batch: int = 4, cameras: int = 2, state: int = 3, seed: int = 0) -> ValueInputs:
    generator = torch.Generator().manual_seed(seed)
    return ValueInputs(
        images=torch.randint(0, 256, (batch, cameras, 32, 48, 3), dtype=torch.uint8, generator=generator),
        present=torch.ones(batch, cameras, dtype=torch.bool),
        state=torch.randn(batch, state, generator=generator),
        tasks=("stack the cups",) * batch,
    )


def changed(base: ValueInputs, **fields: object) -> ValueInputs:
    return ValueInputs(**(base.__dict__ | fields))


def test_logits_are_float32_over_201_atoms_whatever_the_autocast() -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = small()(inputs())
    assert logits.shape == (4, 201)
    assert logits.dtype == torch.float32


def test_a_missing_camera_s_pixels_do_not_count() -> None:
    model, base = small(), inputs()
    present = torch.tensor([[True, False]] * 4)
    other = base.images.clone()
    other[:, 1] = 255 - other[:, 1]
    with torch.no_grad():
        one = model(changed(base, present=present))
        two = model(changed(base, present=present, images=other))
        both = model(base)
    assert torch.equal(one, two)
    assert not torch.allclose(one, both)


def test_a_frame_without_any_camera_still_has_a_value() -> None:
    with torch.no_grad():
        logits = small()(changed(inputs(), present=torch.zeros(4, 2, dtype=torch.bool)))
    assert torch.isfinite(logits).all()


def test_cameras_are_told_apart() -> None:
    model, base = small(), inputs()
    with torch.no_grad():
        swapped = changed(base, images=base.images.flip(1), present=torch.tensor([[True, False]] * 4))
        alone = changed(base, present=torch.tensor([[False, True]] * 4))
        assert not torch.allclose(model(swapped), model(alone))


@pytest.mark.parametrize("part", ["state", "task", "image"])
def test_each_input_moves_the_value(part: str) -> None:
    model, base = small(), inputs()
    other = {
        "state": changed(base, state=base.state + 1),
        "task": changed(base, tasks=("open the drawer",) * 4),
        "image": changed(base, images=255 - base.images),
    }[part]
    with torch.no_grad():
        assert not torch.allclose(model(base), model(other))


def test_the_state_is_normalised_by_the_training_statistics() -> None:
    # (x - 1) / 2 with the config's statistics equals x with mean 0 and deviation 1.
    model, base = small(), inputs()
    plain = SmallValue(
        SmallValueConfig(**(model.config.__dict__ | {"state_mean": (0.0,) * 3, "state_std": (1.0,) * 3}))
    )
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.allclose(model(base), plain.eval()(changed(base, state=(base.state - 1) / 2)), atol=1e-6)


def test_a_frame_s_value_does_not_depend_on_its_batch() -> None:
    model, base = small(), inputs(batch=6)
    mixed = changed(base, tasks=("a", "b", "a", "c", "b", "a"))
    with torch.no_grad():
        whole = model(mixed)
        alone = torch.cat(
            [
                model(
                    ValueInputs(
                        images=mixed.images[i : i + 1],
                        present=mixed.present[i : i + 1],
                        state=mixed.state[i : i + 1],
                        tasks=mixed.tasks[i : i + 1],
                    )
                )
                for i in range(6)
            ]
        )
    assert torch.allclose(whole, alone, atol=1e-5)


def test_it_runs_on_state_alone_and_on_images_alone() -> None:
    with torch.no_grad():
        assert small(cameras=())(inputs(cameras=0)).shape == (4, 201)
        assert small(state=0)(inputs(state=0)).shape == (4, 201)


def test_a_config_makes_the_same_model_again() -> None:
    model = small()
    again = build_value_model(config_to_json(model.config)).eval()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(inputs()), again(inputs()))
    assert again.config == model.config


def test_unknown_models_sizes_and_configs_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"no value model 'smal'.*Did you mean 'small'"):
        value_model_config("smal")
    with pytest.raises(ConfigError, match="multiples of 16"):
        value_model_config("small", cameras=("a",), image_size=(40, 40), state_mean=(), state_std=())
    with pytest.raises(CheckpointError, match="model config"):
        build_value_model({"name": "small", "cameras": ["a"], "colour": 3})


@given(st.text(max_size=40), st.integers(1, 5000))
def test_any_text_has_buckets(text: str, buckets: int) -> None:
    found = hashed_text(text, buckets)
    assert found
    assert all(0 <= bucket < buckets for bucket in found)


def test_text_is_hashed_the_same_in_every_process() -> None:
    # "a" is the word w:a, of crc32 2984454256 = 728626 * 4096 + 2160, and the group g:<a>, of 3796901692 = ... + 3900.
    assert hashed_text("a", 4096) == (2160, 3900)
    command = "from regrasp.models.task_text import hashed_text; print(hashed_text('Pick up the cup', 4096))"
    runs = {
        subprocess.run(
            [sys.executable, "-c", command], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert runs == {f"{hashed_text('Pick up the cup', 4096)}\n"}


def test_case_and_punctuation_do_not_count_and_word_order_does() -> None:
    assert hashed_text("Pick_up the CUP.", 4096) == hashed_text("pick up the cup", 4096)
    assert sorted(hashed_text("red on blue", 4096)) != sorted(hashed_text("blue on red", 4096))


def test_it_learns_to_tell_two_pictures_apart() -> None:
    model = small(cameras=("top",), state=0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    images = torch.zeros(2, 1, 32, 48, 3, dtype=torch.uint8)
    images[1, :, :16] = 255
    batch = ValueInputs(
        images=images, present=torch.ones(2, 1, dtype=torch.bool), state=torch.zeros(2, 0), tasks=("t", "t")
    )
    target = torch.tensor([20, 180])
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        assert np.array_equal(model.eval()(batch).argmax(1).numpy(), target.numpy())
