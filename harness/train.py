"""RL fine-tuning in one process: sample, score, step. Short enough to read in one sitting.

One *round*: take rollouts from the queue (fresh ones, or ``staleness`` rounds old), step the optimiser once a
minibatch, write a line of metrics. Every random draw is seeded by (seed, round), so a run that goes on from a
checkpoint is the run that was never stopped.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from klgrad.harness import checkpoints
from klgrad.harness.evaluate import check_tasks, evaluate, responses
from klgrad.harness.models import DTYPES, Base, CausalLM, check_device, load, load_reference, own_reference
from klgrad.harness.objective import (
    ADVANTAGES,
    MONITORS,
    Objective,
    estimator_summaries,
    policy_loss,
    token_terms,
)
from klgrad.harness.recipe import Recipe
from klgrad.harness.rollouts import Rollouts, pad_prompts, sample
from klgrad.harness.state import Experience, Run
from klgrad.harness.tasks import Problem, Task, encoded, judged, task
from klgrad.synth.estimators import Estimator, estimator

Progress = Callable[[int, int], None]
_LOG_RATIO_CLAMP = 20.0  # nats; where libraries clamp: tokens beyond it are counted, a share that grows is drift


class Stopped(RuntimeError):
    """Training cannot go on; the state it had is saved."""


class UsedUp(ValueError):
    """The tasks have too few problems left for a batch."""


def used_up(left: int, batch: int) -> UsedUp:
    """What to raise where so many problems are left."""
    return UsedUp(f"the tasks have only {left} problems left: batch = {batch} needs more data")


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    tensorboard: bool = False,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Train, writing ``metrics.jsonl``, ``evaluations.jsonl`` and ``step-N`` checkpoints to ``out``.

    Args:
        resume: go on from the last checkpoint in ``out``; without one, from the start.
        stop: asked after every round; True saves a checkpoint and returns.

    Returns:
        The lines of metrics.

    Raises:
        ValueError: for what cannot be trained, before anything is written.
        UsedUp: where the data ends before the training does; what was trained is saved.
        Stopped: for a loss that is not finite; the state before it is saved.
        OSError: when the disk refuses; earlier checkpoints are untouched.
    """
    run = start(recipe)
    lines = _resumed(run, out) if resume else fresh(out)
    with recording(out, tensorboard) as record:
        while run.step < recipe.steps:
            try:
                line = train_round(run, out)
            except UsedUp as ended:
                if run.step:
                    checkpoints.save(run, out)
                    raise UsedUp(f"{ended}; round {run.step} is saved in {out}") from None
                raise
            lines.append(line)
            checkpoints.append_line(out / "metrics.jsonl", line)
            record(line)
            done = run.step == recipe.steps
            asked = stop()
            if every(recipe.evaluate_every, run.step) or done:
                checkpoints.append_line(out / "evaluations.jsonl", {"step": run.step, **evaluations(run)})
            if every(recipe.checkpoint_every, run.step) or done or asked:
                checkpoints.save(run, out)
            if progress:
                progress(run.step, recipe.steps)
            if asked:
                break
    return lines


@contextmanager
def recording(out: Path, tensorboard: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What also takes each line of metrics (TensorBoard, where asked for); a disk that refuses is said in a sentence.

    Raises:
        ValueError: without the package tensorboard, where asked for.
        OSError: when the disk refuses; earlier checkpoints are untouched.
    """
    writer = _tensorboard_writer(out) if tensorboard else None
    try:
        yield (lambda line: None) if writer is None else partial(_write_scalars, writer)
    except OSError as error:
        raise OSError(
            f"cannot write to {out}: {error.strerror or error}; checkpoints there are whole, "
            "free some space and go on with --resume"
        ) from error
    finally:
        if writer:
            writer.close()


def every(period: int, step: int) -> bool:
    """Whether something is due after that many rounds; 0: never."""
    return period > 0 and step % period == 0


def fresh(out: Path) -> list[dict[str, Any]]:
    """The folder of a new run, which has no lines yet."""
    out.mkdir(parents=True, exist_ok=True)
    if (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size:
        raise ValueError(f"{out} holds a run already: go on with --resume, or give another folder with --out")
    return []


def _resumed(run: Run, out: Path) -> list[dict[str, Any]]:
    out.mkdir(parents=True, exist_ok=True)
    checkpoints.restore(run, out)
    deque(itertools.islice(run.problems, run.drawn * run.recipe.batch), maxlen=0)  # those of the rounds done
    checkpoints.truncate(out / "evaluations.jsonl", run.step)
    return checkpoints.truncate(out / "metrics.jsonl", run.step)


def start(recipe: Recipe) -> Run:
    """Models, tokenizer, optimiser and tasks of a run at step 0.

    Raises:
        ValueError: for a model, reference, task or setting that cannot be used.
    """
    check_settings(recipe)
    policy, tokenizer = load(recipe.model, device=recipe.device)
    check_prompts(recipe, policy, tokenizer)
    policy.autocast = DTYPES[recipe.dtype] if recipe.dtype != "float32" else None
    reference: CausalLM | Base | None = None
    if objective_of(recipe).penalised or recipe.monitor:
        if recipe.reference:
            reference = load_reference(recipe.reference, policy, tokenizer, dtype=recipe.dtype, device=recipe.device)
        else:
            reference = own_reference(policy)
    if policy.adapted and recipe.reset_every:
        raise ValueError(
            f"reset_every = {recipe.reset_every}: an adapter is compared with its base, which cannot be reset to it"
        )
    optimizer = torch.optim.AdamW(
        [parameter for parameter in policy.parameters() if parameter.requires_grad],
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    return Run(recipe, policy, reference, tokenizer, optimizer, problems_of(recipe))


def check_settings(recipe: Recipe) -> None:
    """What either backend can say of a recipe before a model is loaded.

    Raises:
        ValueError: for an objective that cannot be, a precision that is not trained in, or a device that is not here.
    """
    objective_of(recipe)
    if recipe.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype = {recipe.dtype!r}: train in float32, or in bfloat16 over float32 weights")
    check_device(recipe.device)


def check_prompts(recipe: Recipe, policy: CausalLM, tokenizer: Any) -> None:
    """Find out before a training, not at its end, whether it can be evaluated, and whether its first prompts fit.

    Raises:
        ValueError: as ``check_tasks``.
    """
    evaluated = dict.fromkeys((*recipe.in_domain, *recipe.out_of_domain))
    check_tasks(evaluated, policy, tokenizer, length=recipe.length, problems=recipe.evaluate_problems)
    check_tasks(recipe.tasks, policy, tokenizer, length=recipe.length, split="train", seed=recipe.seed)


def problems_of(recipe: Recipe) -> Iterator[tuple[Task, Problem]]:
    """Problems of the tasks in turn, from one stream a run."""
    sources = [(judge, judge.problems("train", recipe.seed)) for judge in map(task, recipe.tasks)]
    for judge, stream in itertools.cycle(sources):
        for problem in itertools.islice(stream, 1):
            yield judge, problem
            break
        else:
            return  # one task's data is used up


def objective_of(recipe: Recipe) -> Objective:
    """The objective of a recipe."""
    clips = (recipe.clip_low or None, recipe.clip_high or None)
    return Objective(
        recipe.configuration, recipe.beta, recipe.group, recipe.advantage, recipe.aggregation,
        recipe.kl_aggregation, recipe.ratio, *clips, max_length=recipe.length,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- one round


def train_round(run: Run, out: Path) -> dict[str, Any]:
    """One round; returns its line of metrics."""
    recipe, began = run.recipe, time.perf_counter()
    while len(run.queue) <= recipe.staleness:  # the first rounds find old rollouts too: asynchronous runs start so
        run.queue.append(draw(run))
    experience, staleness = run.queue[0], run.step - run.queue[0].version
    for group in run.optimizer.param_groups:
        group["lr"] = recipe.learning_rate * min(1.0, (run.step + 1) / max(recipe.warmup, 1))
    seen = Statistics()
    advantages = ADVANTAGES[recipe.advantage](experience.rewards, recipe.group)
    for rows in _splits(len(experience.rewards), (recipe.minibatch or recipe.batch) * recipe.group):
        _optimise(run, experience, advantages, rows, seen, out)
    run.queue.pop(0)
    run.step += 1
    if isinstance(run.reference, CausalLM) and every(recipe.reset_every, run.step):
        run.reference.load_state_dict(run.policy.state_dict())
    return {
        "step": run.step, "staleness": staleness, "reward": float(experience.rewards.mean()),
        "unjudged": experience.unjudged,
        "length": float(experience.rollouts.mask.sum(1).float().mean()), **seen.summary(),
        "learning_rate": run.optimizer.param_groups[0]["lr"], "seconds": time.perf_counter() - began,
    }  # fmt: skip


def _splits(total: int, size: int) -> Iterator[slice]:
    return (slice(first, first + size) for first in range(0, total, size))


def draw(run: Run) -> Experience:
    """Rollouts of the present policy with their rewards."""
    recipe = run.recipe
    posed = list(itertools.islice(run.problems, recipe.batch))
    if len(posed) < recipe.batch:
        raise used_up(len(posed), recipe.batch)
    prompts = [encoded(run.tokenizer, problem) for _, problem in posed]
    tokens, real = pad_prompts(prompts, run.tokenizer.pad_token_id)
    tokens, real = (x.repeat_interleave(recipe.group, 0).to(recipe.device) for x in (tokens, real))
    generator = torch.Generator(recipe.device).manual_seed((recipe.seed << 32) + run.drawn)
    rollouts = sample(
        run.policy, tokens, real, recipe.length,
        end=run.tokenizer.eos_token_id, generator=generator, temperature=recipe.temperature,
    )  # fmt: skip
    run.drawn += 1
    texts = responses(run.tokenizer, rollouts.responses, rollouts.mask)
    rewards, unjudged = judged([each for each in posed for _ in range(recipe.group)], texts)
    return Experience(rollouts, torch.tensor(rewards, device=recipe.device), run.step, unjudged)


def _optimise(run: Run, experience: Experience, advantages: Tensor, rows: slice, seen: Statistics, out: Path) -> None:
    """One optimiser step on some rows, accumulated over what fits in memory."""
    recipe, objective = run.recipe, objective_of(run.recipe)
    run.optimizer.zero_grad(set_to_none=True)
    index = range(*rows.indices(len(advantages)))
    size = (recipe.micro or recipe.minibatch or recipe.batch) * recipe.group
    for cut in _splits(len(index), size):
        part = slice(index[cut][0], index[cut][-1] + 1)
        rollouts = experience.rollouts.rows(part)
        terms = score(run, rollouts)
        behaviour = None if recipe.on_policy else rollouts.behaviour
        loss, counts = policy_loss(objective, terms, rollouts.mask, advantages[part], behaviour)
        loss = loss * (len(index[cut]) / len(index))
        if not math.isfinite(float(loss.detach())):
            _stop(run, out, "the loss")
        torch.autograd.backward(loss)
        seen.add(terms, rollouts.mask, counts, objective.configuration, float(loss.detach()))
    limit = recipe.max_norm or math.inf
    norm = float(torch.nn.utils.clip_grad_norm_(run.policy.parameters(), limit))
    if not math.isfinite(norm):
        _stop(run, out, "the gradient")
    seen.norms.append(norm)
    run.optimizer.step()


def _stop(run: Run, out: Path, what: str) -> None:
    folder = checkpoints.save(run, out, name=f"stopped-{run.step}")
    raise Stopped(
        f"{what} is not finite in round {run.step + 1}: training stopped; the weights before that step are in {folder}"
    )


def score(run: Run, rollouts: Rollouts) -> dict[str, Tensor]:
    """The terms of some rollouts under policy and, where there is one, reference."""
    recipe, objective = run.recipe, objective_of(run.recipe)
    reference, summaries = None, {}
    if run.reference is not None:
        with torch.no_grad():
            reference = rollouts.features(run.reference), run.reference.head
        summaries = dict(MONITORS) if recipe.monitor else {}
        if objective.configuration is not None and objective.penalised:
            summaries |= estimator_summaries(objective.configuration.estimator)
    return token_terms(
        rollouts.features(run.policy), run.policy.head, rollouts.responses, rollouts.mask,
        reference=reference, summaries=summaries, temperature=recipe.temperature,
    )  # fmt: skip


class Statistics:
    """What happened in the minibatches of one round, summed up as a line of metrics."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.losses = 0.0
        self.sequences: dict[str, list[Tensor]] = {}
        self.counts: list[dict[str, float]] = []

    def add(self, terms: dict[str, Tensor], mask: Tensor, counts: dict[str, float], kl: Any, loss: float) -> None:
        self.losses += loss
        self.counts.append(counts)
        found = {name: terms[name].detach() for name in MONITORS if name in terms}
        if "reference" in terms:
            est = kl.estimator if kl is not None else estimator("k1")
            delta = torch.where(mask, terms["log_probs"].detach() - terms["reference"], 0.0)
            if not est.full or "value" in terms:
                found["kl_estimate"] = torch.where(mask, terms["value"] if est.full else est.value(delta), 0.0)
            found["clamped"] = (_clamped(est, delta) & mask).to(delta) / mask.sum().clamp(min=1) * len(mask)
        for name, value in found.items():
            self.sequences.setdefault(name, []).append(value.sum(1))

    def summary(self) -> dict[str, float]:
        columns = {name: torch.cat(values) for name, values in self.sequences.items()}
        found = {name: float(column.mean()) for name, column in columns.items()}
        if "kl_estimate" in columns:
            found["kl_estimate_variance"] = float(columns["kl_estimate"].var())
        if "clamped" in found:
            found["clamp_share"] = found.pop("clamped")
        return {
            "loss": self.losses / max(len(self.norms), 1), **found,
            "clip_share": sum(c["clip_share"] for c in self.counts) / len(self.counts),
            "ratio_max": max(c["ratio_max"] for c in self.counts),
            "gradient_norm": sum(self.norms) / len(self.norms),
        }  # fmt: skip


def _clamped(est: Estimator, delta: Tensor) -> Tensor:
    """Tokens whose log-ratio lies beyond where libraries clamp, or where the estimator's own clamp is saturated."""
    beyond = delta.abs() > _LOG_RATIO_CLAMP
    return beyond | ((est.slope(delta) == 0) & (delta != 0)) if est.name.startswith("k3-clamped") else beyond


# ------------------------------------------------------------------------------------------------------ evaluation


def evaluations(run: Run) -> dict[str, Any]:
    """mean@k, its error and pass@1 of each evaluation task."""
    recipe = run.recipe
    found = {}
    for name in dict.fromkeys((*recipe.in_domain, *recipe.out_of_domain)):
        found[name] = vars(evaluate(
            run.policy, run.tokenizer, name, problems=recipe.evaluate_problems, samples=recipe.evaluate_samples,
            length=recipe.length, temperature=recipe.temperature, seed=0, device=recipe.device,
        ))  # fmt: skip
    return found


def _tensorboard_writer(out: Path) -> Any:
    """Where the scalars of a run go.

    Raises:
        ValueError: without the package.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--tensorboard needs the package tensorboard: pip install tensorboard") from None
    return SummaryWriter(str(out))


def _write_scalars(writer: Any, line: dict[str, Any]) -> None:
    """A line of metrics as scalars."""
    for name, value in line.items():
        writer.add_scalar(name, value, line["step"])
