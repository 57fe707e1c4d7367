"""The reference policy: flow matching from noise to a chunk of actions, conditioned by advantage.

Source: RECAP, arXiv:2511.14759, and flow matching, arXiv:2210.02747. Time 0 is noise and 1 is the action, as in
``regrasp.rl.flow``.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION
from torch import Tensor, nn

from regrasp.core.errors import CheckpointError, ConfigError, one_line
from regrasp.models.flow_policy.chunks import ChunkQueue
from regrasp.models.flow_policy.configuration_flow import FlowConfig
from regrasp.models.flow_policy.networks import ObservationEncoder, VelocityNetwork
from regrasp.rl.condition import INDICATOR_KEY, INDICATORS, UNCONDITIONAL
from regrasp.rl.flow import flow_matching_loss, integrate, interpolate, velocity_target
from regrasp.rl.guidance import guided_velocity

Generators = torch.Generator | Sequence[torch.Generator] | None
"""Where randomness comes from: torch's own, one generator, or one for each row of the batch."""

Batch = dict[str, Any]
"""What a stock preprocessor gives: tensors under ``observation.*`` and ``action``, and other things beside them."""


class FlowPolicy(PreTrainedPolicy):
    """A LeRobot policy of type ``regrasp_flow``.

    Axes: ``B`` batch or environments, ``H`` steps of a chunk, ``D`` dimensions of an action. Observations and actions
    are normalised: the pipelines of ``processor_flow`` stand around the policy.
    """

    config_class = FlowConfig  # pyright: ignore[reportAssignmentType] - LeRobot declares None
    name = "regrasp_flow"  # pyright: ignore[reportAssignmentType]

    def __init__(self, config: FlowConfig, **_: Any) -> None:  # noqa: ANN401 - LeRobot's statistics
        """Build the networks for the config's features."""
        super().__init__(config)
        config.validate_features()
        self.config: FlowConfig = config
        self.encoder = ObservationEncoder(config)
        self.velocity = VelocityNetwork(config, self.encoder.output_dim)
        self.queue = ChunkQueue(config.n_action_steps)

    def forward(
        self,
        batch: Batch,
        reduction: Literal["mean", "none"] = "mean",
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """The flow matching loss of a batch.

        Args:
            batch: The normalised inputs; ``action`` [B, H, D]; ``action_is_pad`` [B, H] and ``action_dim_is_pad``
                [B, D], True for what to leave out, where there is any; ``observation.advantage`` [B], the indicator +1,
                -1 or 0, needed where the policy is conditioned. In training mode some indicators are left out.
            reduction: "none" gives one loss per sample, for weighted training.
            generator: Source of noise, time and dropout; torch's own where it is left out.

        Returns:
            The loss, a scalar or [B], and what to log.

        Raises:
            ConfigError: Where the batch lacks the indicator or an input, or an input has another size.
        """
        is_pad = self._padding(batch)
        action = self._checked_action(batch[ACTION])
        if is_pad is not None:
            action = action.masked_fill(is_pad, 0.0)
        noise = self._normal(action.shape, generator)
        time = self._uniform(len(action), generator)
        indicator = self._training_indicator(batch, len(action), generator)

        x_t = interpolate(noise, action, time)
        velocity = self.velocity(x_t, time, self.encoder(batch), indicator)
        target = velocity_target(noise, action)
        loss = flow_matching_loss(velocity.float(), target.float(), is_pad, per_chunk=reduction == "none")
        return loss, {"flow_matching_loss": loss.detach().mean().item()}

    @torch.no_grad()
    def predict_action_chunk(
        self,
        batch: Batch,
        noise: Tensor | None = None,
        generator: Generators = None,
        **_: Any,  # noqa: ANN401
    ) -> Float[Tensor, "B H D"]:
        """Sample a chunk of normalised actions for each observation.

        Asked for ``config.condition``, unless ``observation.advantage`` in the batch says otherwise for each row.

        Args:
            batch: The normalised inputs.
            noise: eps, [B, H, D] of unit scale; ``config.noise_scale`` multiplies it. Drawn where it is left out.
            generator: One source for the batch, or one for each row, so that an environment's actions do not depend on
                which others are in the batch.

        Returns:
            The actions; all H of them, of which ``select_action`` carries out the first ``n_action_steps``.
        """
        self.eval()
        observation = self.encoder(batch)
        rows = len(observation)
        if noise is None:
            noise = self._noise(rows, generator)
        indicator = self._inference_indicator(batch, rows)
        velocity = guided_velocity(
            null=self._velocity_under(observation, torch.zeros_like(indicator)),
            positive=self._velocity_under(observation, indicator),
            scale=self.config.guidance_scale,
        )
        return integrate(velocity, noise * self.config.noise_scale, self.config.num_inference_steps)

    @torch.no_grad()
    def select_action(
        self,
        batch: Batch,
        noise: Tensor | None = None,
        generator: Generators = None,
        **_: Any,  # noqa: ANN401
    ) -> Float[Tensor, "B D"]:
        """The next normalised action of every environment; chunks are predicted for those that have none left.

        Args:
            batch: The normalised inputs of all environments, in the same order at every step.
            noise: As for ``predict_action_chunk``, for all environments.
            generator: As for ``predict_action_chunk``.
        """
        inputs = self.encoder.inputs(batch)
        rows = self.queue.empty(len(next(iter(inputs.values()))))
        if rows.any():
            at = rows.nonzero().squeeze(-1)
            if isinstance(generator, Sequence):
                generator = [generator[i] for i in at.tolist()]
            chosen = None if noise is None else noise[at.to(noise.device)]
            self.queue.fill(rows, self.predict_action_chunk(self._rows(batch, inputs, at), chosen, generator))
        return self.queue.take()

    def reset(self, rows: Bool[Tensor, " B"] | None = None) -> None:
        """Forget the chunks in progress, of ``rows`` or of every environment; call it where an episode begins."""
        self.queue.reset(rows)

    def get_optim_params(self) -> Iterator[nn.Parameter]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Every parameter, under one learning rate."""
        return self.parameters()

    def _velocity_under(self, observation: Tensor, indicator: Tensor) -> Any:  # noqa: ANN401 - a closure of (x, t)
        return lambda x, t: self.velocity(x, x.new_full((len(x),), t), observation, indicator)

    def _training_indicator(self, batch: Batch, rows: int, generator: torch.Generator | None) -> Float[Tensor, " B"]:
        """What each sample is trained under."""
        if not self.config.conditioned:
            return self._constant(rows, UNCONDITIONAL)
        if INDICATOR_KEY not in batch:
            message = (
                f"A conditioned policy trains on labels and the batch has no '{INDICATOR_KEY}'. Train it with regrasp, "
                "put a regrasp.models.conditioning.AdvantageConditionStep into its preprocessor, or set conditioned to "
                "false."
            )
            raise ConfigError(message)
        indicator = self._given(batch, rows)
        if self.training and self.config.condition_dropout > 0.0:
            kept = self._uniform(rows, generator) >= self.config.condition_dropout
            indicator = indicator * kept
        return indicator

    def _inference_indicator(self, batch: Batch, rows: int) -> Float[Tensor, " B"]:
        """What each environment is asked for."""
        if self.config.conditioned and batch.get(INDICATOR_KEY) is not None:
            return self._given(batch, rows)
        return self._constant(rows, INDICATORS[self.config.condition] if self.config.conditioned else UNCONDITIONAL)

    def _given(self, batch: Batch, rows: int) -> Float[Tensor, " B"]:
        given = torch.as_tensor(batch[INDICATOR_KEY], device=self._device, dtype=self._dtype).reshape(-1)
        return given.expand(rows) if given.numel() == 1 else given

    def _padding(self, batch: Batch) -> Bool[Tensor, "B #H #D"] | None:
        steps, dims = batch.get("action_is_pad"), batch.get("action_dim_is_pad")
        if dims is None:
            return None if steps is None else steps[..., None]
        return dims[:, None] if steps is None else steps[..., None] | dims[:, None]

    def _checked_action(self, action: Tensor) -> Float[Tensor, "B H D"]:
        expected = self.velocity.chunk_shape
        if action.ndim != 3 or tuple(action.shape[1:]) != expected:
            message = (
                f"The policy was made for chunks of {expected[0]} actions of {expected[1]} numbers; the batch holds an "
                f"'action' of shape {tuple(action.shape)}. Give the data loader the policy's action_delta_indices."
            )
            raise ConfigError(message)
        return action

    def _rows(self, batch: Batch, inputs: dict[str, Tensor], at: Tensor) -> dict[str, Tensor]:
        """What the policy sees of the environments ``at``, with their indicators where there are any."""
        chosen = {key: value[at.to(value.device)] for key, value in inputs.items()}
        if self.config.conditioned and batch.get(INDICATOR_KEY) is not None:
            rows = len(next(iter(inputs.values())))
            chosen[INDICATOR_KEY] = self._given(batch, rows)[at.to(self._device)]
        return chosen

    @property
    def _device(self) -> torch.device:
        return self.velocity.output.weight.device

    @property
    def _dtype(self) -> torch.dtype:
        return self.velocity.output.weight.dtype

    def _constant(self, rows: int, value: float) -> Float[Tensor, " B"]:
        return torch.full((rows,), value, device=self._device, dtype=self._dtype)

    def _noise(self, rows: int, generator: Generators) -> Float[Tensor, "B H D"]:
        """Starting noise of unit scale, each row from its own generator where there are several."""
        if not isinstance(generator, Sequence):
            return self._normal((rows, *self.velocity.chunk_shape), generator)
        if len(generator) != rows:
            message = f"There is one generator for each environment: {rows} are needed, {len(generator)} were given."
            raise ConfigError(message)
        return torch.stack([self._normal(self.velocity.chunk_shape, one) for one in generator])

    def _normal(self, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        source = self._device if generator is None else generator.device
        return torch.randn(tuple(shape), generator=generator, device=source, dtype=self._dtype).to(self._device)

    def _uniform(self, rows: int, generator: torch.Generator | None) -> Float[Tensor, " B"]:
        source = self._device if generator is None else generator.device
        return torch.rand(rows, generator=generator, device=source, dtype=self._dtype).to(self._device)

    @classmethod
    def _load_as_safetensor[P: PreTrainedPolicy](cls, model: P, model_file: str, map_location: str, strict: bool) -> P:
        """Load every weight or none: a missing one is an error, never an untrained layer."""
        try:
            return super()._load_as_safetensor(model, model_file, map_location, strict=True)
        except RuntimeError as error:
            message = (
                f"The weights in {model_file} do not fit the policy that its config describes. {one_line(error, 400)}"
            )
            raise CheckpointError(message) from error
