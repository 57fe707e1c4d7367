"""Task texts as bags of hashed words and letter groups: no tokenizer, no vocabulary, the same on every machine."""

import re
import unicodedata
import zlib
from functools import lru_cache
from itertools import pairwise

LETTERS = 3
"""Letters in a group: enough for "bottle" and "bottles" to share most of theirs."""


@lru_cache(maxsize=65536)
def hashed_text(text: str, buckets: int) -> tuple[int, ...]:
    """Return the bucket of each word and each group of three letters of a text.

    Case, punctuation, underscores and runs of space do not count. Pairs of neighbouring words have buckets too, so
    "red cube on blue" and "blue cube on red" differ.

    Args:
        text: A task, in any language.
        buckets: How many buckets there are.

    Returns:
        Numbers in [0, buckets), at least one: an empty text has a bucket of its own.
    """
    plain = unicodedata.normalize("NFKC", text).casefold()
    words = re.findall(r"[^\W_]+", plain)
    pairs = [f"{first} {second}" for first, second in pairwise(words)]
    padded = [f"<{word}>" for word in words]
    groups = [word[i : i + LETTERS] for word in padded for i in range(max(len(word) - LETTERS + 1, 1))]
    pieces = [*(f"w:{word}" for word in words), *(f"p:{pair}" for pair in pairs), *(f"g:{group}" for group in groups)]
    return tuple(zlib.crc32(piece.encode()) % buckets for piece in pieces or ["empty"])
