"""`klgrad lint`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from klgrad.commands.display import dump, number
from klgrad.commands.options import Source, json_option, lengths_of, lengths_option, pair_of, pair_options

if TYPE_CHECKING:
    from klgrad.analysis.lint import Report, Run
    from klgrad.analysis.settings import Setting

_PRESET, _LENGTH = "words", 10  # replies of random length: there aggregation shows
_ABOVE = 4  # folders above a file's in which a path that it names is looked for
_COLOURS = {"open": "magenta", "error": "red", "warning": "yellow", "note": "cyan"}


@click.command(short_help="What a library's config file really does to the KL.")
@click.argument("file", type=click.Path(allow_dash=True))
@click.option(
    "--library",
    "name",
    metavar="NAME[@VERSION]",
    help="Whose settings they are, and of which version or month (verl@0.2.0, verl@2025-02); `klgrad libraries` lists "
    "them. Default: recognised from all keys and from the names in the file, where that is clear.",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="A setting that counts before the file's.")
@click.option("-v", "--verbose", is_flag=True, help="Also name the settings that bear on nothing here.")
@pair_options
@lengths_option
@json_option
def lint(
    file: str,
    name: str | None,
    overrides: tuple[str, ...],
    verbose: bool,
    source: Source,
    lengths: list[int] | None,
    as_json: bool,
) -> None:
    """What a library's config file really does to the KL: verdict, exact bias and variance, traps.

    FILE is YAML, JSON, TOML, or a shell script or command line with Hydra overrides (a.b.c=value) or flags
    (--kl-coef 0.01); - reads standard input. Nothing in it is executed; files that it refers to are read from beside
    it. A script that starts several runs, or one with several values, gets a verdict for each. The exit code is 1 where
    a finding is an error, and 2 where a verdict would rest on a guess. Numbers are for a coefficient of 1, on the
    preset words at T = 10 unless you ask for another pair.

    \b
    klgrad lint ppo.yaml --library verl
    echo "algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl" | klgrad lint -
    """
    from klgrad.analysis.composition import documents
    from klgrad.analysis.libraries import library
    from klgrad.analysis.lint import examine

    text = _text(file)
    found = documents(text, file, _beside(file), may_be_empty=name is not None)
    extra = [s for each in overrides for s in _override(each)]
    found = [replace(run, settings=(*run.settings, *extra)) for run in found]
    runs = examine(found, library(name) if name else None)
    measured = [_numbers(run.report, source, lengths) for run in runs]
    if as_json:
        contents = [_content(file, found[0].format, run, m) for run, m in zip(runs, measured, strict=True)]
        dump(contents[0] if len(runs) == 1 else {"file": file, "runs": contents})
    else:
        for i, (run, m) in enumerate(zip(runs, measured, strict=True)):
            if i:
                click.echo()
            _show(file, run, m, several=len(runs) > 1, verbose=verbose)
    code = 2 if any(run.report.open for run in runs) else int(any(run.report.errors for run in runs))
    click.get_current_context().exit(code)


def _numbers(report: Report, source: Source, lengths: list[int] | None) -> list[dict[str, Any]]:
    from klgrad.analysis.lint import active, numbers

    terms = active(report.resolution)
    if not terms or report.open:
        return []
    if source.preset is None and source.pair is None:
        source, lengths = Source(_PRESET, None, source.behaviour), lengths or [_LENGTH]
    usual = lengths_of(None, source)
    wanted = lengths or sorted({usual[0], usual[-1]})
    pair = pair_of(source, max(wanted))
    return [numbers(terms, pair, length) for length in wanted]


def _beside(file: str) -> Callable[[str], str | None]:
    """Texts of files by the paths that a file uses: from its folder, or from one above, as a repository's root."""
    folder = Path(file).resolve().parent

    def text(name: str) -> str | None:
        if file == "-" or "$" in name:
            return None
        parts = Path(name).parts
        ends = [Path(*parts[i:]) for i in range(1, len(parts))] if Path(name).is_absolute() else [Path(name)]
        for start in [folder, *list(folder.parents)[:_ABOVE]]:
            for end in ends:
                try:
                    return (start / end).read_text(encoding="utf-8-sig")
                except (OSError, ValueError):
                    continue
        return None

    return text


def _override(text: str) -> list[Setting]:
    from klgrad.analysis.settings import Setting, plain

    if "=" not in text:
        raise ValueError(f"--set {text}: write KEY=VALUE")
    key, _, value = text.partition("=")
    return [Setting(key.strip().removeprefix("--"), plain(value))]


def _text(file: str) -> str:
    try:
        if file == "-":
            return sys.stdin.read()
        return Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no UTF-8 text file") from None
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None


def _show(file: str, run: Run, measured: list[dict[str, Any]], *, several: bool, verbose: bool) -> None:
    report = run.report
    entry = report.resolution.library
    if several:
        click.echo(f"run           {run.label or 'as it stands'}")
    click.echo(f"{entry.title} {entry.version}, read from {entry.read}" if not entry.stage else entry.title)
    if run.clues:
        click.echo(f"library       {entry.name}, by {', '.join(run.clues[:4])}")
    label = "without it" if report.open else "verdict"
    if report.open:
        ids = ", ".join(dict.fromkeys(finding.id for finding in report.findings if finding.level == "open"))
        click.echo(f"verdict       not known: {ids}")
    if not entry.stage:
        _show_penalties(report)
        click.echo(f"{label:<14}{report.verdict}")
    if report.off_policy:
        click.echo(f"off-policy    {report.off_policy} (stale samples, policy loss unclipped)")
    for other in run.others:
        _show_other(other)
    for m in measured:
        click.echo(f"on {m['preset']:<10} T = {m['length']}: {_measured(m)}")
    if verbose and (names := report.not_read):
        click.echo(f"not read      {len(names)} other setting{'s' if len(names) > 1 else ''}: {', '.join(names)}")
    if report.findings:
        click.echo()
    shown = "stdin" if file == "-" else file
    for finding in report.findings:
        where = shown if finding.line is None else f"{shown}:{finding.line}"
        level = click.style(finding.level, fg=_COLOURS[finding.level], bold=finding.level in ("open", "error"))
        click.echo(f"{where}: {level}: {finding.message} [{finding.id}]")


def _show_penalties(report: Report) -> None:
    for penalty in report.resolution.penalties:
        click.echo(f"penalty       {penalty.coefficient:g} x {penalty.recipe}")


def _show_other(other: Report) -> None:
    """The same settings as another trainer or edition would read them."""
    entry = other.resolution.library
    penalties = " and ".join(f"{p.coefficient:g} x {p.recipe}" for p in other.resolution.penalties)
    until = f", until {entry.until}" if entry.until else ""
    click.echo(
        f"or            {other.verdict}{' (' + penalties + ')' if penalties else ''} in {entry.title} {entry.version}"
        f"{until} (--library {entry.name})"
    )


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


def _content(file: str, form: str, run: Run, measured: list[dict[str, Any]]) -> dict[str, Any]:
    from klgrad.analysis.results import finite

    report = run.report
    entry, resolution, reading = report.resolution.library, report.resolution, report.reading
    given = resolution.given
    return {
        "file": file,
        "format": form,
        "run": run.label,
        "library": entry.name,
        "version": entry.version,
        "read": entry.read,
        "recognised_by": list(run.clues),
        "settings": {
            key: {"value": value, "given": key in given, "line": given[key].line if key in given else None}
            for key, value in resolution.values.items()
        },
        "penalties": [
            {"placement": p.placement, "coefficient": p.coefficient, "recipe": str(p.recipe)}
            for p in resolution.penalties
        ],
        "open": report.open,
        "verdict": "not known" if report.open else (reading.name if reading else "none"),
        "phrase": "not known" if report.open else (reading.phrase if reading else "no KL penalty"),
        "provided": list(report.provided),
        "off_policy": str(report.off_policy) if report.off_policy else None,
        "others": [{"library": o.resolution.library.name, "verdict": o.verdict} for o in run.others],
        "numbers": [{key: finite(value) for key, value in m.items()} for m in measured],
        "not_read": list(report.not_read),
        "findings": [
            {"level": f.level, "id": f.id, "message": f.message, "line": f.line, "keys": [key for key, _ in f.keys]}
            for f in report.findings
        ],
    }  # fmt: skip
