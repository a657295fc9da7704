"""What is zero to rounding: the one rule of tables, rankings and figures.

No number is small by itself: on a nearly deterministic policy gradients of 1e-14 have biases that are real. A bias is
measured by the true gradient and by what rounding of the log-probs can do to it (``exact.gradient_rounding``), which
tables carry as ``bias_rounding``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_BIAS, _VARIANCE = 1e-9, 1e-12  # of the true gradient's norm and its square: one part in a billion is none


def zero_bias(rows: Mapping[str, Any] | Any) -> Any:
    """Whether ``bias`` is rounding, for a row or a whole table with ``gradient_norm`` and ``bias_rounding``."""
    return np.asarray(rows["bias"], float) <= _BIAS * _known(rows["gradient_norm"]) + _known(rows.get("bias_rounding"))


def zero_variance(rows: Mapping[str, Any] | Any) -> Any:
    """Whether ``variance`` is rounding, likewise."""
    return np.asarray(rows["variance"], float) <= _VARIANCE * _known(rows["gradient_norm"]) ** 2


def zero_gradient(rows: Mapping[str, Any] | Any) -> Any:
    """Whether the true gradient itself is, likewise."""
    return np.asarray(rows["gradient_norm"], float) <= _known(rows.get("bias_rounding"))


def _known(values: Any) -> Any:
    """0 for what is not finite, or not there: it allows nothing."""
    values = np.asarray(0.0 if values is None else values, float)
    return np.where(np.isfinite(values), values, 0.0)
