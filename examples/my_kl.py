"""A KL penalty as many libraries write it, for `klgrad check examples/my_kl.py:penalty --placement loss`."""

import torch


def penalty(logp, ref_logp):
    """k3 of each token."""
    log_ratio = ref_logp - logp
    return torch.exp(log_ratio) - 1 - log_ratio
