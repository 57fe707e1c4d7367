"""Fine-tune a vision-language model as a terminal judge, on attempts whose scores you know.

    python examples/train_judge.py MODEL OUT_DIR --jobs jobs.jsonl --labels truth.csv [--profile generic] [--steps 400]

``truth.csv`` has the columns id and score (1 to 5). The model is shown exactly what ``regrasp annotate terminal`` shows
it, and learns to give the score at the place where that command reads it. All weights are trained, in float32: this is
for small models. Let the attempts hold what a judge has to tell apart, such as the same video under a task that it does
not show. Then, on attempts that the model has not seen:

    regrasp annotate check --engine transformers --model OUT_DIR --jobs held_out.jsonl --labels … --output check.jsonl
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import OneCycleLR
from transformers import AutoModelForImageTextToText, AutoProcessor

from regrasp.rewards.engines.local_prompt import PromptMaker
from regrasp.rewards.jobs import read_jobs
from regrasp.rewards.profiles import read_profile
from regrasp.rewards.terminal import SCORES, TerminalSignal
from regrasp.rewards.views import Views

Attempt = tuple[dict[str, torch.Tensor], int]
"""What the model is given for one attempt, and the token of its score."""


def read_attempts(arguments: argparse.Namespace, processor: Any) -> list[list[Attempt]]:  # noqa: ANN401
    """Return the labelled attempts, those of one shape together."""
    with arguments.labels.open(newline="") as file:
        scores = {row["id"]: row["score"].strip() for row in csv.DictReader(file)}
    signal = TerminalSignal(ask=read_profile(arguments.profile).ask("terminal"))
    prompts, prefill = PromptMaker(processor, frames_as="auto"), signal.ask.prefill or ""
    token = {s: processor.tokenizer.encode(prefill + s, add_special_tokens=False)[-1] for s in SCORES}
    groups: dict[tuple[torch.Size, ...], list[Attempt]] = defaultdict(list)
    for job in read_jobs(arguments.jobs):
        if job.id in scores:
            inputs = prompts.make(signal.first_request(job, Views(job)), thinking=False).inputs
            groups[tuple(tensor.shape for tensor in inputs.values())].append((inputs, token[scores[job.id]]))
    if not groups:
        raise SystemExit(f"'{arguments.labels}' has no score of a job of '{arguments.jobs}'.")
    return list(groups.values())


def train(model: torch.nn.Module, groups: list[list[Attempt]], arguments: argparse.Namespace) -> float:
    """Train on batches of one shape each, and return the mean loss of the last tenth of the steps."""
    random = np.random.default_rng(arguments.seed)
    share = np.array([len(group) for group in groups]) / sum(map(len, groups))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01)
    schedule = OneCycleLR(optimizer, arguments.lr, total_steps=arguments.steps, pct_start=0.1)
    losses = []
    model.train()
    for step in range(1, arguments.steps + 1):
        group = groups[random.choice(len(groups), p=share)]
        drawn = [group[place] for place in random.choice(len(group), arguments.batch)]
        inputs = {key: torch.cat([one[key] for one, _ in drawn]).to(arguments.device) for key in drawn[0][0]}
        said = torch.tensor([token for _, token in drawn], device=arguments.device)
        loss = cross_entropy(model(**inputs, logits_to_keep=1).logits[:, -1].float(), said)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step}: loss {np.mean(losses[-50:]):.3f}", flush=True)
    return float(np.mean(losses[-max(1, arguments.steps // 10) :]))


def main(words: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("output", type=Path)
    parser.add_argument("--jobs", type=Path, required=True)
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--profile", default="generic")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(words)
    torch.manual_seed(arguments.seed)
    processor = AutoProcessor.from_pretrained(arguments.model)
    model: Any = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=torch.float32)
    groups = read_attempts(arguments, processor)
    print(f"{sum(map(len, groups))} attempts of {len(groups)} shapes")
    loss = train(model.to(arguments.device), groups, arguments)
    model.save_pretrained(arguments.output)
    processor.save_pretrained(arguments.output)
    print(f"loss {loss:.3f}; wrote '{arguments.output}'")
    return loss


if __name__ == "__main__":
    main()
