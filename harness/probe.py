"""Figure 1 on a language model: each configuration's gradient bias and variance, on common samples.

**Bias** is estimated in Rao-Blackwellised form (``fields``), **variance** is that of the sampled form, as it would be
trained. The squared bias is a U-statistic over trials.

Shapes: K trials, each of N = samples x prompts sequences, k the coordinates of a gradient (or of its sketch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from klgrad.harness import statistics
from klgrad.harness.fields import TRUTH, combine, field_loss, fields, summaries_of, wanted
from klgrad.harness.models import LanguageModel, check_same_vocabulary, select_parameters
from klgrad.harness.objective import Summary, kl_loss, loss_part, reward_part, token_terms
from klgrad.harness.rollouts import Rollouts, pad_prompts, sample
from klgrad.synth.configurations import Configuration, check_names
from klgrad.synth.estimators import Estimator

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[int, int], None]
COORDINATES = 1 << 14


# ------------------------------------------------------------------------------------------------ gradients as rows


class Sketch:
    """Gradients as rows of numbers: all coordinates, or a count sketch of them.

    A count sketch adds every coordinate, with a random sign, to one of k bins: inner products keep their mean, a
    squared norm to a relative sqrt(2 / k) at most (one standard deviation; 1.1 % for k = 16,384).
    """

    def __init__(self, coordinates: int, size: int, seed: int, device: torch.device) -> None:
        self.coordinates, self.size = coordinates, min(coordinates, size)
        self.exact = coordinates <= size
        if not self.exact:
            generator = torch.Generator().manual_seed(seed)
            self.bins = torch.randint(size, (coordinates,), generator=generator).to(device)
            self.signs = (torch.randint(2, (coordinates,), generator=generator, dtype=torch.int8) * 2 - 1).to(device)

    def __call__(self, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]) -> np.ndarray:
        """``[k]`` float64."""
        pieces = [
            (torch.zeros_like(p) if g is None else g).reshape(-1).double()
            for g, p in zip(gradients, parameters, strict=True)
        ]
        whole = torch.cat(pieces)
        if not self.exact:
            whole = torch.zeros(self.size, dtype=torch.float64, device=whole.device).index_add_(
                0, self.bins, whole * self.signs
            )
        return np.asarray(whole.cpu().numpy())


# -------------------------------------------------------------------------------------------------------- the probe


@dataclass(frozen=True, eq=False)
class Setting:
    """What is probed.

    Args:
        policy, reference: language models on one vocabulary.
        prompts: token lists.
        end: the end token; ``None`` for responses of fixed length.
        pad: any token, for padding.
        lengths: response lengths T; shorter ones are prefixes of the same samples.
        samples: responses per prompt and trial.
        parameters: ``all``, ``last-block``, ``lora`` or a regular expression.
        coordinates: gradients with more are sketched to that many.
        chunk: logits held at once.
    """

    policy: LanguageModel
    reference: LanguageModel
    prompts: Sequence[Sequence[int]]
    end: int | None
    pad: int = 0
    lengths: Sequence[int] = (4, 8)
    samples: int = 8
    parameters: str = "all"
    coordinates: int = COORDINATES
    chunk: int = 1 << 24
    temperature: float = 1.0


@dataclass(frozen=True, eq=False)
class Trials:
    """What K trials gave, for one length.

    Args:
        fields: name -> ``[K, k]`` Rao-Blackwellised gradients.
        sampled: configuration -> ``[K, k]`` gradients in sampled form.
        kl: ``[K]`` mean exact sequence KL.
        values: configuration -> ``[K]`` mean KL estimate.
    """

    fields: dict[str, np.ndarray]
    sampled: dict[str, np.ndarray]
    kl: np.ndarray
    values: dict[str, np.ndarray]


def probe(
    setting: Setting,
    configurations: Sequence[Configuration],
    *,
    trials: int = 32,
    seed: int = 0,
    name: str = "model",
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Bias and variance of each configuration's gradient at each response length.

    Returns:
        A frame with the columns of ``analysis.results`` (``bias_debiased`` is the U-statistic, ``relative_bias`` and
        ``scale`` use it too) and ``relative_bias_error``, the jackknife's standard error over trials.

    Raises:
        ValueError: for fewer than 3 trials or 2 samples, empty data, prompts that do not fit, another vocabulary,
            a configuration without a Rao-Blackwellised form, or two estimators of one name.
    """
    import pandas as pd

    from klgrad.analysis.results import COLUMNS

    if trials < 3 or setting.samples < 2:
        raise ValueError(f"{trials} trials of {setting.samples} samples: take at least 3 trials and 2 samples a prompt")
    if not configurations:
        raise ValueError("no configurations: give at least one")
    check_names(configurations)
    check_same_vocabulary(setting.policy, setting.reference)
    drawn = run_trials(setting, configurations, trials=trials, seed=seed, progress=progress)
    n = setting.samples * len(setting.prompts)
    rows = []
    for configuration in configurations:
        for length in sorted(setting.lengths):
            at = drawn[length]
            truth, expected = combine(TRUTH, at.fields), combine(fields(configuration), at.fields)
            head = {
                "preset": name, "configuration": str(configuration), "estimator": str(configuration.estimator),
                "placement": configuration.placement, "length": int(length), "source": "monte_carlo",
                "kl": float(at.kl.mean()),
            }  # fmt: skip
            sampled, value = at.sampled[str(configuration)], at.values[str(configuration)]
            rows.append({**head, **statistics.row(truth, expected, sampled, value, n)})
    return pd.DataFrame(statistics.with_intervals(rows), columns=[*COLUMNS, "relative_bias_error"])


def run_trials(
    setting: Setting,
    configurations: Sequence[Configuration],
    *,
    trials: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[int, Trials]:
    """The trials, length by length."""
    assert isinstance(setting.policy, nn.Module)
    chosen = [parameter for _, parameter in select_parameters(setting.policy, setting.parameters)]
    names = wanted(configurations)
    summaries = summaries_of(names, configurations)
    device = chosen[0].device
    sketch = Sketch(sum(p.numel() for p in chosen), setting.coordinates, seed, device)
    prompts, real = (
        x.repeat_interleave(setting.samples, 0).to(device) for x in pad_prompts(setting.prompts, setting.pad)
    )
    generator = torch.Generator(device).manual_seed(seed)
    rows: list[dict[int, dict[str, Any]]] = []
    with _gradients_for(setting.policy, chosen):
        for trial in range(trials):
            rollouts = sample(
                setting.policy, prompts, real, max(setting.lengths),
                end=setting.end, generator=generator, temperature=setting.temperature,
            )  # fmt: skip
            terms = _terms(setting, rollouts, summaries, chosen)
            rows.append({
                length: _one_trial(terms, _first(rollouts.mask, length), configurations, names, setting, chosen, sketch)
                for length in setting.lengths
            })  # fmt: skip
            if progress:
                progress(trial + 1, trials)
    return {length: _stack([row[length] for row in rows]) for length in setting.lengths}


def _first(mask: Tensor, length: int) -> Tensor:
    return mask & (torch.arange(mask.shape[1], device=mask.device) < length)


@contextmanager
def _gradients_for(model: nn.Module, chosen: Sequence[nn.Parameter]) -> Iterator[None]:
    """Only the chosen parameters take gradients, so that activations are kept for their part of the model alone."""
    wanted = {id(parameter) for parameter in chosen}
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(id(parameter) in wanted)
        yield
    finally:
        for parameter, gradient in before:
            parameter.requires_grad_(gradient)


def _terms(
    setting: Setting, rollouts: Rollouts, summaries: dict[str, Summary], chosen: Sequence[nn.Parameter]
) -> dict[str, Tensor]:
    with torch.no_grad():
        theirs = rollouts.features(setting.reference)
    features = rollouts.features(setting.policy)
    apart = not _in_head(setting.policy, features, chosen)
    start = features.detach().requires_grad_() if apart else features
    terms = token_terms(
        start, setting.policy.head, rollouts.responses, rollouts.mask, reference=(theirs, setting.reference.head),
        summaries=summaries, temperature=setting.temperature, chunk=setting.chunk,
    )  # fmt: skip
    return linear(terms, start, features) if apart else terms


def _in_head(model: LanguageModel, features: Tensor, chosen: Sequence[nn.Parameter]) -> bool:
    """Whether the logits depend on chosen parameters other than through the features."""
    logits = model.head(features[:1, :1].detach())
    found = torch.autograd.grad(logits.sum(), chosen, allow_unused=True) if logits.requires_grad else []
    return any(gradient is not None for gradient in found)


def linear(terms: dict[str, Tensor], start: Tensor, features: Tensor) -> dict[str, Tensor]:
    """The same terms and gradients, differentiated through the vocabulary once a term and not once a loss.

    A term of a token depends on that token's features alone, so one backward pass gives the slopes of all.

    Args:
        terms: ``[B, T]`` each, computed from ``start``.
        start: ``[B, T, H]`` ``features`` cut from what gave them.
    """
    moved = (features - features.detach()).to(start)  # zero, with a gradient

    def along(term: Tensor) -> Tensor:
        if not term.requires_grad:
            return term
        (slope,) = torch.autograd.grad(term.sum(), start, retain_graph=True)
        return term.detach() + (moved * slope).sum(-1)

    return {name: along(term) for name, term in terms.items()}


def _one_trial(
    terms: dict[str, Tensor],
    mask: Tensor,
    configurations: Sequence[Configuration],
    names: Sequence[str],
    setting: Setting,
    chosen: list[nn.Parameter],
    sketch: Sketch,
) -> dict[str, Any]:
    def gradient(loss: Tensor) -> np.ndarray:
        found = torch.autograd.grad(loss.mean(), chosen, retain_graph=True, allow_unused=True)
        row = sketch(found, chosen)
        if not np.isfinite(row).all():
            raise ValueError(
                "a gradient is not finite: policy and reference are too far apart for this precision; "
                "try --dtype float32 or a nearer reference"
            )
        return row

    whole = dict.fromkeys(part for c in configurations for part in parts(c))
    sampled = {part: gradient(kl_loss(part, terms, mask)) for part in whole}
    return {
        "fields": {name: gradient(field_loss(name, terms, mask, setting.samples)) for name in names},
        "sampled": {str(c): sum(sampled[part] for part in parts(c)) for c in configurations},
        "kl": float(torch.where(mask, terms["kl"], 0.0).sum(1).mean()),
        "values": {str(c): float(values(c.estimator, terms, mask).sum(1).mean()) for c in configurations},
    }


def parts(configuration: Configuration) -> tuple[Configuration, ...]:
    """The reward and the loss part: the sampled gradient is their sum, and parts are shared between configurations."""
    return (
        (reward_part(configuration), loss_part(configuration))
        if configuration.placement == "both"
        else (configuration,)
    )


def values(est: Estimator, terms: dict[str, Tensor], mask: Tensor) -> Tensor:
    """``[B, T]`` what each token contributes to the estimate, 0 where masked; no gradient."""
    found = terms["value"] if est.full else est.value(terms["log_probs"].detach() - terms["reference"])
    return torch.where(mask, found.detach(), 0.0)


def _stack(rows: Sequence[dict[str, Any]]) -> Trials:
    def stacked(key: str) -> dict[str, np.ndarray]:
        return {name: np.array([row[key][name] for row in rows]) for name in rows[0][key]}

    return Trials(stacked("fields"), stacked("sampled"), np.array([row["kl"] for row in rows]), stacked("values"))
