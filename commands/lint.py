"""`klgrad lint`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from klgrad.commands.display import dump, number
from klgrad.commands.options import Source, json_option, lengths_of, lengths_option, pair_of, pair_options

if TYPE_CHECKING:
    from klgrad.analysis.libraries import Library
    from klgrad.analysis.lint import Report
    from klgrad.analysis.settings import Document

_PRESET, _LENGTH = "words", 10  # replies of random length: there aggregation shows
_FEW = 6  # settings that are not read and are named
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


@click.command(short_help="What a library's config file really does to the KL.")
@click.argument("file", type=click.Path(allow_dash=True))
@click.option(
    "--library",
    "name",
    metavar="NAME[@VERSION]",
    help="Whose settings they are; `klgrad libraries` lists them. Default: guessed from the keys, where that is clear.",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="A setting that counts before the file's.")
@pair_options
@lengths_option
@json_option
def lint(
    file: str,
    name: str | None,
    overrides: tuple[str, ...],
    source: Source,
    lengths: list[int] | None,
    as_json: bool,
) -> None:
    """What a library's config file really does to the KL: verdict, exact bias and variance, traps.

    FILE is YAML, JSON, TOML, or a shell script or command line with Hydra overrides (a.b.c=value) or flags
    (--kl-coef 0.01); - reads standard input. Nothing in it is executed. The exit code is 1 where a finding is an
    error. Numbers are for a coefficient of 1, on the preset words at T = 10 unless you ask for another pair.

    \b
    klgrad lint ppo.yaml --library verl
    echo "algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl" | klgrad lint -
    """
    from klgrad.analysis.libraries import guess, library
    from klgrad.analysis.lint import active, numbers
    from klgrad.analysis.lint import lint as examine
    from klgrad.analysis.settings import read

    document = read(_text(file), file, may_be_empty=name is not None)
    extra = [replace(s, line=None) for each in overrides for s in read(_override(each), "--set.sh").settings]
    document = replace(document, settings=(*document.settings, *extra))
    entry, clues = (library(name), []) if name else guess(document.settings, document.words)
    report = examine(entry, document.settings, document.repeated)
    terms = active(report.resolution)
    measured = []
    if terms:
        if source.preset is None and source.pair is None:
            source, lengths = Source(_PRESET, None, source.behaviour), lengths or [_LENGTH]
        usual = lengths_of(None, source)
        wanted = lengths or sorted({usual[0], usual[-1]})
        pair = pair_of(source, max(wanted))
        measured = [numbers(terms, pair, length) for length in wanted]
    if as_json:
        dump(_content(file, document, report, measured, clues))
    else:
        _show(file, entry, report, measured, clues)
    if report.errors:
        click.get_current_context().exit(1)


def _override(text: str) -> str:
    if "=" not in text:
        raise ValueError(f"--set {text}: write KEY=VALUE")
    key, _, value = text.partition("=")
    return f"{key.strip().removeprefix('--')}='{value.strip()}'"


def _text(file: str) -> str:
    try:
        if file == "-":
            return sys.stdin.read()
        return Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no UTF-8 text file") from None
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None


def _show(file: str, entry: Library, report: Report, measured: list[dict[str, Any]], clues: list[str]) -> None:
    click.echo(f"{entry.title} {entry.version}, read from {entry.read}")
    if clues:
        click.echo(f"library       {entry.name}, guessed from {', '.join(clues[:4])}")
    for penalty in report.resolution.penalties:
        click.echo(f"penalty       {penalty.coefficient:g} x {penalty.recipe}")
    click.echo(f"verdict       {report.verdict}")
    if report.off_policy:
        click.echo(f"off-policy    {report.off_policy} (stale samples, policy loss unclipped)")
    for m in measured:
        click.echo(f"on {m['preset']:<10} T = {m['length']}: {_measured(m)}")
    if names := report.not_read:
        which = f": {', '.join(names)}" if len(names) <= _FEW else ""
        click.echo(f"not read      {len(names)} other setting{'s' if len(names) > 1 else ''}{which}")
    if report.findings:
        click.echo()
    shown = "stdin" if file == "-" else file
    for finding in report.findings:
        where = shown if finding.line is None else f"{shown}:{finding.line}"
        level = click.style(finding.level, fg=_COLOURS[finding.level], bold=finding.level == "error")
        click.echo(f"{where}: {level}: {finding.message} [{finding.id}]")


def _measured(m: dict[str, Any]) -> str:
    """Bias and variance at a coefficient of 1, with the noise of what was sampled."""
    sampled = m["method"] == "sampling"
    noise = f" +- {number(m['noise'], 2)}" if sampled else ""
    left = "0" if not sampled and m["rescaled_bias"] < 1e-6 else number(m["rescaled_bias"], 3)
    bias = "0" if not sampled and m["bias"] < 1e-9 * m["gradient_norm"] else number(m["bias"])
    return (
        f"KL {number(m['kl'])}, |gradient| {number(m['gradient_norm'])}; bias {bias}{noise}, "
        f"relative {left} at the best scale ({number(max(m['scale'], 0.0), 3)}), cosine {number(m['cosine'])}, "
        f"variance {number(m['variance'])} ({m['method']})"
    )


def _content(
    file: str, document: Document, report: Report, measured: list[dict[str, Any]], clues: list[str]
) -> dict[str, Any]:
    from klgrad.analysis.results import finite

    entry, resolution, reading = report.resolution.library, report.resolution, report.reading
    given = resolution.given
    return {
        "file": file,
        "format": document.format,
        "library": entry.name,
        "version": entry.version,
        "read": entry.read,
        "guessed_from": clues,
        "settings": {
            key: {"value": value, "given": key in given, "line": given[key].line if key in given else None}
            for key, value in resolution.values.items()
        },
        "penalties": [
            {"placement": p.placement, "coefficient": p.coefficient, "recipe": str(p.recipe)}
            for p in resolution.penalties
        ],
        "verdict": reading.name if reading else "none",
        "phrase": reading.phrase if reading else "no KL penalty",
        "provided": list(report.provided),
        "off_policy": str(report.off_policy) if report.off_policy else None,
        "numbers": [{key: finite(value) for key, value in m.items()} for m in measured],
        "not_read": list(report.not_read),
        "findings": [
            {"level": f.level, "id": f.id, "message": f.message, "line": f.line, "keys": [key for key, _ in f.keys]}
            for f in report.findings
        ],
    }  # fmt: skip
