"""The batch that invariances are tried on, and when two results on it are the same."""

from __future__ import annotations

from functools import cache

import numpy as np

from klgrad.analysis.checking.models import models
from klgrad.analysis.checking.subject import Terms
from klgrad.synth.enumeration import Batch, rows_of

ROWS = 7


@cache
def probe() -> Batch:
    """A few replies of different length, padded."""
    (m,) = (m for m in models((4,), 1) if m.ends)
    rng = np.random.default_rng(0)
    chosen = np.sort(rng.choice(len(m.probability), ROWS, replace=False))
    lengths = m.batch.mask[chosen].sum(axis=1)
    assert lengths.min() < lengths.max()
    return rows_of(m.batch, chosen)


def slopes(terms: Terms) -> np.ndarray:
    """``[B, T, 1 or 1 + V]`` derivative in the sampled tokens' log-probs, and in the full ones."""
    assert terms.token is not None
    token = terms.token[..., None]
    return token if terms.vocab is None else np.concatenate([token, terms.vocab], axis=-1)


def real(batch: Batch, terms: Terms) -> np.ndarray:
    """Value and gradient on the real tokens, as one list."""
    mask = np.asarray(batch.mask)
    value = terms.value[mask] if terms.value.ndim == 2 else terms.value.ravel()
    return np.concatenate([value, slopes(terms)[mask].ravel()])


def apart(a: np.ndarray, b: np.ndarray, tolerance: float) -> float:
    """0 where they agree to the tolerance, else the relative difference; NaN against a number counts as 1."""
    if a.shape != b.shape:
        return 1.0
    with np.errstate(invalid="ignore"):
        difference = np.where(np.isnan(a) != np.isnan(b), np.inf, np.nan_to_num(np.abs(a - b), nan=0.0, posinf=np.inf))
    size = max(float(np.abs(a[np.isfinite(a)]).max(initial=0.0)), 1e-300)
    worst = float(difference.max(initial=0.0)) / size
    return 0.0 if worst <= 100 * tolerance else min(worst, 1e30)
