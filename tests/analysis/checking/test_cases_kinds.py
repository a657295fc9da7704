"""The second collection of cases, C01 to C33: each with the function as people have it, and variants of its kind."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kl_terms import k1, k2, k3
from torch.distributions import Categorical
from toys import expected_gradient, one_token

from klgrad.analysis import check
from klgrad.analysis.verdicts import verdict
from klgrad.synth.configurations import parse


def ls(x):
    return x.log_softmax(-1)


def W(mask, x):
    return torch.where(mask.bool(), x, torch.zeros_like(x))


def told(report):
    return f"{report}\n" + "\n".join(f.message for f in report.findings)


# ------------------------------------------------------------------------------------------ what is wrong and passed


def raw(logits, ref_logp, input_ids):
    return logits.gather(-1, input_ids[..., None])[..., 0] - ref_logp


def raw_both(logits, ref_logits):
    return (logits.softmax(-1) * (logits - ref_logits)).sum(-1)


def raw_numpy(logits, ref_logits, tokens):
    gap = logits - ref_logits
    return np.take_along_axis(gap, tokens[..., None], -1)[..., 0]


@pytest.mark.parametrize(("function", "placement"), [(raw, "reward"), (raw_both, "loss"), (raw_numpy, "reward")])
def test_c01_raw_logits(function, placement):
    report = check(function, placement=placement, sections=("gradient",))
    assert not report.passed
    assert "normalise first" in report.mend
    names = {"logits": "full_log_probs", "ref_logits": "full_reference"}
    taken = {k: v for k, v in names.items() if k in function.__code__.co_varnames}
    target = "token" if placement == "loss" else "sequence"
    options = {"placement": placement, "target": target, "mapping": taken}
    assert check(function, sections=("gradient",), **options).passed  # they are log-probs


def counts(logp, ref_logp, mask):
    first = torch.arange(logp.shape[1])[None] < mask.long().sum(-1, keepdim=True)
    return W(first, 0.5 * (logp - ref_logp) ** 2).sum(-1).mean()


def leaking_returns(logp, ref_logp, mask):
    k = ref_logp - logp
    return k.flip(-1).cumsum(-1).flip(-1) * mask


def last_by_count(logp, ref_logp, mask):
    last = (mask.long().sum(-1, keepdim=True) - 1).clamp(min=0)
    return W(mask, logp - ref_logp).cumsum(-1).gather(-1, last)[:, 0]


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (counts, {"target": "token"}),
        (leaking_returns, {"returns": "return"}),
        (last_by_count, {"placement": "reward"}),
    ],
)
def test_c02_holes_in_the_mask(function, options):
    report = check(function, **options)
    assert not report.passed
    assert "a masked place between real tokens changes the result" in told(report)


def mean_undone(logp, ref_logp, mask):
    n = mask.sum(-1)
    return (W(mask, 0.5 * (logp - ref_logp) ** 2).sum(-1) / n * n).mean()


def gathered(logp, ref_logp, mask):
    last = mask.long().sum(-1, keepdim=True) - 1
    return W(mask, logp - ref_logp).cumsum(-1).gather(-1, last)[:, 0]


@pytest.mark.parametrize("function", [mean_undone, gathered])
def test_c03_a_reply_without_tokens(function):
    messages = [f.message for f in check(function, sections=("invariance",)).of("invariance", "error")]
    assert any("a reply with no tokens" in m for m in messages)


def total(logp, ref_logp, mask, advantages, beta):
    return W(mask, -advantages * logp + beta * 0.5 * (logp - ref_logp) ** 2).sum(-1).mean()


def total_k3(logp, ref_logp, mask, beta):
    return beta * W(mask, k3(logp, ref_logp)).sum(-1).mean()


def total_guarded(logp, ref_logp, mask, advantages, beta):
    policy = W(mask, -advantages * logp).sum(-1).mean()
    if beta == 0:
        return policy
    return policy + beta * W(mask, 0.5 * (logp - ref_logp) ** 2).sum(-1).mean()


def test_c04_beta_of_zero_and_an_infinite_kl():
    for function, target in ((total, "token"), (total_k3, "token-forward")):
        report = check(function, target=target)
        assert "beta = 0 and an infinite KL" in report.of("invariance", "error")[0].message
    assert check(total_guarded, target="token").passed


def test_c05_almost_is_not_exactly():
    def more(logp, ref_logp):
        return 1.02 * (logp - ref_logp)

    def more_in_half(logp, ref_logp):
        return 1.02 * (logp.bfloat16() - ref_logp.bfloat16())

    def mixed(logp, ref_logp):
        return logp - ref_logp + 0.05 * (ref_logp - logp).exp() * (ref_logp - logp)

    def half(logp, ref_logp):
        return 0.5 * (logp.bfloat16() - ref_logp.bfloat16()) ** 2

    for function in (more, more_in_half):
        part = check(function, placement="reward", sections=("gradient",)).gradient["reward"]
        assert part["verdict"] == "scaled-sequence"
        assert part["factor"] == pytest.approx(1.02, abs=4e-3)
    assert not check(mixed, placement="reward", sections=("gradient",)).passed
    report = check(half, placement="loss", target="token")
    assert report.passed
    assert "within" in report.verdict
    assert any("half precision" in f.message for f in report.of("function", "warning"))
    assert not any("exactly" in f.message for f in report.findings)


def test_c06_a_capped_ratio_is_named():
    def capped(logp, ref_logp, old_logp):
        return (logp - old_logp).exp().detach().clamp(max=2.0) * (logp - ref_logp)

    toy = one_token(0.7, 0.2, 0.1)
    assert expected_gradient(capped, "reward", toy) == pytest.approx([0.281140], abs=1e-6)
    (warning,) = [f for f in check(capped, placement="reward").of("sampling", "warning") if "cap" in f.message]
    assert warning.numbers["cap"] == pytest.approx(2, rel=1e-4)
    assert 0 < warning.numbers["capped_share"] < 1
    biases = list(warning.numbers["bias_by_cap"].values())
    assert biases == sorted(biases, reverse=True)


def test_c06_a_truncated_sampler_shows_a_constant():
    def weighted(logp, ref_logp, old_logp):
        return (logp - old_logp).exp().detach() * (logp - ref_logp)

    top_p = next(f.message for f in check(weighted, placement="reward").of("sampling") if "top-p" in f.message)
    assert "constant log of the mass kept" in top_p


def test_c07_a_verdict_for_each_placement():
    report = check(k3)
    assert not report.passed
    assert "reward FAIL: sequence - token-forward · loss FAIL: token-forward · both PASS" in report.verdict
    assert "--placement both" in report.mend
    assert check(k3, placement="both").passed


# ------------------------------------------------------------------------------------------ what is right and failed


def by_product(logp, ref_logp, mask):
    return ((logp - ref_logp) * mask).sum(-1)


def where_after(logp, ref_logp, mask):
    d = ref_logp - logp
    return W(mask, d.exp() - 1 - d).sum(-1).mean()


@pytest.mark.parametrize(
    ("function", "options"),
    [(by_product, {"placement": "reward"}), (where_after, {"target": "token-forward"})],
)
def test_c10_what_only_odd_padding_shows(function, options):
    report = check(function, **options)
    assert report.passed, str(report)
    assert report.of("invariance", "warning")
    assert not check(function, strict=True, **options).passed


def library(logits, ref_logits):
    return torch.distributions.kl_divergence(Categorical(logits=logits), Categorical(logits=ref_logits))


def functional(logits, ref_logits):
    return F.kl_div(ls(ref_logits), ls(logits), log_target=True, reduction="none").sum(-1)


def by_softmax(logits, ref_logits):
    p, q = logits.softmax(-1), ref_logits.softmax(-1)
    return (p * (p.log() - q.log())).sum(-1)


def low_var_kl(logp, ref_logp):
    d = torch.clamp(ref_logp - logp, -20, 20)
    return torch.clamp(d.exp() - d - 1, -10, 10)


@pytest.mark.parametrize(
    ("function", "target"),
    [(library, "token"), (functional, "token"), (by_softmax, "token"), (low_var_kl, "token-forward")],
)
def test_c11_and_c12_library_code_passes(function, target):
    report = check(function, placement="loss", target=target)
    assert report.passed, str(report)
    assert not check(function, placement="loss", target=target, strict=True).passed


def huber(logp, ref_logp, delta=1e9):
    return F.huber_loss(logp, ref_logp, reduction="none", delta=delta)


def mix(logp, ref_logp, r=0.5):
    k = 0.5 * (logp - ref_logp) ** 2
    return r * k + (1 - r) * k


def scored(logp, ref_logp, score=None):
    k = 0.5 * (logp - ref_logp) ** 2
    return k if score is None else k * score


@pytest.mark.parametrize("function", [huber, mix, scored])
def test_c13_a_default_stays(function):
    report = check(function, placement="loss", target="token")
    assert report.passed, str(report)
    assert "its default" in report.text(verbose=True)
    assert "logp: log_probs" in report.text(verbose=True)


def whitened(logp, ref_logp, mask, rewards):
    w = (rewards - rewards.mean()) / rewards.std()
    return w.mean() * 0 + W(mask, 0.5 * (logp - ref_logp) ** 2).sum(-1).mean()


def group_mean(logp, ref_logp, mask, rewards):
    advantage = (rewards - rewards.mean())[:, None]
    return W(mask, -advantage * logp + 0.5 * (logp - ref_logp) ** 2).sum(-1).mean()


@pytest.mark.parametrize("function", [whitened, group_mean])
def test_c14_rewards_that_are_centred(function):
    report = check(function, target="token")
    assert report.passed, str(report)
    assert "change nothing" not in report.text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_c15_a_compiled_function():
    def plain(logp, ref_logp):
        return 0.5 * (logp - ref_logp) ** 2

    report = check(torch.compile(plain), placement="loss", target="token", timeout=5.0)
    assert report.passed, str(report)
    assert any("compiled" in f.message for f in report.of("function"))


# -------------------------------------------------------------------------------------- what failed for a wrong reason


def vocabulary_mean(logits, ref_logits):
    p, q = ls(logits), ls(ref_logits)
    return (p.exp() * (p - q)).mean(-1)


def divided_by_v(logits, ref_logits, mask):
    p, q = ls(logits), ls(ref_logits)
    return W(mask, (p.exp() * (p - q)).sum(-1) / logits.shape[-1]).sum(-1).mean()


@pytest.mark.parametrize(("function", "placement"), [(vocabulary_mean, "loss"), (divided_by_v, None)])
def test_c20_a_mean_over_the_vocabulary(function, placement):
    report = check(function, placement=placement, target="token", sections=("gradient",))
    assert not report.passed
    assert "scaled by 1/V" in told(report)
    assert "padding does" not in told(report)
    factor = report.gradient["loss"]["factor"]
    assert factor == pytest.approx({v: 1 / v for v in factor})


def test_c20_the_default_mean_of_the_library():
    def default(logits, ref_logits):
        return F.kl_div(ls(ref_logits), ls(logits), log_target=True, reduction="mean")

    report = check(default, target="token", sections=("gradient",))
    assert "the vocabulary's size and the places of the batch" in told(report)


def head(logits, ref_logits, k):
    p, q = ls(logits), ls(ref_logits)
    index = p.topk(k, -1).indices
    return p.gather(-1, index), q.gather(-1, index)


def truncated(logits, ref_logits):
    p, q = head(logits, ref_logits, 2)
    return (p.exp() * (p - q)).sum(-1)


def with_tail(logits, ref_logits):
    p, q = (x.exp() for x in head(logits, ref_logits, 1))
    return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum(-1)


def renormalised(logits, ref_logits):
    p, q = (ls(x) for x in head(logits, ref_logits, 2))
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (truncated, "policy's top 2, the tail left out"),
        (with_tail, "policy's top 1 and one bucket for the tail"),
        (renormalised, "policy's top 2, renormalised"),
    ],
)
def test_c21_truncations_are_named(function, words):
    report = check(function, placement="loss", target="token", sections=("gradient",))
    assert words in told(report)
    assert not report.passed


def test_c22_bernoulli():
    def bernoulli(logp, ref_logp):
        p, q = logp.exp(), ref_logp.exp()
        return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()

    assert "Bernoulli KL of the sampled token" in told(check(bernoulli, placement="loss", sections=("gradient",)))


@pytest.mark.parametrize("factor", [0.5, 1 / 16, 3.0])
def test_c23_a_scaled_target_is_the_target(factor):
    def scaled(logp, ref_logp):
        return factor * k3(logp, ref_logp)

    report = check(scaled, placement="loss", target="token-forward", sections=("gradient", "variance"))
    assert not report.passed
    assert f"{factor:.6g} times the token-level forward-KL gradient (cosine 1)" in told(report)
    assert f"divide by {factor:.6g}" in report.mend
    assert "something else" not in told(report)
    assert "no number of sequences" not in told(report)


def test_c23_the_mean_of_each_reply():
    def each(logp, ref_logp, mask):
        return (W(mask, k3(W(mask, logp), W(mask, ref_logp))).sum(-1) / mask.sum(-1).clamp(min=1)).mean()

    assert "token-level forward-KL gradient scaled by 1/T" in told(check(each, target="token-forward"))


def weighed(logp, ref_logp, mask, rewards, beta):
    return ((1 + rewards) * beta * W(mask, 0.5 * (logp - ref_logp) ** 2).sum(-1)).mean()


def by_advantage(logp, ref_logp, mask, advantages):
    return (advantages * W(mask, 0.5 * (logp - ref_logp) ** 2)).sum(-1).mean()


@pytest.mark.parametrize("function", [weighed, by_advantage])
def test_c24_the_reward_multiplies_the_kl(function):
    report = check(function, target="token")
    assert "the reward multiplies the KL" in told(report)
    assert "add the KL outside" in report.mend
    assert "no_grad" not in told(report)


def end_dropped(logp, ref_logp, mask):
    return W(mask & F.pad(mask[:, 1:], (0, 1)), 0.5 * (logp - ref_logp) ** 2).sum(-1).mean()


def mask_late(logp, ref_logp, mask):
    return W(F.pad(mask[:, :-1], (1, 0)), 0.5 * (logp - ref_logp) ** 2).sum(-1).mean()


def first_lost(logp, ref_logp, mask):
    return W(mask, 0.5 * (logp - ref_logp) ** 2)[:, 1:].sum(-1).mean()


def rolled(logp, ref_logp, mask):
    return W(mask, 0.5 * (logp - torch.roll(ref_logp, -1, 1)) ** 2)


def shifted_inside(logits, ref_logits, input_ids, mask):
    ids = input_ids[:, 1:, None]
    d = (ls(logits[:, :-1]).gather(-1, ids) - ls(ref_logits[:, :-1]).gather(-1, ids))[..., 0]
    return W(mask[:, 1:], 0.5 * d**2).sum(-1).mean()


@pytest.mark.parametrize(
    ("function", "placement", "words"),
    [
        (end_dropped, None, "the last real token's log-prob has no effect"),
        (mask_late, None, "the mask is shifted by one"),
        (first_lost, None, "the first token's log-prob has no effect"),
        (rolled, "loss", "shifted by one against each other"),
        (shifted_inside, None, "it shifts inside"),
    ],
)
def test_c25_what_is_off_by_one(function, placement, words):
    assert words in told(check(function, placement=placement, target="token", sections=("gradient",)))


def test_c26_an_inverted_ratio():
    def inverted(logp, ref_logp, old_logp):
        return (old_logp - logp).exp() * (logp - ref_logp)

    report = check(inverted, placement="loss", target="token", sections=("gradient",))
    assert "the importance ratio is upside down" in told(report)
    assert "negate it" not in told(report)
    assert not check(inverted, placement="reward").passed


@pytest.mark.parametrize("bound", [0.5, 1.3])
def test_c27_clamps_are_told_as_they_are(bound):
    def clamped(logp, ref_logp):
        return 0.5 * torch.clamp(logp - ref_logp, -bound, bound) ** 2

    (warning,) = [f for f in check(clamped, sections=("numerics",)).findings if "clamp leaves" in f.message]
    assert warning.numbers["thresholds"] == pytest.approx((bound, -bound), abs=1e-3)
    assert f"above {bound:g} and below -{bound:g}" in warning.message


def test_c27_a_clamp_at_zero():
    def floored(logp, ref_logp):
        return torch.clamp(logp - ref_logp, min=0)

    text = told(check(floored, placement="loss", target="token"))
    assert "clamped at 0, which kills the gradient wherever the log-ratio is negative" in text


def test_c28_cancellation_is_no_clamp():
    def prefix(logp, ref_logp, mask):
        ratio = W(mask, logp - logp.detach()).cumsum(-1).exp()
        return W(mask, ratio * k3(W(mask, logp), W(mask, ref_logp)))

    def detached(logits, ref_logits):
        p, q = ls(logits), ls(ref_logits)
        return (p.exp().detach() * (p - q)).sum(-1)

    for function in (prefix, detached):
        messages = [f.message for f in check(function, placement="loss").findings]
        assert not any("a clamp leaves" in m for m in messages)
    text = told(check(by_softmax, placement="loss", target="token", sections=("numerics",)))
    assert "0 log 0" in text
    assert "clamp the argument of exp" not in text


def test_c29_what_the_token_itself_did_is_not_in_it():
    def top_two(logits, ref_logits):
        p, q = head(logits, ref_logits, 2)
        return -(p.exp() * (p - q)).sum(-1).detach()

    report = check(top_two, returns="return", target="token", sections=("gradient",))
    assert "what the sampled token itself did is not in it" in told(report)
    assert "put the estimate in the reward instead" not in told(report)


def test_c30_terms_that_are_clipped_before_the_sum():
    def clipped(logits, ref_logits):
        p, q = ls(logits), ls(ref_logits)
        return (p.exp() * (p - q).clamp(max=0.3)).sum(-1)

    text = told(check(clipped, placement="loss", target="token", sections=("gradient", "value")))
    assert "clipped, weighted or left out before the sum" in text or "clamped" in text
    assert "at the same temperature" not in text


def test_c31_a_token_mean_is_said_both_ways():
    def token_mean(logp, ref_logp, mask):
        return W(mask, k3(W(mask, logp), W(mask, ref_logp))).sum() / mask.sum()

    report = check(token_mean, target="token-forward", sections=("gradient",))
    assert "in large batches it is token-forward / E|y|" in told(report)
    large = report.gradient["loss"]["large_batch"]
    assert large["factor"] == pytest.approx(1, abs=1e-5)
    assert large["remainder"][2] > large["remainder"][4] > 0


def test_c32_the_best_configuration_is_that_for_the_target():
    best = check(k2, placement="loss", target="token", sections=("variance",)).variance["best_unbiased"]
    assert {verdict(parse(name)).name for name in best.values()} == {"token"}


def jensen_shannon(logits, ref_logits):
    p, q = ls(logits), ls(ref_logits)
    m = torch.logaddexp(p, q) - math.log(2)
    return 0.5 * ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1))


def entropy_bonus(logits, mask):
    p = ls(logits)
    return W(mask, (p.exp() * p).sum(-1)).sum(-1).mean()


def wrong_way(logits, mask):
    return -entropy_bonus(logits, mask)


def sampled_entropy(logp):
    return logp


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (jensen_shannon, {"placement": "loss", "target": "jensen-shannon"}),
        (jensen_shannon, {"placement": "both", "target": "jensen-shannon"}),
        (entropy_bonus, {"target": "entropy"}),
        (sampled_entropy, {"placement": "reward", "target": "entropy"}),
        (k2, {"placement": "loss", "target": "k2-in-loss"}),
        (k2, {"placement": "both", "target": "k2-in-both"}),
        (k3, {"placement": "loss", "target": "k3-in-loss"}),
    ],
)
def test_c33_a_target_of_ones_own(function, options):
    report = check(function, sections=("value", "gradient"), **options)
    assert report.passed, str(report)
    assert [f for f in report.findings if f.level == "warning" and "emit" not in f.message] == []


def test_c33_a_target_can_be_missed():
    assert not check(wrong_way, target="entropy", sections=("gradient",)).passed
    assert not check(jensen_shannon, placement="loss", target="token", sections=("gradient",)).passed
    assert not check(k1, placement="loss", target="k2-in-loss", sections=("gradient",)).passed


def test_c33_another_function_is_a_target(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def other(logp, ref_logp):\n    return 0.5 * (logp - ref_logp) ** 2\n")
    assert check(k2, placement="loss", target=f"{path}:other", sections=("gradient",)).passed
    assert not check(k3, placement="loss", target=f"{path}:other", sections=("gradient",)).passed
