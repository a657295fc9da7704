"""Wrong code, torch: at the edges: clamps, caps, masks, shifts, returns, and what a function does besides."""

import torch
import torch.nn.functional as F
from corpus import causes as why
from corpus.entries import Corpus

CORPUS = Corpus()
wrong = CORPUS.wrong


def only(mask, x):
    return torch.where(mask.bool(), x, torch.zeros_like(x))


# ------------------------------------------------------------------------------------------------------ clamps


@wrong("token", "loss", r"clamp[^\n]*0\.5\b|0\.5\b[^\n]*clamp", shows="drift", level="any")
def log_ratio_held_to_a_half(logp, ref_logp):
    return 0.5 * (logp - ref_logp).clamp(-0.5, 0.5) ** 2


@wrong("sequence", "reward", r"clamp[^\n]*\b1\b|\b1\b[^\n]*clamp")
def log_ratio_held_to_one(logp, ref_logp):
    return torch.clamp(logp - ref_logp, -1.0, 1.0)


@wrong("token-forward", "loss", why.CLAMPED, shows="drift", level="any")
def value_held_to_ten(logp, ref_logp):
    d = ref_logp - logp
    return torch.clamp(d.exp() - d - 1, max=10.0)


@wrong("sequence", "reward", why.CLAMPED, shows="drift", level="any")
def k1_held_to_five(log_probs, ref_log_probs):
    return (log_probs - ref_log_probs).clamp(-5, 5)


@wrong("token", "loss", why.AT_ZERO, r"negative")
def value_floored_at_zero(logp, old_logp, ref_logp):
    """Of k1 under the live ratio: where the log-ratio is negative the gradient is gone."""
    return ((logp - old_logp).exp() * (logp - ref_logp)).clamp(min=0)


@wrong("token", "loss", r"grows|clamp|Huber|log-ratio", why.OTHER, shows="drift", level="any")
def narrow_huber(logp, ref_logp):
    return F.huber_loss(logp, ref_logp, reduction="none", delta=1.0)


@wrong("token", "loss", why.CAP, shows="stale", level="any")
def capped_ratio(logp, old_logp, ref_logp):
    return torch.clamp((logp - old_logp).exp(), max=2.0).detach() * 0.5 * (logp - ref_logp) ** 2


@wrong("token", "loss", why.CAP, shows="stale", level="any")
def capped_ratio_on_k1(log_prob, old_log_prob, ref_log_prob):
    weight = (log_prob - old_log_prob).detach().exp().clamp_max(1.5)
    return weight * (log_prob - ref_log_prob).detach() * log_prob


@wrong("sequence", "loss", why.CAP, shows="stale", level="any")
def capped_sequence_ratio(logp, old_logp, ref_logp, mask):
    weight = torch.minimum(only(mask, logp - old_logp).sum(-1).exp(), torch.tensor(2.0, dtype=logp.dtype))
    return weight.detach() * only(mask, logp - ref_logp).sum(-1).detach() * only(mask, logp).sum(-1)


@wrong("sequence", "reward", why.CAP, shows="stale", level="any")
def capped_whole_ratio_in_the_reward(logp, old_logp, ref_logp, mask):
    weight = only(mask, logp - old_logp).sum(-1).exp().clamp(max=2.0)
    return weight * only(mask, logp - ref_logp).sum(-1)


@wrong("token", "loss", r"sampler's log-probs|does not make up", shows="stale", level="any")
def ratio_to_itself(logp, old_logp, ref_logp):
    """The sampler's log-probs are recomputed with today's weights: the ratio is 1 however stale the sample."""
    old_logp = logp.detach() + 0 * old_logp
    d = ref_logp - logp
    return (logp - old_logp).exp() * (d.exp() - d - 1)


@wrong("token-forward", "loss", r"whole sequences")
def k3_of_the_summed_ratio(logp, ref_logp, mask):
    d = only(mask, ref_logp - logp).sum(-1)
    return d.exp() - d - 1


@wrong("sequence", "loss", r"geometric|/T\b|length")
def geometric_ratio(logp, old_logp, ref_logp, mask):
    n = mask.sum(-1).clamp(min=1)
    weight = (only(mask, logp - old_logp).sum(-1) / n).exp()
    return weight * only(mask, logp - ref_logp).sum(-1)


@wrong("sequence", "loss", r"geometric|/T\b|length")
def mean_ratio_on_k3(logp, old_logp, ref_logp, mask):
    n = mask.sum(-1, keepdim=True).clamp(min=1)
    weight = (only(mask, logp - old_logp).sum(-1, keepdim=True) / n).exp()
    d = only(mask, ref_logp - logp)
    return weight * (torch.expm1(d) - d)


# ---------------------------------------------------------------------------------------------- mask and shift


@wrong("sequence", "reward", why.SHIFTED)
def reference_one_late(logp, ref_logp):
    return logp - torch.roll(ref_logp, 1, dims=-1)


@wrong("token", "loss", why.SHIFTED)
def reference_one_early(logp, ref_logp, mask):
    late = F.pad(ref_logp[:, 1:], (0, 1))
    return 0.5 * only(mask, logp - late) ** 2


@wrong("sequence", "reward", why.LAST)
def end_token_dropped(logp, ref_logp, mask):
    inner = mask.bool() & F.pad(mask[:, 1:].bool(), (0, 1))
    return only(inner, logp - ref_logp)


@wrong("token", "loss", why.LAST)
def end_token_dropped_from_k2(logp, ref_logp, mask):
    inner = mask.bool() & F.pad(mask[:, 1:].bool(), (0, 1))
    return 0.5 * only(inner, logp - ref_logp) ** 2


@wrong("sequence", "reward", why.FIRST)
def first_token_dropped(logp, ref_logp, mask):
    inner = mask.bool() & F.pad(mask[:, :-1].bool(), (1, 0))
    return only(inner, logp - ref_logp)


@wrong("token", "loss", why.FIRST)
def first_column_dropped(logp, ref_logp, mask):
    k = 0.5 * only(mask, logp - ref_logp) ** 2
    return F.pad(k[:, 1:], (1, 0)).sum(-1)


@wrong("sequence", "reward", why.SHIFTED, why.LAST)
def mask_shifted_by_one(logp, ref_logp, mask):
    return only(F.pad(mask[:, 1:], (0, 1)), logp - ref_logp).sum(-1)


@wrong("sequence", "reward", r"mask is inverted|inverted|masked places|padd", why.ALIAS, why.PADDING)
def mask_inverted(logp, ref_logp, mask):
    return (logp - ref_logp).masked_fill(mask.bool(), 0.0).sum(-1)


@wrong("token", "loss", r"inverted|padd|zero for every")
def mask_inverted_in_the_loss(logp, ref_logp, mask):
    return (0.5 * (logp - ref_logp) ** 2).masked_fill(mask.bool(), 0.0).sum(-1)


@wrong("sequence", "reward", why.HOLES, shows="holes", returns="return")
def environment_leaks_into_returns(logp, ref_logp, mask):
    k = logp - ref_logp
    return -k.flip(-1).cumsum(-1).flip(-1) * mask


@wrong("sequence", "reward", why.HOLES, shows="holes", returns="return")
def environment_leaks_by_counting(logp, ref_logp, mask):
    count = mask.long().sum(-1, keepdim=True)
    head = torch.arange(mask.shape[1])[None] < count
    return -only(head, logp - ref_logp).flip(-1).cumsum(-1).flip(-1)


@wrong("token", "loss", why.HOLES, why.LEFT, shows="holes")
def first_n_instead_of_the_mask(logp, ref_logp, mask):
    first = torch.arange(logp.shape[1])[None] < mask.long().sum(-1, keepdim=True)
    return only(first, 0.5 * (logp - ref_logp) ** 2).sum(-1)


@wrong("token", "loss", why.HOLES, shows="holes")
def up_to_the_last_real_token(logp, ref_logp, mask):
    upto = mask.long().flip(-1).cumsum(-1).flip(-1) > 0
    return only(upto, 0.5 * (logp - ref_logp) ** 2).sum(-1)


@wrong("sequence", "reward", why.HOLES, why.LEFT, why.EMPTY, why.PADDING, shows="holes")
def running_total_at_the_last_index(logp, ref_logp, mask):
    total = (logp - ref_logp).cumsum(-1)
    last = mask.long().sum(-1, keepdim=True) - 1
    return total.gather(-1, last.clamp(min=0))[:, 0]


@wrong("sequence", "reward", why.EMPTY, why.NAN, shows="empty")
def mean_times_length(logp, ref_logp, mask):
    n = mask.sum(-1)
    return only(mask, logp - ref_logp).sum(-1) / n * n


@wrong("sequence", "reward", r"direction|past|earlier", why.NO_FUTURE, returns="return")
def returns_in_the_wrong_direction(logp, ref_logp, mask):
    return -only(mask, logp - ref_logp).cumsum(-1)


@wrong("sequence", "reward", r"future term|discount|token", why.OTHER, returns="return")
def returns_with_a_discount(logp, ref_logp, mask):
    gain, out = torch.zeros(len(logp), dtype=logp.dtype), []
    for t in reversed(range(logp.shape[1])):
        gain = only(mask[:, t], ref_logp[:, t] - logp[:, t]) + 0.9 * gain
        out.append(gain)
    return torch.stack(out[::-1], dim=1)


@wrong("token", "reward", r"sequence-level|future", returns="return")
def returns_where_own_token_is_meant(student_logp, teacher_logp, mask):
    k = only(mask, teacher_logp - student_logp)
    return k.flip(-1).cumsum(-1).flip(-1)


@wrong("sequence", "reward", why.BY_T, why.OTHER)
def mean_of_the_reply(logp, ref_logp, mask):
    return only(mask, logp - ref_logp).sum(-1) / mask.sum(-1).clamp(min=1)


@wrong("sequence", "reward", r"length", why.OTHER, returns="return")
def sum_paid_at_every_token(logp, ref_logp, mask):
    """The whole sum as the reward of each token, and then summed again to go."""
    total = -only(mask, logp - ref_logp).sum(-1, keepdim=True)
    each = only(mask, total.expand_as(logp))
    return each.flip(-1).cumsum(-1).flip(-1)


# ------------------------------------------------------------------------------------------ what it does otherwise


@wrong("token", "loss", why.RANDOM, shows="random")
def dropout_inside(logp, ref_logp):
    return 0.5 * F.dropout(logp - ref_logp, 0.1, training=True) ** 2


@wrong("sequence", "reward", why.IN_PLACE, shows="in place")
def writes_into_its_argument(logp, ref_logp):
    ref_logp -= 0.1
    return logp - ref_logp - 0.1


@wrong("sequence", "reward", r"-inf|infinite|NaN", shows="support", level="any")
def probability_floor_hides_the_mismatch(logp, ref_logp):
    return logp - ref_logp.clamp(min=-6.0)


@wrong("sequence", "reward", r"-inf|infinite|NaN", shows="support", level="any")
def nan_to_num(logp, ref_logp):
    return torch.nan_to_num(logp - ref_logp, nan=0.0, posinf=0.0, neginf=0.0)
