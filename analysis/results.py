"""Tidy tables of bias and variance, exact and sampled, with provenance; written atomically.

One row per configuration, length and source. ``bias`` is the Euclidean norm of expected minus true gradient (as
measured, where sampled); ``variance`` is N times the trace of the covariance of the N-sequence estimate.
"""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.analysis.arithmetic import arithmetic, system
from klgrad.analysis.montecarlo import CPU, Progress, Simulation, check_counts, fingerprint, identity, simulate
from klgrad.files import write_together
from klgrad.synth import exact
from klgrad.synth.configurations import Configuration, check_names
from klgrad.synth.fourth import Cumulants, fourth_cumulants
from klgrad.synth.moments import Moments, full_fits, moments
from klgrad.synth.policies import PolicyPair
from klgrad.zeros import zero_bias, zero_variance

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    "preset", "configuration", "estimator", "placement", "length", "source",
    "kl", "gradient_norm",
    "bias", "bias_low", "bias_high", "bias_floor", "bias_debiased", "bias_rounding", "relative_bias", "scale", "cosine",
    "variance", "variance_low", "variance_high", "variance_interval", "variance_rounding",
    "estimate", "estimate_variance", "estimate_variance_rounding", "samples", "trials",
)  # fmt: skip
LATER = (
    "bias_rounding",
    "variance_interval",
    "variance_rounding",
    "estimate_variance_rounding",
)  # columns that earlier tables lack
_ZERO = 1e-12  # a mean below this share of the true gradient has no direction
_FULL_PARAMETERS = 64
_FEW_DIGITS, _LOG_RATIO_DIGITS = 1e-6, 1e-9  # relative roundings from which numbers are not given without a word
_FEWEST = 3  # sequences that carry a variance, expected among those drawn, below which it has no upper end
EXACT, FOURTH, SKETCHED, SAMPLED, LOW_END = "exact", "fourth moment", "sketched", "sampled", "low end"


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # what overflows is in the table, and beyond_float64
def compare(
    pair: PolicyPair,
    configurations: Sequence[Configuration],
    lengths: Sequence[int],
    *,
    trials: int = 200,
    samples: int = 1000,
    seed: int = 0,
    exact_only: bool = False,
    workers: int = 1,
    device: str = CPU,
    scheduler: str | None = None,
    store: Path | None = None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Bias and variance of each configuration at each length: exact rows, then Monte Carlo rows.

    Arguments that are not named here are those of ``montecarlo.simulate``.

    Args:
        exact_only: leave the Monte Carlo out.

    Returns:
        A frame with ``COLUMNS``. Exact rows have floor 0, low = high, and trials 0; what double precision leaves
        open is in ``bias_rounding`` and ``variance_rounding`` (see ``lost_digits``). ``variance_interval`` is
        ``exact`` there, and elsewhere what its width is from: the exact ``fourth moment`` (``sketched`` along random
        directions where there are many parameters; ``sampled``, from the trials, where that fails too), or
        ``low end`` where the tail forbids an upper one. Of ``NAME(best)`` the column ``estimator`` says which it is at
        the row's length.

    Raises:
        ValueError: for a length out of range, fewer than 2 trials or samples, no configuration, or two estimators of
            one name.
    """
    import pandas as pd

    if not configurations:
        raise ValueError("no configurations: give at least one")
    check_names(configurations)
    check_counts(trials, samples)
    full = full_fits(pair) and pair.policy.parameters <= _FULL_PARAMETERS and not exact_only
    found = moments(pair, configurations, lengths, covariance="full" if full else "trace", samples=samples)
    truth, rounding = exact.true_gradient(pair, lengths), exact.gradient_rounding(pair, lengths)
    kls = exact.kl(pair, lengths)
    rows = [
        _exact_row(_head(pair, m, i, lengths[i], kls[i], truth[i], rounding[i]), m, i, truth[i], samples)
        for m in found
        for i in range(len(lengths))
    ]
    if not exact_only:
        drawn = simulate(
            pair, configurations, lengths,
            trials=trials, samples=samples, seed=seed, workers=workers, device=device, scheduler=scheduler,
            store=store, progress=progress,
        )  # fmt: skip
        rows += _monte_carlo_rows(pair, found, lengths, kls, truth, rounding, drawn, trials, samples)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _head(
    pair: PolicyPair, m: Moments, i: int, length: int, kl: float, truth: np.ndarray, rounding: float
) -> dict[str, Any]:
    return {
        "preset": pair.name,
        "configuration": str(m.configuration),
        "estimator": str(m.at(i).estimator),
        "placement": m.configuration.placement,
        "length": int(length),
        "kl": float(kl),
        "gradient_norm": float(np.linalg.norm(truth)),
        "bias_rounding": float(rounding),
    }


def _direction(mean: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Relative bias, least-squares scale of the true gradient, and cosine; NaN where they mean nothing."""
    norm, size = float(np.linalg.norm(truth)), float(np.linalg.norm(mean))
    if norm == 0:
        return {"relative_bias": np.nan, "scale": np.nan, "cosine": np.nan}
    inner = float(mean @ truth)
    return {
        "relative_bias": float(np.linalg.norm(mean - truth)) / norm,
        "scale": inner / norm / norm,
        "cosine": inner / norm / size if size > _ZERO * norm else np.nan,
    }


def _trace(m: Moments, i: int) -> float:
    assert m.covariance is not None
    at = m.covariance[i]
    return max(float(np.trace(at) if at.ndim == 2 else at), 0.0)


def _exact_row(head: dict[str, Any], m: Moments, i: int, truth: np.ndarray, samples: int) -> dict[str, Any]:
    bias, variance = float(np.linalg.norm(m.mean[i] - truth)), _trace(m, i)
    return {
        **head,
        "source": "exact",
        "bias": bias, "bias_low": bias, "bias_high": bias, "bias_floor": 0.0, "bias_debiased": bias,
        **_direction(m.mean[i], truth),
        "variance": variance, "variance_low": variance, "variance_high": variance, "variance_interval": EXACT,
        "variance_rounding": float(m.rounding[i, 0]),
        "estimate": float(m.estimate[i]), "estimate_variance": float(m.estimate_variance[i]),
        "estimate_variance_rounding": float(m.rounding[i, 1]),
        "samples": samples, "trials": 0,
    }  # fmt: skip


def _monte_carlo_rows(
    pair: PolicyPair,
    found: Sequence[Moments],
    lengths: Sequence[int],
    kls: np.ndarray,
    truth: np.ndarray,
    rounding: np.ndarray,
    drawn: Simulation,
    trials: int,
    samples: int,
) -> list[dict[str, Any]]:
    from klgrad.analysis.intervals import bias_interval

    rows, noise = [], []
    for c, m in enumerate(found):
        for i, length in enumerate(lengths):
            trial = drawn.gradients[i][:, c]
            mean = trial.mean(axis=0)
            variance = samples * float(trial.var(axis=0, ddof=1).sum())
            bias, floor = float(np.linalg.norm(mean - truth[i])), float(np.sqrt(variance / (trials * samples)))
            value = drawn.estimates[i][:, c]
            noise.append(_noise(m, i, trial, mean - truth[i], samples))
            rows.append({
                **_head(pair, m, i, length, kls[i], truth[i], rounding[i]),
                "source": "monte_carlo",
                "bias": bias, "bias_floor": floor,
                "bias_debiased": float(np.sqrt(max((bias - floor) * (bias + floor), 0.0))),
                **_direction(mean, truth[i]),
                "variance": variance, "variance_rounding": 0.0, "estimate_variance_rounding": 0.0,
                "estimate": float(value.mean()), "estimate_variance": samples * float(value.var(ddof=1)),
                "samples": samples, "trials": trials,
            })  # fmt: skip
    trace, square, along, relative = np.array(noise).T
    low, high = bias_interval(np.array([row["bias"] for row in rows]), trace, square, along)
    low = np.where([zero_bias(row) for row in rows], 0.0, low)
    measured = np.array([row["variance"] for row in rows])
    cumulants = fourth_cumulants(pair, found, lengths, samples)
    v_low, v_high, kinds = _variance_ends(measured, trace, square, relative, cumulants, trials, samples)
    for k, row in enumerate(rows):
        row.update(bias_low=low[k], bias_high=high[k])
        row.update(variance_low=v_low[k], variance_high=v_high[k], variance_interval=str(kinds[k]))
    return rows


def _variance_ends(
    variance: np.ndarray,
    trace: np.ndarray,
    square: np.ndarray,
    sampled: np.ndarray,
    cumulants: Cumulants,
    trials: int,
    samples: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Low and high ends, and what each interval is from, of variances measured with noise as ``_noise`` has it.

    Were the tail's share of the relative variance, kappa / (K N sigma^4), carried by sequences all alike, at most one
    over it of them would be expected among the K N (events of size J at rate r add r J to a mean of 1, r J^2 to its
    variance). Where that is too few, what was drawn says nothing of how large the variance may be.
    """
    from klgrad.analysis.intervals import low_end, variance_interval

    rounding = sampled == 0  # not noise, and without a tail
    tail = cumulants.kappa.ravel() / (trace * trials * samples) ** 2 / (trials * samples)
    relative = tail + 2 * square / trace**2 / (trials - 1)
    known = np.isfinite(relative) & (relative > 0) & ~rounding
    kinds = np.where(cumulants.sketched, SKETCHED, FOURTH).repeat(cumulants.kappa.shape[1])
    kinds = np.where(known | rounding, kinds, SAMPLED)
    relative = np.where(known, relative, sampled)
    few = np.where(known, tail > 1 / _FEWEST, np.isinf(sampled))
    low, high = variance_interval(variance, relative)
    kinds = np.where(few, LOW_END, kinds)
    return np.where(few, low_end(variance, relative), low), np.where(few, np.inf, high), kinds


def _noise(m: Moments, i: int, trial: np.ndarray, off: np.ndarray, samples: int) -> tuple[float, float, float, float]:
    """tr Sigma, tr Sigma^2 and m' Sigma m of the mean over trials, and the relative variance of the variance.

    The exact covariance where there is one: a tail that was never sampled makes the sampled covariance lie.
    """
    trials = len(trial)
    centred = trial - trial.mean(axis=0)
    direction = off / (np.linalg.norm(off) or 1.0)
    assert m.covariance is not None
    if m.covariance.ndim == 3:
        sigma = m.covariance[i] / samples
        trace, square, along = float(np.trace(sigma)), float((sigma**2).sum()), float(direction @ sigma @ direction)
    else:
        gram = centred @ centred.T / (trials - 1)  # trials x trials: d may be large
        sampled = float(np.trace(gram))
        square = max(float((gram**2).sum()) - sampled * sampled / (trials - 1), sampled * sampled / trial.shape[1] / 2)
        trace, along = _trace(m, i) / samples, float(((centred @ direction) ** 2).sum()) / (trials - 1)
    each = (centred**2).sum(axis=1)
    if trace < (_ZERO * np.linalg.norm(trial.mean(axis=0))) ** 2:
        return 0.0, 0.0, 0.0, 0.0  # rounding, not noise
    # trials that all agree although they vary say nothing about how much
    spread = float(each.var(ddof=1) / each.mean() ** 2 / trials) if each.mean() > 0 else np.inf if trace > 0 else 0.0
    gaussian = 2 * square / trace / trace / (trials - 1) if trace > 0 else 0.0
    return max(trace, 0.0) / trials, square / trials**2, max(along, 0.0) / trials, max(spread, gaussian)


# ---------------------------------------------------------------------------------------------------- provenance


def software() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    names = ("klgrad", "numpy", "scipy", "pandas", "matplotlib", "torch")
    found = {"python": platform.python_version()}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def manifest(
    command: str, pairs: Sequence[PolicyPair], request: dict[str, Any], *, torch: bool = False
) -> dict[str, Any]:
    """Everything needed to make a table again: versions, platform, arithmetic, request, and a hash of each pair.

    Args:
        torch: whether torch computed the numbers, also where the request names no device.
    """
    device = drawn_on(request)
    return {
        "command": command,
        "request": request,
        "pairs": {pair.name: fingerprint(pair) for pair in pairs},
        "software": software(),
        "platform": system(),
        "arithmetic": arithmetic(torch=torch or bool(device)),
        **device,
    }


def drawn_on(request: Mapping[str, Any]) -> dict[str, str]:
    """What hardware drew, where it was not the reference on the CPU."""
    device = CPU if request.get("exact_only") else request.get("device", CPU)
    return {} if device == CPU else {"device": identity(device)}


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain Python values; None for what is not finite or not there."""
    rows = frame.astype(object).to_dict("records")
    return [{str(key): finite(value) for key, value in row.items()} for row in rows]


def finite(value: Any) -> Any:
    """Plain Python values, lists included; None for a number that is not finite (JSON has none)."""
    if isinstance(value, list):
        return [finite(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def writable_folder(path: Path) -> Path:
    """The folder, made if need be.

    Raises:
        ValueError: when it cannot be made or written to, before any work is done.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"cannot write to {path}: {error.strerror}; give another folder with --out") from None
    return path


def csv_bytes(frame: pd.DataFrame) -> bytes:
    """The table as it is saved: every float in the fewest digits that read back as itself."""
    return frame.to_csv(index=False, lineterminator="\n").encode()


def save(frame: pd.DataFrame, provenance: dict[str, Any], stem: Path) -> None:
    """Write ``stem.csv`` and ``stem.json`` (manifest and rows), both or neither."""
    content = {"manifest": provenance, "rows": records(frame)}
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_together({stem.with_suffix(".csv"): csv_bytes(frame), stem.with_suffix(".json"): text.encode()})


def load(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The frame and manifest of a saved ``.json``, whichever command's: its own columns in their order.

    Raises:
        ValueError: for a file that is missing or not such a table.
    """
    import pandas as pd

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content["rows"]
        frame = pd.DataFrame(rows, columns=list(rows[0] if rows else COLUMNS))
        return frame, dict(content["manifest"])
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a saved klgrad table: {error}") from None


def forget(folder: Path) -> None:
    """Remove one complete request's blocks, and the store when no other request has any."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()


def lost_digits(pair: PolicyPair, frame: pd.DataFrame) -> list[str]:
    """Sentences about exact numbers of the pair's table that double precision leaves few digits of.

    A variance is a difference of mean squares and a log-ratio one of log-probs: where they nearly cancel, what is left
    has no more digits than that.
    """
    found = []
    log_ratio, log_probs = pair.log_ratio[pair.possible], pair.policy.log_probs[pair.possible]
    distance = float(np.abs(log_ratio).max(initial=0.0))
    share = float(np.finfo(float).eps * max(1.0, np.abs(log_probs).max(initial=0.0))) / (distance or np.inf)
    if share > _LOG_RATIO_DIGITS:
        found.append(
            f"{pair.name}: policy and reference are at most {distance:.2g} nats apart; a log-ratio, the difference of "
            f"two log-probs, has {_digits(share)} there, and so has what is made of it"
        )
    rows = frame[(frame["source"] == "exact") & ~zero_variance(frame)]
    open_ = (rows["variance_rounding"] / rows["variance"]).replace(np.inf, np.nan).dropna()
    worst = open_[open_ > _FEW_DIGITS].sort_values(ascending=False)
    if len(worst):
        at = rows.loc[worst.index[0]]
        others = rows.loc[worst.index, "configuration"].nunique() - 1
        found.append(
            f"{at['configuration']}: its variance at T = {at['length']} is a difference of mean squares and has "
            f"{_digits(worst.iloc[0])}: {at['variance']:.2g}, give or take {at['variance_rounding']:.2g}"
            + (f" ({others} more like it: see variance_rounding in the table)" if others else "")
        )
    return found


def _digits(share: float) -> str:
    """``6 digits``, from a relative rounding."""
    left = int(max(-np.log10(share), 0.0)) if np.isfinite(share) else 0
    return "no digit" if left == 0 else f"about {left} digit{'s' if left > 1 else ''}"


def beyond_float64(frame: pd.DataFrame) -> list[str]:
    """Configurations with a value, exact or sampled, that double precision cannot hold on this pair."""
    bad = ~np.isfinite(frame[["bias", "variance", "estimate", "estimate_variance"]].to_numpy(float)).all(axis=1)
    return list(dict.fromkeys(frame.loc[bad, "configuration"]))


def short_of_variance(frame: pd.DataFrame) -> list[str]:
    """Which variances have no upper end, and which an interval from the trials alone, in sentences that say why."""
    sentences = {
        LOW_END: f"no upper end of the variance's interval: fewer than {_FEWEST} of the sequences that carry it are "
        "expected among those drawn; take more trials or samples",
        SAMPLED: "the variance's interval is from the trials alone, and covers less than 95 % where rare sequences "
        "carry the variance",
    }
    found = []
    for kind, sentence in sentences.items():
        for preset, rows in frame[frame["variance_interval"] == kind].groupby("preset", sort=False):
            lengths = rows.groupby("configuration", sort=False)["length"].agg(lambda each: ", ".join(map(str, each)))
            who = "; ".join(f"{configuration} at T = {at}" for configuration, at in lengths.items())
            found.append(f"{preset}: {who}: {sentence}")
    return found
