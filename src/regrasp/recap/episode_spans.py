"""Which of a dataset's episodes are meant, as a user writes it."""

from regrasp.core.errors import ConfigError, listing


def parse_episodes(text: str | None, known: list[int]) -> list[int] | None:
    """Read which episodes are wanted: numbers and spans FROM:TO (TO excluded, as in Python), joined by commas.

    Args:
        text: What the user gave; None for all.
        known: The dataset's episode numbers; a span takes those of them that lie in it.

    Raises:
        ConfigError: It cannot be understood, or names no episode.
    """
    if text is None:
        return None
    wanted: list[int] = []
    try:
        for part in text.split(","):
            start, colon, stop = part.strip().partition(":")
            if colon:
                low, high = int(start or 0), int(stop) if stop else max(known, default=0) + 1
                wanted += [number for number in known if low <= number < high]
            else:
                wanted.append(int(start))
    except ValueError:
        message = f"--episodes is numbers and spans, such as 0:20 or 3,5,8; found {text!r}."
        raise ConfigError(message) from None
    if not wanted:
        message = f"--episodes {text} names none of the dataset's episodes, {listing(known)}."
        raise ConfigError(message)
    return sorted(set(wanted))
