"""A request in vLLM's own terms, and a reply read from its output; nothing of vLLM is imported."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from regrasp.rewards.engine import Reply, Request
from regrasp.rewards.engines.frames import in_pairs
from regrasp.rewards.engines.local_prompt import PromptMaker, video_metadata
from regrasp.rewards.engines.openai_chat import CUT_OFF_FLAG, THOUGHT_END, score_probabilities


def prompt_of(prompts: PromptMaker, request: Request, *, thinking: bool) -> dict[str, Any]:
    """Return a request's prompt, with its videos as lists of frames that say their own times, or as images."""
    prompt: dict[str, Any] = {"prompt": prompts.text(request, thinking=thinking)}
    if not request.videos:
        return prompt
    if not prompts.as_videos:
        return prompt | {"multi_modal_data": {"image": [frame for video in request.videos for frame in video.frames]}}
    videos = [in_pairs(video) for video in request.videos]
    told = [(video.frames, video_metadata(video) | {"do_sample_frames": False}) for video in videos]
    options = {"mm_processor_kwargs": dict(prompts.video_options)} if prompts.video_options else {}
    return prompt | {"multi_modal_data": {"video": told}} | options


def sampling_fields(request: Request, ids: Sequence[int], constraint: str | None, sampling: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the fields of vLLM's sampling parameters.

    Args:
        request: What is asked.
        ids: Tokens whose log-probability is wanted at every position; few positions are asked for then.
        constraint: What the reply matches; it acts before log-probabilities are taken.
        sampling: vLLM's module of sampling parameters, by which its way to constrain is known.
    """
    fields: dict[str, Any] = {
        "n": request.n,
        "temperature": request.temperature,
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "output_kind": sampling.RequestOutputKind.FINAL_ONLY,
    }
    if constraint is not None:
        if hasattr(sampling, "StructuredOutputsParams"):
            fields["structured_outputs"] = sampling.StructuredOutputsParams(regex=constraint)
        else:  # before 0.11
            fields["guided_decoding"] = sampling.GuidedDecodingParams(regex=constraint)
    if ids:
        known = hasattr(sampling.SamplingParams, "logprob_token_ids")
        fields |= {"logprob_token_ids": list(ids)} if known else {"logprobs": -1}
    return fields


def read_output(output: Any, *, thinking: bool) -> Reply:  # noqa: ANN401 - vLLM's RequestOutput
    """Return what vLLM answered: texts, thoughts, ends and counts."""
    texts, thoughts = [], []
    for one in output.outputs:
        thought, end, answer = one.text.partition(THOUGHT_END) if thinking else ("", "", one.text)
        texts.append(answer.lstrip() if end else one.text)
        thoughts.append(thought.removeprefix("<think>").strip() if end else "")
    finish = tuple(str(one.finish_reason or "") for one in output.outputs)
    return Reply(
        texts=tuple(texts),
        thinking=tuple(thoughts) if any(thoughts) else (),
        finish=finish,
        prompt_tokens=len(output.prompt_token_ids or ()),
        completion_tokens=sum(len(one.token_ids) for one in output.outputs),
        flags=(CUT_OFF_FLAG,) if "length" in finish else (),
    )


def with_scores(reply: Reply, output: Any, ids: Mapping[str, int], *, choose: bool) -> Reply:  # noqa: ANN401
    """Return a reply of one unconstrained token with the probabilities of the score tokens in it.

    Args:
        reply: The reply without.
        output: vLLM's.
        ids: The score tokens.
        choose: The reply is to be the most probable of them, as one that is constrained to them would be.
    """
    position = output.outputs[0].logprobs[0] if output.outputs[0].logprobs else {}
    shown = {token: float(position[number].logprob) for token, number in ids.items() if number in position}
    scores = score_probabilities(shown, list(ids))
    flags = tuple(flag for flag in reply.flags if flag != CUT_OFF_FLAG)
    if scores.odd is not None or scores.missing:
        flags = (*flags, scores.odd or f"no log-probability of {', '.join(scores.missing)}")
    best = max(ids, key=lambda token: scores.probabilities[token]) if choose and scores.finite else None
    return replace(
        reply,
        texts=reply.texts if best is None else (best,),
        probabilities=scores.probabilities,
        mass=scores.mass if scores.finite else None,
        flags=flags,
    )
