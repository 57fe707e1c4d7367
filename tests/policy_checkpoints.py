"""Checkpoints of flow policies with random weights, for tests of what runs them."""

from collections.abc import Mapping
from pathlib import Path

STATE = "observation.state"


def write_flow_policy(
    path: Path, inputs: Mapping[str, tuple[int, ...]], action_size: int, *, mean: float = 0.0, scale: float = 1.0
) -> Path:
    """Write a policy in LeRobot's layout whose actions are about ``mean``, give or take ``scale``."""
    import torch
    from lerobot.configs import FeatureType, PolicyFeature

    from regrasp.models.flow_policy import FlowConfig, FlowPolicy, make_regrasp_flow_pre_post_processors

    torch.manual_seed(0)
    kinds = {STATE: FeatureType.STATE, "observation.environment_state": FeatureType.ENV}
    config = FlowConfig(
        device="cpu",
        input_features={key: PolicyFeature(kinds.get(key, FeatureType.VISUAL), shape) for key, shape in inputs.items()},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (action_size,))},
        chunk_size=6,
        n_action_steps=5,
        hidden_dim=16,
        push_to_hub=False,
    )
    statistics = {"action": {"mean": torch.full((action_size,), mean), "std": torch.full((action_size,), scale)}}
    FlowPolicy(config).save_pretrained(path)
    for processor in make_regrasp_flow_pre_post_processors(config, statistics):
        processor.save_pretrained(path)
    return path
