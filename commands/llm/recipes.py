"""`klgrad llm recipes` and `plan`: which runs there are, and what one needs."""

from __future__ import annotations

from typing import Any

import click

from klgrad.commands.display import dump, number, table
from klgrad.commands.llm.options import recipe_of, set_option
from klgrad.commands.options import json_option


@click.command(short_help="What a recipe needs.")
@click.argument("recipe")
@set_option
@click.option("--measure", is_flag=True, help="Time a few rounds on this machine.")
@json_option
def plan(recipe: str, changes: tuple[str, ...], measure: bool, as_json: bool) -> None:
    """Memory and tokens of RECIPE by arithmetic and, with --measure, hours from a few rounds on this machine."""
    from klgrad.harness import plan as engine

    given = recipe_of(recipe, changes)
    parameters, vocabulary = engine.parameters_of(given)
    found = engine.needs(given, parameters, vocabulary)
    found["total_gib"] = engine.total_gib(found)
    if measure:
        found |= engine.measured(given)
    if as_json:
        dump(found)
        return
    rows = [[name.replace("_", " ").replace(" gib", " (GiB)"), _plain(value)] for name, value in found.items()]
    table(recipe, ["", ""], rows)
    click.echo("activations and the key-value cache come on top" + ("" if measure else "; --measure times it here"))


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else number(value, 3)


@click.command(short_help="The recipes that come with klgrad.")
@json_option
def recipes(as_json: bool) -> None:
    """The recipes that come with klgrad: the paper's runs, and their twins at the size of tiny."""
    from klgrad.harness import recipe

    found = {name: recipe.load(name) for name in recipe.names()}
    if as_json:
        dump({name: each.to_dict() for name, each in found.items()})
        return
    rows = [[name, each.model, each.kl or "no KL", f"{each.beta:g}", each.note] for name, each in found.items()]
    table("", ["recipe", "model", "KL", "beta", ""], rows, left=5)
