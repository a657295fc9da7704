"""The fields a check compares with, against the exact engine and autograd: two routes to each."""

import numpy as np
import pytest
import torch
from hypothesis import given
from strategies import assert_close, build_world, worlds

from klgrad.analysis.checking.fields import DIVERGENCES, TRUNCATED
from klgrad.analysis.checking.models import LENGTHS, model, models, with_reference
from klgrad.synth import exact
from klgrad.synth.enumeration import torch_policy
from klgrad.synth.policies import log_softmax


@given(worlds(off=False, longest=4))
def test_fields_agree_with_the_exact_engine(world):
    m = model(world.pair, world.length)
    engines = {
        "sequence": exact.true_gradient,
        "token": exact.token_gradient,
        "token-forward": exact.token_forward_gradient,
        "future": exact.future_gradient,
    }
    for name, engine in engines.items():
        assert_close(m.fields[name], engine(world.pair, [world.length])[0])
    assert_close(m.kl, exact.kl(world.pair, [world.length])[0])
    assert m.probability.sum() == pytest.approx(1)


TORCH = {  # the generators once more, written in r = pi_ref / pi as the textbooks do
    "reverse KL": lambda r: -r.log(),
    "forward KL": lambda r: r * r.log(),
    "Jeffreys": lambda r: (r - 1) * r.log(),
    "E[k2], the mean squared log-ratio / 2": lambda r: r.log() ** 2 / 2,
    "Jensen-Shannon": lambda r: (r * (2 * r / (1 + r)).log() + (2 / (1 + r)).log()) / 2,
    "total variation": lambda r: (r - 1).abs() / 2,
    "chi-squared(pi_ref || pi)": lambda r: (r - 1) ** 2,
    "chi-squared(pi || pi_ref)": lambda r: (r - 1) ** 2 / r,
    "squared Hellinger": lambda r: (r.sqrt() - 1) ** 2,
}


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("eos", [False, True])
def test_divergences_agree_with_autograd(name, eos):
    """Sequence level: autograd through E[sum_t D_f(prefix)], probabilities included. Token level: prefixes frozen."""
    world = build_world("markov", 3, 3, eos=eos, seed=5)
    m = model(world.pair, 3)
    theta, policy = torch_policy(world.pair)
    contexts, mask = torch.as_tensor(m.contexts), torch.as_tensor(m.batch.mask)
    full = policy(contexts)
    sampled = full.gather(-1, torch.as_tensor(m.batch.tokens)[..., None])[..., 0]
    probability = torch.where(mask, sampled, 0.0).sum(1).exp()
    ratio = (torch.as_tensor(world.pair.reference)[contexts] - full).exp()
    local = torch.where(mask, (full.exp() * TORCH[name](ratio)).sum(-1), 0.0).sum(1)
    for objective, field in (
        ((probability * local).sum(), "sequence"),
        ((probability.detach() * local).sum(), "token"),
    ):
        (expected,) = torch.autograd.grad(objective, theta, retain_graph=True)
        known = {("sequence", "reverse KL"): "sequence", ("token", "reverse KL"): "token"}
        known[("token", "forward KL")] = "token-forward"
        assert_close(m.fields[known.get((field, name), f"{field}-level {name}")], expected.numpy())


def test_every_length_is_met_without_and_with_an_end_token():
    for ends in (False, True):
        assert {m.length for m in models() if m.ends is ends} == set(LENGTHS)
    assert len({len(row) for m in models() if m.ends for row in [m.batch.mask.sum(axis=1).tolist()]}) > 1


def test_known_fields_differ_on_the_models():
    """Otherwise a verdict would be a matter of order; from T = 2 on no two fields agree, not even up to a factor."""
    chosen = [m for m in models() if m.length > 1]
    usual = [name for name in chosen[0].fields if name not in TRUNCATED]  # with three tokens the top 3 is all there is
    table = {name: np.concatenate([m.fields[name] for m in chosen]) for name in usual}
    names = list(table)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            cosine = table[a] @ table[b] / np.linalg.norm(table[a]) / np.linalg.norm(table[b])
            assert abs(cosine) < 1 - 1e-6, (a, b, cosine)


def test_another_reference_keeps_the_policy():
    m = models()[0]
    other = with_reference(m, log_softmax(np.ones_like(m.pair.reference)))
    assert_close(other.batch.log_probs, m.batch.log_probs)
    assert not np.allclose(other.batch.reference, m.batch.reference)
