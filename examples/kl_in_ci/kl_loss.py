"""A KL term as one would write it for a run: per token, masked, its gradient the sequence-level one."""

import torch


def kl_loss(log_probs, ref_log_probs, mask):
    log_ratio = torch.where(mask, log_probs - ref_log_probs, 0.0)
    later = log_ratio.detach().flip(-1).cumsum(-1).flip(-1)  # reward-to-go
    return (later * torch.where(mask, log_probs, 0.0)).sum(-1).mean()
