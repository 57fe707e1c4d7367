"""The settings of one stage as a recipe states them, checked against the stage's own."""

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from regrasp.core.errors import ConfigError, listing, nearest


def settings_of(recipe: Path, command: str, section: Mapping[str, object], config_type: type) -> dict[str, object]:
    """Return a section's settings by the names and types that a stage's config has.

    Args:
        recipe: The file, for messages and for the paths in it, which start from its folder.
        command: What the section is for, such as ``value fit``.
        section: What the recipe says.
        config_type: The stage's config.

    Raises:
        ConfigError: A key is not known (the nearest is named), or a value is not of the setting's type.
    """
    fields = {field.name: field for field in dataclasses.fields(config_type)}
    types, flags = typing.get_type_hints(config_type), _flags(config_type)
    values: dict[str, object] = {}
    for key, value in section.items():
        name = flags.get(key, key.replace("-", "_"))
        if name not in fields:
            message = (
                f"The recipe '{recipe}' has the unknown key {key!r} for `{command}`.{nearest(name, fields)} Known are: "
                f"{listing(fields, 30)}."
            )
            raise ConfigError(message)
        try:
            values[name] = _beside(recipe, TypeAdapter(types[name]).validate_python(value))
        except ValidationError as error:
            message = f"The recipe '{recipe}', {command}.{key}: {error.errors()[0]['msg']}; found {value!r}."
            raise ConfigError(message) from None
    return values


def _flags(config_type: type) -> dict[str, str]:
    """The settings whose flag has another name, by that name: ``from`` is no name for a field."""
    hints = typing.get_type_hints(config_type, include_extras=True)
    named = [(name, getattr(one, "name", None)) for name, hint in hints.items() for one in typing.get_args(hint)[1:]]
    return {flag: name for name, flag in named if isinstance(flag, str)}


def _beside(recipe: Path, value: object) -> object:
    """A setting of a recipe; its paths start, like its datasets', from the recipe's own folder."""
    if isinstance(value, Path):
        return recipe.parent / value.expanduser()
    return tuple(_beside(recipe, one) for one in value) if isinstance(value, tuple) else value
