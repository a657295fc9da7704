"""`klgrad audit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from klgrad.commands.display import Progress, dump, table
from klgrad.commands.options import format_option, json_option

if TYPE_CHECKING:
    from klgrad.analysis.auditing import Adapter, Row

_HEAD = ("library", "installed", "settings", "placement", "expected", "found", "status", "")


@click.command(short_help="Do the installed libraries still do what klgrad says?")
@click.argument("names", nargs=-1, metavar="[LIBRARY]...")
@format_option("text", "markdown")
@json_option
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@click.option("--keys", is_flag=True, help="Instead: the lists of all settings against the installed packages' source.")
@click.option("--write", is_flag=True, help="With --keys: make the lists again where they differ.")
def audit(names: tuple[str, ...], form: str, as_json: bool, quiet: bool, keys: bool, write: bool) -> None:
    """Do the installed libraries still do what klgrad says they do?

    Imports each library's own KL function where the library is installed, and puts it through the exact check: its
    gradient token by token and its verdict against the settings' entry. Nothing is ever installed, and nothing but
    that function is called. Exit code 1 where a function no longer agrees, is gone or takes other arguments; what is
    not installed or cannot be imported is said so.
    """
    if write and not keys:
        raise ValueError("--write makes the lists of settings again: give --keys with it")
    if keys:
        _compare_keys(names, as_json, write)
        return
    from klgrad.analysis.adapters import ADAPTERS
    from klgrad.analysis.auditing import audit as examine
    from klgrad.synth.estimators import unknown

    known = [adapter.library for adapter in ADAPTERS]
    for name in names:
        if not any(library == name or library.startswith(f"{name}-") for library in known):
            raise unknown("library with an adapter", name, known)
    chosen = [a for a in ADAPTERS if not names or any(a.library == n or a.library.startswith(f"{n}-") for n in names)]
    rows = []
    with Progress("auditing", quiet or as_json) as progress:
        for done, adapter in enumerate(chosen):
            progress(done, len(chosen))
            rows += list(examine([adapter]))
    if as_json:
        dump([_content(row) for row in rows])
    else:
        _show(rows, chosen, form)
    if any(row.alarm for row in rows):
        click.get_current_context().exit(1)


def _compare_keys(names: tuple[str, ...], as_json: bool, write: bool) -> None:
    from klgrad.analysis import keylists
    from klgrad.synth.estimators import unknown

    known = [source.name for source in keylists.SOURCES]
    for name in names:
        if name not in known:
            raise unknown("list of settings", name, known)
    differs = False
    rows: list[dict[str, Any]] = []
    for found in keylists.compare(names):
        if isinstance(found, tuple):
            source, reason = found
            rows.append({"list": source.name, "status": reason})
            continue
        changed = bool(found.added or found.gone)
        differs |= changed and not write
        if changed and write:
            keylists.write(found.source, found.version, found.keys)
        rows.append({
            "list": found.source.name, "status": "differs" if changed else "agrees", "version": found.version,
            "settings": len(found.keys), "added": list(found.added), "gone": list(found.gone),
        })  # fmt: skip
    if as_json:
        dump(rows)
    else:
        _show_keys(rows)
    if differs:
        click.get_current_context().exit(1)


def _show_keys(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if "version" not in row:
            click.echo(f"{row['list']}: {row['status']}")
            continue
        click.echo(f"{row['list']}: {row['status']}, {row['settings']} settings in {row['version']}")
        for sign, name in (("+", "added"), ("-", "gone")):
            for key in row[name]:
                click.echo(f"  {sign} {key}")


def _content(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.library,
        row.version or "-",
        row.settings,
        row.placement,
        row.expected,
        row.found,
        row.status,
        row.message,
    )


def _show(rows: list[Row], adapters: list[Adapter], form: str) -> None:
    if form == "markdown":
        from klgrad.figures.table1 import pipes

        lines = [pipes(list(_HEAD)), pipes(["---"] * len(_HEAD)), *(pipes(list(_cells(row))) for row in rows)]
        click.echo("\n".join(lines))
    else:
        table("The libraries' own functions against their entries", _HEAD, [_cells(row) for row in rows], len(_HEAD))
    counted = {status: sum(row.status == status for row in rows) for status in dict.fromkeys(r.status for r in rows)}
    words = {"agrees": "agree", "drift": "drifted"}
    click.echo("\n" + ", ".join(f"{count} {words.get(status, status)}" for status, count in counted.items()))
    called = dict.fromkeys(f"{a.library}: {a.function}" for a in adapters if _ran(a, rows))
    for line in called:
        click.echo(f"called {line}")


def _ran(adapter: Adapter, rows: list[Row]) -> bool:
    return any(row.library == adapter.library and row.settings for row in rows)
