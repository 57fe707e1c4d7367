"""How an episode ended, and what kind of data it belongs to."""

from enum import StrEnum

from regrasp.core.errors import ConfigError, nearest


class Outcome(StrEnum):
    """How an episode ended. UNKNOWN is never taken for a failure."""

    SUCCESS = "success"
    FAILURE = "failure"
    UNKNOWN = "unknown"

    @classmethod
    def parse(cls, value: object) -> "Outcome":
        """Return the outcome that a flag or a word stands for; UNKNOWN for null and for anything else.

        Booleans, 0 and 1 (also as floats), and the words success/failure/true/false (any case) are read.
        """
        if isinstance(value, str):
            word = value.strip().lower()
            if word in {"success", "true", "1", "1.0"}:
                return cls.SUCCESS
            if word in {"failure", "false", "0", "0.0"}:
                return cls.FAILURE
            return cls.UNKNOWN
        if isinstance(value, bool | int | float) and value in (0, 1):
            return cls.SUCCESS if value else cls.FAILURE
        return cls.UNKNOWN


class Source(StrEnum):
    """What a dataset is: demonstrations, or rollouts of a policy."""

    DEMO = "demo"
    ROLLOUT = "rollout"

    @classmethod
    def parse(cls, word: str) -> "Source":
        """Return the source that ``demo``, ``sft`` (RLinf's word for it) or ``rollout`` names."""
        known = {"demo": cls.DEMO, "sft": cls.DEMO, "rollout": cls.ROLLOUT}
        try:
            return known[word.strip().lower()]
        except KeyError:
            message = f"A dataset's type is 'demo' (or 'sft') or 'rollout'; found {word!r}.{nearest(word, known)}"
            raise ConfigError(message) from None
