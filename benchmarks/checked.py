"""What `klgrad check` is timed on: a token term, a whole loss of the full vocabulary, a loss that couples its rows."""

import torch
import torch.nn.functional as F


def token(logp, ref_logp):
    """k1, in numpy or torch."""
    return torch.subtract(logp, ref_logp)


def loss(logits, ref_logits, mask):
    """The masked sum of a full KL, as a scalar."""
    each = F.kl_div(ref_logits.log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    return torch.where(mask, each, torch.zeros_like(each)).sum(-1).mean()


def distilled(student_logits, teacher_logits, mask):
    """Cross-entropy with a teacher's whole distribution, as a scalar."""
    each = -(teacher_logits.softmax(-1) * student_logits.log_softmax(-1)).sum(-1)
    return torch.where(mask, each, torch.zeros_like(each)).sum(-1).mean()


def coupled(logp, ref_logp, mask, rewards):
    """k2 beside rewards less their group's mean: every group of two to four is tried."""
    advantage = (rewards - rewards.mean())[:, None]
    each = 0.5 * (logp - ref_logp) ** 2 - advantage * logp
    return torch.where(mask, each, torch.zeros_like(each)).sum(-1).mean()
