"""What to write instead: a few lines for the commonest failures; the tests put each through the check."""

from __future__ import annotations

from typing import Any

from klgrad.analysis.checking.targets import Target

LATER = (
    "k = torch.where(mask, logp - ref_logp, 0.0).detach()",
    "later = k.flip(-1).cumsum(-1).flip(-1)  # the KL that this token answers for",
    "loss = (later * torch.where(mask, logp, 0.0)).sum(-1).mean()",
)
SQUARED = (
    "d = torch.where(mask, logp - ref_logp, 0.0)",
    "loss = (0.5 * d**2).sum(-1).mean()  # k2: in the loss exactly the token-level reverse KL",
)
FORWARD = (
    "d = torch.where(mask, ref_logp - logp, 0.0)",
    "loss = (d.exp() - 1 - d).sum(-1).mean()  # k3: in the loss exactly the token-level forward KL",
)
REWARD = (
    "kl = torch.where(mask, logp - ref_logp, 0.0).detach().sum(-1)  # k1 of the whole reply",
    "reward = reward - beta * kl",
)
NORMALISED = (
    "logp_all, ref_all = logits.log_softmax(-1), ref_logits.log_softmax(-1)",
    "logp, ref_logp = (x.gather(-1, tokens[..., None])[..., 0] for x in (logp_all, ref_all))",
)
SHIFTED = (
    "logp = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]",
    "mask = attention_mask[:, 1:]  # the same shift for everything; klgrad's own inputs are aligned already",
)
SNIPPETS = {
    ("sequence", "loss"): LATER, ("token", "loss"): SQUARED, ("token-forward", "loss"): FORWARD,
    ("sequence", "reward"): REWARD,
}  # fmt: skip
_COMMON = ("token-forward", "token", "sequence", "zero", "dead", "wrong-sign")


def instead(found: dict[str, Any], target: Target, placement: str, cause: str) -> tuple[str, ...]:
    """The lines for that failure; none where the mend alone says it."""
    if cause == "logits":
        return NORMALISED
    if cause == "shifted":
        return SHIFTED
    plain = found["verdict"] in _COMMON and found["name"] not in target.fields
    combined = placement == "reward" and found["verdict"] == "other" and "sequence - token-forward" in found["name"]
    if cause or not (plain or combined):
        return ()
    return SNIPPETS.get((target.name, placement), ())
