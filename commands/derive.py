"""`klgrad derive`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from klgrad.commands.display import dump, notes, table
from klgrad.commands.options import Lengths, Source, format_option, json_option, pair_of, pair_options

if TYPE_CHECKING:
    from klgrad.analysis.derivations import Checked, Derivation


class CheckFailed(click.ClickException):
    """A step does not hold: exit code 1."""

    exit_code = 1


@click.command(short_help="Derivations that run: every step with both sides as numbers.")
@click.argument("name", required=False)
@click.option("--phi", metavar="FORMULA", help="An estimator of your own, phi(r) with r = pi_ref / pi, as a formula.")
@click.option("--placement", metavar="PLACEMENT", help="Only the steps for this placement: reward, loss or both.")
@pair_options
@click.option(
    "--lengths", type=Lengths(), metavar="LENGTHS", help="1:4, or 1,2,5. Default: the derivation's own, mostly 3."
)
@format_option("text", "markdown", "latex", "html")
@json_option
def derive(
    name: str | None,
    phi: str | None,
    placement: str | None,
    source: Source,
    lengths: list[int] | None,
    form: str,
    as_json: bool,
) -> None:
    """From the definition to what an estimator optimises, every step evaluated on an exact model.

    Without a NAME: the list of derivations. Both sides of each step are computed, one by summing over every sequence,
    and a step whose sides differ by more than the rounding of their terms stops with exit code 1. One that double
    precision cannot tell on this pair, next to the reference, says so and stops nothing. Lengths are short by default:
    every sequence is written out.

    With --phi: the derivation of an estimator of your own. A formula is made of numbers, r, delta (= -log r),
    + - * / ^, parentheses, log, exp, sqrt and abs.

    \b
    klgrad derive k3
    klgrad derive k3 --placement loss --preset near --lengths 1,2,3
    klgrad derive optimum --format html > optimum.html
    klgrad derive --phi "r*log(r) - (r-1)"
    """
    from klgrad.analysis.derivations import DERIVATIONS, derivation
    from klgrad.analysis.derivations.phi import phi_derivation
    from klgrad.analysis.derivations.render import as_data, formats

    if name is not None and phi is not None:
        raise ValueError(f"give the name of a derivation ({name}) or --phi, not both")
    if name is None and phi is None:
        _list(list(DERIVATIONS.values()), as_json)
        return
    shown = phi_derivation(phi) if phi is not None else derivation(str(name))
    checked = _checked(shown, source, lengths, placement)
    if as_json:
        dump(as_data(checked))
    else:
        click.echo(formats()[form](checked))


def _checked(shown: Derivation, source: Source, lengths: list[int] | None, placement: str | None) -> Checked:
    from klgrad.analysis.derivations import StepFailed, check

    named = source.preset is not None or source.pair is not None or source.behaviour is not None
    if shown.fixed and (named or lengths):
        raise ValueError(
            f"derivation {shown.name} is about the numbers of its own pair: leave --preset, --pair, --behaviour and "
            "--lengths out"
        )
    wanted = lengths or list(shown.lengths)
    default = source.pair is None and source.preset is None
    pair = pair_of(replace(source, preset=shown.preset) if default else source, max(wanted))
    if not (pair.on_policy or shown.off_policy):
        notes([f"{shown.name} is about samples of the policy itself: the behaviour policy is left aside"], False)
    try:
        return check(shown, pair, wanted, placement=placement)
    except StepFailed as failed:
        raise CheckFailed(str(failed)) from failed


def _list(every: list[Derivation], as_json: bool) -> None:
    if as_json:
        dump([
            {"name": d.name, "title": d.title, "source": d.source, "placements": list(d.placements)} for d in every
        ])  # fmt: skip
        return
    table("klgrad derive NAME", ("name", "what it shows"), [(d.name, d.title) for d in every], left=2)
