"""The engines that run a judge, by name."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrasp.core.errors import ConfigError, nearest
from regrasp.core.provenance import file_digest
from regrasp.rewards.engine import JudgeEngine


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """Where an engine is found, and what it takes to run it; nothing is imported before it is chosen."""

    module: str
    engine: str
    config: str
    install: str
    in_process: bool = False
    """Whether the model runs where the engine does, on its GPUs."""

    def load(self) -> tuple[type, type]:
        """Return the engine's class and that of its config; a ``ConfigError`` where a package is missing."""
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            raise ConfigError(f"This engine needs a package that is not installed ({error}). {self.install}") from error
        return getattr(module, self.engine), getattr(module, self.config)

    def gpus(self, settings: Mapping[str, Any]) -> int:
        """Return how many GPUs an engine with these settings fills, where there are any."""
        return int(settings.get("tensor_parallel", 1)) if self.in_process else 0


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
        in_process=True,
    ),
    "vllm": EngineEntry(
        module="regrasp.rewards.engines.vllm_engine",
        engine="VllmEngine",
        config="VllmConfig",
        install="Mend: pip install 'regrasp[judge,vllm]'",
        in_process=True,
    ),
}
"""Every engine by its name on the command line."""
_DECIDING = {"answer_tokens", "dtype", "frames_as", "jpeg_quality", "reasoning_parser"}
"""Settings of engines that change what the model is shown or says."""


def engine_entry(name: str) -> EngineEntry:
    """Return an engine's entry; a ``ConfigError`` that names the known ones where there is none."""
    if name not in ENGINES:
        raise ConfigError(f"There is no engine {name!r}; there are {', '.join(ENGINES)}.{nearest(name, ENGINES)}")
    return ENGINES[name]


def engine_settings(model: str, base_url: str | None, options: Sequence[str]) -> dict[str, Any]:
    """Return an engine's settings as a command line gives them.

    Args:
        model: The model's name or folder.
        base_url: A server's address.
        options: Further ones as name=value, the value as YAML has it.

    Raises:
        ConfigError: An option is something else than name=value.
    """
    import yaml

    settings: dict[str, Any] = {"model": model} | ({"base_url": base_url} if base_url else {})
    for option in options:
        name, equals, value = option.partition("=")
        try:
            settings[name.strip().replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not equals or not name.strip():
            raise ConfigError(f"--engine-options are name=value, such as tensor_parallel=2; found {option!r}.")
    return settings


def judge_identity(name: str, settings: Mapping[str, Any]) -> list[object]:
    """Return what decides an engine's answers besides its name and the model's, as a JSON list.

    That is a folder's files where the model runs in process, so that a model that was trained on is another judge, and
    settings such as a precision; not where it runs or how fast.
    """
    folder = Path(str(settings["model"])).expanduser()
    files = sorted(folder.iterdir()) if engine_entry(name).in_process and folder.is_dir() else []
    weights = [file_digest(file) for file in files if file.is_file()]
    said = {key: str(settings[key]) for key in sorted(_DECIDING & set(settings))}
    return [part for part in (weights, said) if part]


def build_engine(name: str, settings: Mapping[str, Any], *, concurrency: int | None = None) -> JudgeEngine:
    """Return an engine, not yet connected or loaded.

    Args:
        name: One of ``ENGINES``.
        settings: Fields of its config; ``model`` at least.
        concurrency: How many calls it will have at once, for an engine that makes several requests of one.

    Raises:
        ConfigError: No such engine or setting, a setting out of range, or a missing package.
    """
    engine, config = engine_entry(name).load()
    known = config.__dataclass_fields__
    for key in settings:
        if key not in known:
            raise ConfigError(f"The engine {name!r} has no setting {key!r}; it has {', '.join(known)}.")
    if concurrency is not None and "concurrency" in known:
        settings = {"concurrency": concurrency, **settings}
    return engine(_checked(name, config, settings))


def _checked[T](name: str, config: type[T], settings: Mapping[str, Any]) -> T:
    """Return a config whose fields have the types that it says."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(config).validate_python(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        own = first.get("ctx", {}).get("error")
        if isinstance(own, ConfigError):
            raise own from None
        place, found = ".".join(map(str, first["loc"])), first["input"]
        message = f"The engine {name!r} does not take {place} = {found!r}: {first['msg'][0].lower()}{first['msg'][1:]}."
        raise ConfigError(message) from None
