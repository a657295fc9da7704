"""`klgrad presets`."""

from __future__ import annotations

from typing import Any

import click

from klgrad.commands.display import dump
from klgrad.commands.options import json_option


@click.command(short_help="The published policy pairs, and training tasks.")
@click.option("--tasks", is_flag=True, help="The training tasks instead of the pairs.")
@json_option
def presets(tasks: bool, as_json: bool) -> None:
    """The published policy pairs, or with --tasks the training tasks, with all their numbers."""
    found = _tasks() if tasks else _pairs()
    if as_json:
        return dump(found)
    for each in found:
        click.echo(f"{each['name']}: {each['description']}\n    {each['numbers']}")
        if tasks:
            trained = f"reward {each['reward']}, out of domain {each['out_of_domain']}, T = {each['length']}"
            click.echo(f"    {trained}, beta {each['beta']:g}, learning rate {each['learning_rate']:g}")
        else:
            click.echo(f"    source: {each['source']}")


def _pairs() -> list[dict[str, Any]]:
    from klgrad.synth.presets import PRESETS

    return [
        {
            "name": name, "description": p.description, "numbers": p.numbers, "lengths": list(p.lengths),
            "source": p.source,
        }
        for name, p in PRESETS.items()
    ]  # fmt: skip


def _tasks() -> list[dict[str, Any]]:
    from klgrad.synth.tasks import TASKS

    return [
        {
            "name": name, "description": t.description, "numbers": t.numbers, "reward": t.reward,
            "out_of_domain": t.out_of_domain, "length": t.length, "beta": t.beta, "learning_rate": t.learning_rate,
        }
        for name, t in TASKS.items()
    ]  # fmt: skip
