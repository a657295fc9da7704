"""The report as a whole: value, variance, tail, sampling, JSON, and what a function can do wrong."""

import json
import math

import numpy as np
import pytest
import torch

from klgrad.analysis import check, testing
from klgrad.analysis.checking.models import models
from klgrad.analysis.checking.signature import ROLES, plan
from klgrad.synth.configurations import parse
from klgrad.synth.exact import kl
from klgrad.synth.moments import moments


def k1(log_probs, ref_log_probs):
    return log_probs - ref_log_probs


def k3(log_probs, ref_log_probs):
    d = ref_log_probs - log_probs
    return torch.exp(torch.as_tensor(d)) - d - 1


def test_the_report_says_what_the_issue_asks():
    data = check(k3).to_dict()
    json.dumps(data, allow_nan=False)
    assert {"passed", "target", "function", "value", "gradient", "variance", "findings"} <= set(data)
    assert {"expected", "kl", "bias", "nonnegative", "zero_at_identity", "support_mismatch"} <= set(data["value"])
    for part in data["gradient"].values():
        assert {"verdict", "name", "scale", "relative_bias", "cosine"} <= set(part)
        assert set(part["scale"]) == {"1", "2", "4", "8"}
    assert {"rare_token_probability", "sequences_for_error", "both"} <= set(data["variance"])
    assert all({"section", "level", "message", "numbers"} == set(f) for f in data["findings"])
    assert data["gives_target"] == ["both"]


def test_value_is_the_exact_kl():
    value = check("k1-in-reward").value
    m = next(m for m in models((8,), 1) if not m.ends)
    assert value["kl"] == pytest.approx(kl(m.pair, [8])[0])
    assert value["expected"] == pytest.approx(value["kl"])
    assert value["nonnegative"] is False
    assert value["zero_at_identity"]
    assert value["support_mismatch"] == "inf"


def test_variance_ratios_and_counts_are_the_engines():
    variance = check("k3-in-both").variance
    chosen = [m for m in models() if not m.ends and m.length == 4]
    own, k1_variance, size = 0.0, 0.0, 0.0
    for m in chosen:
        a, b = moments(m.pair, [parse("k3-in-both"), parse("k1-in-reward")], [4])
        own, k1_variance, size = own + a.covariance[0], k1_variance + b.covariance[0], size + m.truth @ m.truth
    assert variance["both"]["relative_to_k1_in_reward"][4] == pytest.approx(own / k1_variance)
    assert variance["both"]["sequences_for_error"][4] == math.ceil(own / (0.01 * size))
    finer = check("k3-in-both", error=0.01).variance["both"]["sequences_for_error"][4]
    assert finer == pytest.approx(100 * own / (0.01 * size), abs=1)


def test_the_heavy_tail_of_k3_is_case_b26():
    variance = check(k3, sections=("variance",)).variance
    assert variance["rare_token_probability"] == pytest.approx(0.905, abs=1e-3)
    assert variance["median_batch"] == pytest.approx(0.193, abs=1e-3)
    assert variance["mean_batch"] == pytest.approx(0.692126, abs=1e-6)
    assert variance["token_variance"] == pytest.approx(2490, rel=1e-3)
    light = check(k1, sections=("variance",)).variance
    assert light["token_variance"] == pytest.approx(0.00848, rel=1e-3)
    assert light["rare_token_probability"] < 1e-9


def test_the_median_batch_is_that_of_samples():
    """A z-test of the binomial median: 4,000 batches; the share that saw no rare token within 4.5 sigma (false
    alarm under 1e-5)."""
    drawn = np.random.default_rng(3).binomial(1000, 1e-4, size=4000)
    share, expected = (drawn == 0).mean(), check(k3, sections=("variance",)).variance["rare_token_probability"]
    assert abs(share - expected) < 4.5 * math.sqrt(expected * (1 - expected) / 4000)


def test_sampling_tells_what_is_off():
    def weighted(log_probs, ref_log_probs, old_log_probs):
        rho = torch.exp(torch.as_tensor(log_probs - old_log_probs).sum(-1, keepdim=True)).detach()
        return rho * (log_probs - ref_log_probs)

    def frozen(log_probs, ref_log_probs, old_log_probs):
        rho = torch.exp(log_probs - log_probs.detach()) + 0 * old_log_probs
        return rho.detach() * (log_probs - ref_log_probs)

    right = check(weighted, placement="reward").of("sampling")
    assert right[0].message == "a stale policy changes nothing"
    assert right[1].message.startswith("temperature 0.6 changes nothing")
    assert any("blocked" in f.message and "off" in f.message for f in right)
    wrong = check(frozen, placement="reward").of("sampling")[0]
    assert wrong.level == "warning"
    assert "does not make up for it" in wrong.message


def test_a_blocked_end_token_makes_the_mean_negative_somewhere():
    """cases.md B13 on one token: pi(end) = 0.3 against 0.1, blocked: E[k1] = log(.7 / .9)."""
    from klgrad.analysis.checking.sampling import SAMPLERS

    log_pi = np.log(np.array([[0.7, 0.3]]))
    blocked = SAMPLERS["a blocked end token"][0](log_pi)
    assert blocked[0, 1] == -np.inf
    assert blocked[0, 0] - np.log(0.9) == pytest.approx(-0.251314, abs=1e-6)


# ------------------------------------------------------------------------------------------ what goes wrong


def hangs(log_probs, ref_log_probs):
    while True:
        pass


def raises(log_probs, ref_log_probs):
    raise RuntimeError("no luck today")


def exits(log_probs, ref_log_probs):
    raise SystemExit(3)


def prints(log_probs, ref_log_probs):
    print("debugging")
    return log_probs - ref_log_probs


def shortened(log_probs, ref_log_probs):
    return (log_probs - ref_log_probs)[:, 1:]


def whole_numbers(log_probs, ref_log_probs):
    return (torch.as_tensor(log_probs - ref_log_probs) > 0).long()


def item(log_probs: torch.Tensor, ref_log_probs):
    return (log_probs - ref_log_probs).sum().item()


def in_place(log_probs, ref_log_probs):
    ref_log_probs -= log_probs
    return -ref_log_probs


def nothing(log_probs, ref_log_probs):
    return None


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (hangs, "did not return within"),
        (raises, "RuntimeError: no luck today"),
        (exits, "SystemExit"),
        (shortened, "returns the shape"),
        (whole_numbers, "not floating-point"),
        (item, "Python number"),
        (in_place, "changes its argument 'ref_log_probs'"),
        (nothing, "NoneType"),
    ],
)
def test_a_broken_function_is_a_finding(function, words):
    report = check(function, timeout=0.2)
    assert not report.passed
    (finding,) = report.findings
    assert finding.section == "function"
    assert words in finding.message


def test_the_users_traceback_is_kept_for_verbose():
    report = check(raises)
    assert "no luck today" in report.text(verbose=True)
    assert 'raise RuntimeError("no luck today")' in report.text(verbose=True)
    assert "Traceback" not in report.text()


def test_prints_are_kept_from_the_terminal(capsys):
    report = check(prints, placement="reward")
    assert report.passed
    assert capsys.readouterr().out == ""
    assert any("debugging" in f.message for f in report.of("function"))


# ------------------------------------------------------------------------------------------- bad use


def two(p, q):
    return p - q


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"function": two}, "cannot fill the parameter 'p'"),
        ({"function": two, "mapping": {"p": "log_prob", "x": "reference"}}, "no parameter 'x'"),
        ({"function": two, "mapping": {"p": "policy", "q": "reference"}}, "is not offered"),
        ({"function": k1, "arguments": {"scale": 2}}, "no parameter 'scale'"),
        ({"function": k1, "target": "forward"}, "unknown target"),
        ({"function": k1, "placement": "rewards"}, "did you mean 'reward'"),
        ({"function": k1, "returns": "loss"}, "none of penalty"),
        ({"function": k1, "error": 0.0}, "must be positive"),
        ({"function": k1, "timeout": -1.0}, "must be a positive number"),
        ({"function": "k4"}, "no built-in"),
        ({"function": "k3-in-loss", "placement": "reward"}, "names its placement"),
        ({"function": "k3", "returns": "reward"}, "functions of your own"),
        ({"function": "nowhere.py:f"}, "no file"),
        ({"function": "nomodule.at.all:f"}, "cannot be imported"),
        ({"function": "json:nothing"}, "has no 'nothing'"),
        ({"function": ":"}, "names no function"),
    ],
)
def test_bad_use_is_one_sentence(options, words):
    with pytest.raises(ValueError, match=words) as caught:
        check(**options)
    assert "\n" not in str(caught.value)


def test_a_loss_has_no_other_placement():
    def loss(log_probs, ref_log_probs):
        return (log_probs - ref_log_probs).sum()

    with pytest.raises(ValueError, match="leave --placement reward out"):
        check(loss, placement="reward")


def test_two_parameters_for_one_thing_are_told_apart():
    def both(logp, log_probs, ref_logp):
        return logp - ref_logp

    with pytest.raises(ValueError, match="logp and log_probs would both be given log_probs"):
        check(both)
    assert check(both, placement="reward", mapping={"log_probs": "behaviour"}, sections=("gradient",)).passed


def test_every_spelling_means_one_thing():
    spellings = [(name, role) for role, names in ROLES.items() for name in (role, *names.split())]
    plain = [name.lower().replace("_", "") for name, _ in spellings]
    twice = {name for name in plain if plain.count(name) > 1}
    meanings = {name: {role for n, role in spellings if n.lower().replace("_", "") == name} for name in twice}
    assert all(len(roles) == 1 for roles in meanings.values()), meanings


def test_a_plan_takes_what_the_function_asks_for():
    def ours(per_token_logps, ref_per_token_logps, completion_mask, *, beta=0.04, eps=0.2, **rest):
        return per_token_logps

    found = plan(ours)
    assert found.roles == {
        "per_token_logps": "log_probs",
        "ref_per_token_logps": "reference",
        "completion_mask": "mask",
        "beta": "beta",
    }


# ------------------------------------------------------------------------------------------- assertions


def test_assertions_pass_and_say_why_they_do_not():
    testing.assert_gradient(k1, placement="reward")
    testing.assert_value(k1)
    testing.assert_finite(k1)
    testing.assert_mask_invariant(k1)
    with pytest.raises(AssertionError, match=r"in the loss, its expected gradient is zero"):
        testing.assert_gradient(k1, placement="loss")
    with pytest.raises(AssertionError, match="descends the token-level forward KL"):
        testing.assert_gradient(k3, placement="loss")
    testing.assert_gradient(k3, placement="loss", target="token-forward")

    def squared(log_probs, ref_log_probs):
        return (log_probs - ref_log_probs) ** 2 / 2

    with pytest.raises(AssertionError, match="the expected value is"):
        testing.assert_value(squared)
    testing.assert_gradient(squared, placement="loss", target="token")

    def leaky(log_probs, ref_log_probs, mask):
        return (log_probs - ref_log_probs) * mask

    with pytest.raises(AssertionError, match="padded places"):
        testing.assert_mask_invariant(leaky)

    def undefined(log_probs, ref_log_probs):
        r = torch.exp(torch.as_tensor(ref_log_probs - log_probs))
        return r / r

    with pytest.raises(AssertionError, match="NaN"):
        testing.assert_finite(undefined)


def test_sequences_are_counted_only_where_they_lead_there():
    """A bias stays however many sequences there are."""
    counts = check(k3).variance["sequences_for_error"]
    assert all(n is None for placement in ("reward", "loss") for n in counts[placement].values())
    assert all(isinstance(n, int) for n in counts["both"].values())


def test_a_log_ratio_says_which_way_round_it_was_given():
    def schulman(logr):
        return torch.exp(torch.as_tensor(logr)) - 1 - logr

    report = check(schulman, placement="both")
    assert report.passed
    assert any("log pi_ref / pi" in f.message for f in report.of("function"))


def test_a_clamp_of_the_drifted_context_is_not_outweighed():
    def within(bound):
        def wide(log_probs: torch.Tensor, ref_log_probs):
            return torch.clamp(log_probs - ref_log_probs, -bound, bound)

        return wide

    (warning,) = check(within(8), placement="reward").of("gradient", "warning")
    assert warning.numbers["relative_bias_after_drift"] > 0.1
    assert "clamped: no gradient is left" in check(within(2), placement="reward").of("gradient", "error")[0].message


def test_token_level_scores_may_be_shifted():
    def scores(token_level_scores, logp, ref_logp, mask):
        return token_level_scores - torch.where(torch.as_tensor(mask), torch.as_tensor(logp - ref_logp), 0.0)

    report = check(scores, returns="reward", sections=("gradient", "invariance"))
    assert report.of("invariance", "warning") == []
