"""`klgrad llm pretrain` and `evaluate`: make a small model, and see how often models are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from klgrad.commands.display import Progress, dump, number, table
from klgrad.commands.folders import made, present, told
from klgrad.commands.llm.options import MODEL, device_option, quiet_option, seed_option
from klgrad.commands.options import json_option


@click.command(short_help="Make tiny: 450,000 parameters taught small tasks.")
@click.option("--task", "tasks", multiple=True, default=("countdown", "sort"), show_default=True, help="What to teach.")
@click.option("--steps", type=click.IntRange(min=1), default=800, show_default=True, help="Optimiser steps.")
@click.option("--batch", type=click.IntRange(min=1), default=64, show_default=True, help="Answers a step.")
@seed_option
@click.option("--out", type=click.Path(path_type=Path), default=Path(MODEL), show_default=True, help="Folder to write.")
@quiet_option
def pretrain(tasks: tuple[str, ...], steps: int, batch: int, seed: int, out: Path, quiet: bool) -> None:
    """Train a Qwen2 of 450,000 parameters from scratch on answers to small tasks, with a character tokenizer."""
    from klgrad.harness import models
    from klgrad.harness.pretrain import pretrain as teach

    models.check_replaceable(out)
    there = present(out.parent)
    with made(out.parent):
        model, tokenizer = models.tiny(seed)
        with Progress("pretraining", quiet) as progress:
            found = teach(model, tokenizer, tasks, steps=steps, batch=batch, seed=seed, progress=progress)
        models.save(model, tokenizer, out)
    if not quiet:
        scores = ", ".join(f"{name} {100 * found[name]:.0f} %" for name in tasks)
        click.echo(f"{models.parameter_count(model):,} parameters; right when sampled: {scores}\n{told([out], there)}")


@click.command(short_help="Scores, KL and entropy of checkpoints.")
@click.argument("models", nargs=-1, required=True)
@click.option("--reference", metavar="MODEL", help="Also KL, forward KL and entropy against this model.")
@click.option(
    "--task", "tasks", multiple=True, default=("countdown", "sort"), show_default=True, help="Where prompts come from."
)
@click.option("--problems", type=click.IntRange(min=1), default=200, show_default=True, help="Test problems a task.")
@click.option(
    "--samples", type=click.IntRange(min=1), default=4, show_default=True, help="Responses a problem (mean@k)."
)
@click.option("--length", type=click.IntRange(min=1), default=12, show_default=True, help="Most response tokens.")
@seed_option
@device_option
@json_option
def evaluate(
    models: tuple[str, ...], reference: str | None, tasks: tuple[str, ...], problems: int, samples: int, length: int,
    seed: int, device: str, as_json: bool,
) -> None:  # fmt: skip
    """Scores of MODELS on test problems: mean@k with its standard error and pass@1 (the likeliest response)."""
    from klgrad.harness import evaluate as engine
    from klgrad.harness.models import check_same_tokens, check_same_vocabulary, load

    other, theirs = load(reference, device=device) if reference else (None, None)
    rows = []
    for path in models:
        model, tokenizer = load(path, device=device)
        if other is not None:
            check_same_vocabulary(model, other)
            check_same_tokens(tokenizer, theirs)
        engine.check_tasks(tasks, model, tokenizer, length=length, problems=problems)
        for name in tasks:
            options: dict[str, Any] = {
                "problems": problems,
                "samples": samples,
                "length": length,
                "seed": seed,
                "device": device,
            }
            row = {"model": path, "task": name, **vars(engine.evaluate(model, tokenizer, name, **options))}
            if other is not None:
                row |= engine.divergences(model, other, tokenizer, name, **options)
            rows.append(row)
    if as_json:
        dump(rows)
        return
    extra = ("kl", "forward_kl", "entropy") if reference else ()
    cells = [
        [
            r["model"],
            r["task"],
            f"{r['mean']:.3f}" + ("" if r["error"] is None else f" +- {r['error']:.3f}"),
            f"{r['greedy']:.3f}",
            *(number(r[k]) for k in extra),
        ]
        for r in rows
    ]
    head = ["model", "task", f"mean@{samples}", "pass@1", *(name.replace("_", " ") for name in extra)]
    most = problems if all(r["problems"] == problems for r in rows) else f"up to {problems}"  # data can be fewer
    table(f"{most} problem{'s' * (problems > 1)} a task; nats", head, cells, left=2)
    if failed := sum(r["unjudged"] for r in rows):
        click.echo(f"{failed} answers or problems failed in isolation and count 0; --json has them by task")
