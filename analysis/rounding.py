"""How far rounding alone can move each number of a table of bias and variance.

Two CPUs round another way. What a sum loses to that is proportional to the sizes of its terms and not to its own: the
terms of a mean add up to at most the root of its second moment (Cauchy-Schwarz), and variance, bias and gradient give
that for each row; those of the KL, E |log pi / q|, to KL + sqrt(2 KL) (Pinsker). In both placements two gradients are
added that may cancel, each as large as the estimate times the sequence's score. Shapes: R rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from jaxtyping import Float

EPSILON = float(np.finfo(float).eps)
_PER_TOKEN = 32  # roundings on a number's way through one token, on two CPUs: exp and log of 4 units each (numpy's
# own bound), the log-softmax's sum, ratio and products, the sum over the next tokens
_SCORE = 2.0**0.5  # of one token of a softmax over logits, at most
_PROBABLE = 4  # a sum of n terms loses sqrt(n) units of them, and hardly ever 4 times that (Higham and Mary, 2019)
_QUANTILE = 8  # an interval's end moves by no more than so many times what it was computed from


@np.errstate(all="ignore")  # a table may hold anything; what is not finite is compared as such
def rounding(frame: pd.DataFrame) -> dict[str, tuple[Float[np.ndarray, " R"], Float[np.ndarray, " R"]]]:
    """For each column of numbers what is its size in each row ``[R]``, and the share of that to allow ``[R]``.

    Args:
        frame: a table of ``results.compare``. Columns that it does not know are as large as they are; counts, ranks
            and texts are not among the columns.
    """
    column = {str(name): _numbers(frame[name]) for name in frame.columns if _is_numeric(frame[name])}
    sampled, both = np.asarray(frame["source"] != "exact"), np.asarray(frame["placement"] == "both")
    drawn = np.where(sampled, column["samples"] * column["trials"], 0.0)
    share = EPSILON * (_PER_TOKEN * column["length"] + 2 * _PROBABLE * np.sqrt(drawn))
    counts = ("length", "samples", "trials", "rank")
    sizes = {name: np.abs(values) for name, values in column.items() if name not in counts} | _sizes(
        column, sampled, both
    )
    roots = {name: np.where(sampled, size, sizes[name]) for name, size in _roots(column, sizes, share).items()}
    return {name: (size, share) for name, size in (sizes | roots).items() if name in column}


def _sizes(column: dict[str, np.ndarray], sampled: np.ndarray, both: np.ndarray) -> dict[str, np.ndarray]:
    norm, bias = column["gradient_norm"], column["bias"]
    told = np.sqrt(column["estimate_variance"] + column["estimate"] ** 2)
    cancelling = np.where(both, _SCORE * np.sqrt(column["length"]) * told, 0.0)
    terms = np.sqrt(column["variance"] + (norm + bias) ** 2 + cancelling**2)
    spread = _spread(column["variance"], terms, column["samples"], sampled)
    relative = spread / column["variance"]
    mean = np.maximum(np.abs(column["scale"]) * norm, np.abs(bias - norm))  # |mean| is no less
    return {
        "kl": column["kl"] + np.sqrt(2 * column["kl"]),
        "gradient_norm": terms, "bias": terms, "bias_low": terms, "bias_debiased": terms,
        "bias_high": np.where(sampled, _QUANTILE, 1) * (terms + bias),
        "bias_floor": relative * column["bias_floor"],
        "relative_bias": terms / norm * (1 + column["relative_bias"]),
        "scale": terms / norm * (1 + np.abs(column["scale"])), "cosine": 2 * terms / mean,
        "variance": spread, "variance_low": _QUANTILE * relative * column["variance_low"],
        "variance_high": _QUANTILE * relative * column["variance_high"],
        "estimate": told,
        "estimate_variance": _spread(column["estimate_variance"], told, column["samples"], sampled),
        "sequences_for_error": relative * column.get("sequences_for_error", np.zeros_like(norm)),
    }  # fmt: skip


def _spread(variance: np.ndarray, terms: np.ndarray, samples: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """Of a variance: the second moments it is a difference of; where sampled, deviations of means of N as well."""
    return 2 * terms**2 + np.where(sampled, 2 * np.sqrt(samples * variance) * terms, 0.0)


def _roots(
    column: dict[str, np.ndarray], sizes: dict[str, np.ndarray], share: np.ndarray
) -> dict[str, np.ndarray]:  # fmt: skip
    """Of what is the root of a difference of squares: near zero it moves by the root of what the squares move by."""
    square = 2 * column["bias"] * sizes["bias"] + 2 * column["bias_floor"] * sizes["bias_floor"]
    low = _QUANTILE * 2 * column["bias_high"] * sizes["bias_high"]
    return {
        name: moved / np.fmax(np.abs(column[name]), np.sqrt(moved * share))
        for name, moved in (("bias_debiased", square), ("bias_low", low))
    }


def _is_numeric(values: Any) -> bool:
    return all(value is None or not isinstance(value, str) for value in values)


def _numbers(values: Any) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], float)
