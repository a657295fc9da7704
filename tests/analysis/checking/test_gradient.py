"""Verdicts on gradients: the engine's own, every built-in in numpy and torch, random fields and random models."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import assert_close, configurations, worlds

from klgrad.analysis import check
from klgrad.analysis.checking import gradient
from klgrad.analysis.checking.invariance import is_coupled, probe
from klgrad.analysis.checking.models import model, models
from klgrad.analysis.checking.subject import BuiltIn, function_subject
from klgrad.analysis.verdicts import verdict
from klgrad.synth.configurations import PLACEMENTS, parse
from klgrad.synth.estimators import ESTIMATORS, estimator
from klgrad.synth.moments import moments

SAMPLED = [name for name, entry in ESTIMATORS.items() if not entry.full]


def written(name, kind):
    """The estimator as somebody would write it: ``numpy``, ``torch``, or torch in single precision inside."""
    value = estimator(name).value

    def in_torch(log_probs: torch.Tensor, ref_log_probs: torch.Tensor):
        return value(log_probs - ref_log_probs)

    def in_float32(log_probs: torch.Tensor, ref_log_probs: torch.Tensor):
        return value(log_probs.float() - ref_log_probs.float())

    def in_numpy(log_probs, ref_log_probs):
        assert isinstance(log_probs, np.ndarray)
        return value(log_probs - ref_log_probs)

    return {"torch": in_torch, "float32": in_float32, "numpy": in_numpy}[kind]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("kind", ["numpy", "torch", "float32"])
def test_a_function_gets_the_built_ins_verdict(name, placement, kind):
    """No false alarm, and no other: written anew, an estimator is named as the engine names it."""
    if not ESTIMATORS[name].consistent and placement != "reward":
        pytest.skip("its slope is not the derivative of its value, by design")
    mine = check(written(name, kind), placement=placement, sections=("gradient",)).gradient[placement]
    ours = check(f"{name}-in-{placement}").gradient[placement]
    assert mine["verdict"] == ours["verdict"]
    for length, bias in ours["relative_bias"].items():
        assert mine["relative_bias"][length] == pytest.approx(bias, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_table_of_verdicts_and_the_check_agree(name, placement):
    """Two routes: one combination of fields on two probes, and field by field at four lengths."""
    configuration = parse(f"{name}-in-{placement}")
    if name == "k3-clamped" and placement != "reward":
        (warning,) = check(str(configuration)).of("gradient", "warning")  # the table's probes reach its clamp
        assert warning.numbers["relative_bias_after_drift"] > 1e-4
        return
    known = verdict(configuration).name
    found = check(str(configuration)).gradient[placement]["verdict"]
    assert found == known or (known == "other" and found == "divergence")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_the_full_vocabulary_kl_is_known_in_every_placement(kind):
    def full_torch(logits: torch.Tensor, ref_logits: torch.Tensor):
        a, b = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        return (a.exp() * (a - b)).sum(-1)

    def full_numpy(full_log_probs, ref_full_log_probs):
        assert isinstance(full_log_probs, np.ndarray)
        total = np.log(np.exp(full_log_probs).sum(-1, keepdims=True))
        return (np.exp(full_log_probs - total) * (full_log_probs - total - ref_full_log_probs)).sum(-1)

    report = check(full_torch if kind == "torch" else full_numpy, sections=("gradient",))
    found = {where: part["verdict"] for where, part in report.gradient.items()}
    assert found == {"reward": "future", "loss": "token", "both": "sequence"}
    assert report.gives == ["both"]


@settings(max_examples=30)
@given(worlds(off=False, longest=4), configurations(baselines=("",)))
def test_enumeration_through_a_function_agrees_with_the_moments(world, configuration):
    """Any configuration's value and slope, called as a numpy function on random models, against the exact engine."""
    if configuration.credit != "whole" or configuration.estimator.full or str(configuration).count("+"):
        configuration = parse(f"{configuration.estimator}-in-{configuration.placement}")
    if configuration.estimator.full or not configuration.estimator.consistent:
        return
    value = configuration.estimator.value
    subject = function_subject(lambda logp, ref_logp: value(logp - ref_logp), probe())
    m = model(world.pair, world.length)
    found = gradient.measure(subject, configuration.placement, m)
    (exact,) = moments(world.pair, [configuration], [world.length])
    kinked = str(configuration.estimator).startswith(("abs", "k3-clamped"))  # a difference across a kink is no slope
    assert_close(found.mean, exact.mean[0], 1e-4 if kinked else 1e-7)
    assert_close(found.variance, exact.covariance[0], 1e-4 if kinked else 1e-6)


FIELDS = ("sequence", "token", "token-forward", "future")


@given(st.sampled_from(FIELDS), st.floats(0.05, 20.0), st.booleans())
def test_a_scaled_field_is_named_with_its_scale(name, scale, negative):
    scale = -scale if negative else scale
    named = gradient.classify([(m, scale * m.fields[name]) for m in models()], 1e-8)
    assert named.scale == pytest.approx(scale)
    if abs(scale - 1) < 1e-6:
        assert named.verdict == name
    elif name in ("sequence", "token"):
        assert named.verdict == ("wrong-sign" if negative else f"scaled-{name}")
    else:
        assert named.verdict == "divergence"


@given(st.sampled_from(FIELDS[:3]))
def test_a_length_mean_is_scaled_at_fixed_length_only(name):
    found = [(m, m.fields[name] / m.length) for m in models() if not m.ends]
    named = gradient.classify(found, 1e-8)
    assert named.scale == pytest.approx({n: 1 / n for n in (1, 2, 4, 8)})
    other = [(m, m.fields["token-level Jeffreys"]) for m in models() if m.ends]
    assert gradient.classify(found + other, 1e-8).only_fixed


@given(st.integers(0, 10**6))
def test_no_random_field_is_taken_for_a_known_one(seed):
    """Exact checks have no false verdicts: a random direction is none of them."""
    rng = np.random.default_rng(seed)
    named = gradient.classify([(m, rng.normal(size=len(m.truth)) * np.linalg.norm(m.truth)) for m in models()], 1e-8)
    assert named.verdict == "other"
    assert named.name == "no combination of known fields"


@given(st.sampled_from(FIELDS), st.floats(1e-6, 1e-2), st.integers(0, 10**6))
def test_a_small_error_is_not_overlooked(name, size, seed):
    rng = np.random.default_rng(seed)
    found = [(m, m.fields[name] + size * np.linalg.norm(m.truth) * rng.normal(size=len(m.truth))) for m in models()]
    assert gradient.classify(found, 1e-8).verdict == "other"


# ------------------------------------------------------------------------------------------ losses and groups


def sequence_loss(log_probs, ref_log_probs, mask):
    k = torch.where(mask, log_probs - ref_log_probs, 0.0).detach().sum(-1, keepdim=True)
    return (k * torch.where(mask, log_probs, 0.0)).sum(-1).mean()


def token_mean(log_probs, ref_log_probs, mask):
    k2 = torch.where(mask, log_probs - ref_log_probs, 0.0) ** 2 / 2
    return k2.sum() / mask.sum()


def batch_sum(log_probs, ref_log_probs, mask):
    return sequence_loss(log_probs, ref_log_probs, mask) * len(mask)


def leave_one_out(log_probs, ref_log_probs, mask):
    k = torch.where(mask, log_probs - ref_log_probs, 0.0).detach().sum(-1, keepdim=True)
    others = (k.sum() - k) / max(len(k) - 1, 1)
    return ((k - others) * torch.where(mask, log_probs, 0.0)).sum(-1).mean()


def group_mean(log_probs, ref_log_probs, mask):
    k = torch.where(mask, log_probs - ref_log_probs, 0.0).detach().sum(-1, keepdim=True)
    return ((k - k.mean()) * torch.where(mask, log_probs, 0.0)).sum(-1).mean()


def test_a_loss_over_a_batch_is_seen_one_sequence_at_a_time():
    found = check(sequence_loss, sections=("gradient",))
    assert found.passed
    assert found.gradient["loss"]["verdict"] == "sequence"
    assert list(found.gradient) == ["loss"]


def test_leave_one_out_is_unbiased_over_all_groups():
    found = check(leave_one_out, sections=("gradient",)).gradient["loss"]
    assert found["verdict"] == "sequence"
    assert found["by_group_size"] == pytest.approx({2: 1, 3: 1, 4: 1})


def test_a_group_mean_costs_one_part_in_the_group():
    found = check(group_mean, sections=("gradient",))
    assert not found.passed
    part = found.gradient["loss"]
    assert part["verdict"] == "scaled-sequence"
    assert part["by_group_size"] == pytest.approx({2: 1 / 2, 3: 2 / 3, 4: 3 / 4})
    assert "(G - 1)/G" in found.of("gradient")[0].message


def test_a_token_mean_depends_on_the_length():
    found = check(token_mean, target="token", sections=("gradient",))
    assert not found.passed
    part = found.gradient["loss"]
    assert part["verdict"] == "scaled-token"
    assert part["only_fixed_length"]
    assert "1/T" in found.of("gradient")[0].message
    assert "in large batches it is token / E|y|" in found.of("gradient")[0].message


def test_group_gradients_of_independent_rows_are_the_plain_ones():
    subject = function_subject(sequence_loss, probe())
    assert is_coupled(subject) == (False, pytest.approx(0, abs=1e-9))
    for m in gradient.group_models(2):
        plain = gradient.measure(subject, "loss", m).mean
        assert_close(gradient.group_gradient(subject, "loss", m, 2), plain)


def test_built_in_leave_one_out_passes():
    report = check("k1-in-reward+loo")
    assert report.passed
    assert report.gradient["reward"]["verdict"] == "sequence"
    assert isinstance(gradient.placements(BuiltIn(parse("k1-in-reward"))), tuple)


def test_by_length_numbers_are_those_of_the_exact_engine():
    part = check("k3-in-loss").gradient["loss"]
    chosen = [m for m in models() if not m.ends]
    for length in (1, 2, 4, 8):
        here = [m for m in chosen if m.length == length]
        field = np.concatenate([moments(m.pair, [parse("k3-in-loss")], [length])[0].mean[0] for m in here])
        truth = np.concatenate([m.truth for m in here])
        assert part["scale"][length] == pytest.approx(field @ truth / (truth @ truth))
        assert part["relative_bias"][length] == pytest.approx(np.linalg.norm(field - truth) / np.linalg.norm(truth))
        assert part["cosine"][length] == pytest.approx(field @ truth / np.linalg.norm(field) / np.linalg.norm(truth))
