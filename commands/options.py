"""Options that commands share, and what they stand for: the pair, its lengths, the configurations."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from klgrad.commands.display import notes

if TYPE_CHECKING:
    from klgrad.synth.configurations import Configuration
    from klgrad.synth.policies import PolicyPair

DEFAULT = tuple(f"{name}-in-{placement}" for name in ("k1", "k3") for placement in ("reward", "loss", "both"))
DEFAULT_PRESET = "near"
MAX_LENGTH = 1_000_000
MAX_ROWS = 100_000  # of a table: seconds to make and to print, and more than anybody reads

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


def workers_of(given: int | None) -> int:
    """How many to use where --workers says it, and where it does not: the CPUs, up to 4."""
    return given or min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Drawing:
    """How to sample."""

    trials: int
    samples: int
    seed: int
    workers: int | None
    quiet: bool
    scheduler: str | None = None
    device: str = "cpu"

    @property
    def request(self) -> dict[str, Any]:
        """What decides the numbers."""
        return {"trials": self.trials, "samples": self.samples, "seed": self.seed, "device": self.device}

    @property
    def threads(self) -> int:
        """Threads to use; the numbers do not depend on them."""
        return workers_of(self.workers)


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


def grouped(name: str, kind: type, *options: Callable[[Command], Command]) -> Callable[[Command], Command]:
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


pair_options = grouped(
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
scheduler_option = click.option(
    "--scheduler",
    metavar="ADDRESS",
    envvar="KLGRAD_SCHEDULER",
    show_envvar=True,
    help="Work on a Dask cluster, tcp://HOST:PORT, instead of here; the numbers do not depend on it.",
)
sampling_options = grouped(
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
    scheduler_option,
    click.option(
        "--device",
        default="cpu",
        show_default=True,
        metavar="DEVICE",
        help="Where to draw: cpu (numpy, the reference), cuda or cuda:N (torch on a GPU), torch-cpu (the same without "
        "one). Each draws other numbers of the same law.",
    ),
)
out_option = click.option(
    "--out", type=click.Path(path_type=Path), default=Path("out"), show_default=True, help="Folder to write to."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
exact_only_option = click.option("--exact-only", is_flag=True, help="Exact curves without the Monte Carlo.")


def format_option(*forms: str) -> Callable[[Command], Command]:
    """--format, one of these; the first is the default."""
    return click.option(
        "--format", "form", type=click.Choice(forms), default=forms[0], show_default=True, help="How to print it."
    )


def pair_of(source: Source, length: int) -> PolicyPair:
    """The pair asked for, with who samples it; ``length`` is how long a preset must reach.

    Raises:
        ValueError: for a preset and a pair at once, or what cannot be loaded or does not fit together.
    """
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


def lengths_of(lengths: list[int] | None, source: Source) -> list[int]:
    """The lengths asked for; by default the preset's own, and 5 to 20 for a pair of the user's."""
    from klgrad.synth.presets import PRESETS

    if lengths:
        return lengths
    known = source.pair is None and source.preset_name in PRESETS
    return list(PRESETS[source.preset_name].lengths) if known else list(range(5, 21))


def check_rows(lengths: Sequence[int], configurations: int = 1) -> None:
    """Refuse a table that would take minutes to make and gigabytes to hold, before any work.

    Raises:
        ValueError: for more than ``MAX_ROWS``, with lengths that fit.
    """
    rows = len(lengths) * configurations
    if rows > MAX_ROWS:
        step = -(-rows // MAX_ROWS) * max(1, (lengths[-1] - lengths[0]) // max(1, len(lengths) - 1))
        asked = f"{len(lengths):,} lengths" + (f" of {configurations} configurations" if configurations > 1 else "")
        raise ValueError(
            f"{asked} are {rows:,} rows, past the limit of {MAX_ROWS:,}: take steps, such as "
            f"--lengths {lengths[0]}:{lengths[-1]}:{step}"
        )


def configurations_of(names: Sequence[str], pairs: Sequence[PolicyPair], quiet: bool) -> list[Configuration]:
    """The configurations asked for or the default ones, each once; cautions about them and the pairs are printed.

    Raises:
        ValueError: for a name outside the grammar.
    """
    from klgrad.synth.configurations import parse

    found = list(dict.fromkeys(parse(name) for name in names or DEFAULT))
    notes((c for pair in pairs for configuration in found for c in configuration.cautions(pair)), quiet)
    return found
