"""The engines that run a judge, by name."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regrasp.core.errors import ConfigError, nearest
from regrasp.rewards.engine import JudgeEngine


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """Where an engine is found, and what it takes to run it; nothing is imported before it is chosen."""

    module: str
    engine: str
    config: str
    install: str

    def load(self) -> tuple[type, type]:
        """Return the engine's class and that of its config; a ``ConfigError`` where a package is missing."""
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            raise ConfigError(f"This engine needs a package that is not installed ({error}). {self.install}") from error
        return getattr(module, self.engine), getattr(module, self.config)


_EXTRA = "Mend: pip install 'regrasp[judge]'"
ENGINES: dict[str, EngineEntry] = {
    "openai": EngineEntry(
        module="regrasp.rewards.engines.openai_http", engine="OpenAIEngine", config="OpenAIConfig", install=_EXTRA
    ),
    "transformers": EngineEntry(
        module="regrasp.rewards.engines.transformers_engine",
        engine="TransformersEngine",
        config="TransformersConfig",
        install=_EXTRA,
    ),
}
"""Every engine by its name on the command line."""


def engine_entry(name: str) -> EngineEntry:
    """Return an engine's entry; a ``ConfigError`` that names the known ones where there is none."""
    if name not in ENGINES:
        raise ConfigError(f"There is no engine {name!r}; there are {', '.join(ENGINES)}.{nearest(name, ENGINES)}")
    return ENGINES[name]


def build_engine(name: str, settings: Mapping[str, Any]) -> JudgeEngine:
    """Return an engine, not yet connected or loaded.

    Args:
        name: One of ``ENGINES``.
        settings: Fields of its config; ``model`` at least.

    Raises:
        ConfigError: No such engine or setting, a setting out of range, or a missing package.
    """
    engine, config = engine_entry(name).load()
    known = config.__dataclass_fields__
    for key in settings:
        if key not in known:
            raise ConfigError(f"The engine {name!r} has no setting {key!r}; it has {', '.join(known)}.")
    return engine(config(**settings))
