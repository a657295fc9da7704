"""The one sweep behind figure1, growth and compare: pairs x configurations x lengths, saved whole, resumable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from klgrad.commands.display import Progress, notes
from klgrad.commands.folders import STORE, present, resumable, told
from klgrad.commands.options import Drawing, Source, check_rows, configurations_of, lengths_of, pair_of

if TYPE_CHECKING:
    import pandas as pd

    from klgrad.synth.configurations import Configuration
    from klgrad.synth.policies import PolicyPair

FIGURE_PRESETS = ("near", "far")  # the rows of Figure 1 when no pair is named


def figure_rows(source: Source) -> list[Source]:
    """The pairs of a figure, one row each."""
    named = source.preset is not None or source.pair is not None
    return [source] if named else [Source(name, None, source.behaviour) for name in FIGURE_PRESETS]


def sweep(
    command: str,
    sources: Sequence[Source],
    lengths: Sequence[list[int] | None],
    configs: Sequence[str],
    drawing: Drawing,
    out: Path | None,
    *,
    exact_only: bool,
    draw: Callable[[pd.DataFrame], str] | None = None,
    extend: Callable[[PolicyPair, pd.DataFrame], pd.DataFrame] | None = None,
    asked: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """The table of all pairs; with ``out`` drawn, saved as ``command.csv`` and ``.json``, and resumable until then.

    ``lengths`` has a list for each source, or None for its own. ``extend`` adds columns to each pair's table;
    ``asked`` is what the manifest should say of it.
    """
    import pandas as pd

    from klgrad.analysis import results
    from klgrad.analysis.montecarlo import check_counts, check_device, store_of

    check_counts(drawing.trials, drawing.samples)
    check_device(drawing.device, drawing.scheduler)
    wanted = [lengths_of(each, source) for each, source in zip(lengths, sources, strict=True)]
    pairs = [pair_of(source, max(each)) for source, each in zip(sources, wanted, strict=True)]
    configurations = configurations_of(configs, pairs, drawing.quiet)
    for each in wanted:
        check_rows(each, len(configurations))
    there = present(out)
    store = None if out is None else out / STORE
    frames = []
    with resumable(store):
        for pair, each in zip(pairs, wanted, strict=True):
            with Progress(pair.name, drawing.quiet) as progress:
                table = results.compare(
                    pair, configurations, each,
                    exact_only=exact_only, workers=drawing.threads, scheduler=drawing.scheduler, store=store,
                    progress=progress, **drawing.request,
                )  # fmt: skip
            notes(results.lost_digits(pair, table), drawing.quiet)
            frames.append(extend(pair, table) if extend else table)
        frame = pd.concat(frames, ignore_index=True)
        notes((f"{c}: beyond double precision on this pair" for c in results.beyond_float64(frame)), drawing.quiet)
        notes(results.short_of_variance(frame), drawing.quiet)
        if out is not None and store is not None:
            caption = draw(frame) if draw else ""
            request = _request(sources, pairs, configurations, wanted, drawing, exact_only) | dict(asked or {})
            results.save(frame, results.manifest(f"klgrad {command}", pairs, request), out / command)
            for pair in pairs:  # only now: until here an interruption loses nothing
                results.forget(store_of(store, pair, configurations, **drawing.request))
            files = [out / f"{command}.{kind}" for kind in (("png", "pdf") if draw else ()) + ("csv", "json")]
            if draw and not drawing.quiet:
                click.echo("\n".join(filter(None, [caption, told(files, there)])))
            elif there.intersection(files):  # the table itself is what is printed
                notes([told(files, there)], drawing.quiet)
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
    from klgrad.analysis.montecarlo import sampler_used

    return {
        "sources": [vars(source) for source in sources],
        "configurations": [str(c) for c in configurations],
        "lengths": lengths,
        "exact_only": exact_only,
        "samplers": {}
        if exact_only
        else {pair.name: sampler_used(pair, configurations, drawing.device) for pair in pairs},
        **drawing.request,
    }
