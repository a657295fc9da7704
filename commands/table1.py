"""`klgrad table1`."""

from __future__ import annotations

import click

from klgrad.commands.options import Source, format_option, lengths_of, lengths_option, pair_of, pair_options


@click.command(short_help="What each estimator and placement really optimises.")
@pair_options
@lengths_option
@click.option("--estimator", "names", multiple=True, metavar="NAME", help="May be repeated. Default: all.")
@format_option("text", "markdown", "latex", "html")
def table1(source: Source, lengths: list[int] | None, names: tuple[str, ...], form: str) -> None:
    """Estimator x placement: what the expected gradient is, and its exact relative bias (the paper's Table 1).

    The words are decided on random models and hold for every model; the numbers are the pair's.
    """
    from klgrad.analysis.results import compare as tabulate
    from klgrad.analysis.verdicts import verdict
    from klgrad.figures import table1 as lay_out
    from klgrad.synth.configurations import PLACEMENTS, parse
    from klgrad.synth.estimators import ESTIMATORS, estimator

    chosen = [estimator(name) for name in names or ESTIMATORS]
    usual = lengths_of(None, source)
    wanted = lengths or sorted({usual[0], usual[-1]})
    pair = pair_of(source, max(wanted))
    configurations = [parse(f"{name}-in-{placement}") for name in chosen for placement in PLACEMENTS]
    frame = tabulate(pair, configurations, wanted, exact_only=True)
    words = {str(c): verdict(c, off_policy=not pair.on_policy).phrase for c in configurations}
    click.echo(lay_out(frame, words, form))
