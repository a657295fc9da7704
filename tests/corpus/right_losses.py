"""Right code, torch: whole losses, what the optimiser is given."""

import torch
import torch.nn.functional as F
from corpus.entries import CANCEL, FLOAT16, GROUP, IMPOSSIBLE, OVERFLOW, POISON, STALE, TAIL, UNREACHED, Corpus

CORPUS = Corpus()
right = CORPUS.right
FAR = (TAIL, OVERFLOW, FLOAT16, CANCEL)


def keep(mask, x):
    return torch.where(mask.bool(), x, torch.zeros_like(x))


def weighed(beta, kl):
    """Nothing at all for a coefficient of 0, where the KL may be infinite."""
    return beta * kl if beta else torch.zeros_like(kl)


# ------------------------------------------------------------------------------------------ the KL in the loss


@right("token", "loss")
def k2_per_reply(logp, ref_logp, mask):
    return 0.5 * keep(mask, logp - ref_logp).square().sum(-1).mean()


@right("token", "loss")
def k2_over_batch(log_prob, ref_log_prob, response_mask, kl_loss_coef):
    each = keep(response_mask, log_prob - ref_log_prob) ** 2 / 2
    return weighed(kl_loss_coef, each.sum() / each.shape[0])


@right("token-forward", "loss", warns=(*FAR, STALE))
def grpo_dr_style(per_token_logps, ref_per_token_logps, old_per_token_logps, completion_mask, advantages, beta):
    """A constant divisor is a matter of the learning rate; here it is 1."""
    gap = keep(completion_mask, ref_per_token_logps - per_token_logps)
    ratio = keep(completion_mask, per_token_logps - old_per_token_logps).exp()
    policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return keep(completion_mask, policy + weighed(beta, gap.exp() - gap - 1)).sum(-1).mean()


@right("token", "loss", warns=(*FAR, STALE))
def grpo_with_bias_correction(per_token_logps, ref_per_token_logps, old_per_token_logps, completion_mask, beta):
    gap = keep(completion_mask, ref_per_token_logps - per_token_logps)
    weight = keep(completion_mask, per_token_logps - old_per_token_logps).exp()
    return weighed(beta, keep(completion_mask, weight * (gap.exp() - gap - 1))).sum(-1).mean()


@right("token", "loss", warns=(*FAR, UNREACHED, IMPOSSIBLE))
def full_kl_loss(logits, ref_logits, mask, beta):
    a, b = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return weighed(beta, keep(mask, (a.exp() * (a - b)).sum(-1)).sum(-1).mean())


@right("token", "loss")
def guard_of_zero_beta(logp, ref_logp, mask, beta):
    if beta == 0:
        return 0.0 * keep(mask, logp).sum()
    return beta * (0.5 * keep(mask, logp - ref_logp) ** 2).sum(-1).mean()


@right("token", "loss")
def from_logits_and_labels(logits, labels, ref_logps, mask):
    logps = -F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (keep(mask, logps - ref_logps).pow(2) / 2).sum(1).mean(0)


@right("token", "loss", warns=(STALE,))
def opd_policy_gradient(student_logp, teacher_logp, old_logp, mask):
    """On-policy distillation: the detached log-ratio as advantage of its own token."""
    advantage = (teacher_logp - student_logp).detach()
    ratio = keep(mask, student_logp - old_logp).exp()
    return -keep(mask, ratio * advantage).sum(-1).mean()


@right("token", "loss", warns=(*FAR, GROUP), group=2)
def whitened_reward_beside(logp, ref_logp, mask, rewards):
    spread = rewards.std() if len(rewards) > 1 else torch.ones_like(rewards[0])
    white = (rewards - rewards.mean()) / (spread + 1e-6)
    policy = -(white * keep(mask, logp).sum(-1)).mean()
    return policy + 0.5 * keep(mask, logp - ref_logp).square().sum(-1).mean()


@right("token-forward", "loss", warns=(*FAR, POISON))
def masked_after_the_exponential(logp, ref_logp, mask):
    d = ref_logp - logp
    return keep(mask, d.exp() - 1 - d).sum(-1).mean()


@right("token", "loss", warns=(POISON,))
def masked_by_multiplication(logp, ref_logp, mask):
    return (0.5 * (logp - ref_logp) ** 2 * mask).sum(-1).mean()


# ---------------------------------------------------------------------------------------- the KL in the reward


@right("sequence", "loss")
def reinforce_surrogate(logp, ref_logp, mask, beta):
    paid = keep(mask, logp - ref_logp).sum(-1).detach()
    return weighed(beta, (paid * keep(mask, logp).sum(-1)).mean())


@right("sequence", "loss", warns=(STALE, POISON))
def ppo_clipped(logp, ref_logp, old_logp, mask, rewards, kl_coef):
    advantage = (rewards - weighed(kl_coef, keep(mask, old_logp - ref_logp).sum(-1))).unsqueeze(-1)
    ratio = keep(mask, logp - old_logp).exp()
    surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -keep(mask, surrogate).sum(-1).mean()


@right("sequence", "loss", warns=(STALE,))
def reinforce_plus_plus(logp, ref_logp, old_logp, response_mask, token_level_rewards, kl_ctl):
    """Rewards to go of token rewards less the KL."""
    paid = keep(response_mask, token_level_rewards - weighed(kl_ctl, old_logp - ref_logp))
    gains = paid.flip(1).cumsum(1).flip(1)
    ratio = keep(response_mask, logp - old_logp).exp()
    return -keep(response_mask, ratio * gains).sum(-1).mean()


@right("sequence", "loss", warns=(STALE,))
def sequence_ratio(logp, ref_logp, old_logp, mask, rewards, beta):
    log_w = keep(mask, logp - old_logp).sum(-1)
    paid = rewards - weighed(beta, keep(mask, logp - ref_logp).sum(-1).detach())
    return -(log_w.exp() * paid).mean()


@right("sequence", "loss", group=2, warns=(GROUP, STALE, UNREACHED))
def rloo(logp, ref_logp, old_logp, mask, rewards, beta):
    paid = rewards - weighed(beta, keep(mask, old_logp - ref_logp).sum(-1))
    n = len(paid)
    baseline = (paid.sum() - paid) / max(n - 1, 1)
    return -((paid - baseline) * keep(mask, logp).sum(-1)).mean()


@right("sequence", "loss", group=2, warns=(GROUP, STALE, UNREACHED))
def group_mean_unbiased(logp, ref_logp, old_logp, mask, rewards, beta):
    """The mean holds the reply itself: n / (n - 1) makes up for it."""
    paid = rewards - weighed(beta, keep(mask, old_logp - ref_logp).sum(-1))
    n = len(paid)
    centred = (paid - paid.mean()) * (n / (n - 1)) if n > 1 else paid
    return -(centred[:, None] * keep(mask, logp)).sum(-1).mean()


@right("sequence", "loss", group=2, warns=(GROUP, STALE, UNREACHED))
def centred_task_reward_then_kl(logp, ref_logp, old_logp, mask, rewards, beta):
    """The task's reward is centred by its group before the KL comes in, which keeps its own strength."""
    task = rewards - rewards.mean()
    paid = task - weighed(beta, keep(mask, old_logp - ref_logp).sum(-1))
    return -(paid[:, None] * keep(mask, logp)).sum(-1).mean()


@right("sequence", "loss", warns=(*FAR, UNREACHED))
def k3_loss_and_k3_reward(logp, ref_logp, mask, beta):
    """A value that is unbiased, in the reward and in the loss at once."""
    gap = keep(mask, ref_logp - logp)
    k3 = (gap.exp() - gap - 1).sum(-1)
    return weighed(beta, (k3 + k3.detach() * keep(mask, logp).sum(-1)).mean())


@right("sequence", "loss", warns=(UNREACHED,))
def k2_and_strictly_later_k1(logp, ref_logp, mask, beta):
    """A token's own KL by its square, the later ones by the score."""
    k = keep(mask, logp - ref_logp)
    later = (k.flip(1).cumsum(1).flip(1) - k).detach()
    return weighed(beta, (0.5 * k**2 + later * keep(mask, logp)).sum(1).mean())


@right("sequence", "loss")
def critic_as_baseline(logp, ref_logp, mask, labels, beta):
    """A baseline of the prefix: here a number for each previous token."""
    k = keep(mask, logp - ref_logp).detach()
    gains = k.flip(1).cumsum(1).flip(1)
    before = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], dim=1)
    return weighed(beta, ((gains - 0.1 * before) * keep(mask, logp)).sum(-1).mean())


@right("sequence", "loss", warns=(*FAR, UNREACHED, IMPOSSIBLE))
def full_kl_through_everything(logits, ref_logits, labels, mask, beta):
    """Rao-Blackwellised: the exact KL of every place, differentiated, and paid to the tokens before it."""
    a, b = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    exact = keep(mask, (a.exp() * (a - b)).sum(-1))
    logp = keep(mask, a.gather(-1, labels[..., None]).squeeze(-1))
    total = exact.sum(-1)
    return weighed(beta, (total + total.detach() * logp.sum(-1)).mean())


@right("sequence", "loss")
def in_single_precision(logp, ref_logp, mask):
    logp, ref_logp = logp.float(), ref_logp.float()
    k = keep(mask, logp - ref_logp).sum(-1).detach()
    return (k * keep(mask, logp).sum(-1)).mean()
