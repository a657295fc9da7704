"""`klgrad estimators`."""

from __future__ import annotations

import click

from klgrad.commands.display import dump, table
from klgrad.commands.options import json_option


@click.command(short_help="The KL estimators there are.")
@json_option
def estimators(as_json: bool) -> None:
    """The KL estimators there are, with formula, slope and source (delta = log pi - log pi_ref, r = exp(-delta))."""
    from klgrad.synth.estimators import ESTIMATORS

    if as_json:
        dump([
            {
                "name": name, "arguments": dict(entry.parameters), "value": entry.formula, "slope": entry.slope_formula,
                "unbiased": entry.unbiased, "full_vocabulary": entry.full, "source": entry.source,
            }
            for name, entry in ESTIMATORS.items()
        ])  # fmt: skip
        return
    shown = []
    for name, entry in ESTIMATORS.items():
        arguments = ", ".join(f"{parameter}={default:g}" for parameter, default in entry.parameters)
        called = f"{name}({arguments})" if arguments else name
        shown.append((called, entry.formula, entry.slope_formula, "yes" if entry.unbiased else "no", entry.source))
    table("KL estimators", ("name", "value", "slope (times the score)", "E = KL", "source"), shown, left=5)
