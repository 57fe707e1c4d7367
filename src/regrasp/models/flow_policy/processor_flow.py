"""What stands before and after the policy: the stock steps, under their stock names."""

from typing import Any

from lerobot.processor import PolicyAction, PolicyProcessorPipeline, make_default_pre_post_processors
from torch import Tensor

from regrasp.models.flow_policy.configuration_flow import FlowConfig


def make_regrasp_flow_pre_post_processors(
    config: FlowConfig, dataset_stats: dict[str, dict[str, Tensor]] | None = None
) -> tuple[
    PolicyProcessorPipeline[dict[str, Any], dict[str, Any]], PolicyProcessorPipeline[PolicyAction, PolicyAction]
]:
    """The pipelines that scale observations for the policy and its actions for the robot.

    Before: rename, batch, device, normalise. After: unnormalise, CPU. The indicator in ``observation.advantage`` passes
    through untouched.

    Args:
        config: The policy's settings, with its features.
        dataset_stats: Mean and standard deviation of each feature. Without them nothing is scaled.
    """
    return make_default_pre_post_processors(config, dataset_stats, normalizer_device=config.device)
