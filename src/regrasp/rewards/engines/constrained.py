"""Choosing tokens one at a time so that a reply matches a regular expression, for models that run in process.

Tokens are looked at from the most probable down, and the first that can still lead to a match is taken. With Gumbel
noise on the logits this draws exactly from the model's own distribution over the tokens that fit: nothing needs to
be known about the rest of the vocabulary.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import regex

if TYPE_CHECKING:
    from torch import Tensor

SOME = 64
"""How many of the most probable tokens are looked at before all are."""


class Vocabulary:
    """What each token of a tokenizer adds to a text.

    Args:
        tokenizer: One of transformers, whose tokens they are.
        stops: Tokens that end a reply.
        markers: Further tokens that no text holds, such as those around thinking.
    """

    def __init__(self, tokenizer: Any, stops: Iterable[int], markers: Iterable[int] = ()) -> None:  # noqa: ANN401
        self._tokenizer = tokenizer
        self.stops = frozenset(stops)
        self.unwritten = frozenset([*tokenizer.all_special_ids, *markers]) | self.stops

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens, special ones left out."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @cached_property
    def pieces(self) -> list[str]:
        """Each token's text in the middle of a text; "" for special ones, U+FFFD for parts of a character."""
        anchor = self._tokenizer.encode("a", add_special_tokens=False)
        length = len(self.text(anchor))
        pairs = [[*anchor, token] for token in range(len(self._tokenizer))]
        texts = self._tokenizer.batch_decode(pairs, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return ["" if token in self.unwritten else text[length:] for token, text in enumerate(texts)]

    @cached_property
    def openings(self) -> frozenset[str]:
        """The characters that a token can begin with."""
        return frozenset(piece[0] for piece in self.pieces if piece)


class Pattern:
    """A regular expression for a whole text, over a vocabulary; shared by all replies to a request."""

    def __init__(self, expression: str, vocabulary: Vocabulary) -> None:
        self._expression = regex.compile(expression)
        self._vocabulary = vocabulary
        self._known_openings: dict[str, frozenset[str]] = {}

    def complete(self, text: str) -> bool:
        """Whether a text matches as it is."""
        return self._expression.fullmatch(text) is not None

    def possible(self, text: str) -> bool:
        """Whether a text matches, or begins one that does."""
        return self._expression.fullmatch(text, partial=True) is not None

    def openings(self, text: str) -> frozenset[str]:
        """The characters that may come next."""
        if text not in self._known_openings:
            able = (char for char in self._vocabulary.openings if self.possible(text + char))
            self._known_openings[text] = frozenset(able)
        return self._known_openings[text]


class Writer:
    """Writes one reply, token by token.

    Args:
        vocabulary: The model's.
        pattern: What the reply must match, after thinking; None for anything.
        temperature: 0 takes the most probable token.
        seed: For the draws.
        limit: The most tokens.
        thought_end: The token that ends thinking, where the reply begins with thinking.
        answer_tokens: How many tokens of the limit are kept for the answer, where a pattern asks for one: thinking is
            cut short there.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        pattern: Pattern | None,
        *,
        temperature: float,
        seed: int,
        limit: int,
        thought_end: int | None = None,
        answer_tokens: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        self._pattern = pattern
        self._temperature = temperature
        self._seed = seed
        self._thought_end = thought_end
        self._thought_limit = limit - answer_tokens if pattern is not None else limit
        self._limit = limit
        self._generator = None
        self.thought: list[int] = []
        self.answer: list[int] = []
        self.thinking = thought_end is not None
        self.cut_short = False
        self.finish = ""

    @property
    def text(self) -> str:
        """The reply so far, without its thinking."""
        return self._vocabulary.text(self.answer)

    @property
    def written(self) -> int:
        """Tokens so far."""
        return len(self.thought) + len(self.answer)

    def write(self, logits: "Tensor") -> int:
        """Take the next token, given the logits over the vocabulary, and return it. Once finished, nothing changes."""
        if self.finish:
            return self._last
        token = self._choose(logits)
        if token is None:
            self.finish = "no token fits the constraint"
            return self._last
        (self.thought if self.thinking else self.answer).append(token)
        self._note_end(token)
        return token

    @property
    def _last(self) -> int:
        written = self.answer or self.thought
        return written[-1] if written else min(self._vocabulary.stops, default=0)

    def _note_end(self, token: int) -> None:
        if token in self._vocabulary.stops:
            self.finish = "stop"
        elif self.thinking and token == self._thought_end:
            self.thinking = False
        elif self.written >= self._limit:
            self.finish = "length"
        if not self.finish and not self.thinking and self._pattern is not None and self.answer:
            text = self.text
            if self._pattern.complete(text) and not self._pattern.openings(text):
                self.finish = "stop"

    def _choose(self, logits: "Tensor") -> int | None:
        import torch

        if self.thinking and self._thought_end is not None and self.written >= self._thought_limit - 1:
            self.cut_short = True
            return self._thought_end
        scores = torch.nan_to_num(logits.detach().float().cpu(), nan=-torch.inf)
        if self._temperature > 0:
            if self._generator is None:
                self._generator = torch.Generator().manual_seed(self._seed)
            waits = torch.empty(scores.shape, dtype=torch.float64).exponential_(generator=self._generator)
            scores = scores.double() / self._temperature - waits.log()  # minus the log of one is Gumbel noise
        if self.thinking or self._pattern is None:
            token = int(scores.argmax())
            owes_an_answer = self.thinking and self._pattern is not None and token in self._vocabulary.stops
            return self._thought_end if owes_an_answer else token
        return self._first_that_fits(scores, self._pattern)

    def _first_that_fits(self, scores: "Tensor", pattern: Pattern) -> int | None:
        text = self.text
        may_end, openings = pattern.complete(text), pattern.openings(text)
        looked = scores.topk(min(SOME, len(scores))).indices.tolist()
        token = self._first(looked, pattern, text, openings, may_end)
        if token is None and len(scores) > SOME:
            looked = scores.argsort(descending=True, stable=True)[SOME:].tolist()
            token = self._first(looked, pattern, text, openings, may_end)
        return token

    def _first(
        self, tokens: Iterable[int], pattern: Pattern, text: str, openings: frozenset[str], may_end: bool
    ) -> int | None:
        pieces = self._vocabulary.pieces
        half_a_character = text.endswith("\ufffd")
        for token in tokens:
            if token in self._vocabulary.stops:
                if may_end:
                    return token
                continue
            piece = pieces[token] if token < len(pieces) else ""
            if not piece or (piece[0] not in openings and not half_a_character):
                continue
            following = self._vocabulary.text([*self.answer, token]) if half_a_character else text + piece
            if pattern.possible(following):
                return token
        return None
