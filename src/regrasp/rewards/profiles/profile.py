"""Reading prompt profiles. A row records its profile's digest, so that two prompts are never taken for one."""

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from regrasp.core.errors import ConfigError, listing, nearest
from regrasp.core.provenance import digest

BUILT_IN = ("generic", "roboreward", "topreward")
SIGNALS = ("terminal", "dense", "rubric")
PLACES: dict[str, frozenset[str]] = {
    "terminal": frozenset({"task", "duration", "cameras", "frames"}),
    "dense": frozenset({"task", "duration", "cameras", "frames", "start", "end", "steps"}),
    "rubric": frozenset({"task", "duration", "cameras", "frames", "robot", "rubric", "steps"}),
}
"""What a signal's prompt may name in braces."""
_PLACE = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """How one signal is asked for."""

    prompt: str
    """The question; {task} and the signal's other places are filled in."""
    system: str | None = None
    """The system message."""
    prefill: str | None = None
    """What the reply starts with."""
    rationale_prefill: str | None = None
    """Terminal: what a line of reasons starts with; without it the profile has no --with-rationale."""
    readout: Literal["score", "true"] = "score"
    """Terminal: the probabilities of 1 to 5, or that of "True" against "False"."""
    cell_height: int = 336
    """The most pixels of a camera's height."""
    most_frames: int = 64
    """The most frames of a video; a dense window always has 4 per second."""
    frames_per_second: float = 10.0
    """Frames for a second of a short video."""
    max_tokens: int = 256
    """The most tokens of a free reply."""
    temperature: float = 0.0
    """0 is greedy."""
    thinking: bool = False
    """Whether the model thinks before it answers."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A profile and the digest of all that it says."""

    name: str
    version: int
    asks: dict[str, Ask]
    digest: str

    def ask(self, signal: str) -> Ask:
        """Return how a signal is asked for; a ConfigError says which signals the profile has."""
        if signal not in self.asks:
            message = (
                f"The profile {self.name!r} does not ask for {signal!r}; it has {listing(self.asks)}. "
                "Mend: choose another --profile."
            )
            raise ConfigError(message)
        return self.asks[signal]


def read_profile(name: str) -> Profile:
    """Read a profile that comes with Regrasp, by name, or the user's own, by the path of its YAML file.

    Raises:
        ConfigError: There is none, or it has a key, a value or a place that is not known.
    """
    import yaml

    path = Path(__file__).parent / f"{name}.yaml" if name in BUILT_IN else Path(name).expanduser()
    if not path.is_file():
        message = (
            f"There is no profile {name!r}.{nearest(name, BUILT_IN)} Known are {listing(BUILT_IN)}, or give a path."
        )
        raise ConfigError(message)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = f"The profile '{path}' is not YAML ({str(error).splitlines()[0]}). Mend: correct it."
        raise ConfigError(message) from None
    if not isinstance(content, dict):
        message = f"The profile '{path}' is a table with name, version and one table for each signal; found no table."
        raise ConfigError(message)
    return _profile(content, path)


def _profile(content: dict[str, Any], path: Path) -> Profile:
    known = ("name", "version", *SIGNALS)
    _refuse_unknown(content, known, f"The profile '{path}'")
    name, version = content.get("name"), content.get("version")
    if not isinstance(name, str) or not isinstance(version, int):
        message = f"The profile '{path}' needs a name and a whole-numbered version; found {name!r} and {version!r}."
        raise ConfigError(message)
    asks = {signal: _ask(content[signal], signal, path) for signal in SIGNALS if signal in content}
    if not asks:
        message = f"The profile '{path}' asks for nothing. Mend: give a table for one of {listing(SIGNALS)}."
        raise ConfigError(message)
    said = {signal: dataclasses.asdict(ask) for signal, ask in asks.items()}
    return Profile(name=name, version=version, asks=asks, digest=digest([name, version, said]))


def _ask(content: object, signal: str, path: Path) -> Ask:
    from pydantic import TypeAdapter, ValidationError

    place = f"The profile '{path}', {signal}"
    if not isinstance(content, dict):
        message = f"{place}, is a table; found {content!r}."
        raise ConfigError(message)
    _refuse_unknown(content, [field.name for field in dataclasses.fields(Ask)], place)
    try:
        ask = TypeAdapter(Ask).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        message = f"{place}.{'.'.join(map(str, first['loc']))}: {first['msg']}."
        raise ConfigError(message) from None
    usable = min(ask.cell_height, ask.most_frames, ask.max_tokens) >= 1
    if not (usable and 0 < ask.frames_per_second < math.inf and 0 <= ask.temperature < math.inf):
        message = f"{place}: sizes, counts and rates are numbers above 0, and the temperature is one of at least 0."
        raise ConfigError(message)
    for text in (ask.prompt, ask.system or ""):
        for named in _PLACE.findall(text):
            if named not in PLACES[signal]:
                message = (
                    f"{place}: the prompt names {{{named}}}.{nearest(named, PLACES[signal])} Known are "
                    f"{listing(sorted(PLACES[signal]))}."
                )
                raise ConfigError(message)
    return ask


def _refuse_unknown(content: dict[str, Any], known: tuple[str, ...] | list[str], place: str) -> None:
    unknown = next((key for key in content if key not in known), None)
    if unknown is not None:
        message = (
            f"{place} has the unknown key {unknown!r}.{nearest(str(unknown), known)} Known are {listing(known, 20)}."
        )
        raise ConfigError(message)


def fill(text: str, places: dict[str, object]) -> str:
    """Return ``text`` with its {places} filled in, once: braces within a task stay as they are."""
    return _PLACE.sub(lambda match: str(places.get(match[1], match[0])), text)
