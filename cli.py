"""klgrad: one command per question. Each lives in ``commands/`` and is imported when it is asked for."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

from klgrad.commands.groups import Suggesting

COMMANDS = (
    "figure1", "growth", "compare", "exact", "table1", "derive", "report", "check", "libraries", "lint", "audit",
    "dynamics", "field", "stability", "llm", "reproduce", "digits", "estimators", "presets",
)  # fmt: skip


class BadInput(click.ClickException):
    """What a user gave cannot be used: one sentence, exit code 2."""

    exit_code = 2


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the cyclic collector: what an import makes stays, and it would look at all of that again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Group(Suggesting):
    """Loads a command by its name; bad input is one sentence and exit code 2, wherever it was found."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The object of the command's name in the module of its name."""
        if cmd_name not in COMMANDS:
            return None
        with uncollected():
            command: click.Command = getattr(import_module(f"klgrad.commands.{cmd_name}"), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise BadInput(" ".join(str(error).split())) from error
        except KeyboardInterrupt as stopped:
            click.echo(f"interrupted{stopped}", err=True)
            exec("")  # where Ctrl-C met another exec (a dataclass's), Python would end ``-m`` by the signal, not by 130
            ctx.exit(130)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="klgrad")
def main() -> None:
    """What does my KL penalty really optimise, and how noisy is it?

    Exact bias and variance of every KL estimator and placement on autoregressive models small enough to be
    computed exactly, with the Monte Carlo of "A Comedy of Estimators" (arXiv 2512.21852) on top. KL in nats.
    """


class Closed(io.TextIOBase):
    """What stands for a standard output that was closed (``>&-``): silence would be taken for an answer."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        """Refuse: there is nowhere to write to."""
        raise BadInput("standard output is closed and the answer has nowhere to go: send it somewhere, if to /dev/null")


def _stand_in() -> None:
    """Keep the numbers of closed standard streams from files opened later, and refuse what is printed to nowhere."""
    while sys.stdout is None or sys.stderr is None:
        if os.open(os.devnull, os.O_RDWR) > 2:
            break
    if sys.stdout is None:
        sys.stdout = Closed()


def process() -> None:
    """``main`` in a process of its own, which gives everything back at its end: what is left is not collected first."""
    _stand_in()
    try:
        main()
    finally:
        gc.freeze()


if __name__ == "__main__":
    process()
