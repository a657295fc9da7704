"""`klgrad exact`."""

from __future__ import annotations

import click

from klgrad.commands.display import dump, number, table
from klgrad.commands.options import Source, check_rows, json_option, lengths_of, lengths_option, pair_of, pair_options


@click.command(short_help="Exact KL, entropy and true gradient of a pair.")
@pair_options
@lengths_option
@json_option
def exact(source: Source, lengths: list[int] | None, as_json: bool) -> None:
    """Exact KL, forward KL, entropy and true gradient of a pair, by length."""
    import numpy as np

    from klgrad.analysis.results import finite
    from klgrad.synth import exact as engine

    wanted = lengths_of(lengths, source)
    check_rows(wanted)
    pair = pair_of(source, max(wanted))
    gradient = engine.true_gradient(pair, wanted)
    columns = {
        "kl": engine.kl(pair, wanted),
        "forward_kl": engine.forward_kl(pair, wanted),
        "entropy": engine.entropy(pair, wanted),
        "gradient": gradient,
        "gradient_norm": np.linalg.norm(gradient, axis=1),
    }
    if as_json:
        dump([
            {"length": n, **{name: finite(column[i].tolist()) for name, column in columns.items()}}
            for i, n in enumerate(wanted)
        ])  # fmt: skip
        return
    coordinates = gradient.shape[1] if gradient.shape[1] <= 8 else 0
    scalars = ("kl", "forward_kl", "entropy", "gradient_norm")
    rows = [
        [
            str(n),
            *(number(columns[name][i], 6) for name in scalars),
            *(number(g, 5) for g in gradient[i, :coordinates]),
        ]
        for i, n in enumerate(wanted)
    ]
    header = ["T", "KL", "forward KL", "entropy", "|gradient|", *(f"d{j}" for j in range(coordinates))]
    table(f"{pair.name}: exact, in nats", header, rows, left=0)
    if not coordinates:
        click.echo(f"the gradient has {gradient.shape[1]} coordinates; --json gives them all")
