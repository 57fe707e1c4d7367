"""The value models, by the name that ``--model`` takes."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from regrasp.core.errors import CheckpointError, ConfigError, nearest
from regrasp.models.small_value import SmallValue, SmallValueConfig

VALUE_MODELS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "small": (SmallValueConfig, SmallValue),
}
"""Name → (its config, its class)."""


def value_model_config(name: str, **inputs: Any) -> Any:  # noqa: ANN401 - each model has its own config class
    """Return the default config of the model ``name`` for what it is to look at.

    Args:
        name: A key of ``VALUE_MODELS``.
        inputs: ``cameras``, ``image_size``, ``state_mean``, ``state_std``.
    """
    if name not in VALUE_MODELS:
        known = ", ".join(VALUE_MODELS)
        raise ConfigError(f"There is no value model {name!r}; there is: {known}.{nearest(name, VALUE_MODELS)}")
    try:
        return VALUE_MODELS[name][0](**inputs)
    except ValueError as error:
        raise ConfigError(f"{error} Mend: choose another --image-size.") from error


def config_to_json(config: Any) -> dict[str, Any]:  # noqa: ANN401 - each model has its own config class
    """Return a model config as JSON, with the name of its model."""
    name = next(name for name, (kind, _) in VALUE_MODELS.items() if type(config) is kind)
    return {"name": name, **asdict(config)}  # type: ignore[arg-type]


def build_value_model(data: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a ValueModel, which is also a torch module
    """Return a model with fresh weights from what ``config_to_json`` gave."""
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items() if key != "name"}
    try:
        kind, model = VALUE_MODELS[data["name"]]
        return model(kind(**fields))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The checkpoint's model config cannot be used ({type(error).__name__}: {error}); this version knows the "
            f"models: {', '.join(VALUE_MODELS)}. Mend: use the version of Regrasp that made the checkpoint."
        ) from error
