"""``tiny`` taught from scratch by imitation, so that a policy worth regularising exists without a download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch

from klgrad.harness.evaluate import evaluate
from klgrad.harness.models import CausalLM
from klgrad.harness.tasks import Problem, encoded, task

Progress = Callable[[int, int], None]


def pretrain(
    model: CausalLM,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    steps: int = 900,
    batch: int = 128,
    learning_rate: float = 3e-3,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Train on answers of the tasks, an equal share each; cross-entropy of the answer and its end.

    Returns:
        ``loss`` (nats per answer token, mean of the last tenth) and each task's share of right answers when sampled.

    Raises:
        ValueError: for no task, an unknown one, or a prompt in characters that the tokenizer lacks.
    """
    if not tasks or steps < 1 or batch < len(tasks):
        raise ValueError(f"{len(tasks)} tasks, {steps} steps, batch {batch}: give a task, a step, a row for each task")
    sources = [task(name).problems("train", seed) for name in tasks]
    share = batch // len(sources)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm, max(0.02, (steps - i) / (steps - warm or 1)))
    )
    losses = []
    model.train()
    for step in range(steps):
        rows = [problem for source in sources for problem in islice(source, share)]
        loss = _loss(model, tokenizer, rows)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if progress:
            progress(step + 1, steps)
    model.eval()
    last = losses[-max(1, steps // 10) :]
    right = {name: evaluate(model, tokenizer, name, problems=200, samples=1, seed=seed).mean for name in tasks}
    return {"loss": sum(last) / len(last), **right}


def _loss(model: CausalLM, tokenizer: Any, rows: Sequence[Problem]) -> torch.Tensor:
    prompts = [encoded(tokenizer, row) for row in rows]
    answers = [[*tokenizer(row.answer)["input_ids"], tokenizer.eos_token_id] for row in rows]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    tokens = torch.full((len(rows), width), tokenizer.pad_token_id)
    real = torch.zeros((len(rows), width), dtype=torch.bool)
    target = torch.full((len(rows), width), -100)
    for i, (p, a) in enumerate(zip(prompts, answers, strict=True)):
        tokens[i, : len(p) + len(a)] = torch.tensor(p + a)
        real[i, : len(p) + len(a)] = True
        target[i, len(p) : len(p) + len(a)] = torch.tensor(a)
    tokens, real, target = (x.to(next(model.parameters()).device) for x in (tokens, real, target))
    features, _ = model.features(tokens[:, :-1], real[:, :-1])
    wanted = target[:, 1:]
    keep = wanted != -100
    return torch.nn.functional.cross_entropy(model.head(features[keep]).float(), wanted[keep])
