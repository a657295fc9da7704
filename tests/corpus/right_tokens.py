"""Right code, torch: terms of every token or reply, before whatever weighs and sums them in the trainer."""

import torch
import torch.nn.functional as F
from corpus.entries import (
    CANCEL,
    CLAMP,
    FLOAT16,
    IMPOSSIBLE,
    OVERFLOW,
    POISON,
    STALE,
    TAIL,
    UNREACHED,
    VALUE,
    Corpus,
    Entry,
)

CORPUS = Corpus()
right = CORPUS.right
FAR = (TAIL, OVERFLOW, FLOAT16, CANCEL)  # k3 grows as exp: its tail is heavy and it leaves the range of a dtype


def only(mask, x):
    return torch.where(mask.bool(), x, torch.zeros_like(x))


def weighed(beta, kl):
    """Nothing at all for a coefficient of 0, where the KL may be infinite."""
    return beta * kl if beta else torch.zeros_like(kl)


# ---------------------------------------------------------------------------------------- k1, into the reward


@right("sequence", "reward")
def logprob_difference(logp, ref_logp):
    return logp - ref_logp


@right("sequence", "reward")
def kl_penalty_kl(log_prob, ref_log_prob, response_mask):
    """A trainer of the verl kind: masked before it is taken off the token rewards."""
    kld = log_prob - ref_log_prob
    return torch.where(response_mask > 0, kld, 0.0)


@right("sequence", "reward", warns=(POISON,))
def approx_kl_openrlhf_style(log_probs, log_probs_base, action_mask=None):
    log_ratio = log_probs.float() - log_probs_base.float()
    if action_mask is not None:
        log_ratio = log_ratio * action_mask
    return log_ratio


@right("sequence", "reward")
def rloo_sequence_kl(per_token_logps, ref_per_token_logps, completion_mask):
    diff = (per_token_logps - ref_per_token_logps).masked_fill(~completion_mask.bool(), 0.0)
    return diff.sum(dim=1)


@right("sequence", "reward", warns=(POISON,))
def rloo_sequence_kl_by_product(per_token_logps, ref_per_token_logps, completion_mask):
    return ((per_token_logps - ref_per_token_logps) * completion_mask).sum(-1)


@right("sequence", "reward", returns="reward")
def negative_kl_reward(logprobs, ref_logprobs, loss_mask, kl_coef):
    return -weighed(kl_coef, only(loss_mask, logprobs - ref_logprobs))


@right("sequence", "reward", returns="reward")
def score_minus_kl(logp, ref_logp, mask, rewards, beta):
    kl = only(mask, logp - ref_logp).sum(-1)
    return rewards - weighed(beta, kl)


@right("sequence", "reward")
def selected_from_logits(logits, ref_logits, labels, mask):
    """The log-prob of the sampled token, minus the logsumexp."""

    def pick(x):
        chosen = x.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return chosen - x.logsumexp(-1)

    return only(mask, pick(logits) - pick(ref_logits))


@right("sequence", "reward")
def negative_cross_entropies(logits, ref_logits, input_ids):
    def logp(x):
        flat = F.cross_entropy(x.flatten(0, 1), input_ids.flatten(), reduction="none")
        return -flat.view(input_ids.shape)

    return logp(logits) - logp(ref_logits)


@right("sequence", "reward")
def at_temperature(logits, ref_logits, tokens, temperature=1.0):
    both = [(x / temperature).log_softmax(-1) for x in (logits, ref_logits)]
    mine, other = (torch.take_along_dim(x, tokens[..., None], dim=-1)[..., 0] for x in both)
    return mine - other


NEMO = {"curr_logprobs": "log_probs", "reference_policy_logprobs": "reference", "token_mask": "mask"}


@right("sequence", "reward", warns=(POISON,), mapping=NEMO)
def trainer_minus_reference(curr_logprobs, reference_policy_logprobs, token_mask):
    """Names that no list holds: they are mapped."""
    return (curr_logprobs - reference_policy_logprobs) * token_mask


@right("sequence", "reward")
def selectable(logp, ref_logp, kind="k1"):
    d = logp - ref_logp
    return {"k1": d, "abs": d.abs(), "k2": d.square() / 2, "k3": torch.expm1(-d) + d}[kind]


@right("sequence", "reward")
def log_ratio_itself(log_ratio):
    return 1.0 * log_ratio


class Penalty(torch.nn.Module):
    """An instance with a forward."""

    __name__ = "Penalty"

    def forward(self, log_probs, ref_log_probs, mask):
        return only(mask, log_probs - ref_log_probs)


CORPUS.append(Entry(Penalty(), "sequence", "reward"))


# -------------------------------------------------------------------------------------- rewards to go


@right("sequence", "reward", returns="return")
def reverse_cumsum(log_probs, ref_log_probs, response_mask, kl_ctl):
    paid = -weighed(kl_ctl, only(response_mask, log_probs - ref_log_probs))
    return only(response_mask, paid.flip(-1).cumsum(-1).flip(-1))


@right("sequence", "reward", returns="return")
def loop_backwards(logp, ref_logp, mask, token_level_rewards, beta):
    gain = torch.zeros(logp.shape[0], dtype=logp.dtype)
    out = []
    paid = token_level_rewards - weighed(beta, logp - ref_logp)
    for t in reversed(range(logp.shape[1])):
        gain = gain + only(mask[:, t], paid[:, t])
        out.append(gain)
    return torch.stack(out[::-1], dim=1)


@right("sequence", "reward", returns="return")
def whole_reply_broadcast(logp, ref_logp, mask, rewards, beta):
    total = rewards - weighed(beta, only(mask, logp - ref_logp).sum(-1))
    return total[:, None].expand_as(logp)


@right("token", "reward", returns="return")
def own_token_advantage(student_logp, teacher_logp):
    """On-policy distillation: each token is paid its own log-ratio."""
    return (teacher_logp - student_logp).detach()


@right("token", "reward", returns="return", warns=(UNREACHED, IMPOSSIBLE))
def own_token_with_prefix_baseline(student_logits, teacher_logits, completion_ids, mask):
    """Its own log-ratio less the KL of its place, which the prefix alone fixes."""
    p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    index = completion_ids.unsqueeze(-1)
    own = (p.gather(-1, index) - q.gather(-1, index)).squeeze(-1)
    return only(mask, (p.exp() * (p - q)).sum(-1) - own)


# ------------------------------------------------------------------------------------------ k2, in the loss


@right("token", "loss")
def half_square(logp, ref_logp):
    return 0.5 * (logp - ref_logp) ** 2


@right("token", "loss")
def mse_penalty(log_prob, ref_log_prob, response_mask):
    return 0.5 * only(response_mask, log_prob - ref_log_prob).square()


@right("token", "loss")
def half_mse_loss(new_logp, ref_logp):
    return F.mse_loss(new_logp, ref_logp, reduction="none") / 2


@right("token", "loss")
def wide_huber(logp, ref_logp, delta=1e9):
    return F.huber_loss(logp, ref_logp, reduction="none", delta=delta)


@right("token", "loss")
def mixed_with_itself(logp, ref_logp, r=0.5):
    k = 0.5 * (logp - ref_logp) ** 2
    return r * k + (1 - r) * k


@right("token", "loss")
def detached_ratio_times_log_prob(logp, ref_logp, score=None):
    own = logp if score is None else score
    return (logp - ref_logp).detach() * own


@right("k2-in-loss", "loss")
def target_by_configuration(logp, ref_logp):
    return (logp - ref_logp).pow(2).mul(0.5)


# ------------------------------------------------------------------------------- k3: forward KL, or with a live ratio


@right("token-forward", "loss", warns=FAR)
def grpo_k3(per_token_logps, ref_per_token_logps):
    gap = ref_per_token_logps - per_token_logps
    return torch.exp(gap) - gap - 1


@right("token-forward", "loss", warns=FAR)
def low_variance_kl(log_prob, ref_log_prob, response_mask):
    kl = only(response_mask, ref_log_prob - log_prob)
    return kl.exp() - kl - 1


@right("token-forward", "loss", warns=(*FAR, CLAMP))
def low_variance_kl_clamped(log_prob, ref_log_prob):
    """As some trainers guard it: the log-ratio held to 20, the result to 10."""
    kl = torch.clamp(ref_log_prob - log_prob, min=-20, max=20)
    return torch.clamp(kl.exp() - kl - 1, min=-10, max=10)


@right("token-forward", "loss", warns=FAR)
def k3_by_expm1(action_log_probs, base_action_log_probs):
    d = action_log_probs - base_action_log_probs
    return torch.expm1(-d) + d


@right("token-forward", "loss", warns=FAR)
def k3_from_reverse_ratio(log_r):
    return log_r.exp() - 1 - log_r


@right("token-forward", "loss", warns=(*FAR, VALUE))
def ratio_alone(logp, ref_logp):
    """k3 without its zero-mean term."""
    return (ref_logp - logp).exp()


@right("sequence", "both", warns=FAR)
def k3_in_both(logp, ref_logp):
    d = ref_logp - logp
    return d.exp() - 1 - d


@right("sequence", "both")
def k1_in_both(logp, ref_logp, mask):
    return only(mask, logp - ref_logp)


@right("sequence", "both", warns=FAR)
def between_k1_and_k3(logp, ref_logp):
    d = ref_logp - logp
    return 0.5 * torch.expm1(d) - d


@right("token", "loss", warns=(*FAR, STALE))
def unbiased_kl_of_v32(per_token_logps, old_per_token_logps, ref_per_token_logps):
    """k3 under the token's own ratio, which is differentiated."""
    gap = ref_per_token_logps - per_token_logps
    return (per_token_logps - old_per_token_logps).exp() * (gap.exp() - gap - 1)


@right("token", "loss", warns=(STALE,))
def live_ratio_times_k1(logp, old_logp, ref_logp):
    return torch.exp(logp - old_logp) * (logp - ref_logp)


@right("token", "loss", warns=FAR, mapping={"curr_logp": "log_probs"})
def score_function_weight(curr_logp, ref_logp):
    """A weight whose value is 1 carries the score."""
    d = ref_logp - curr_logp
    return (curr_logp - curr_logp.detach()).exp() * (torch.expm1(d) - d)


@right("token", "loss", warns=(*FAR, UNREACHED))
def straight_through(log_prob, ref_log_prob):
    """The value of k3 with the gradient of k2."""
    d = ref_log_prob - log_prob
    value, slope = torch.expm1(d) - d, 0.5 * d.square()
    return slope - slope.detach() + value.detach()


@right("sequence", "loss", warns=(*FAR, POISON))
def live_prefix_ratio(logp, old_logp, ref_logp, mask):
    """k3 of each token under the ratio of the whole prefix."""
    log_w = only(mask, logp - old_logp).cumsum(-1)
    d = only(mask, ref_logp - logp)
    return only(mask, log_w.exp() * (torch.expm1(d) - d))


@right("sequence", "loss")
def whole_ratio_times_sum(logp, old_logp, ref_logp, mask):
    weight = only(mask, logp - old_logp).sum(-1).exp()
    return weight * only(mask, logp - ref_logp).sum(-1)


@right("sequence", "loss")
def half_square_of_the_sum(logp, ref_logp, mask):
    return 0.5 * only(mask, logp - ref_logp).sum(-1) ** 2


@right("forward-kl", "loss", warns=(*FAR, UNREACHED))
def k3_of_the_sum(logp, ref_logp, mask):
    d = only(mask, ref_logp - logp).sum(-1)
    return torch.expm1(d) - d


@right("token", "loss", warns=(POISON,))
def compiled_half_square(logp, ref_logp):
    """Stands for what torch.compile wraps; its default backend needs a compiler, this one only the tracing."""
    return 0.5 * (logp - ref_logp) ** 2


CORPUS[-1] = Entry(torch.compile(compiled_half_square, backend="eager"), "token", "loss")
