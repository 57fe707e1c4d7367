"""A vision-language model of transformers as a judge, in this process.

The prompt is read once, however many replies are drawn from it. One thread prepares requests while another runs the
model.
"""

import asyncio
import copy
import importlib.metadata
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from regrasp.core.errors import ConfigError, one_line
from regrasp.rewards.engine import Capabilities, EngineError, EngineUnavailable, Reply, Request
from regrasp.rewards.engines.constrained import Pattern, Vocabulary, Writer
from regrasp.rewards.engines.local_prompt import LocalPrompt, PromptMaker, model_fingerprint, score_ids, too_long
from regrasp.rewards.engines.openai_chat import NOT_FINITE_FLAG

log = logging.getLogger(__name__)

THOUGHT_MARKS = ("<think>", "</think>")
SEED_STEP = 1_000_003
"""Between the seeds of one request's replies, so that requests with neighbouring seeds do not share draws."""


@dataclass(frozen=True, kw_only=True)
class TransformersConfig:
    """Which model, and where it runs."""

    model: str
    """A folder, or a name on the hub."""
    device: str = "auto"
    """Auto takes a GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Auto takes bfloat16 on a GPU and float32 on a CPU."""
    answer_tokens: int = 128
    """How many tokens of a reply are kept for the answer when thinking goes on for too long."""
    frames_as: Literal["auto", "images"] = "auto"
    """Auto: videos where the processor is seen to tell the model their times, else images with their times in words."""

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        if not self.model:
            raise ConfigError("A judge needs a model: give --model, or set REGRASP_JUDGE_MODEL.")
        if self.answer_tokens < 1:
            raise ConfigError(f"At least one token is kept for the answer; answer_tokens is {self.answer_tokens}.")


class TransformersEngine:
    """A model of transformers behind the engines' interface. It is loaded when it is first needed."""

    name = "transformers"

    def __init__(self, config: TransformersConfig) -> None:
        self.model = config.model
        self.version = f"transformers {importlib.metadata.version('transformers')}"
        self._config = config
        self._loaded: LoadedModel | None = None
        self._loading = asyncio.Lock()
        self._preparing = asyncio.Lock()
        self._running = asyncio.Lock()

    async def probe(self) -> Capabilities:
        """Load the model, and say what it and its processor can do."""
        loaded = await self._load()
        return Capabilities(
            constraint=True,
            logprobs=True,
            several_videos=True,
            timestamps=True,  # as videos or as images with their times in words
            prefill=True,
            n=True,
            thinking=loaded.thinks,
        )

    async def judge(self, request: Request) -> Reply:
        """Answer one request.

        Raises:
            RequestTooLong: The prompt and the reply do not fit the model's context.
            EngineError: A score token is not one token of the model's, or memory ran out.
        """
        loaded = await self._load()
        async with self._preparing:
            prompt = await asyncio.to_thread(loaded.prepare, request)
        async with self._running:
            return await asyncio.to_thread(loaded.answer, request, prompt)

    async def close(self) -> None:
        """Let the model go."""
        self._loaded = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    async def _load(self) -> "LoadedModel":
        async with self._loading:
            if self._loaded is None:
                self._loaded = await asyncio.to_thread(LoadedModel, self._config)
                self.version = f"{self.version}, model {self._loaded.fingerprint}"
        return self._loaded


class LoadedModel:
    """A model and its processor in memory; every method blocks."""

    def __init__(self, config: TransformersConfig) -> None:
        cuda = torch.cuda.is_available() if config.device == "auto" else config.device.startswith("cuda")
        device = ("cuda" if cuda else "cpu") if config.device == "auto" else config.device
        dtype = ("bfloat16" if cuda else "float32") if config.dtype == "auto" else config.dtype
        try:
            processor = AutoProcessor.from_pretrained(config.model)
            model: Any = AutoModelForImageTextToText.from_pretrained(config.model, dtype=getattr(torch, dtype))
        except (OSError, ValueError, KeyError) as error:
            words = one_line(error, 300)
            raise EngineUnavailable(
                f"{config.model!r} cannot be loaded as a vision-language model of transformers ({words}). Give --model"
                " a folder with config.json, weights and processor files, or the name of such a model on the hub."
            ) from error
        self.network = model.to(device).eval()
        self.device = device
        self.fingerprint = model_fingerprint(config.model, self.network.config)
        self._answer_tokens = config.answer_tokens
        self._name = config.model
        tokenizer = processor.tokenizer
        self._tokenizer = copy.deepcopy(tokenizer)  # one thread's own: a tokenizer must not be used by two at once
        known = tokenizer.get_vocab()
        marks = [known[mark] for mark in THOUGHT_MARKS if mark in known]
        self._thought_end = known.get(THOUGHT_MARKS[1])
        self._vocabulary = Vocabulary(self._tokenizer, self._stops(), marks)
        self.prompts = PromptMaker(processor, frames_as=config.frames_as)
        self.thinks = self._thought_end is not None and self.prompts.template_thinks
        text_config = self.network.config.get_text_config()
        self.context = getattr(text_config, "max_position_embeddings", None)

    def _stops(self) -> set[int]:
        given = self.network.generation_config.eos_token_id
        stops = set(given if isinstance(given, list) else [] if given is None else [given])
        return stops | ({self._tokenizer.eos_token_id} - {None})

    def prepare(self, request: Request) -> LocalPrompt:
        """Return the inputs of the model for a request; a ``RequestTooLong`` where they do not fit."""
        prompt = self.prompts.make(request, thinking=request.thinking and self.thinks)
        if self.context is not None and prompt.tokens + request.max_tokens > self.context:
            raise too_long(request, prompt.tokens, f"{self._name!r} holds {self.context}")
        return prompt

    def answer(self, request: Request, prompt: LocalPrompt) -> Reply:
        """Run the model on a prompt."""
        scores = score_ids(self._tokenizer, request, self._name)
        try:
            with torch.inference_mode():
                writers, first = self._write(request, prompt)
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"{request.id!r} ran out of memory on {self.device} with {prompt.tokens} tokens of prompt and"
                f" {request.n} replies at once. Lower the number of frames, their size or the number of samples."
            ) from error
        return self._reply(request, prompt, writers, first, scores)

    def _writers(self, request: Request, *, thinking: bool) -> list[Writer]:
        expression = request.constraint
        if thinking and (expression is not None or request.prefill):
            rest = expression if expression is not None else r"[\s\S]*"
            expression = rf"\s{{0,2}}{re.escape(request.prefill or '')}(?:{rest})"
        pattern = None if expression is None else Pattern(expression, self._vocabulary)
        seed = torch.seed() % 2**31 if request.seed is None else request.seed
        return [
            Writer(
                self._vocabulary,
                pattern,
                temperature=request.temperature,
                seed=seed + SEED_STEP * number,
                limit=request.max_tokens,
                thought_end=self._thought_end if thinking else None,
                answer_tokens=min(self._answer_tokens, request.max_tokens // 2),
            )
            for number in range(request.n)
        ]

    def _write(self, request: Request, prompt: LocalPrompt) -> tuple[list[Writer], torch.Tensor]:
        """Write all replies side by side; also return the logits of the first position."""
        writers = self._writers(request, thinking=prompt.thinking)
        self._forget_positions()
        inputs = {key: value.to(self.device) for key, value in prompt.inputs.items()}
        output = self.network(**inputs, use_cache=True, logits_to_keep=1)
        first = output.logits[0, -1].float().cpu()
        cache = output.past_key_values
        if request.n > 1:
            cache.batch_repeat_interleave(request.n)
        tokens = [writer.write(first) for writer in writers]
        while not all(writer.finish for writer in writers):
            step = torch.tensor(tokens, device=self.device)[:, None]
            logits = self.network(input_ids=step, past_key_values=cache, use_cache=True).logits[:, -1].float().cpu()
            tokens = [writer.write(row) for writer, row in zip(writers, logits, strict=True)]
        return writers, first

    def _forget_positions(self) -> None:
        """Qwen's models keep the last prompt's offset of positions, and would use it for a prompt without videos."""
        for module in self.network.modules():
            if getattr(module, "rope_deltas", None) is not None:
                module.rope_deltas = None

    def _reply(
        self,
        request: Request,
        prompt: LocalPrompt,
        writers: Sequence[Writer],
        first: torch.Tensor,
        scores: Mapping[str, int],
    ) -> Reply:
        flags = [] if bool(torch.isfinite(first).any()) and not bool(first.isnan().any()) else [NOT_FINITE_FLAG]
        if any(writer.cut_short for writer in writers):
            flags.append("thinking was cut short")
        probabilities = mass = None
        if scores:
            share = torch.softmax(first.double(), dim=-1)[list(scores.values())]
            probabilities = dict(zip(scores, (share / share.sum()).tolist(), strict=True))
            mass = None if bool(share.isnan().any()) else float(share.sum())
        prefill = request.prefill or "" if prompt.thinking else ""
        answers = [writer.text.lstrip() if prompt.thinking else writer.text for writer in writers]
        thoughts = [self._vocabulary.text(writer.thought).strip() for writer in writers]
        return Reply(
            texts=tuple(answer.removeprefix(prefill) for answer in answers),
            thinking=tuple(thought.removeprefix(THOUGHT_MARKS[0]) for thought in thoughts) if prompt.thinking else (),
            probabilities=probabilities,
            mass=mass,
            finish=tuple(writer.finish for writer in writers),
            prompt_tokens=prompt.tokens,
            completion_tokens=sum(writer.written for writer in writers),
            flags=tuple(flags),
        )
