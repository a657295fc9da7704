"""`klgrad llm train`: RL fine-tuning by a recipe."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from klgrad.commands.display import Progress, number
from klgrad.commands.folders import held
from klgrad.commands.llm.options import quiet_option, recipe_of, set_option
from klgrad.commands.options import out_option


@click.command(short_help="RL fine-tuning by a recipe.")
@click.argument("recipe")
@set_option
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in the --out folder.")
@click.option("--tensorboard", is_flag=True, help="Also write TensorBoard events.")
@click.option(
    "--backend",
    type=click.Choice(["own", "trl"]),
    default="own",
    show_default=True,
    help="Who trains: klgrad's loop, in one process, or TRL's trainer, also in several.",
)
@click.option(
    "--trl",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of TRL's RLOOConfig that the recipe leaves open, such as use_vllm=true; may be repeated.",
)
@click.option("--lora", type=click.IntRange(min=1), metavar="RANK", help="Train only a LoRA adapter (backend trl).")
@out_option
@quiet_option
def train(
    recipe: str,
    changes: tuple[str, ...],
    resume: bool,
    tensorboard: bool,
    backend: str,
    options: tuple[str, ...],
    lora: int | None,
    out: Path,
    quiet: bool,
) -> None:
    """Fine-tune with verifiable rewards and a KL by RECIPE, a TOML file or the name of one that comes with klgrad.

    Writes metrics.jsonl, evaluations.jsonl and checkpoints to the --out folder. Interrupt once and it stops after the
    round with a checkpoint; --resume goes on exactly from there.

    \b
    klgrad llm train tiny-rloo --set model=out/tiny --set beta=0.1 --out out/run
    klgrad llm recipes

    With --backend trl it runs in as many processes as are started:

    \b
    accelerate launch --num_processes 8 -m klgrad.cli llm train RECIPE --backend trl
    """
    from klgrad.harness.train import Stopped

    given = recipe_of(recipe, changes)
    run = _backend(backend, options, lora)
    first = os.environ.get("RANK", "0") == "0"  # of several processes, the first one speaks and holds the folder
    quiet = quiet or not first
    trained = []
    with held(out if first else None), _patience() as stop, Progress(recipe, quiet) as progress:

        def advance(done: int, total: int) -> None:
            trained.append(done)
            progress(done, total)

        try:
            lines = run(given, out, resume=resume, tensorboard=tensorboard, progress=advance, stop=stop)
        except Stopped as stopped:
            raise click.ClickException(str(stopped)) from None
    if lines and lines[-1]["step"] < given.steps:
        raise KeyboardInterrupt(
            f": round {lines[-1]['step']} is saved in {out}; the same command with --resume goes on"
        )
    if not quiet and lines:
        last = lines[-1]
        parts = [f"{name} {number(last[name])}" for name in ("reward", "kl", "entropy") if last.get(name) is not None]
        files = f"{out / 'metrics.jsonl'} and {out}/step-{last['step']}"
        ending = f"wrote {files}" if trained else f"nothing was left to train: {files} are as they were"
        click.echo(f"round {last['step']}: {', '.join(parts)}\n{ending}")


def _backend(name: str, options: tuple[str, ...], lora: int | None) -> Callable[..., list[dict[str, Any]]]:
    """The function that trains."""
    if name == "trl":
        from klgrad.harness import trl_backend

        return partial(trl_backend.train, options=options, lora=lora or 0)
    if options or lora:
        raise ValueError(f"{'--trl' if options else '--lora'} is for TRL's trainer: add --backend trl")
    from klgrad.harness.train import train

    return train


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
