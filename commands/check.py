"""`klgrad check`."""

from __future__ import annotations

import shutil
import sys
import textwrap

import click

from klgrad.commands.display import Progress, dump
from klgrad.commands.options import json_option


@click.command(short_help="What does this KL term optimise, how noisy is it, does it hold?")
@click.argument("function")
@click.option("--placement", metavar="WHERE", help="reward, loss or both: that one must give the target. Default: all.")
@click.option(
    "--target",
    default="sequence",
    show_default=True,
    metavar="FIELD",
    help="The gradient wanted: sequence (of the sequence-level reverse KL), token, token-forward, jensen-shannon, "
    "entropy, ...; or what a configuration (k2-in-loss) or FILE.py:NAME gives.",
)
@click.option(
    "--returns",
    default="penalty",
    show_default=True,
    metavar="KIND",
    help="What it returns: a penalty, a reward (its negative), or return (rewards to go, one per token).",
)
@click.option("--map", "mapping", multiple=True, metavar="THEIRS=OURS", help="What a parameter is; may be repeated.")
@click.option("--arg", "arguments", multiple=True, metavar="NAME=VALUE", help="A further argument; may be repeated.")
@click.option(
    "--error",
    type=float,
    default=0.1,
    show_default=True,
    help="Count sequences for this relative error of the gradient.",
)
@click.option(
    "--timeout", type=float, default=30.0, show_default=True, help="Seconds that one call, and the import, may take."
)
@click.option(
    "--strict", is_flag=True, help="What only odd input shows is an error too: NaN at padding, half precision."
)
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Only the verdict.")
@click.option(
    "-v", "--verbose", is_flag=True, help="All findings, what each parameter was given, the function's own tracebacks."
)
@click.pass_context
def check(
    ctx: click.Context,
    function: str,
    placement: str | None,
    target: str,
    returns: str,
    mapping: tuple[str, ...],
    arguments: tuple[str, ...],
    error: float,
    timeout: float,
    strict: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """What does a KL estimator or loss really optimise, how noisy is it, and does it survive bad input?

    FUNCTION is a built-in (k3, k3-in-loss) or code of yours, FILE.py:NAME or package.module:NAME, in numpy or torch.
    It is called with what its parameters ask for, by name: log-probs of the policy (logp, log_probs, ...), of the
    reference (ref_logp, ...), of the policy that sampled (old_logp, ...), mask, tokens, logits, ref_logits, beta; and
    returns a penalty per token [B, T], per sequence [B], or a loss. Everything is exact: by enumeration, on small
    models of length 1, 2, 4 and 8, with and without an end token. Without --placement each is judged, and all must give
    the target. Exit code 0: PASS, 1: FAIL, 2: bad use.

    \b
    klgrad check k3-in-loss
    klgrad check examples/my_kl.py:penalty --placement loss --target token-forward
    klgrad check my_pkg.losses:grpo --map lp=log_probs --arg eps=0.2 --json
    """
    from klgrad.analysis import check as run
    from klgrad.analysis.checking.signature import constant

    with Progress("checking", quiet or as_json) as progress:
        report = run(
            function,
            placement=placement,
            target=target,
            returns=returns,
            mapping=dict(_equation(text) for text in mapping),
            arguments=dict(constant(text) for text in arguments),
            error=error,
            timeout=timeout,
            strict=strict,
            progress=progress,
        )
    if as_json:
        dump(report.to_dict())
    elif quiet:
        click.echo(report.verdict)
    else:
        click.echo(_wrapped(report.text(verbose=verbose)))
    ctx.exit(0 if report.passed else 1)


def _equation(text: str) -> tuple[str, str]:
    theirs, equals, ours = text.partition("=")
    if not equals:
        raise ValueError(f"--map {text!r}: write THEIRS=OURS, such as --map lp=log_probs")
    return theirs.strip(), ours.strip()


def _wrapped(text: str) -> str:
    """Long findings folded to the terminal's width; as they are where nobody looks."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=" " * 11 if line.startswith("  ") else "") or line
        for line in text.splitlines()
    )
