"""`klgrad libraries`."""

from __future__ import annotations

import click

from klgrad.commands.display import dump
from klgrad.commands.options import format_option, json_option


@click.command(short_help="What each RL library's KL settings really do.")
@click.argument("names", nargs=-1, metavar="[LIBRARY]...")
@format_option("text", "markdown", "latex")
@click.option("--keys", is_flag=True, help="The settings that are read, with their defaults and meanings, instead.")
@json_option
def libraries(names: tuple[str, ...], form: str, keys: bool, as_json: bool) -> None:
    """What each RL library's KL settings really do: the paper's Table 2, computed.

    For each library the version that was read, what its defaults optimise, its settings for the unbiased
    sequence-level gradient, and what no setting gives. Verdicts come from the exact engine.
    """
    from klgrad.analysis.libraries import libraries as entries
    from klgrad.analysis.libraries import library
    from klgrad.analysis.lint import survey

    chosen = [library(name).name for name in names] or list(entries())
    if keys:
        _show_keys(chosen, as_json)
        return
    frame = survey(chosen)
    if as_json:
        described = {name: entries()[name] for name in chosen}
        dump([
            {"name": name, **row, "read": described[name].read, "source": list(described[name].source)}
            for name, row in zip(chosen, frame.to_dict("records"), strict=True)
        ])  # fmt: skip
    else:
        from klgrad.figures.libraries import libraries as lay_out

        click.echo(lay_out(frame, form))


def _show_keys(names: list[str], as_json: bool) -> None:
    from klgrad.analysis.libraries import libraries as entries
    from klgrad.analysis.resolution import written
    from klgrad.commands.display import table

    rows = [
        {"library": name, "key": key, "default": known.default, "values": list(known.values), "means": known.means}
        for name in names
        for key, known in entries()[name].keys.items()
    ]
    if as_json:
        dump(rows)
        return
    for name in names:
        entry = entries()[name]
        own = [row for row in rows if row["library"] == name]
        cells = [(r["key"], written(r["default"]), " ".join(map(written, r["values"])), r["means"]) for r in own]
        table(f"{name}: {entry.title} {entry.version} ({entry.read})", ["key", "default", "values", "means"], cells, 4)
        click.echo()
