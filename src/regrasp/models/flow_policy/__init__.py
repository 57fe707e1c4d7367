"""The reference policy, ``FlowPolicy``: a LeRobot policy of type ``regrasp_flow``.

Its checkpoints are LeRobot's own and need ``pip install regrasp`` and no other package. LeRobot learns of the type
when this package is imported:

- its commands: add ``--discover_packages_path=regrasp.models.flow_policy`` to ``lerobot-eval``, ``lerobot-train``,
  ``lerobot-record`` or ``lerobot-rollout``;
- its Python functions: ``import regrasp.models.flow_policy`` before ``PreTrainedConfig.from_pretrained``,
  ``make_policy`` or ``make_pre_post_processors``.

LeRobot imports packages without being told only where a distribution's name begins with ``lerobot_policy_``.
"""

from regrasp.models.flow_policy.configuration_flow import FlowConfig
from regrasp.models.flow_policy.modeling_flow import FlowPolicy
from regrasp.models.flow_policy.processor_flow import make_regrasp_flow_pre_post_processors

__all__ = ["FlowConfig", "FlowPolicy", "make_regrasp_flow_pre_post_processors"]
