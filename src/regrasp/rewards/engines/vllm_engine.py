"""A vision-language model in vLLM as a judge, in this process: batched, and over several GPUs where it is told to.

Requests go to vLLM as they come, and it batches them; how many there are at once is the caller's to bound. It runs the
model in processes of its own.
"""

import asyncio
import copy
import importlib
import importlib.metadata
import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from transformers import AutoConfig, AutoProcessor

from regrasp.core.errors import ConfigError, one_line
from regrasp.rewards.engine import (
    Capabilities,
    EngineError,
    EngineUnavailable,
    MissingCapability,
    Reply,
    Request,
    RequestTooLong,
)
from regrasp.rewards.engines.frames import expected_stamps, probe_clip
from regrasp.rewards.engines.local_prompt import PromptMaker, model_fingerprint, score_ids, too_long
from regrasp.rewards.engines.openai_probe import QUESTION, UNLIKELY
from regrasp.rewards.engines.openai_transport import CONTEXT
from regrasp.rewards.engines.vllm_request import prompt_of, read_output, sampling_fields, with_scores

VERSION = importlib.metadata.version("vllm")  # raises an ImportError where it is not installed


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """Which model, and how vLLM runs it."""

    model: str
    """A folder, or a name on the hub."""
    tensor_parallel: int = 1
    """Over how many GPUs each layer is spread."""
    context: int | None = None
    """The most tokens of prompt and reply together; the model's own where it is not given."""
    reasoning_parser: str | None = None
    """vLLM's name of how the model thinks, such as qwen3: a constraint then leaves thinking alone."""
    frames_as: Literal["auto", "images"] = "auto"
    """Auto: videos where the model is seen to be told their times, else images with their times in words."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, such as {gpu_memory_utilization: 0.8}."""

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        if not self.model:
            raise ConfigError("A judge needs a model: give --model, or set REGRASP_JUDGE_MODEL.")
        if self.tensor_parallel < 1 or (self.context is not None and self.context < 1):
            raise ConfigError("tensor_parallel and context are at least 1.")


class VllmEngine:
    """A model in vLLM behind the engines' interface. It is loaded when it is first needed."""

    name = "vllm"

    def __init__(self, config: VllmConfig) -> None:
        self.model = config.model
        self.version = f"vllm {VERSION}"
        self._config = config
        self._loading = asyncio.Lock()
        self._loaded: _Loaded | None = None
        self._able: Capabilities | None = None
        self._numbers = itertools.count()

    async def probe(self) -> Capabilities:
        """Load the model, and find out by a few small questions what it and vLLM do."""
        if self._able is None:
            loaded = await self._load()
            constrained = await self.judge(replace(QUESTION, constraint=UNLIKELY))
            scored = await self._or_none(replace(QUESTION, score_tokens=("1", "2"), max_tokens=1))
            self._able = Capabilities(
                constraint=re.fullmatch(UNLIKELY, constrained.texts[0]) is not None,
                logprobs=scored is not None and scored.probabilities is not None,
                several_videos=await self._sees_videos(loaded),
                timestamps=True,  # as videos or as images with their times in words
                prefill=True,
                n=True,
                thinking=loaded.thinks,
            )
        return self._able

    async def judge(self, request: Request) -> Reply:
        """Answer one request.

        Raises:
            RequestTooLong: The prompt and the reply do not fit the model's context.
            MissingCapability: A constraint after thinking is wanted, and ``reasoning_parser`` was not given.
            EngineError: vLLM refuses the request, or a score token is not one token of the model's.
        """
        loaded = await self._load()
        thinking = request.thinking and loaded.prompts.template_thinks
        if thinking and request.constraint is not None and not loaded.thinks:
            message = "A constraint after thinking needs --engine-options reasoning_parser=NAME, such as qwen3."
            raise MissingCapability(message)
        prompt = await asyncio.to_thread(prompt_of, loaded.prompts, request, thinking=thinking)
        ids = score_ids(loaded.tokenizer, request, self.model)
        output = await self._generate(loaded, request, prompt, tuple(ids.values()))
        reply = read_output(output, thinking=thinking)
        assert not ids or request.constraint is None or all(re.fullmatch(request.constraint, token) for token in ids)
        return with_scores(reply, output, ids, choose=request.constraint is not None) if ids else reply

    async def close(self) -> None:
        """End vLLM's processes."""
        loaded, self._loaded, self._able = self._loaded, None, None
        if loaded is not None:
            await asyncio.to_thread(loaded.llm.shutdown)

    async def _generate(self, loaded: "_Loaded", request: Request, prompt: dict[str, Any], ids: tuple[int, ...]) -> Any:  # noqa: ANN401
        """Have vLLM answer; where scores are wanted, one free token shows them, and what a constrained one would be."""
        asked = replace(request, max_tokens=1, n=1) if ids else request
        constraint = None if ids else request.constraint
        sampling = importlib.import_module("vllm.sampling_params")
        try:
            parameters = sampling.SamplingParams(**sampling_fields(asked, ids, constraint, sampling))
            answers = loaded.llm.generate(prompt, parameters, f"{request.id} #{next(self._numbers)}")
            output = [answer async for answer in answers][-1]
        except Exception as error:  # vLLM's classes of errors differ between versions
            raise self._refusal(loaded, request, error) from error
        tokens = len(output.prompt_token_ids or ())
        if tokens + request.max_tokens > loaded.context:
            holds = f"{self.model!r} holds {loaded.context} here"
            raise too_long(request, tokens, holds, mend=", or raise the engine's context")
        return output

    def _refusal(self, loaded: "_Loaded", request: Request, error: Exception) -> EngineError:
        words = one_line(error, 300) or type(error).__name__
        if loaded.llm.errored:
            return EngineUnavailable(
                f"vLLM has ended ({words}). Lower its memory (gpu_memory_utilization, context) or --concurrency, and"
                " run the same command again: what is already answered is kept."
            )
        if CONTEXT.search(words):
            return RequestTooLong(
                f"{request.id!r} does not fit the context of {self.model!r} ({words}). Lower the number of frames,"
                " their size or the tokens of a reply, or raise the engine's context."
            )
        return EngineError(f"{request.id!r} was refused by vLLM ({words}).")

    async def _sees_videos(self, loaded: "_Loaded") -> bool:
        """Whether two videos can be shown; they become images where their times do not reach the model as they are."""
        clip = probe_clip()
        if loaded.prompts.as_videos:
            asked = replace(QUESTION, videos=(clip,), max_tokens=1)
            prompt = prompt_of(loaded.prompts, asked, thinking=False)
            try:
                seen = loaded.tokenizer.decode((await self._generate(loaded, asked, prompt, ())).prompt_token_ids)
            except EngineUnavailable:
                raise
            except EngineError:
                seen = ""
            loaded.prompts.as_videos = re.findall(r"<\d+\.\d seconds>", seen) == expected_stamps(clip)
        one, two = [await self._or_none(replace(QUESTION, videos=(clip,) * n, max_tokens=1)) for n in (1, 2)]
        return one is not None and two is not None and one.prompt_tokens < two.prompt_tokens

    async def _or_none(self, request: Request) -> Reply | None:
        """The answer to a question that may be refused."""
        try:
            return await self.judge(request)
        except EngineUnavailable:
            raise
        except EngineError:
            return None

    async def _load(self) -> "_Loaded":
        async with self._loading:
            if self._loaded is None:
                loaded = _Loaded(self._config)  # vLLM starts where the loop runs, and nothing else has begun yet
                self.version = f"vllm {VERSION}, model {loaded.fingerprint}"
                self._loaded = loaded
        return self._loaded


class _Loaded:
    """vLLM with a model, and what writes its prompts."""

    def __init__(self, config: VllmConfig) -> None:
        for variable, value in (("VLLM_LOGGING_LEVEL", "WARNING"), ("VLLM_NO_USAGE_STATS", "1")):
            os.environ.setdefault(variable, value)
        arguments: Mapping[str, Any] = {
            "model": config.model,
            "tensor_parallel_size": config.tensor_parallel,
            "max_model_len": config.context,
            "max_logprobs": -1,
            "disable_log_stats": True,
            **({"reasoning_parser": config.reasoning_parser} if config.reasoning_parser else {}),
            **config.arguments,
        }
        try:
            processor = AutoProcessor.from_pretrained(config.model)
            own = AutoConfig.from_pretrained(config.model)
            arguments_class = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
            engine = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
            self.llm: Any = engine.from_engine_args(arguments_class(**arguments))
        except Exception as error:  # vLLM's classes of errors differ between versions
            words = one_line(error, 300)
            raise EngineUnavailable(
                f"{config.model!r} cannot be run by vLLM {VERSION} ({words}); vLLM's own words above may say more. Give"
                " --model a vision-language model that it knows, and what memory it may take by --engine-options"
                " context=N 'arguments={gpu_memory_utilization: 0.8}'."
            ) from error
        self.tokenizer = copy.deepcopy(processor.tokenizer)  # the loop's own: threads use the processor's
        self.prompts = PromptMaker(processor, frames_as=config.frames_as)
        self.thinks = config.reasoning_parser is not None and self.prompts.template_thinks
        self.context = int(self.llm.model_config.max_model_len)
        self.fingerprint = model_fingerprint(config.model, own)
