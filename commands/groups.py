"""Groups of commands that know what an unknown name was meant to be."""

from __future__ import annotations

from typing import Any

import click


class Suggesting(click.Group):
    """A group that answers an unknown command as klgrad answers any unknown name: what there is, and the nearest."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, ...]:
        """The command of the first argument.

        Raises:
            ValueError: when there is none of that name.
        """
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-") and not ctx.resilient_parsing:
            from klgrad.synth.estimators import unknown

            raise unknown("command", args[0], known)
        return super().resolve_command(ctx, args)
