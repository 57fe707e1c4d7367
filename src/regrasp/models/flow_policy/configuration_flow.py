"""The settings of the reference policy.

LeRobot finds the classes by name: ``FlowConfig`` here, ``FlowPolicy`` in ``modeling_flow``, and
``make_regrasp_flow_pre_post_processors`` in ``processor_flow``.
"""

from dataclasses import dataclass, field

from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature, PreTrainedConfig
from lerobot.optim import AdamWConfig, CosineDecayWithWarmupSchedulerConfig

from regrasp.core.errors import ConfigError, nearest
from regrasp.rl.condition import INDICATOR_KEY, INDICATORS


@PreTrainedConfig.register_subclass("regrasp_flow")
@dataclass
class FlowConfig(PreTrainedConfig):
    """A small flow-matching policy that acts in chunks, from state, images, or both.

    LeRobot sets fields of a policy's config after it is made, so unlike Regrasp's own configs this one is not frozen.
    """

    n_obs_steps: int = 1
    """Observations the policy sees, in steps. Only the present one."""

    chunk_size: int = 16
    """H: actions predicted at once, in steps."""

    n_action_steps: int = 8
    """Actions of a chunk that are carried out before the next is predicted, in steps."""

    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {
            "VISUAL": NormalizationMode.MEAN_STD,
            "STATE": NormalizationMode.MEAN_STD,
            "ENV": NormalizationMode.MEAN_STD,
            "ACTION": NormalizationMode.MEAN_STD,
        }
    )
    """How the stock normaliser step scales each kind of feature."""

    state_limit: float = 10.0
    """Normalised states are cut to this magnitude: one that never moved in the data would be divided by nearly 0."""

    hidden_dim: int = 128
    """Width of the velocity network."""

    hidden_layers: int = 2
    """Hidden layers of the velocity network."""

    time_dim: int = 32
    """Features that describe t to the velocity network. Even."""

    vision_channels: tuple[int, ...] = (32, 64, 64)
    """Channels of each stride-2 convolution; the last ones become key points."""

    vision_dim: int = 64
    """Features of each camera."""

    conditioned: bool = True
    """Train with the indicator in ``observation.advantage``. False: one plain policy, for demonstrations alone."""

    condition_dropout: float = 0.3
    """Share of training samples whose indicator is left out, so that the policy without a condition is learned too."""

    condition: str = "positive"
    """What the policy is asked for where the observation does not say: positive, negative or none."""

    guidance_scale: float = 1.0
    """beta. 1 samples the conditioned policy in one pass; above 1 goes past it, in two passes."""

    noise_scale: float = 1.0
    """Standard deviation of the starting noise. Below 1 samples nearer the mode, with or without guidance."""

    num_inference_steps: int = 10
    """K: Euler steps from noise to action."""

    optimizer_lr: float = 1e-3
    """Peak learning rate."""

    optimizer_weight_decay: float = 1e-4
    """Weight decay of AdamW."""

    scheduler_warmup_steps: int = 100
    """Steps over which the learning rate rises; fewer in a run shorter than ``scheduler_decay_steps``."""

    scheduler_decay_steps: int = 10_000
    """Steps over which the learning rate falls along a cosine; a shorter run falls over its own length."""

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other.

        Raises:
            ConfigError: Naming the setting, what was found and what is possible.
        """
        super().__post_init__()
        self.vision_channels = tuple(self.vision_channels)
        if not 1 <= self.n_action_steps <= self.chunk_size:
            _refuse("n_action_steps", self.n_action_steps, f"from 1 to chunk_size = {self.chunk_size}")
        if self.n_obs_steps != 1:
            _refuse("n_obs_steps", self.n_obs_steps, "1")
        if not 0.0 <= self.condition_dropout < 1.0:
            _refuse("condition_dropout", self.condition_dropout, "at least 0 and below 1")
        if self.noise_scale < 0.0:
            _refuse("noise_scale", self.noise_scale, "at least 0")
        if self.num_inference_steps < 1:
            _refuse("num_inference_steps", self.num_inference_steps, "at least 1")
        if self.time_dim < 2 or self.time_dim % 2:
            _refuse("time_dim", self.time_dim, "even and at least 2")
        if self.condition not in INDICATORS:
            _refuse(
                "condition", self.condition, f"one of {', '.join(INDICATORS)}.{nearest(self.condition, INDICATORS)}"
            )
        if not self.conditioned and self.guidance_scale != 1.0:
            _refuse("guidance_scale", self.guidance_scale, "1 where conditioned is false: there is nothing to guide by")

    def validate_features(self) -> None:
        """Check that there is something to see and something to do.

        Raises:
            ConfigError: Where no input can be used, or the action is missing.
        """
        inputs, outputs = self.input_features or {}, self.output_features or {}
        if not (self.state_features or self.image_features):
            found = ", ".join(inputs) or "nothing"
            message = f"A flow policy needs a state vector or an image among its input features; found {found}."
            raise ConfigError(message)
        if self.action_feature is None or len(self.action_feature.shape) != 1:
            message = f"A flow policy needs one 'action' vector as its output feature; found {outputs or 'nothing'}."
            raise ConfigError(message)

    @property
    def state_features(self) -> dict[str, PolicyFeature]:
        """The vectors that the policy sees, such as ``observation.state``; the indicator is not one of them."""
        kinds = (FeatureType.STATE, FeatureType.ENV)
        features = (self.input_features or {}).items()
        return {key: feature for key, feature in features if feature.type in kinds and key != INDICATOR_KEY}

    @property
    def observation_delta_indices(self) -> None:
        """The present observation alone."""
        return None

    @property
    def action_delta_indices(self) -> list[int]:
        """The steps of a chunk, from the present one on."""
        return list(range(self.chunk_size))

    @property
    def reward_delta_indices(self) -> None:
        """No rewards."""
        return None

    def get_optimizer_preset(self) -> AdamWConfig:
        """AdamW, gradients cut to norm 1."""
        return AdamWConfig(lr=self.optimizer_lr, weight_decay=self.optimizer_weight_decay, grad_clip_norm=1.0)

    def get_scheduler_preset(self) -> CosineDecayWithWarmupSchedulerConfig:
        """A linear warm-up, then a cosine down to a hundredth."""
        return CosineDecayWithWarmupSchedulerConfig(
            num_warmup_steps=self.scheduler_warmup_steps,
            num_decay_steps=self.scheduler_decay_steps,
            peak_lr=self.optimizer_lr,
            decay_lr=self.optimizer_lr / 100,
        )


def _refuse(name: str, found: object, possible: str) -> None:
    message = f"The policy's {name} must be {possible}; found {found}."
    raise ConfigError(message)
