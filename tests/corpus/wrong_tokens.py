"""Wrong code, torch: terms of every token or reply."""

import torch
import torch.nn.functional as F
from corpus import causes as why
from corpus.entries import Corpus

CORPUS = Corpus()
wrong = CORPUS.wrong


def only(mask, x):
    return torch.where(mask.bool(), x, torch.zeros_like(x))


# --------------------------------------------------------------------------------------------- sign, arguments


@wrong("sequence", "reward", why.SIGN, why.SWAPPED)
def reference_minus_policy(logp, ref_logp):
    return ref_logp - logp


@wrong("sequence", "reward", why.SIGN, why.SWAPPED, returns="reward")
def reward_that_pays_for_drift(log_probs, ref_log_probs, action_mask, kl_coef):
    return kl_coef * only(action_mask, log_probs - ref_log_probs)


@wrong("sequence", "reward", why.SIGN, returns="return")
def returns_that_pay_for_drift(logp, ref_logp, mask):
    k = only(mask, logp - ref_logp)
    return k.flip(-1).cumsum(-1).flip(-1)


@wrong("token", "loss", why.SIGN)
def minus_k2(logp, ref_logp):
    return -((logp - ref_logp) ** 2) / 2


@wrong("token-forward", "loss", why.RATIO_INVERTED, why.CHI_SQUARED, why.SWAPPED)
def k3_with_the_ratio_inverted(logp, ref_logp):
    d = logp - ref_logp
    return d.exp() - d - 1


@wrong("sequence", "both", why.SIGN)
def k3_with_the_wrong_sign_in_the_middle(per_token_logps, ref_per_token_logps):
    d = ref_per_token_logps - per_token_logps
    return d.exp() + d - 1


@wrong("token-forward", "loss", why.RATIO_INVERTED, why.CHI_SQUARED, why.SWAPPED)
def k3_of_minus_the_exponent(per_token_logps, ref_per_token_logps):
    d = ref_per_token_logps - per_token_logps
    return (-d).exp() - d - 1


@wrong("sequence", "both", why.RATIO_INVERTED, why.CHI_SQUARED, why.SWAPPED)
def k3_inverted_in_both(log_prob, ref_log_prob):
    ratio = torch.exp(log_prob - ref_log_prob)
    return ratio - 1 - (log_prob - ref_log_prob)


@wrong("token", "loss", why.RATIO_INVERTED, never=(why.NEGATE,))
def ratio_upside_down(logp, old_logp, ref_logp):
    return (old_logp - logp).exp() * (logp - ref_logp)


@wrong("token", "loss", why.RATIO_INVERTED, never=(why.NEGATE,))
def ratio_upside_down_on_k3(log_prob, old_log_prob, ref_log_prob):
    d = ref_log_prob - log_prob
    return torch.exp(old_log_prob - log_prob) * (d.exp() - d - 1)


@wrong("sequence", "loss", why.RATIO_INVERTED, never=(why.NEGATE,))
def sequence_ratio_upside_down(logp, old_logp, ref_logp, mask):
    weight = only(mask, old_logp - logp).sum(-1).exp()
    return weight * only(mask, logp - ref_logp).sum(-1)


# --------------------------------------------------------------------------------------- the placement is wrong


@wrong("sequence", "loss", why.ZERO, why.FREE)
def k1_in_the_loss(log_probs, ref_log_probs):
    return log_probs - ref_log_probs


@wrong("token", "loss", why.ZERO, why.FREE)
def k1_in_the_loss_masked(log_probs, ref_log_probs, loss_mask):
    return only(loss_mask, log_probs - ref_log_probs).sum(-1)


@wrong("sequence", "loss", why.FORWARD)
def k3_in_the_loss(logp, ref_logp):
    d = ref_logp - logp
    return d.exp() - d - 1


@wrong("token", "loss", why.FORWARD)
def k3_in_the_loss_by_token(logprobs, ref_logprobs, response_mask):
    d = only(response_mask, ref_logprobs - logprobs)
    return torch.expm1(d) - d


@wrong("sequence", "reward", why.K3_IN_REWARD)
def k3_in_the_reward(logp, ref_logp):
    d = ref_logp - logp
    return d.exp() - d - 1


@wrong("sequence", "reward", why.K3_IN_REWARD, why.FORWARD, returns="return")
def k3_in_rewards_to_go(logp, ref_logp, mask):
    d = only(mask, ref_logp - logp)
    k = torch.expm1(d) - d
    return -k.flip(-1).cumsum(-1).flip(-1)


@wrong("sequence", "reward", why.OTHER, r"k2")
def k2_in_the_reward(logp, ref_logp):
    return 0.5 * (logp - ref_logp).square()


@wrong("sequence", "both", r"k2")
def k2_in_both(logp, ref_logp):
    return 0.5 * (logp - ref_logp).square()


@wrong("sequence", "loss", why.NO_FUTURE)
def k2_for_the_sequence(logp, ref_logp):
    return 0.5 * (logp - ref_logp).square()


@wrong("sequence", "reward", why.NO_FUTURE, returns="return")
def own_token_for_the_sequence(logp, ref_logp):
    return (ref_logp - logp).detach()


@wrong("token", "loss", r"k2", why.OTHER)
def live_ratio_times_k2(logp, old_logp, ref_logp):
    return (logp - old_logp).exp() * 0.5 * (logp - ref_logp) ** 2


@wrong("token", "loss", why.DEAD)
def dead_because_detached(logp, ref_logp):
    return 0.5 * (logp.detach() - ref_logp) ** 2


@wrong("token", "loss", why.DEAD)
@torch.no_grad()
def dead_under_no_grad(logp, ref_logp):
    return 0.5 * (logp - ref_logp) ** 2


@wrong("token", "loss", why.DEAD)
def dead_because_rebuilt(logp, ref_logp):
    return torch.tensor((0.5 * (logp - ref_logp) ** 2).tolist(), dtype=logp.dtype)


@wrong("token", "loss", why.ZERO, why.DEAD)
def detached_weight_alone(logp, ref_logp):
    """The weight is detached, and so is the log-prob it should weigh."""
    return (logp - ref_logp).detach() * logp.detach()


@wrong("token", "loss", why.DEAD, why.ALIAS)
def reference_is_the_policy(logp, ref_logp):
    ref_logp = logp
    return 0.5 * (logp - ref_logp) ** 2


@wrong("sequence", "reward", why.ALIAS)
def reference_is_the_sampler(logp, old_logp):
    return logp - old_logp


@wrong("token", "loss", why.ZERO, why.FREE, r"half|0\.5|entropy")
def ratio_of_detached_terms(logp, ref_logp):
    """The wrong half is detached: the score is left without its weight."""
    return logp - ref_logp.detach() + (0.5 * (logp - ref_logp) ** 2).detach()


# --------------------------------------------------------------------------------------------------- strength


@wrong("sequence", None, why.CHOOSE, shows="placement")
def k3_anywhere(logp, ref_logp):
    d = ref_logp - logp
    return torch.expm1(d) - d


@wrong("sequence", None, why.CHOOSE, shows="placement")
def k1_anywhere(log_probs, ref_log_probs, action_mask):
    return only(action_mask, log_probs - ref_log_probs)


@wrong("token", None, why.CHOOSE, shows="placement")
def k2_anywhere(logp, ref_logp, mask):
    return 0.5 * only(mask, logp - ref_logp).square()


@wrong("token", "loss", r"\b2 times|divide by 2")
def square_without_half(logp, ref_logp):
    return (logp - ref_logp) ** 2


@wrong("token", "loss", r"\b2 times|divide by 2")
def mse_without_half(log_prob, ref_log_prob, response_mask):
    return F.mse_loss(only(response_mask, log_prob), only(response_mask, ref_log_prob), reduction="none")


@wrong("sequence", "reward", r"0\.5 times|divide by 0\.5")
def half_k1(logp, ref_logp):
    return 0.5 * (logp - ref_logp)


@wrong("sequence", "reward", r"1\.44\d* times|divide by 1\.44|log2|base 2")
def in_bits(logp, ref_logp):
    return (logp - ref_logp) / torch.log(torch.tensor(2.0, dtype=logp.dtype))


@wrong("sequence", "reward", r"0\.434\d* times|log10|base 10")
def in_decades(logp, ref_logp):
    return torch.log10(logp.exp()) - torch.log10(ref_logp.exp())


@wrong("token-forward", "loss", r"0\.5 times|divide by 0\.5", never=(why.NO_NUMBER,))
def half_k3(logp, ref_logp):
    d = ref_logp - logp
    return 0.5 * (torch.expm1(d) - d)


@wrong("token-forward", "loss", r"0\.0625 times|divide by 0\.0625", never=(why.NO_NUMBER,))
def sixteenth_of_k3(per_token_logps, ref_per_token_logps):
    d = ref_per_token_logps - per_token_logps
    return (d.exp() - d - 1) / 16


@wrong("sequence", "reward", why.WITHIN)
def two_per_cent_more(logp, ref_logp):
    return 1.02 * (logp - ref_logp)


@wrong("token", "loss", why.WITHIN, r"0\.99")
def one_per_cent_less(logp, ref_logp):
    return 0.99 * 0.5 * (logp - ref_logp) ** 2


@wrong("token", "loss", r"0\.95", why.WITHIN)
def a_little_forward_kl(logp, ref_logp):
    d = ref_logp - logp
    return 0.95 * 0.5 * d**2 + 0.05 * (torch.expm1(d) - d)


@wrong("token", "loss", why.HALF, shows="rounding", level="any")
def half_precision_inside(logp, ref_logp):
    return (0.5 * (logp - ref_logp) ** 2).bfloat16()


@wrong("sequence", "reward", why.HALF, shows="rounding", level="any")
def float16_difference(log_probs, log_probs_base):
    return log_probs.half() - log_probs_base.half()


@wrong("sequence", "reward", why.HALF, shows="rounding", level="any")
def bfloat16_log_softmax(logits, ref_logits, labels):
    a, b = (x.bfloat16().log_softmax(-1).gather(-1, labels[..., None])[..., 0] for x in (logits, ref_logits))
    return a - b


# ------------------------------------------------------------------------------------------- another quantity


@wrong("sequence", "reward", why.OTHER)
def absolute_value_in_the_reward(logp, ref_logp):
    return (logp - ref_logp).abs()


@wrong("token", "loss", r"total variation", why.OTHER)
def absolute_value_in_the_loss(logp, ref_logp):
    return (logp - ref_logp).abs()


@wrong("sequence", "reward", why.AT_ZERO, r"negative")
def negative_ones_cut_off(logp, ref_logp):
    return (logp - ref_logp).clamp(min=0)


@wrong("token", "loss", why.AT_ZERO, r"negative")
def relu_before_the_square(logp, ref_logp):
    return 0.5 * F.relu(logp - ref_logp) ** 2


@wrong("sequence", "reward", why.OTHER, r"not an estimate|value")
def difference_of_probabilities(logp, ref_logp):
    return logp.exp() - ref_logp.exp()


@wrong("sequence", "reward", why.OTHER, r"sequence|probabilit")
def weighted_by_the_probability_again(logp, ref_logp):
    """The sample is drawn with pi already."""
    return logp.exp() * (logp - ref_logp)


@wrong("token", "loss", why.OTHER, r"p\(|probabilit|sampled")
def kl_div_of_sampled_log_probs(logp, ref_logp):
    return F.kl_div(ref_logp, logp, log_target=True, reduction="none")


@wrong("sequence", "reward", r"entropy", why.OTHER, r"cross-entropy")
def reference_forgotten(logp, ref_logp):
    return logp + 0 * ref_logp


@wrong("sequence", "reward", r"cross-entropy", why.OTHER)
def policy_forgotten(logp, ref_logp):
    return -ref_logp + 0 * logp


@wrong("sequence", "reward", why.TEMPERATURE, why.IDENTITY)
def divided_log_prob(logp, ref_logp, temperature=0.6):
    return logp / temperature - ref_logp


@wrong("sequence", "reward", why.TEMPERATURE, why.IDENTITY, why.OTHER)
def one_side_at_a_temperature(logits, ref_logits, labels):
    a, b = (logits / 0.7).log_softmax(-1), ref_logits.log_softmax(-1)
    return (a - b).gather(-1, labels[..., None])[..., 0]


@wrong("token", "loss", why.TWO_TOKENS, never=(why.BY_PADDING,))
def bernoulli(logp, ref_logp):
    p, q = logp.exp(), ref_logp.exp()
    return p * (logp - ref_logp) + (1 - p) * (torch.log1p(-p) - torch.log1p(-q))


@wrong("token", "loss", why.TWO_TOKENS, never=(why.BY_PADDING,))
def bernoulli_in_logits(log_prob, ref_log_prob, response_mask):
    p = only(response_mask, log_prob).exp().clamp(1e-9, 1 - 1e-9)
    q = only(response_mask, ref_log_prob).exp().clamp(1e-9, 1 - 1e-9)
    return only(response_mask, p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log())
