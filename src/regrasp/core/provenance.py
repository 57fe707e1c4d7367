"""Where a file came from: the stage, its settings, its dataset and its inputs."""

import datetime
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

VERSION = "0.1.0"
"""Written into every file. The package takes its version from here."""
_END_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What made a file, enough to tell whether making it again would give the same.

    Attributes:
        stage: The command, such as ``returns``.
        config: The settings that decide the content; no paths.
        fingerprint: The digest of the dataset's rows (``EpisodeIndex.fingerprint``).
        inputs: The ids or digests of the files that were read, by role.
        scale: ``ScaleSet.to_json()``, where the stage knows one.
        statistics: Means, ranges and counts of what was written.
        notes: Whatever a later stage or a person needs: outcomes, thresholds, warnings.
        created: The day, ISO 8601. Not part of the id.
        version: Regrasp's version. Not part of the id.
    """

    stage: str
    config: dict
    fingerprint: str
    inputs: dict[str, str] = field(default_factory=dict)
    scale: dict | None = None
    statistics: dict = field(default_factory=dict)
    notes: dict = field(default_factory=dict)
    created: str = ""
    version: str = VERSION

    @property
    def id(self) -> str:
        """A digest of stage, config, dataset and inputs: equal ids mean equal content."""
        return digest([self.stage, self.config, self.fingerprint, self.inputs])

    def to_json(self) -> str:
        """Return the text that is stored in a parquet file's metadata under ``regrasp``."""
        return json.dumps(asdict(self) | {"id": self.id}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Provenance":
        """Read what ``to_json`` wrote; keys of a newer version are left out."""
        data = json.loads(text)
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        return cls(**known)


def today() -> str:
    """Return the day, ISO 8601, as ``Provenance.created`` holds it."""
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def digest(value: object) -> str:
    """Return 32 hexadecimal digits for a JSON value, the same for the same value on any machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def file_digest(path: Path) -> list[object]:
    """Return a file's name and size, and a digest of its two ends; the name alone where it cannot be read.

    It tells one version of a large file from another without reading all of it: a video has its index at one of its
    ends, and trained weights change everywhere.
    """
    try:
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            return [path.name, None]
        with path.open("rb") as file:
            ends = file.read(_END_BYTES)
            file.seek(max(len(ends), size - _END_BYTES))
            ends += file.read(_END_BYTES)
    except (OSError, ValueError):  # ValueError: a path that no file can have
        return [path.name, None]
    return [path.name, size, hashlib.blake2b(ends, digest_size=16).hexdigest()]
