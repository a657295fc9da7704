"""`klgrad report`."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import click

from klgrad.commands.display import count, notes, number
from klgrad.commands.folders import held, present, told
from klgrad.commands.growth import GROWTH_LENGTHS
from klgrad.commands.options import (
    Drawing,
    Lengths,
    Source,
    config_option,
    configurations_of,
    exact_only_option,
    lengths_of,
    lengths_option,
    out_option,
    pair_of,
    pair_options,
    sampling_options,
)
from klgrad.commands.sweep import sweep

if TYPE_CHECKING:
    import pandas as pd

    from klgrad.synth.policies import PolicyPair

SHOWN = ("true-gradient", "k1", "k3")
SHOWN_OFF_POLICY = ("off-policy",)
_DERIVED = 3  # tokens of the sequences that derivations write out
_MOST_CONTEXTS = 1 << 12  # up to which the curves on to T = 1,000 are drawn


@click.command(short_help="One HTML page about a pair: figures, tables, advice, derivations.")
@pair_options
@lengths_option
@config_option
@sampling_options
@out_option
@exact_only_option
def report(
    source: Source, lengths: list[int] | None, configs: tuple[str, ...], drawing: Drawing, out: Path, exact_only: bool
) -> None:
    """One self-contained page about a pair, to read, print or send: report.html in the --out folder.

    What to use on this pair, bias and variance by length, growth on to T = 1,000, the paper's Table 1 for the pair,
    the derivations with its numbers, and the manifest that makes it all again. The page fetches nothing.

    \b
    klgrad report --preset far --out out
    klgrad report --pair mine.npz --exact-only
    """
    from klgrad.analysis.derivations.render import STYLE
    from klgrad.analysis.results import manifest
    from klgrad.figures import page
    from klgrad.files import write_whole

    wanted = lengths_of(lengths, source)
    pair = pair_of(source, max(wanted))
    there = present(out)
    with held(out):
        frame = sweep("report", [source], [wanted], configs, drawing, None, exact_only=exact_only)
        request = {
            "source": vars(source), "lengths": wanted, "configurations": list(dict.fromkeys(frame["configuration"])),
            "exact_only": exact_only, **drawing.request,
        }  # fmt: skip
        provenance = json.dumps(manifest("klgrad report", [pair], request), indent=1)
        sections = [
            ("", _summary(pair, wanted, exact_only)),
            ("What to use", _advice(pair, wanted[-1], drawing.samples)),
            ("Bias and variance", _figure1(frame)),
            ("Growth", _growth(source, pair, configs, drawing)),
            ("What each gradient is", _table1(pair, wanted)),
            ("Why", _derivations(pair, drawing.quiet)),
            ("Manifest", f"<p>What makes this page again.</p>\n<pre>{escape(provenance)}</pre>"),
        ]
        html = page(f"KL gradients on the pair {pair.name}", [s for s in sections if s[1]], STYLE)
        write_whole(out / "report.html", html.encode())
    if not drawing.quiet:
        click.echo(told([out / "report.html"], there))


def _summary(pair: PolicyPair, lengths: list[int], exact_only: bool) -> str:
    import numpy as np

    from klgrad.figures import table
    from klgrad.synth import exact

    shown = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    kl, entropy, true = (f(pair, shown) for f in (exact.kl, exact.entropy, exact.true_gradient))
    sizes = np.linalg.norm(true, axis=1)
    rows = [[str(n), *(number(float(x), 6) for x in (kl[i], entropy[i], sizes[i]))] for i, n in enumerate(shown)]
    automaton = pair.automaton
    sampled = "sampled by the policy itself" if pair.on_policy else "sampled by an older policy (off-policy)"
    exactly = "Everything" if exact_only else "Everything but the points with bars"
    return (
        f"<p>{automaton.vocabulary} tokens, {automaton.contexts} contexts, {pair.policy.parameters} parameters; "
        f"{sampled}. {exactly} is exact. KL in nats; gradients are of the penalty.</p>\n"
        + table(["T", "KL(π‖q)", "entropy", "|∇KL|"], rows, text=0)
    )


def _advice(pair: PolicyPair, length: int, samples: int) -> str:
    from klgrad.analysis.advice import ERROR, GOALS, SHOWN, advise
    from klgrad.analysis.results import records
    from klgrad.figures import table
    from klgrad.zeros import zero_bias

    found = records(advise(pair, length, samples=samples))
    out = [
        f"<p>At T = {length}, quietest first. <em>Sequences</em>: how many bring the noise down to {ERROR:.0%} of the "
        f"true gradient; no number of them removes a bias. Of the unbiased ones the first {SHOWN} of every estimator, "
        "placement, credit and baseline there is, but for baselines that only an exact engine knows.</p>"
    ]
    head = ["configuration", "descends", "needs", "relative bias", "variance", "sequences"]
    for goal, words in GOALS.items():
        rows = [
            [
                row["configuration"],
                row["descends"],
                row["cost"],
                "0" if zero_bias(row) else number(row["relative_bias"], 3),
                number(row["variance"]),
                *([] if goal == "avoid" else [count(row["sequences_for_error"])]),
            ]
            for row in found
            if row["goal"] == goal
        ]
        shown = head[:-1] if goal == "avoid" else head  # what is to be avoided is worth no number of sequences
        out.append(f"<h3>{words[0].upper()}{words[1:]}</h3>\n{table(shown, rows, text=3)}")
    return "\n".join(out)


def _figure1(frame: pd.DataFrame) -> str:
    from klgrad.figures import figure1, figure1_caption, svg

    return f"{svg(figure1(frame), 'bias-and-variance')}\n<p>{escape(figure1_caption(frame))}</p>"


def _growth(source: Source, pair: PolicyPair, configs: tuple[str, ...], drawing: Drawing) -> str:
    """Nothing for a pair whose contexts end at a horizon."""
    if pair.automaton.horizon is not None or pair.automaton.contexts > _MOST_CONTEXTS:
        return ""
    from klgrad.analysis.results import compare
    from klgrad.figures import growth, svg

    lengths = Lengths().convert(GROWTH_LENGTHS, None, None)
    frame = compare(pair, configurations_of(configs, [pair], quiet=True), lengths, exact_only=True)
    return f"{svg(growth(frame), 'growth')}\n<p>Exact, with the exponent of each curve's last step.</p>"


def _table1(pair: PolicyPair, lengths: list[int]) -> str:
    from klgrad.analysis.results import compare
    from klgrad.analysis.verdicts import verdict
    from klgrad.figures import table1
    from klgrad.synth.configurations import PLACEMENTS, parse
    from klgrad.synth.estimators import ESTIMATORS, estimator

    configurations = [parse(f"{estimator(name)}-in-{placement}") for name in ESTIMATORS for placement in PLACEMENTS]
    frame = compare(pair, configurations, sorted({lengths[0], lengths[-1]}), exact_only=True)
    words = {str(c): verdict(c, off_policy=not pair.on_policy).phrase for c in configurations}
    return table1(frame, words, "html")


def _derivations(pair: PolicyPair, quiet: bool) -> str:
    """The derivations with this pair's numbers, folded; a sentence where the pair does not allow them."""
    from klgrad.analysis.derivations import check, derivation
    from klgrad.analysis.derivations.render import article

    out: list[str] = []
    horizon = pair.automaton.horizon or _DERIVED
    for name in SHOWN if pair.on_policy else SHOWN_OFF_POLICY:
        try:
            checked = check(derivation(name), pair, [min(_DERIVED, horizon)])
        except ValueError as refused:
            notes([f"no derivation {name}: {refused}"], quiet)
            return f"<p>No derivations on this pair: {escape(str(refused))}.</p>"
        out.append(article(checked, level=3, notation=not out))
    return "\n".join(out)
