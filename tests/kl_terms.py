"""KL terms as people write them: right ones, in torch and numpy, under the usual names."""

import numpy as np
import torch


def masked(mask, x):
    return torch.where(mask, x, torch.zeros_like(x))


def live(logp, mask):
    """log pi / sg(pi): 0, and differentiated."""
    return masked(mask, logp - logp.detach())


def k1(log_probs, ref_log_probs):
    return log_probs - ref_log_probs


def k1_numpy(logprobs, base_logprobs):
    assert isinstance(logprobs, np.ndarray)
    return np.subtract(logprobs, base_logprobs)


def k2(new_log_probs, ref_logp):
    return 0.5 * (new_log_probs - ref_logp) ** 2


def k3(per_token_logps, ref_per_token_logps):
    d = ref_per_token_logps - per_token_logps
    return d.exp() - d - 1


def k3_numpy(logp, logp_ref):
    d = logp_ref - logp
    assert isinstance(d, np.ndarray)
    return np.expm1(d) - d


def k1_by_sequence(log_pi, log_ref, response_mask):
    return masked(response_mask, log_pi - log_ref).sum(-1)


def score_loss(logp, ref_logp, mask, beta=0.1):
    """k1 in the reward, as a surrogate."""
    k = masked(mask, logp - ref_logp).detach().sum(-1)
    return beta * (k * masked(mask, logp).sum(-1)).mean()


def half_alpha(logp, ref_logp):
    return logp - ref_logp + 0.5 * torch.expm1(ref_logp - logp)


def full_kl(logits, ref_logits):
    a, b = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1)
