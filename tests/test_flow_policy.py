"""The reference policy: its loss and its samples, its chunks, and its checkpoints under LeRobot's own tools."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from torch import Tensor

from regrasp.core.errors import CheckpointError, ConfigError
from regrasp.models.flow_policy import FlowConfig, FlowPolicy, make_regrasp_flow_pre_post_processors

STATE, ACTION, INDICATOR = "observation.state", "action", "observation.advantage"
IMAGE = "observation.images.front"


def _policy(state: int = 3, action: int = 2, image: bool = False, seed: int = 0, **settings: object) -> FlowPolicy:
    torch.manual_seed(seed)
    inputs = {STATE: PolicyFeature(FeatureType.STATE, (state,))} if state else {}
    if image:
        inputs[IMAGE] = PolicyFeature(FeatureType.VISUAL, (3, 24, 32))
    outputs = {ACTION: PolicyFeature(FeatureType.ACTION, (action,))}
    small = {"chunk_size": 4, "n_action_steps": 2, "hidden_dim": 32, "vision_channels": (8, 8), "vision_dim": 8}
    return FlowPolicy(FlowConfig(device="cpu", input_features=inputs, output_features=outputs, **small | settings))


def _batch(rows: int = 5, state: int = 3, action: int = 2, chunk: int = 4, seed: int = 1) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        STATE: torch.randn(rows, state, generator=draw),
        ACTION: torch.randn(rows, chunk, action, generator=draw),
        INDICATOR: torch.where(torch.rand(rows, generator=draw) < 0.5, 1.0, -1.0),
    }


def _draw(seed: int = 2) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _under(policy: FlowPolicy, batch: dict[str, Tensor], value: float) -> Tensor:
    given = batch | {INDICATOR: torch.full((len(batch[STATE]),), value)}
    return policy.predict_action_chunk(given, generator=_draw())


def _observed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {STATE: batch[STATE]}


# --- the loss


def test_the_loss_of_a_batch_is_the_mean_of_its_samples():
    policy, batch = _policy().eval(), _batch()
    total, logged = policy(batch, generator=_draw())
    each, _ = policy(batch, reduction="none", generator=_draw())
    assert each.shape == (5,)
    torch.testing.assert_close(each.mean(), total)
    assert logged == {"flow_matching_loss": pytest.approx(total.item())}


def test_a_network_that_knew_the_velocity_would_have_no_loss():
    policy, batch = _policy().eval(), _batch()
    # x_t = (1 - t) eps + t a, so (a - x_t) / (1 - t) = a - eps, the target
    policy.velocity.forward = lambda x, time, observation, indicator: (batch[ACTION] - x) / (1 - time[:, None, None])
    assert policy(batch, generator=_draw())[0].item() < 1e-6


@pytest.mark.parametrize("value", [0.0, 1e6, float("nan")])
def test_padding_has_no_influence_on_the_loss_or_its_gradient(value: float):
    policy, batch = _policy().eval(), _batch()
    batch["action_is_pad"] = torch.tensor([[False, False, True, True]] * 5)
    batch["action_dim_is_pad"] = torch.tensor([[False, True]] * 5)
    results = []
    for filled in (3.0, value):
        action = batch[ACTION].clone()
        action[:, 2:], action[:, :, 1] = filled, filled
        policy.zero_grad()
        loss, _ = policy(batch | {ACTION: action}, generator=_draw())
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in policy.parameters() if p.grad is not None)])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_the_condition_is_left_out_in_training_alone_and_about_as_often_as_asked():
    policy = _policy(condition_dropout=0.25)
    batch = _batch(rows=4000)
    seen: list[Tensor] = []
    policy.velocity.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[3]))
    policy.train()(batch, generator=_draw())
    policy.eval()(batch, generator=_draw())
    assert (seen[0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.04)
    kept = seen[0] != 0
    assert torch.equal(seen[0][kept], batch[INDICATOR][kept])
    assert torch.equal(seen[1], batch[INDICATOR])


def test_training_a_conditioned_policy_without_labels_is_refused():
    batch = _batch()
    del batch[INDICATOR]
    with pytest.raises(ConfigError, match=r"no 'observation.advantage'.*AdvantageConditionStep"):
        _policy()(batch)
    _policy(conditioned=False)(batch)


def test_an_unconditioned_policy_does_not_look_at_labels():
    policy, batch = _policy(conditioned=False), _batch()
    one = policy(batch, generator=_draw())[0]
    other = policy(batch | {INDICATOR: -batch[INDICATOR]}, generator=_draw())[0]
    assert torch.equal(one, other)
    assert torch.equal(_under(policy, batch, 1.0), _under(policy, batch, -1.0))


def test_sizes_that_differ_from_training_are_named():
    policy, batch = _policy(), _batch()
    with pytest.raises(ConfigError, match=r"'observation.state' of 3 numbers.*\(5, 7\)"):
        policy.predict_action_chunk({STATE: torch.zeros(5, 7)})
    with pytest.raises(ConfigError, match=r"made for observation.state, which the observation lacks"):
        policy.select_action({"observation.robot": torch.zeros(5, 3)})
    with pytest.raises(ConfigError, match=r"chunks of 4 actions of 2 numbers.*\(5, 4, 6\)"):
        policy(batch | {ACTION: torch.zeros(5, 4, 6)})


# --- sampling


def test_guidance_of_one_is_the_plain_conditional_pass_and_of_zero_the_null_pass():
    policy, batch = _policy(), _batch()
    positive, null = _under(policy, batch, 1.0), _under(policy, batch, 0.0)
    assert not torch.allclose(positive, null)
    for scale, expected, passes in ((1.0, positive, 1), (0.0, null, 1), (2.0, None, 2)):
        policy.config.guidance_scale = scale
        calls: list[int] = []
        handle = policy.velocity.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        sampled = _under(policy, batch, 1.0)
        handle.remove()
        assert len(calls) == passes * policy.config.num_inference_steps
        assert expected is None or torch.equal(sampled, expected)


def test_guidance_mixes_velocities_at_every_step():
    policy, batch = _policy(num_inference_steps=2, guidance_scale=3.0), _batch()
    observation, noise = policy.encoder(batch), torch.randn(5, 4, 2)
    one, zero = torch.ones(5), torch.zeros(5)
    x = noise
    for t in (0.0, 0.5):
        null = policy.velocity(x, torch.full((5,), t), observation, zero)
        positive = policy.velocity(x, torch.full((5,), t), observation, one)
        x = x + (null + 3.0 * (positive - null)) / 2
    torch.testing.assert_close(policy.predict_action_chunk(_observed(batch), noise=noise), x)


@pytest.mark.parametrize(("condition", "value"), [("positive", 1.0), ("negative", -1.0), ("none", 0.0)])
def test_inference_asks_for_the_configs_condition_and_positive_by_default(condition: str, value: float):
    batch = _batch()
    assert FlowConfig(device="cpu").condition == "positive"
    policy = _policy(condition=condition)
    sampled = policy.predict_action_chunk(_observed(batch), generator=_draw())
    assert torch.equal(sampled, _under(policy, batch, value))


def test_the_starting_noise_has_a_scale_of_its_own():
    batch = _observed(_batch())
    noise = torch.randn(5, 4, 2)
    quiet, loud = _policy(noise_scale=0.25), _policy()
    assert torch.equal(
        quiet.predict_action_chunk(batch, noise=noise), loud.predict_action_chunk(batch, noise=0.25 * noise)
    )
    still = _policy(noise_scale=0.0)
    assert torch.equal(still.predict_action_chunk(batch), still.predict_action_chunk(batch))


def test_samples_are_the_same_for_the_same_seed_and_differ_for_another():
    policy, batch = _policy(), _observed(_batch())
    first = policy.predict_action_chunk(batch, generator=_draw(3))
    assert torch.equal(first, policy.predict_action_chunk(batch, generator=_draw(3)))
    assert not torch.equal(first, policy.predict_action_chunk(batch, generator=_draw(4)))
    torch.manual_seed(5)
    loose = policy.predict_action_chunk(batch)
    torch.manual_seed(5)
    assert torch.equal(loose, policy.predict_action_chunk(batch))


def test_with_a_generator_each_an_environments_actions_do_not_depend_on_the_others():
    policy, batch = _policy(), _observed(_batch())
    together = policy.predict_action_chunk(batch, generator=[_draw(s) for s in range(5)])
    alone = policy.predict_action_chunk({STATE: batch[STATE][3:4]}, generator=[_draw(3)])
    torch.testing.assert_close(together[3:4], alone)
    with pytest.raises(ConfigError, match="5 are needed, 2 were given"):
        policy.predict_action_chunk(batch, generator=[_draw(0), _draw(1)])


# --- chunks


def _counting(policy: FlowPolicy) -> list[int]:
    """Make chunks count up, so that an action says which chunk and which step of it it is; returns the batch sizes."""
    sizes: list[int] = []

    def predict(batch: dict[str, Tensor], noise: Tensor | None = None, generator: Sequence | None = None) -> Tensor:
        rows = len(batch[STATE])
        sizes.append(rows)
        steps = torch.arange(4.0).expand(rows, 4)
        return torch.stack([torch.full((rows, 4), float(len(sizes))), steps], dim=-1)

    policy.predict_action_chunk = predict  # type: ignore[method-assign]
    return sizes


def test_the_first_steps_of_a_chunk_are_carried_out_before_the_next_is_predicted():
    policy = _policy()
    sizes = _counting(policy)
    batch = _observed(_batch(rows=2))
    actions = torch.stack([policy.select_action(batch) for _ in range(5)])
    assert actions[:, 0].tolist() == [[1, 0], [1, 1], [2, 0], [2, 1], [3, 0]]
    assert sizes == [2, 2, 2]
    policy.reset()
    assert policy.select_action(batch)[0].tolist() == [4, 0]


def test_an_environment_that_begins_anew_gets_a_chunk_of_its_own():
    policy = _policy()
    sizes = _counting(policy)
    batch = _observed(_batch(rows=3))
    policy.select_action(batch)
    policy.reset(rows=torch.tensor([False, True, False]))
    assert policy.select_action(batch).tolist() == [[1, 1], [2, 0], [1, 1]]
    assert policy.select_action(batch).tolist() == [[3, 0], [2, 1], [3, 0]]
    assert sizes == [3, 1, 2]


def test_a_queue_filled_under_inference_mode_can_be_used_outside():
    policy, batch = _policy(), _observed(_batch())
    with torch.inference_mode():
        policy.select_action(batch)
    policy.reset(rows=torch.tensor([True] + [False] * 4))
    assert policy.select_action(batch).shape == (5, 2)


def test_select_action_gives_each_environment_its_own_generator_and_condition():
    policy, batch = _policy(), _batch()
    generators = [_draw(s) for s in range(5)]
    expected = policy.predict_action_chunk(batch, generator=[_draw(s) for s in range(5)])
    torch.testing.assert_close(policy.select_action(batch, generator=generators), expected[:, 0])
    torch.testing.assert_close(policy.select_action(batch, generator=generators), expected[:, 1])


def test_another_number_of_environments_without_a_reset_is_refused():
    policy = _policy()
    policy.select_action(_observed(_batch(rows=2)))
    with pytest.raises(ConfigError, match=r"chunks of 2 environments.*observations of 3"):
        policy.select_action(_observed(_batch(rows=3)))


# --- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_action_steps": 5}, "n_action_steps must be from 1 to chunk_size = 4; found 5"),
        ({"n_obs_steps": 2}, "n_obs_steps must be 1"),
        ({"condition": "postive"}, "Did you mean 'positive'"),
        ({"condition_dropout": 1.0}, "condition_dropout must be at least 0 and below 1"),
        ({"noise_scale": -1.0}, "noise_scale must be at least 0"),
        ({"num_inference_steps": 0}, "num_inference_steps must be at least 1"),
        ({"time_dim": 7}, "time_dim must be even"),
        ({"conditioned": False, "guidance_scale": 2.0}, "nothing to guide by"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        _policy(**settings)


def test_a_policy_without_inputs_or_without_an_action_is_refused():
    with pytest.raises(ConfigError, match="a state vector or an image"):
        _policy(state=0)
    inputs = {STATE: PolicyFeature(FeatureType.STATE, (3,))}
    with pytest.raises(ConfigError, match="one 'action' vector"):
        FlowPolicy(FlowConfig(device="cpu", input_features=inputs, output_features={}))


def test_a_recorded_indicator_is_not_taken_for_a_state():
    config = FlowConfig(
        device="cpu",
        input_features={
            STATE: PolicyFeature(FeatureType.STATE, (3,)),
            INDICATOR: PolicyFeature(FeatureType.STATE, (1,)),
        },
    )
    assert list(config.state_features) == [STATE]


def test_a_state_that_never_moved_in_the_data_cannot_blow_up_the_policy():
    policy = _policy(state_limit=10.0)
    far = policy.predict_action_chunk({STATE: torch.full((1, 3), 1e8)}, generator=_draw())
    assert torch.equal(far, policy.predict_action_chunk({STATE: torch.full((1, 3), 10.0)}, generator=_draw()))


# --- learning


def _two_modes(rows: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Good actions go to +s, bad ones to -s, each step a little further: one state, two modes, told apart by label."""
    state = torch.rand(rows, 1, generator=draw) + 0.5
    indicator = torch.where(torch.rand(rows, generator=draw) < 0.4, 1.0, -1.0)
    ramp = torch.linspace(0.5, 1.0, 4)
    action = (indicator * state[:, 0])[:, None, None] * ramp[None, :, None]
    return {STATE: state, INDICATOR: indicator, ACTION: action}


def test_a_policy_learns_two_modes_and_the_condition_tells_them_apart():
    policy = _policy(state=1, action=1, hidden_dim=64).train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    draw = _draw(0)
    first = None
    for _ in range(500):
        loss, _ = policy(_two_modes(128, draw), generator=draw)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first = first or loss.item()
    held_out = _two_modes(400, draw)
    assert policy.eval()(held_out, generator=_draw())[0].item() < 0.25 * first
    last, size = _under(policy, held_out, 1.0)[:, -1, 0], held_out[STATE][:, 0]
    assert (last - size).abs().mean() < 0.2
    assert (_under(policy, held_out, -1.0)[:, -1, 0] + size).abs().mean() < 0.2
    null = _under(policy, held_out, 0.0)[:, -1, 0]
    assert 0.2 < (null > 0).float().mean() < 0.6  # without a condition both modes, as often as in the data (0.4)


def test_an_image_policy_learns_from_where_a_thing_is_seen():
    policy = _policy(state=0, action=1, image=True, conditioned=False, chunk_size=1, n_action_steps=1).train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    draw = _draw(0)

    def see(rows: int) -> dict[str, Tensor]:
        column = torch.randint(2, 30, (rows,), generator=draw)
        image = torch.zeros(rows, 3, 24, 32)
        for row, at in enumerate(column.tolist()):
            image[row, :, 10:14, at - 2 : at + 2] = 1.0
        return {IMAGE: image, ACTION: (column / 16 - 1)[:, None, None].float()}

    for _ in range(250):
        loss, _ = policy(see(64), generator=draw)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    batch = see(64)
    error = policy.predict_action_chunk({IMAGE: batch[IMAGE]}, generator=_draw()) - batch[ACTION]
    assert error.abs().mean() < 0.2  # guessing the middle errs by 0.44


# --- checkpoints


def _pusht_checkpoint(path: Path) -> Tensor:
    """Save a policy for LeRobot's PushT with its processors; returns a chunk that it gives."""
    torch.manual_seed(0)
    inputs = {
        STATE: PolicyFeature(FeatureType.STATE, (2,)),
        "observation.environment_state": PolicyFeature(FeatureType.ENV, (16,)),
    }
    outputs = {ACTION: PolicyFeature(FeatureType.ACTION, (2,))}
    config = FlowConfig(device="cpu", input_features=inputs, output_features=outputs, noise_scale=0.5)
    statistics = {
        ACTION: {"mean": torch.full((2,), 256.0), "std": torch.full((2,), 80.0)},
        STATE: {"mean": torch.full((2,), 250.0), "std": torch.full((2,), 100.0)},
    }
    policy = FlowPolicy(config).eval()
    before, after = make_regrasp_flow_pre_post_processors(config, statistics)
    policy.save_pretrained(path)
    before.save_pretrained(path)
    after.save_pretrained(path)
    seen = before({STATE: torch.full((2,), 200.0), "observation.environment_state": torch.ones(16)})
    return after(policy.predict_action_chunk(seen, generator=_draw()))


FRESH_PROCESS = """
import sys, torch
from lerobot.configs import PreTrainedConfig
from lerobot.configs.parser import load_plugin
from lerobot.envs.configs import PushtEnv
from lerobot.policies import make_policy, make_pre_post_processors
assert not any(name.startswith("regrasp") for name in sys.modules)
load_plugin("regrasp.models.flow_policy")
path, out = sys.argv[1:]
config = PreTrainedConfig.from_pretrained(path)
config.pretrained_path = path
policy = make_policy(config, env_cfg=PushtEnv(obs_type="environment_state_agent_pos"))
before, after = make_pre_post_processors(config, pretrained_path=path, preprocessor_overrides={
    "device_processor": {"device": "cpu"}, "rename_observations_processor": {"rename_map": {}}})
seen = before({"observation.state": torch.full((2,), 200.0), "observation.environment_state": torch.ones(16)})
torch.save(after(policy.predict_action_chunk(seen, generator=torch.Generator().manual_seed(2))), out)
"""


def test_a_checkpoint_loads_with_stock_functions_in_a_fresh_process_and_gives_the_same_actions(tmp_path: Path):
    expected = _pusht_checkpoint(tmp_path / "policy")
    command = [sys.executable, "-c", FRESH_PROCESS, str(tmp_path / "policy"), str(tmp_path / "chunk.pt")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "chunk.pt"), expected)


def test_lerobot_eval_runs_a_checkpoint_and_takes_settings_of_the_policy(tmp_path: Path):
    _pusht_checkpoint(tmp_path / "policy")
    flags = {
        "discover_packages_path": "regrasp.models.flow_policy",
        "policy.path": tmp_path / "policy",
        "policy.device": "cpu",
        "policy.guidance_scale": 2,
        "policy.condition": "negative",
        "env.type": "pusht",
        "env.obs_type": "environment_state_agent_pos",
        "env.episode_length": 10,
        "eval.n_episodes": 2,
        "eval.batch_size": 2,
        "eval.use_async_envs": "false",
        "output_dir": tmp_path / "eval",
    }
    command = [sys.executable, "-m", "lerobot.scripts.lerobot_eval", *(f"--{k}={v}" for k, v in flags.items())]
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=quiet, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "eval" / "eval_info.json").read_text())["overall"]["n_episodes"] == 2


def test_a_round_trip_keeps_the_settings(tmp_path: Path):
    policy = _policy(image=True, noise_scale=0.5, guidance_scale=1.5, condition="none")
    policy.save_pretrained(tmp_path)
    loaded = FlowPolicy.from_pretrained(tmp_path)
    assert loaded.config == policy.config
    assert not loaded.training


def test_weights_that_do_not_fit_are_an_error_and_never_an_untrained_layer(tmp_path: Path):
    _policy().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_layers": 3}))
    with pytest.raises(CheckpointError, match="hidden"):
        FlowPolicy.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        FlowPolicy.from_pretrained(tmp_path)
