"""Wrong code, torch: whole losses."""

import torch
from corpus import causes as why
from corpus.entries import Corpus

CORPUS = Corpus()
wrong = CORPUS.wrong
LARGE_BATCH = r"large batch|token-forward / E|E\|y\||global token"


def keep(mask, x):
    return torch.where(mask.bool(), x, torch.zeros_like(x))


def k2(logp, ref_logp, mask):
    return 0.5 * keep(mask, logp - ref_logp) ** 2


# ------------------------------------------------------------------------------------------- sign and gradient


@wrong("sequence", "loss", why.SIGN)
def ppo_paid_for_drift(logp, ref_logp, old_logp, mask, rewards, kl_coef):
    advantage = (rewards + kl_coef * keep(mask, old_logp - ref_logp).sum(-1))[:, None]
    return -keep(mask, keep(mask, logp - old_logp).exp() * advantage).sum(-1).mean()


@wrong("token", "loss", why.SIGN)
def kl_taken_off_the_loss(logp, ref_logp, old_logp, mask, advantages, beta):
    policy = keep(mask, keep(mask, logp - old_logp).exp() * advantages)
    return -(policy + beta * k2(logp, ref_logp, mask)).sum(-1).mean()


@wrong("token", "loss", why.DEAD)
def logged_and_never_optimised(logp, ref_logp, mask, beta):
    return beta * k2(logp, ref_logp, mask).sum(-1).mean().detach() + 0 * logp.sum()


@wrong("token", "loss", why.NUMBER, why.DEAD)
def item_of_a_tensor(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask).sum(-1).mean().item()


@wrong("sequence", "loss", why.ZERO, why.FREE, r"detach")
def weight_not_detached(logp, ref_logp, mask):
    """k1 where the surrogate k1.detach() * log pi is meant: the term alone."""
    return keep(mask, logp - ref_logp).sum(-1).mean()


@wrong("sequence", "loss", r"detach|0\.5|sequence|" + why.OTHER)
def surrogate_without_detach(logp, ref_logp, mask, beta):
    k, score = keep(mask, logp - ref_logp).sum(-1), keep(mask, logp).sum(-1)
    return beta * (k * score).mean()


@wrong("sequence", "loss", why.DEAD, why.ZERO)
def surrogate_with_everything_detached(logp, ref_logp, mask):
    k, score = keep(mask, logp - ref_logp).sum(-1), keep(mask, logp).sum(-1)
    return (k.detach() * score.detach()).mean()


@wrong("sequence", "loss", why.DEAD, why.ZERO, r"\bratio\b")
def ratio_detached(logp, ref_logp, old_logp, mask, beta):
    paid = beta * keep(mask, old_logp - ref_logp).sum(-1)
    return (keep(mask, logp - old_logp).sum(-1).exp().detach() * paid).mean()


@wrong("sequence", "loss", why.FORWARD)
def grpo_for_the_sequence(per_token_logps, ref_per_token_logps, completion_mask, beta):
    d = keep(completion_mask, ref_per_token_logps - per_token_logps)
    return beta * (d.exp() - d - 1).sum(-1).mean()


@wrong("sequence", "loss", why.K3_IN_REWARD)
def rloo_with_k3(logp, ref_logp, old_logp, mask, rewards, beta):
    d = keep(mask, ref_logp - old_logp)
    paid = rewards - beta * (torch.expm1(d) - d).sum(-1)
    return -(paid * keep(mask, logp).sum(-1)).mean()


@wrong("sequence", "loss", why.NO_FUTURE)
def own_token_kl_for_the_sequence(logp, ref_logp, old_logp, mask, advantages, beta):
    """The KL of a token taken off its own advantage alone."""
    gain = advantages - beta * (old_logp - ref_logp)
    return -keep(mask, keep(mask, logp - old_logp).exp() * gain).sum(-1).mean()


@wrong("sequence", "loss", r"k2", why.OTHER)
def k2_in_reward_and_loss(logp, ref_logp, mask, beta):
    each = k2(logp, ref_logp, mask).sum(-1)
    return beta * (each + each.detach() * keep(mask, logp).sum(-1)).mean()


@wrong("token", "loss", r"k2", why.OTHER)
def unbiased_flag_with_k2(logp, ref_logp, old_logp, mask, beta):
    weight = keep(mask, logp - old_logp).exp()
    return beta * (weight * k2(logp, ref_logp, mask)).sum(-1).mean()


@wrong("token", "loss", why.RATIO_INVERTED, never=(why.NEGATE,))
def inverted_ratio(logp, ref_logp, old_logp, mask, beta):
    d = keep(mask, ref_logp - logp)
    return beta * (keep(mask, old_logp - logp).exp() * (torch.expm1(d) - d)).sum(-1).mean()


# ------------------------------------------------------------------------------------------- strength


@wrong("token", "loss", r"\b2 times|divide by 2")
def beta_of_both_terms(logp, ref_logp, mask, beta):
    return (beta * k2(logp, ref_logp, mask) + beta * k2(logp, ref_logp, mask)).sum(-1).mean()


@wrong("token", "loss", why.BETA_LINEAR, shows="beta")
def beta_applied_twice(logp, ref_logp, mask, beta):
    kl = beta * k2(logp, ref_logp, mask)
    return beta * kl.sum(-1).mean()


@wrong("sequence", "loss", why.BETA_LINEAR, shows="beta")
def beta_inside_the_square_root(logp, ref_logp, mask, kl_coef):
    paid = kl_coef**0.5 * keep(mask, logp - ref_logp).sum(-1).detach()
    return (paid * keep(mask, logp).sum(-1)).mean()


@wrong("token", "loss", why.BETA_FREE, shows="beta")
def beta_never_used(logp, ref_logp, mask, beta):
    return k2(logp, ref_logp, mask).sum(-1).mean()


@wrong("token", "loss", why.BETA_ZERO, shows="beta zero")
def beta_of_zero_times_infinity(logp, ref_logp, mask, advantages, beta):
    policy = -keep(mask, (logp - logp.detach()).exp() * advantages)
    return (policy + beta * k2(logp, ref_logp, mask)).sum(-1).mean()


@wrong("token-forward", "loss", why.BETA_ZERO, shows="beta zero")
def beta_of_zero_times_an_infinite_k3(logp, ref_logp, mask, beta):
    d = keep(mask, ref_logp - logp)
    return beta * keep(mask, d.exp() - d - 1).sum(-1).mean()


@wrong("sequence", "loss", why.BETA_ZERO, shows="beta zero")
def beta_of_zero_in_the_reward(logp, ref_logp, old_logp, mask, rewards, beta):
    paid = rewards - beta * keep(mask, old_logp - ref_logp).sum(-1)
    return -(paid * keep(mask, logp).sum(-1)).mean()


@wrong("sequence", "loss", why.GROUP_STD, shows="beta", group=2)
def divided_by_the_groups_deviation(logp, ref_logp, old_logp, mask, rewards, beta):
    paid = rewards - beta * keep(mask, old_logp - ref_logp).sum(-1)
    spread = ((paid - paid.mean()) ** 2).mean().sqrt() + 1e-6
    return -((paid - paid.mean()) / spread * keep(mask, logp).sum(-1)).mean()


@wrong("sequence", "loss", r"\(G - 1\)/G|group's size", group=2)
def group_mean_with_itself(logp, ref_logp, old_logp, mask, rewards, beta):
    paid = rewards - beta * keep(mask, old_logp - ref_logp).sum(-1)
    return -((paid - paid.mean()) * keep(mask, logp).sum(-1)).mean()


@wrong("sequence", "loss", why.GROUP, group=2)
def batch_centred_token_kl(logp, ref_logp, mask, beta):
    k = keep(mask, logp - ref_logp)
    k = keep(mask, k - k.sum() / mask.sum()).detach()
    gains = k.flip(1).cumsum(1).flip(1)
    return beta * (gains * keep(mask, logp)).sum(-1).mean()


@wrong("sequence", "loss", why.SELF_NORMALISED, group=2)
def self_normalised_weights(logp, ref_logp, old_logp, mask, beta):
    log_w = keep(mask, logp - old_logp).sum(-1)
    return beta * (log_w.softmax(0) * keep(mask, logp - ref_logp).sum(-1).detach()).sum()


@wrong("token", "loss", why.SUM, shows="sum", level="any")
def sum_over_rows(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask).sum()


@wrong("token", "loss", why.WITHIN, r"0\.98")
def nearly(logp, ref_logp, mask, beta):
    return 0.98 * beta * k2(logp, ref_logp, mask).sum(-1).mean()


@wrong("token", "loss", why.HALF, shows="rounding", level="any")
def in_bfloat16(logp, ref_logp, mask):
    return k2(logp.bfloat16(), ref_logp.bfloat16(), mask).sum(-1).mean()


# ------------------------------------------------------------------------------------------- aggregation


@wrong("token-forward", "loss", why.BY_T, LARGE_BATCH)
def mean_per_reply_then_batch(per_token_logps, ref_per_token_logps, completion_mask):
    d = keep(completion_mask, ref_per_token_logps - per_token_logps)
    each = keep(completion_mask, d.exp() - d - 1).sum(-1) / completion_mask.sum(-1).clamp(min=1)
    return each.mean()


@wrong("token", "loss", why.BY_T, LARGE_BATCH)
def masked_mean_of_k2(logp, ref_logp, mask):
    n = mask.sum(-1).clamp(min=1)
    return (k2(logp, ref_logp, mask).sum(-1) / n).mean()


@wrong("token-forward", "loss", LARGE_BATCH, group=2)
def mean_of_all_tokens(logp, ref_logp, mask):
    d = keep(mask, ref_logp - logp)
    return keep(mask, d.exp() - d - 1).sum() / mask.sum().clamp(min=1)


@wrong("token", "loss", LARGE_BATCH, group=2)
def token_mean_of_k2(logp, ref_logp, response_mask, kl_loss_coef):
    each = k2(logp, ref_logp, response_mask)
    return kl_loss_coef * each.sum() / response_mask.sum().clamp(min=1)


@wrong("token", "loss", r"padd", why.BY_T, r"length")
def mean_over_all_places(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask).mean()


@wrong("token", "loss", r"twice|1/T\^2|T\^2|depends on the length|" + why.OTHER)
def divided_by_length_twice(logp, ref_logp, mask):
    n = mask.sum(-1, keepdim=True).clamp(min=1)
    return ((k2(logp, ref_logp, mask) / n).sum(-1) / n[:, 0]).mean()


@wrong("token", "loss", why.MASK_FREE, why.PADDING, shows="padding", level="any")
def sums_without_a_mask(logp, ref_logp):
    return (0.5 * (logp - ref_logp) ** 2).sum(-1).mean()


@wrong("sequence", "loss", why.BY_T, r"length", why.OTHER)
def reward_of_the_mean_kl(logp, ref_logp, old_logp, mask, rewards, beta):
    n = mask.sum(-1).clamp(min=1)
    paid = rewards - beta * keep(mask, old_logp - ref_logp).sum(-1) / n
    return -(paid * keep(mask, logp).sum(-1)).mean()


@wrong("sequence", "loss", why.BY_T, r"length", why.OTHER)
def k1_in_reward_with_length_normalised_scores(logp, ref_logp, old_logp, mask, rewards, beta):
    paid = rewards - beta * keep(mask, old_logp - ref_logp).sum(-1)
    n = mask.sum(-1).clamp(min=1)
    return -(paid * keep(mask, logp).sum(-1) / n).mean()


@wrong("sequence", "loss", r"/T|length", why.OTHER)
def sum_in_the_reward_and_mean_in_the_loss(logp, ref_logp, mask, beta):
    d = keep(mask, ref_logp - logp)
    k3 = keep(mask, torch.expm1(d) - d)
    n = mask.sum(-1).clamp(min=1)
    return beta * (k3.sum(-1).detach() * keep(mask, logp).sum(-1) + k3.sum(-1) / n).mean()


# ------------------------------------------------------------------------------------------- rewards and masks


@wrong("token", "loss", why.REWARD_TIMES, shows="reward", never=(why.NO_GRAD,))
def one_plus_reward_times_kl(logp, ref_logp, mask, rewards, beta):
    return ((1 + rewards) * beta * k2(logp, ref_logp, mask).sum(-1)).mean()


@wrong("token", "loss", why.REWARD_TIMES, shows="reward", never=(why.NO_GRAD,))
def advantage_times_kl(logp, ref_logp, old_logp, mask, advantages, beta):
    ratio = keep(mask, logp - old_logp).exp()
    each = -ratio * advantages * (1 - beta * k2(logp, ref_logp, mask))
    return keep(mask, each).sum(-1).mean()


@wrong("token", "loss", why.REWARD_TIMES, shows="reward", never=(why.NO_GRAD,))
def kl_only_where_the_advantage_is(logp, ref_logp, old_logp, mask, seq_advantages, beta):
    ratio = keep(mask, logp - old_logp).exp()
    each = seq_advantages[:, None] * (beta * k2(logp, ref_logp, mask) - ratio)
    return keep(mask, each).sum(-1).mean()


@wrong("sequence", "loss", why.REWARD_TIMES, shows="reward", never=(why.NO_GRAD,))
def reward_discounted_by_kl(logp, ref_logp, old_logp, mask, rewards, beta):
    """A factor 1 - beta KL on the reward, beside the penalty."""
    k = keep(mask, old_logp - ref_logp).sum(-1)
    paid = rewards * (1 - beta * k) - beta * k
    return -(paid * keep(mask, logp).sum(-1)).mean()


@wrong("token", "loss", why.HOLES, why.LEFT, shows="holes")
def counts_instead_of_masking(logp, ref_logp, mask):
    first = torch.arange(logp.shape[1])[None] < mask.long().sum(-1, keepdim=True)
    return k2(logp, ref_logp, first).sum(-1).mean()


@wrong("sequence", "loss", why.HOLES, shows="holes")
def environment_in_the_return(logp, ref_logp, old_logp, mask, beta):
    k = old_logp - ref_logp
    real_or_tool = mask.long().flip(-1).cumsum(-1).flip(-1) > 0
    gains = keep(real_or_tool, k).flip(-1).cumsum(-1).flip(-1)
    return beta * (gains * keep(mask, logp)).sum(-1).mean()


@wrong("sequence", "loss", why.HOLES, shows="holes")
def environment_in_the_score(logp, ref_logp, mask, beta):
    real_or_tool = mask.long().flip(-1).cumsum(-1).flip(-1) > 0
    paid = keep(mask, logp - ref_logp).sum(-1).detach()
    return beta * (paid * keep(real_or_tool, logp).sum(-1)).mean()


@wrong("token", "loss", why.EMPTY, why.NAN, shows="empty")
def zero_over_zero_for_an_empty_reply(logp, ref_logp, mask):
    n = mask.sum(-1)
    return (k2(logp, ref_logp, mask).sum(-1) / n * n).mean()


@wrong("token", "loss", why.LAST)
def end_token_is_not_regularised(logp, ref_logp, mask):
    inner = mask.bool() & torch.nn.functional.pad(mask[:, 1:].bool(), (0, 1))
    return k2(logp, ref_logp, inner).sum(-1).mean()


@wrong("token", "loss", why.FIRST, why.SHIFTED)
def mask_one_late(logp, ref_logp, mask):
    late = torch.nn.functional.pad(mask[:, :-1], (1, 0)).bool() & mask.bool()
    return k2(logp, ref_logp, late).sum(-1).mean()


@wrong("sequence", "loss", why.SHIFTED)
def sampler_one_late(logp, ref_logp, old_logp, mask, rewards, beta):
    k = keep(mask, old_logp - torch.roll(ref_logp, 1, 1)).sum(-1)
    return -((rewards - beta * k) * keep(mask, logp).sum(-1)).mean()


@wrong("sequence", "loss", r"never reaches|padded place|last real token", shows="reward lost")
def reward_on_the_first_pad(logp, ref_logp, old_logp, mask, rewards, beta):
    paid = torch.zeros_like(logp)
    end = mask.long().sum(-1).clamp(max=logp.shape[1] - 1)
    paid[torch.arange(len(logp)), end] = rewards
    paid = keep(mask, paid - beta * (old_logp - ref_logp))
    return -(paid.sum(-1) * keep(mask, logp).sum(-1)).mean()
