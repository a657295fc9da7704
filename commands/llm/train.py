"""`klgrad llm train`: RL fine-tuning by a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from klgrad.commands.display import Progress, number
from klgrad.commands.llm.options import quiet_option, recipe_of, set_option
from klgrad.commands.options import out_option


@click.command(short_help="RL fine-tuning by a recipe.")
@click.argument("recipe")
@set_option
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in the --out folder.")
@click.option("--tensorboard", is_flag=True, help="Also write TensorBoard events.")
@out_option
@quiet_option
@click.pass_context
def train(
    ctx: click.Context, recipe: str, changes: tuple[str, ...], resume: bool, tensorboard: bool, out: Path, quiet: bool
) -> None:
    """Fine-tune with verifiable rewards and a KL by RECIPE, a TOML file or the name of one that comes with klgrad.

    Writes metrics.jsonl, evaluations.jsonl and checkpoints to the --out folder. Interrupt once and it stops after the
    round with a checkpoint; --resume goes on exactly from there.

    \b
    klgrad llm train tiny-rloo --set model=out/tiny --set beta=0.1 --out out/run
    klgrad llm recipes
    """
    from klgrad.harness.train import Stopped
    from klgrad.harness.train import train as run

    given = recipe_of(recipe, changes)
    with _patience() as stop, Progress(recipe, quiet) as progress:
        try:
            lines = run(given, out, resume=resume, tensorboard=tensorboard, progress=progress, stop=stop)
        except Stopped as stopped:
            raise click.ClickException(str(stopped)) from None
    if lines and lines[-1]["step"] < given.steps:
        raise KeyboardInterrupt(
            f": round {lines[-1]['step']} is saved in {out}; the same command with --resume goes on"
        )
    if not quiet and lines:
        last = lines[-1]
        parts = [f"{name} {number(last[name])}" for name in ("reward", "kl", "entropy") if last.get(name) is not None]
        click.echo(
            f"round {last['step']}: {', '.join(parts)}\nwrote {out / 'metrics.jsonl'} and {out}/step-{last['step']}"
        )


class _patience:
    """The first interrupt lets the round end and be saved; the second stops at once."""

    def __enter__(self) -> Any:
        import signal

        self.asked = False
        self.before = signal.signal(signal.SIGINT, self._ask)
        return lambda: self.asked

    def _ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        click.echo("stopping after this round; interrupt again to stop at once", err=True)

    def __exit__(self, *_: object) -> None:
        import signal

        signal.signal(signal.SIGINT, self.before)
