"""The scripted model behind ``tests.judge_stub``: a character a token, and replies that follow a regular expression."""

import json
import random
from dataclasses import dataclass
from re import _constants as kinds
from re import _parser as parser
from typing import Any

import numpy as np

PICTURE = "\uffff" * 16
"""The tokens of a picture."""
SCORES = "12345"
TRUTH = (" True", " False")
OTHERS = "0123456789abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,:-[]{}\"'\n"

Place = tuple[str, dict[str, float]]
"""A token that was written, and the probability of each that could have been."""


@dataclass(frozen=True)
class Written:
    """A reply, its tokens with their alternatives, and why it ended."""

    text: str
    tokens: list[Place]
    finish: str
    constrained: bool


def written(
    body: dict[str, Any], prompt: str, level: float, limit: int, number: int, obeyed: tuple[str, ...], free_text: str
) -> Written:
    """Write a reply of at most ``limit`` tokens.

    Args:
        body: The request.
        prompt: As the model reads it.
        level: How bright the last picture is; the scores follow it.
        limit: The most tokens.
        number: Which of the request's replies this is.
        obeyed: The fields by which the server lets itself be constrained.
        free_text: What is said where nothing constrains, and no score is due.
    """
    pattern = pattern_of(body, obeyed)
    warm = body.get("temperature", 1.0) > 0
    draw = random.Random(f"{body.get('seed')} {number}" if body.get("seed") is not None else None) if warm else None
    if pattern is not None:
        tokens = _Speaker(level, draw).follow(pattern)
        if "response_format" in body and "response_format" in obeyed:
            tokens = _in_json(tokens)
    elif limit == 1:
        shares = first_shares(prompt, level)
        tokens = [(max(shares, key=lambda token: shares[token]), shares)]
    else:
        tokens = [(char, {char: 0.9, "~": 0.1}) for char in free_text]
    finish = "length" if len(tokens) >= limit else "stop"
    text = "".join(token for token, _ in tokens[:limit])
    return Written(text, tokens[:limit], finish, pattern is not None)


def pattern_of(body: dict[str, Any], obeyed: tuple[str, ...]) -> str | None:
    """The regular expression that a request asks for, in a spelling that the server obeys."""
    if "structured_outputs" in obeyed and "structured_outputs" in body:
        return body["structured_outputs"]["regex"]
    if "response_format" in obeyed and "response_format" in body:
        schema = body["response_format"]["json_schema"]["schema"]
        (field,) = schema["properties"].values()
        return field["pattern"].removeprefix("^").removesuffix("$")
    return next((body[name] for name in ("guided_regex", "regex") if name in obeyed and name in body), None)


def score_shares(level: float) -> dict[str, float]:
    """The probability of each score: the brighter, the higher."""
    weights = np.array([np.exp(-8 * abs(level - place / 4)) for place in range(5)])
    return dict(zip(SCORES, (weights / weights.sum()).tolist(), strict=True))


def first_shares(prompt: str, level: float) -> dict[str, float]:
    """The probability of each token after a prompt: True and False after a colon, else scores; some for the others."""
    if prompt.endswith(":"):
        own = dict(zip(TRUTH, (0.9 * level + 0.05, 0.95 - 0.9 * level), strict=True))
    else:
        own = score_shares(level)
    others = [char for char in OTHERS if char not in own]
    rest = {char: 0.1 * 0.7**place * 0.3 for place, char in enumerate(others)}
    return {token: 0.9 * share for token, share in own.items()} | rest


class _Speaker:
    """Says something that matches a pattern, character by character."""

    def __init__(self, level: float, draw: random.Random | None) -> None:
        self._scores = score_shares(level)
        self._level = level
        self._draw = draw
        self._said: list[Place] = []

    def follow(self, pattern: str) -> list[Place]:
        self._say_all(parser.parse(pattern))
        return self._said

    def _say_all(self, items: Any) -> None:
        for kind, value in items:
            if kind is kinds.LITERAL:
                self._said.append((chr(value), {chr(value): 1.0}))
            elif kind is kinds.SUBPATTERN:
                self._say_all(value[3])
            elif kind is kinds.MAX_REPEAT:
                for _ in range(value[0]):
                    self._say_all(value[2])
            elif kind is kinds.BRANCH:
                branches = value[1]
                place = self._draw.random() if self._draw else self._level
                self._say_all(branches[min(int(place * len(branches)), len(branches) - 1)])
            else:
                self._say_one([char for char in OTHERS if _fits(kind, value, char)])

    def _say_one(self, allowed: list[str]) -> None:
        weights = [self._scores.get(char, 1e-3) for char in allowed]
        shares = {char: weight / sum(weights) for char, weight in zip(allowed, weights, strict=True)}
        token = self._draw.choices(allowed, weights)[0] if self._draw else max(allowed, key=lambda c: shares[c])
        self._said.append((token, shares))


def _fits(kind: Any, value: Any, char: str) -> bool:
    if kind is kinds.IN:
        inner = [item for item in value if item[0] is not kinds.NEGATE]
        found = any(_fits(*item, char) for item in inner)
        return found == (len(inner) == len(value))
    if kind is kinds.RANGE:
        return value[0] <= ord(char) <= value[1]
    if kind is kinds.CATEGORY:
        space = value in (kinds.CATEGORY_SPACE, kinds.CATEGORY_NOT_SPACE)
        assert space, value
        return char.isspace() == (value is kinds.CATEGORY_SPACE)
    if kind is kinds.NOT_LITERAL:
        return chr(value) != char
    assert kind in (kinds.LITERAL, kinds.ANY), kind
    return kind is kinds.ANY or chr(value) == char


def _in_json(tokens: list[Place]) -> list[Place]:
    """A reply as the only field of a JSON object, with the white space that servers put in."""
    opening = [(char, {char: 1.0}) for char in '{ "reply": "']
    inner = [(json.dumps(token)[1:-1], {json.dumps(t)[1:-1]: p for t, p in shares.items()}) for token, shares in tokens]
    return [*opening, *inner, ('"', {'"': 1.0}), ("}", {"}": 1.0})]
