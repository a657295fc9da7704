"""What a report tells its reader to write instead passes the check itself."""

import pytest
import torch

from klgrad.analysis import check
from klgrad.analysis.checking import instead


def written(lines, arguments, result):
    """A function of the lines."""
    body = "\n".join(f"    {line}" for line in (*lines, f"return {result}"))
    namespace = {"torch": torch}
    exec(f"def function({arguments}):\n{body}\n", namespace)
    return namespace["function"]


@pytest.mark.parametrize(
    ("lines", "target"),
    [(instead.LATER, "sequence"), (instead.SQUARED, "token"), (instead.FORWARD, "token-forward")],
)
def test_the_losses_are_right(lines, target):
    report = check(written(lines, "logp, ref_logp, mask", "loss"), target=target)
    assert report.passed, str(report)
    assert report.of("invariance", "warning") == []


def test_the_reward_is_right():
    function = written(instead.REWARD, "logp, ref_logp, mask, reward, beta", "reward")
    assert check(function, placement="reward", returns="reward").passed


def test_normalised_logits_are_right():
    term = written(instead.NORMALISED, "logits, ref_logits, tokens", "logp - ref_logp")
    assert check(term, placement="reward").passed


def test_a_shift_is_right_for_the_next_token():
    function = written(instead.SHIFTED, "logits, input_ids, attention_mask", "(logp * mask).sum()")
    logits = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids, mask = torch.tensor([[0, 1, 2, 0, 1], [2, 2, 1, 0, 0]]), torch.ones(2, 5)
    by_hand = sum(logits[b, t].log_softmax(-1)[ids[b, t + 1]] for b in range(2) for t in range(4))
    assert function(logits, ids, mask) == pytest.approx(float(by_hand))


@pytest.mark.parametrize(
    ("source", "placement", "target", "shown"),
    [
        ("d = ref_logp - logp\n    return d.exp() - 1 - d", "loss", "token", instead.SQUARED),
        ("return logp - ref_logp", "loss", "sequence", instead.LATER),
        ("return (0.5 * (logp - ref_logp) ** 2).detach()", "loss", "token", instead.SQUARED),
        ("d = ref_logp - logp\n    return d.exp() - 1 - d", "reward", "sequence", instead.REWARD),
    ],
)
def test_the_commonest_failures_get_their_lines(source, placement, target, shown):
    namespace = {}
    exec(f"import torch\ndef function(logp: torch.Tensor, ref_logp):\n    {source}\n", namespace)
    report = check(namespace["function"], placement=placement, target=target, sections=("gradient",))
    assert report.instead == shown
    assert all(line in report.text() for line in shown)
