"""What the commands on language models share: where `tiny` lives, options, and the recipe asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from klgrad.harness.recipe import Recipe

MODEL = "out/tiny"

seed_option = click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Same seed, same run."
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress or summary.")
set_option = click.option(
    "--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key of the recipe; may be repeated."
)
device_option = click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")


def recipe_of(name: str, changes: tuple[str, ...]) -> Recipe:
    """The recipe; ``tiny`` as a model stands for where `pretrain` writes it."""
    from klgrad.harness.recipe import changed, load

    given = load(name, changes)
    return changed(given, [f"model={MODEL}"]) if given.model == "tiny" else given
