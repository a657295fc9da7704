"""klgrad: one command per question. No mathematics here."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import pandas as pd

    from klgrad.synth.configurations import Configuration
    from klgrad.synth.policies import PolicyPair

DEFAULT = tuple(f"{name}-in-{placement}" for name in ("k1", "k3") for placement in ("reward", "loss", "both"))
GROWTH_LENGTHS = (
    "1:10,12,14,17,20,24,28,34,40,48,51,57,68,80,95,113,135,160,190,226,269,320,381,453,539,641,762,906,1000"
)
DEFAULT_PRESET = "near"
FIGURE_PRESETS = ("near", "far")  # the rows of Figure 1 when no pair is named
STORE = ".klgrad-blocks"
MAX_LENGTH = 1_000_000

Command = Callable[..., Any]


@dataclass(frozen=True)
class Source:
    """Which pair: a preset, a file or function of the user's, and who samples."""

    preset: str | None
    pair: str | None
    behaviour: str | None

    @property
    def preset_name(self) -> str:
        """The preset asked for, or the default one; an empty name is a name, and unknown."""
        return DEFAULT_PRESET if self.preset is None else self.preset


@dataclass(frozen=True)
class Drawing:
    """How to sample."""

    trials: int
    samples: int
    seed: int
    workers: int | None
    quiet: bool

    @property
    def request(self) -> dict[str, int]:
        """What decides the numbers."""
        return {"trials": self.trials, "samples": self.samples, "seed": self.seed}

    @property
    def threads(self) -> int:
        """Threads to use; the numbers do not depend on them."""
        return self.workers or min(4, os.cpu_count() or 1)


class BadInput(click.ClickException):
    """What a user gave cannot be used: one sentence, exit code 2."""

    exit_code = 2


class Group(click.Group):
    """Bad input is one sentence and exit code 2, wherever it was found."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise BadInput(" ".join(str(error).split())) from error
        except KeyboardInterrupt as stopped:
            click.echo(f"interrupted{stopped}", err=True)
            ctx.exit(130)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="klgrad")
def main() -> None:
    """What does my KL penalty really optimise, and how noisy is it?

    Exact bias and variance of every KL estimator and placement on autoregressive models small enough to be
    computed exactly, with the Monte Carlo of "A Comedy of Estimators" (arXiv 2512.21852) on top. KL in nats.
    """


# ----------------------------------------------------------------------------------------------------- options


class Lengths(click.ParamType[list[int]]):
    """``5:20`` (both ends), ``5:20:5`` (with a step), ``5,10,20``, or a mix."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Sorted lengths without repeats."""
        if isinstance(value, list):
            return value
        found: set[int] = set()
        for piece in str(value).split(","):
            try:
                numbers = [int(number) for number in piece.split(":")]
            except ValueError:
                numbers = []
            if not 1 <= len(numbers) <= 3:
                raise ValueError(f"{value!r} is no list of lengths: write 5:20 (both ends), 5:20:5, or 5,10,20")
            first, last, step = numbers[0], numbers[min(1, len(numbers) - 1)], numbers[2] if len(numbers) == 3 else 1
            if first < 1 or last < first or step < 1:
                raise ValueError(f"{piece!r} is no range of lengths: it starts at 1 or more and does not run backwards")
            if last > MAX_LENGTH:
                raise ValueError(f"length {last} is past the limit of {MAX_LENGTH:,}")
            found.update(range(first, last + 1, step))
        return sorted(found)


def _grouped(name: str, kind: type, *options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options that reach the command as one object."""
    fields = list(kind.__dataclass_fields__)  # type: ignore[attr-defined]

    def apply(command: Command) -> Command:
        @wraps(command)
        def gathered(**given: Any) -> Any:
            return command(**{name: kind(**{field: given.pop(field) for field in fields})}, **given)

        wrapped: Command = gathered
        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped

    return apply


pair_options = _grouped(
    "source",
    Source,
    click.option("--preset", metavar="NAME", help="A published pair; `klgrad presets` lists them."),
    click.option("--pair", metavar="FILE|MODULE:FUNCTION", help="Your own pair: FILE.npz or MODULE:FUNCTION."),
    click.option(
        "--behaviour",
        metavar="POLICY",
        help="Who samples: policy, reference, uniform, or FILE.npz with behaviour_logits [S, V]. Default: the pair's.",
    ),
)
lengths_option = click.option(
    "--lengths",
    type=Lengths(),
    metavar="LENGTHS",
    help="5:20 (both ends), 5:20:5 or 5,10,20. Default: the preset's own.",
)
config_option = click.option(
    "--config",
    "configs",
    multiple=True,
    metavar="NAME",
    help="ESTIMATOR-in-PLACEMENT[+option]; may be repeated. Default: k1 and k3 in reward, loss and both.",
)
sampling_options = _grouped(
    "drawing",
    Drawing,
    click.option("--trials", type=int, default=200, show_default=True, help="Gradient estimates per length."),
    click.option("--samples", type=int, default=1000, show_default=True, help="Sequences per estimate (N)."),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Same seed, same numbers."),
    click.option(
        "--workers",
        type=click.IntRange(min=1),
        default=None,
        help="Threads; the numbers do not depend on it. Default: the CPUs, up to 4.",
    ),
    click.option("-q", "--quiet", is_flag=True, help="No progress, notes or summary."),
)
out_option = click.option(
    "--out", type=click.Path(path_type=Path), default=Path("out"), show_default=True, help="Folder to write to."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")


def _pair(source: Source, length: int) -> PolicyPair:
    from klgrad.synth.policies import load_pair
    from klgrad.synth.presets import preset

    if source.preset is not None and source.pair is not None:
        raise ValueError("give --preset or --pair, not both")
    pair = preset(source.preset_name, length) if source.pair is None else load_pair(source.pair)
    return pair if source.behaviour is None else _behaviour(pair, source.behaviour)


def _behaviour(pair: PolicyPair, behaviour: str) -> PolicyPair:
    import numpy as np

    from klgrad.synth.policies import load_log_probs, log_softmax, with_behaviour

    if behaviour == "policy":
        return with_behaviour(pair, None)
    if behaviour == "reference":
        return with_behaviour(pair, pair.reference)
    if behaviour == "uniform":
        return with_behaviour(pair, log_softmax(np.zeros(pair.reference.shape)))
    if behaviour.endswith(".npz"):
        return with_behaviour(pair, load_log_probs(behaviour, "behaviour_logits"))
    raise ValueError(f"--behaviour {behaviour!r} is none of policy, reference, uniform, FILE.npz")


def _lengths(lengths: list[int] | None, source: Source) -> list[int]:
    from klgrad.synth.presets import PRESETS

    if lengths:
        return lengths
    known = source.pair is None and source.preset_name in PRESETS
    return list(PRESETS[source.preset_name].lengths) if known else list(range(5, 21))


def _configurations(names: Sequence[str], pairs: Sequence[PolicyPair], quiet: bool) -> list[Configuration]:
    from klgrad.synth.configurations import parse

    found = list(dict.fromkeys(parse(name) for name in names or DEFAULT))
    _notes((c for pair in pairs for configuration in found for c in configuration.cautions(pair)), quiet)
    return found


def _notes(sentences: Iterable[str], quiet: bool) -> None:
    for sentence in dict.fromkeys(() if quiet else sentences):
        click.echo(f"note: {sentence}", err=True)


# ----------------------------------------------------------------------------------------------------- printing


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for i, name in enumerate(header):
        table.add_column(
            name, justify="left" if i < left else "right", overflow="fold", no_wrap=not sys.stdout.isatty()
        )
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 1000, emoji=False)
    if sys.stdout.isatty():
        console.print(table)
    else:
        with console.capture() as captured:
            console.print(table)
        click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _number(value: float | None, digits: int = 4) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.{digits}g}"


def _bias(row: dict[str, Any]) -> str:
    """An exact bias at rounding level is zero."""
    exact_zero = row["source"] == "exact" and row["bias"] is not None
    exact_zero = exact_zero and row["bias"] < 1e-9 * row["gradient_norm"] + 1e-15
    return "0" if exact_zero else _number(row["bias"])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One table row; exact rows have neither interval nor floor."""

    def sampled(text: str) -> str:
        return "" if row["source"] == "exact" else text

    bias = _bias(row)
    return (
        row["configuration"],
        str(row["length"]),
        row["source"].replace("_", " "),
        bias,
        sampled(f"[{_number(row['bias_low'], 3)}, {_number(row['bias_high'], 3)}]"),
        sampled(_number(row["bias_floor"], 2)),
        "0" if bias == "0" else _number(row["relative_bias"], 3),
        _number(row["cosine"]),
        _number(row["variance"]),
        sampled(f"[{_number(row['variance_low'], 3)}, {_number(row['variance_high'], 3)}]"),
        _number(row["estimate"]),
    )


def _show(frame: pd.DataFrame) -> None:
    from klgrad.analysis.results import records

    header = ["configuration", "T", "source", "bias", "95 % interval", "floor", "relative", "cosine"]
    header += ["variance", "95 % interval", "KL estimate"]
    for name, part in frame.groupby("preset", sort=False):
        _table(f"{name}: gradient of the sequence-level KL", header, [_cells(row) for row in records(part)])


def _dump(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, allow_nan=False))


class _Progress:
    """A bar on standard error, shown only on a terminal and only for work that lasts."""

    def __init__(self, label: str, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=console, transient=True, disable=quiet or not console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task(label, total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self.bar.start()
        return lambda done, total: self.bar.update(self.task, completed=done, total=total)

    def __exit__(self, *stopped: object) -> None:
        self.bar.stop()


# ----------------------------------------------------------------------------------------------------- commands


@main.command(short_help="The paper's Figure 1: bias and variance by length.")
@pair_options
@lengths_option
@config_option
@sampling_options
@out_option
@click.option("--exact-only", is_flag=True, help="Exact curves without the Monte Carlo.")
def figure1(
    source: Source, lengths: list[int] | None, configs: tuple[str, ...], drawing: Drawing, out: Path, exact_only: bool
) -> None:
    """Regenerate the paper's Figure 1: exact bias and variance against length, Monte Carlo on top.

    Writes figure1.png, figure1.pdf, figure1.csv and figure1.json (manifest and rows) to the --out folder. Without
    --preset or --pair it shows the presets near and far: the paper does not publish its two models.
    """

    def draw(frame: pd.DataFrame) -> str:
        from klgrad.figures import figure1, figure1_caption, save_figure

        save_figure(figure1(frame), out / "figure1")
        return figure1_caption(frame)

    _sweep("figure1", _rows_of(source), lengths, configs, drawing, out, exact_only=exact_only, draw=draw)


@main.command(short_help="Exact curves to T = 1,000 with growth exponents.")
@pair_options
@click.option(
    "--lengths", type=Lengths(), default=GROWTH_LENGTHS, metavar="LENGTHS", help="Default: 1 to 1000, log-spaced."
)
@config_option
@out_option
@click.option("-q", "--quiet", is_flag=True, help="No summary.")
def growth(source: Source, lengths: list[int], configs: tuple[str, ...], out: Path, quiet: bool) -> None:
    """Exact bias and variance on to T = 1,000 with growth exponents, which no sampling could show.

    Writes growth.png, growth.pdf, growth.csv and growth.json to the --out folder.
    """
    drawing = Drawing(trials=200, samples=1000, seed=0, workers=1, quiet=quiet)

    def draw(frame: pd.DataFrame) -> str:
        from klgrad.figures import growth, save_figure

        save_figure(growth(frame), out / "growth")
        return ""

    _sweep("growth", _rows_of(source), lengths, configs, drawing, out, exact_only=True, draw=draw)


def _rows_of(source: Source) -> list[Source]:
    """The pairs of a figure, one row each."""
    named = source.preset is not None or source.pair is not None
    return [source] if named else [Source(name, None, source.behaviour) for name in FIGURE_PRESETS]


def _sweep(
    command: str,
    sources: Sequence[Source],
    lengths: list[int] | None,
    configs: Sequence[str],
    drawing: Drawing,
    out: Path | None,
    *,
    exact_only: bool,
    draw: Callable[[pd.DataFrame], str] | None = None,
) -> pd.DataFrame:
    """The table of all pairs; with ``out`` drawn, saved as ``command.csv`` and ``.json``, and resumable until then."""
    import pandas as pd

    from klgrad.analysis import results
    from klgrad.analysis.montecarlo import check_counts, store_of

    check_counts(drawing.trials, drawing.samples)
    wanted = [_lengths(lengths, source) for source in sources]
    pairs = [_pair(source, max(each)) for source, each in zip(sources, wanted, strict=True)]
    configurations = _configurations(configs, pairs, drawing.quiet)
    store = None if out is None else results.writable_folder(out) / STORE
    frames = []
    try:
        for pair, each in zip(pairs, wanted, strict=True):
            with _Progress(pair.name, drawing.quiet) as progress:
                table = results.compare(
                    pair, configurations, each,
                    exact_only=exact_only, workers=drawing.threads, store=store, progress=progress, **drawing.request,
                )  # fmt: skip
            frames.append(table)
        frame = pd.concat(frames, ignore_index=True)
        _notes((f"{c}: beyond double precision on this pair" for c in results.beyond_float64(frame)), drawing.quiet)
        if out is not None and store is not None:
            caption = draw(frame) if draw else ""
            request = _request(sources, pairs, configurations, wanted, drawing, exact_only)
            results.save(frame, results.manifest(f"klgrad {command}", pairs, request), out / command)
            for pair in pairs:  # only now: until here an interruption loses nothing
                results.forget(store_of(store, pair, configurations, **drawing.request))
            if draw and not drawing.quiet:
                written = ", ".join(str(out / f"{command}.{kind}") for kind in ("png", "pdf", "csv", "json"))
                click.echo("\n".join(filter(None, [caption, f"wrote {written}"])))
    except KeyboardInterrupt:
        kept = store is not None and store.exists()
        where = f": finished blocks are kept in {store}; the same command goes on from them" if kept else ""
        raise KeyboardInterrupt(where) from None
    return frame


def _request(
    sources: Sequence[Source],
    pairs: Sequence[PolicyPair],
    configurations: Sequence[Configuration],
    lengths: list[list[int]],
    drawing: Drawing,
    exact_only: bool,
) -> dict[str, Any]:
    """What was asked, for the manifest, with the sampler that each pair's request chose."""
    from klgrad.synth.sampling import sampler_name

    return {
        "sources": [vars(source) for source in sources],
        "configurations": [str(c) for c in configurations],
        "lengths": lengths,
        "exact_only": exact_only,
        "samplers": {} if exact_only else {pair.name: sampler_name(pair, configurations) for pair in pairs},
        **drawing.request,
    }


@main.command(short_help="Bias and variance of any configurations, as a table.")
@pair_options
@lengths_option
@config_option
@sampling_options
@click.option("--exact-only", is_flag=True, help="Leave the Monte Carlo out.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write compare.csv and compare.json to this folder.")
@json_option
def compare(
    source: Source,
    lengths: list[int] | None,
    configs: tuple[str, ...],
    drawing: Drawing,
    exact_only: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Bias and variance of any configurations on any pair, as a table.

    \b
    klgrad compare --preset far --lengths 5,10,20 --config k1-in-reward+loo --config k3-in-both
    klgrad compare --pair mine.npz --exact-only --json
    """
    frame = _sweep("compare", [source], lengths, configs, drawing, out, exact_only=exact_only)
    if as_json:
        from klgrad.analysis.results import records

        _dump(records(frame))
    else:
        _show(frame)


@main.command(short_help="Exact KL, entropy and true gradient of a pair.")
@pair_options
@lengths_option
@json_option
def exact(source: Source, lengths: list[int] | None, as_json: bool) -> None:
    """Exact KL, forward KL, entropy and true gradient of a pair, by length."""
    import numpy as np

    from klgrad.analysis.results import finite
    from klgrad.synth import exact as engine

    wanted = _lengths(lengths, source)
    pair = _pair(source, max(wanted))
    gradient = engine.true_gradient(pair, wanted)
    columns = {
        "kl": engine.kl(pair, wanted),
        "forward_kl": engine.forward_kl(pair, wanted),
        "entropy": engine.entropy(pair, wanted),
        "gradient": gradient,
        "gradient_norm": np.linalg.norm(gradient, axis=1),
    }
    if as_json:
        _dump([
            {"length": n, **{name: finite(column[i].tolist()) for name, column in columns.items()}}
            for i, n in enumerate(wanted)
        ])  # fmt: skip
        return
    coordinates = gradient.shape[1] if gradient.shape[1] <= 8 else 0
    scalars = ("kl", "forward_kl", "entropy", "gradient_norm")
    rows = [
        [
            str(n),
            *(_number(columns[name][i], 6) for name in scalars),
            *(_number(g, 5) for g in gradient[i, :coordinates]),
        ]
        for i, n in enumerate(wanted)
    ]
    header = ["T", "KL", "forward KL", "entropy", "|gradient|", *(f"d{j}" for j in range(coordinates))]
    _table(f"{pair.name}: exact, in nats", header, rows, left=0)
    if not coordinates:
        click.echo(f"the gradient has {gradient.shape[1]} coordinates; --json gives them all")


@main.command(short_help="What each estimator and placement really optimises.")
@pair_options
@lengths_option
@click.option("--estimator", "names", multiple=True, metavar="NAME", help="May be repeated. Default: all.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "markdown", "latex"]),
    default="text",
    show_default=True,
    help="How to print it.",
)
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
    usual = _lengths(None, source)
    wanted = lengths or sorted({usual[0], usual[-1]})
    pair = _pair(source, max(wanted))
    configurations = [parse(f"{name}-in-{placement}") for name in chosen for placement in PLACEMENTS]
    frame = tabulate(pair, configurations, wanted, exact_only=True)
    words = {str(c): verdict(c, off_policy=not pair.on_policy).phrase for c in configurations}
    click.echo(lay_out(frame, words, form))


@main.command(short_help="The KL estimators there are.")
@json_option
def estimators(as_json: bool) -> None:
    """The KL estimators there are, with formula, slope and source (delta = log pi - log pi_ref, r = exp(-delta))."""
    from klgrad.synth.estimators import ESTIMATORS

    if as_json:
        _dump([
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
    _table("KL estimators", ("name", "value", "slope (times the score)", "E = KL", "source"), shown, left=5)


@main.command(short_help="The published policy pairs.")
@json_option
def presets(as_json: bool) -> None:
    """The published policy pairs, with all their numbers."""
    from klgrad.synth.presets import PRESETS

    if as_json:
        return _dump([
            {
                "name": name, "description": p.description, "numbers": p.numbers,
                "lengths": list(p.lengths), "source": p.source,
            }
            for name, p in PRESETS.items()
        ])  # fmt: skip
    for name, p in PRESETS.items():
        click.echo(f"{name}: {p.description}\n    {p.numbers}\n    source: {p.source}")


if __name__ == "__main__":
    main()
