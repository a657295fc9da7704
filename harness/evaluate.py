"""How often a policy is right: mean@k and pass@1 on a task's test problems."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from klgrad.harness.models import LanguageModel, check_same_vocabulary
from klgrad.harness.objective import MONITORS, token_terms
from klgrad.harness.rollouts import check_fits, pad_prompts, sample
from klgrad.harness.tasks import decoded, encoded, take, task


@dataclass(frozen=True)
class Evaluation:
    """Mean rewards: shares of right answers where the task gives 0 or 1, as all but some of reasoning-gym's do.

    Args:
        mean: over problems and k samples each (mean@k; its expectation is pass@1 at that temperature, whatever k).
        error: its standard error over problems: spread of the problems' own means over the root of their number; None
            where there is one problem.
        greedy: with the likeliest token each time (pass@1 at temperature 0).
        problems, samples: how many.
        unjudged: answers among these, and problems on the way to them, that failed in isolation and count 0.
    """

    mean: float
    error: float | None
    greedy: float
    problems: int
    samples: int
    unjudged: int = 0


def evaluate(
    model: LanguageModel,
    tokenizer: Any,
    name: str,
    *,
    problems: int = 200,
    samples: int = 1,
    length: int = 16,
    temperature: float = 1.0,
    batch: int = 512,
    seed: int = 0,
    device: str = "cpu",
) -> Evaluation:
    """mean@k and pass@1 of the task's first test problems; the same problems for every model.

    Raises:
        ValueError: for an unknown task, empty data, or prompts that do not fit.
    """
    judge = task(name)
    before = getattr(judge, "failed", 0)
    posed = take(judge.problems("test", 0), problems)
    prompts = [encoded(tokenizer, problem) for problem in posed]
    generator = torch.Generator(device).manual_seed(seed)

    def scores(index: list[int], at: float) -> torch.Tensor:
        found = []
        for first in range(0, len(index), batch):
            rows = index[first : first + batch]
            tokens, real = (x.to(device) for x in pad_prompts([prompts[i] for i in rows], tokenizer.pad_token_id))
            drawn = sample(model, tokens, real, length, end=tokenizer.eos_token_id, generator=generator, temperature=at)
            texts = responses(tokenizer, drawn.responses, drawn.mask)
            found += [judge.reward(posed[i], text) for i, text in zip(rows, texts, strict=True)]
        return torch.tensor(found, dtype=torch.float64)

    each = scores([i for i in range(len(posed)) for _ in range(samples)], temperature).reshape(-1, samples).mean(1)
    greedy = scores(list(range(len(posed))), 0.0)
    error = float(each.std()) / math.sqrt(len(each)) if len(each) > 1 else None
    return Evaluation(
        float(each.mean()), error, float(greedy.mean()), len(posed), samples, getattr(judge, "failed", 0) - before
    )


def check_tasks(
    names: Iterable[str],
    model: LanguageModel,
    tokenizer: Any,
    *,
    length: int,
    problems: int = 1,
    split: str = "test",
    seed: int = 0,
) -> None:
    """Whether the first problems of tasks can be posed to a model; nothing is sampled.

    Raises:
        ValueError: for a task that is unknown or has no data, a prompt whose characters the tokenizer lacks, or one
            that does not fit the model with a response of ``length`` tokens.
    """
    for name in names:
        prompts = [encoded(tokenizer, problem) for problem in take(task(name).problems(split, seed), problems)]
        check_fits(model, max(map(len, prompts)), length)


def responses(tokenizer: Any, tokens: torch.Tensor, mask: torch.Tensor) -> list[str]:
    """Texts of sampled responses."""
    return [
        decoded(tokenizer, [t for t, real in zip(row, keep, strict=True) if real])
        for row, keep in zip(tokens.tolist(), mask.tolist(), strict=True)
    ]


def divergences(
    model: LanguageModel,
    reference: LanguageModel,
    tokenizer: Any,
    name: str,
    *,
    problems: int = 200,
    samples: int = 1,
    length: int = 16,
    temperature: float = 1.0,
    batch: int = 256,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, float]:
    """Exact per-token KL, forward KL and entropy summed over the policy's own responses (paper, appendix D.5), in nats.

    Prefixes are sampled from the policy, so the sum of forward KLs is not the sequence-level forward KL.
    """
    check_same_vocabulary(model, reference)
    prompts = [encoded(tokenizer, problem) for problem in take(task(name).problems("test", 0), problems)]
    generator = torch.Generator(device).manual_seed(seed)
    totals: dict[str, float] = dict.fromkeys(MONITORS, 0.0)
    rows = [prompt for prompt in prompts for _ in range(samples)]
    with torch.no_grad():
        for first in range(0, len(rows), batch):
            tokens, real = (x.to(device) for x in pad_prompts(rows[first : first + batch], tokenizer.pad_token_id))
            drawn = sample(
                model, tokens, real, length, end=tokenizer.eos_token_id, generator=generator, temperature=temperature
            )
            terms = token_terms(
                drawn.features(model), model.head, drawn.responses, drawn.mask,
                reference=(drawn.features(reference), reference.head), summaries=MONITORS, temperature=temperature,
            )  # fmt: skip
            for monitor in MONITORS:
                totals[monitor] += float(terms[monitor].sum())
    return {monitor: total / len(rows) for monitor, total in totals.items()}
