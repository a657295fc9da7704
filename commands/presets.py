"""`klgrad presets`."""

from __future__ import annotations

import click

from klgrad.commands.display import dump
from klgrad.commands.options import json_option


@click.command(short_help="The published policy pairs.")
@json_option
def presets(as_json: bool) -> None:
    """The published policy pairs, with all their numbers."""
    from klgrad.synth.presets import PRESETS

    if as_json:
        return dump([
            {
                "name": name, "description": p.description, "numbers": p.numbers,
                "lengths": list(p.lengths), "source": p.source,
            }
            for name, p in PRESETS.items()
        ])  # fmt: skip
    for name, p in PRESETS.items():
        click.echo(f"{name}: {p.description}\n    {p.numbers}\n    source: {p.source}")
