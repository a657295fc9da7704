"""Wrong code, torch: divergences over the vocabulary that are not the one that is meant."""

import torch
import torch.nn.functional as F
from corpus import causes as why
from corpus.entries import Corpus
from torch.distributions import Categorical, kl_divergence

CORPUS = Corpus()
wrong = CORPUS.wrong


def keep(mask, x):
    return torch.where(mask.bool(), x, torch.zeros_like(x))


# ------------------------------------------------------------------------------------------ not normalised


@wrong("sequence", "reward", why.NORMALISE)
def raw_logits(logits, ref_logp, input_ids):
    return logits.gather(-1, input_ids[..., None])[..., 0] - ref_logp


@wrong("sequence", "reward", why.NORMALISE)
def raw_logits_of_both(logits, ref_logits, labels):
    index = labels.unsqueeze(-1)
    return (logits.gather(-1, index) - ref_logits.gather(-1, index)).squeeze(-1)


@wrong("token", "loss", why.NORMALISE)
def raw_logits_under_a_softmax(logits, ref_logits):
    return (logits.softmax(-1) * (logits - ref_logits)).sum(-1)


@wrong("token", "loss", why.NORMALISE)
def raw_squares(logits, ref_logits, labels, mask):
    index = labels.unsqueeze(-1)
    gap = (logits.gather(-1, index) - ref_logits.gather(-1, index)).squeeze(-1)
    return 0.5 * keep(mask, gap) ** 2


@wrong("sequence", "both", why.NORMALISE)
def kl_div_of_raw_input(logits, ref_logits):
    return F.kl_div(ref_logits, logits.softmax(-1), reduction="none").sum(-1)


@wrong("token-forward", "loss", why.NORMALISE, why.OTHER)
def kl_div_of_a_raw_student(student_logits, teacher_logits):
    return F.kl_div(student_logits, teacher_logits.softmax(-1), reduction="none").sum(-1)


@wrong("token-forward", "loss", why.NORMALISE, r"log_softmax|probabilit", why.OTHER)
def kl_div_of_probabilities(student_logits, teacher_logits):
    """Its first argument wants log-probs."""
    return F.kl_div(student_logits.softmax(-1), teacher_logits.softmax(-1), reduction="none").sum(-1)


@wrong("token", "loss", r"axis|vocabulary|no gradient of a known|depend on each other|between tokens")
def softmax_over_time(logits, ref_logits):
    a, b = logits.log_softmax(1), ref_logits.log_softmax(1)
    return (a.exp() * (a - b)).sum(-1)


@wrong("token", "loss", r"axis|depend on each other|batch")
def softmax_over_the_batch(logits, ref_logits):
    a, b = logits.log_softmax(0), ref_logits.log_softmax(0)
    return (a.exp() * (a - b)).sum(-1)


# ------------------------------------------------------------------------------------------ averaged


@wrong("token", "loss", why.BY_V, never=(why.BY_PADDING,))
def mean_over_the_vocabulary(logits, ref_logits):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (p.exp() * (p - q)).mean(-1)


@wrong("token", "loss", why.BY_V, never=(why.BY_PADDING,))
def kl_div_mean_over_the_vocabulary(logits, ref_logits):
    return F.kl_div(ref_logits.log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="none").mean(-1)


@wrong("token-forward", "loss", why.BY_V, never=(why.BY_PADDING,))
def forward_mean_over_the_vocabulary(student_logits, teacher_logits, mask):
    p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return keep(mask, (q.exp() * (q - p)).mean(-1))


@wrong("token", "loss", why.BY_V, r"\bV\b", why.BY_T, why.OTHER)
def kl_div_default_mean(logits, ref_logits):
    return F.kl_div(ref_logits.log_softmax(-1), logits.log_softmax(-1), log_target=True)


@wrong("token", "loss", why.BY_T, why.MASK_FREE, why.OTHER)
def kl_div_batchmean_of_flat_rows(logits, ref_logits):
    a, b = (x.log_softmax(-1).flatten(0, 1) for x in (logits, ref_logits))
    return F.kl_div(b, a, log_target=True, reduction="batchmean")


@wrong("token", "loss", r"\b2 times|divide by 2|0\.5")
def both_directions_added(logits, ref_logits):
    """Twice the reverse KL, once by each library call."""
    a, b = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return F.kl_div(b, a, log_target=True, reduction="none").sum(-1) + (a.exp() * (a - b)).sum(-1)


# ------------------------------------------------------------------------------------------ truncated


@wrong("token", "loss", why.TRUNCATED, never=(why.BY_PADDING,))
def top_two_without_a_tail(logits, ref_logits):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    top = p.topk(2, dim=-1).indices
    p, q = p.gather(-1, top), q.gather(-1, top)
    return (p.exp() * (p - q)).sum(-1)


@wrong("token", "loss", why.TRUNCATED, never=(why.BY_PADDING,))
def teachers_top_two(student_logits, teacher_logits):
    p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    top = q.topk(2, dim=-1).indices
    p, q = p.gather(-1, top), q.gather(-1, top)
    return (p.exp() * (p - q)).sum(-1)


@wrong("token-forward", "loss", why.TRUNCATED, why.OTHER)
def teachers_top_two_forward(student_logits, teacher_logits):
    p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    q, top = q.topk(2, dim=-1)
    return (q.exp() * (q - p.gather(-1, top))).sum(-1)


@wrong("token", "loss", why.TRUNCATED, never=(why.BY_PADDING,))
def renormalised_top_two(logits, ref_logits):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    top = p.topk(2, dim=-1).indices
    p, q = (x.gather(-1, top).log_softmax(-1) for x in (p, q))
    return (p.exp() * (p - q)).sum(-1)


@wrong("token", "loss", why.TRUNCATED, never=(why.BY_PADDING,))
def renormalised_teachers_top_two(student_logits, teacher_logits):
    top = teacher_logits.topk(2, dim=-1).indices
    p, q = (x.gather(-1, top).log_softmax(-1) for x in (student_logits, teacher_logits))
    return F.kl_div(q, p, log_target=True, reduction="none").sum(-1)


@wrong("token", "loss", why.TRUNCATED, never=(why.BY_PADDING,))
def top_one_with_a_bucket(logits, ref_logits):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    top = p.argmax(-1, keepdim=True)
    a, b = p.gather(-1, top), q.gather(-1, top)
    rest = torch.log1p(-a.exp()) - torch.log1p(-b.exp())
    return (a.exp() * (a - b) + (1 - a.exp()) * rest).squeeze(-1)


@wrong("token", "loss", why.TRUNCATED, why.OTHER)
def head_and_tail_by_plain_autograd(logits, ref_logits, labels):
    """The sampled tail's own score is left out."""
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    head = q.topk(2, dim=-1).indices
    exact = (p.gather(-1, head).exp() * (p.gather(-1, head) - q.gather(-1, head))).sum(-1)
    own, other = (x.gather(-1, labels[..., None])[..., 0] for x in (p, q))
    return exact + keep((head != labels[..., None]).all(-1), own - other)


@wrong(
    "token",
    "reward",
    why.OWN_ABSENT,
    returns="return",
    never=(why.MOVE_IT,),
)
def detached_top_k_as_advantage(student_logits, teacher_logits):
    p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    top = p.topk(2, dim=-1).indices
    p, q = p.gather(-1, top), q.gather(-1, top)
    return -(p.exp() * (p - q)).sum(-1).detach()


@wrong(
    "token",
    "reward",
    why.OWN_ABSENT,
    returns="return",
    never=(why.MOVE_IT,),
)
def detached_full_kl_as_advantage(student_logits, teacher_logits):
    p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return -(p.exp() * (p - q)).sum(-1).detach()


@wrong(
    "token",
    "reward",
    why.OWN_ABSENT,
    returns="return",
    never=(why.MOVE_IT,),
)
def detached_jsd_as_advantage(student_logits, teacher_logits, mask):
    p, q = student_logits.softmax(-1), teacher_logits.softmax(-1)
    m = ((p + q) / 2).log()
    return -keep(mask, ((p * (p.log() - m)).sum(-1) + (q * (q.log() - m)).sum(-1)) / 2)


# ------------------------------------------------------------------------------------- another divergence


@wrong("token", "loss", why.FORWARD, why.SWAPPED)
def kl_div_in_the_order_of_its_arguments(logits, ref_logits):
    return F.kl_div(logits.log_softmax(-1), ref_logits.log_softmax(-1), log_target=True, reduction="none").sum(-1)


@wrong("token", "loss", why.FORWARD, why.SWAPPED)
def categorical_swapped(logits, ref_logits):
    return kl_divergence(Categorical(logits=ref_logits), Categorical(logits=logits))


@wrong("token-forward", "loss", why.SWAPPED, r"reverse")
def reverse_where_forward_is_meant(student_logits, teacher_logits):
    p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@wrong("token", "loss", r"Jensen-Shannon")
def jsd_for_reverse_kl(student_logits, teacher_logits):
    p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    m = ((p.exp() + q.exp()) / 2).log()
    return 0.5 * ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1))


@wrong("token", "loss", r"Jeffreys|symmetr|0\.5 token-forward|token-forward")
def symmetrised(logits, ref_logits):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return 0.5 * ((p.exp() - q.exp()) * (p - q)).sum(-1)


@wrong("token", "loss", r"chi-squared|Hellinger|total variation|" + why.OTHER)
def squared_probabilities(logits, ref_logits):
    return 0.5 * (logits.softmax(-1) - ref_logits.softmax(-1)).square().sum(-1)


@wrong("token", "loss", r"mean squared log-ratio|k2|" + why.OTHER)
def mean_of_squares_over_the_vocabulary(logits, ref_logits):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return 0.5 * (p.exp() * (p - q) ** 2).sum(-1)


@wrong("token", "loss", r"detach|weights|zero in expectation|expected gradient is zero", never=(why.A_CLAMP,))
def weights_detached(logits, ref_logits):
    """sum of sg(p) (log p - log q): its gradient is sum of p times the score, which is 0."""
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (p.exp().detach() * (p - q)).sum(-1)


@wrong("token", "loss", r"detach", why.OTHER)
def log_ratio_of_k3_detached_over_the_vocabulary(logits, ref_logits):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (p.exp() * (p - q).detach() * p.detach().exp()).sum(-1)


@wrong("token", "loss", why.AT_ZERO, r"negative", never=(why.NOT_COMPARED,))
def negative_terms_cut_off(logits, ref_logits):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (p.exp() * (p - q)).clamp(min=0).sum(-1)


@wrong("token", "loss", r"clip|clamp|uniform|weigh", why.OTHER, never=(why.NOT_COMPARED,))
def uniform_weights(logits, ref_logits):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (p - q).mean(-1)


@wrong("sequence", "loss", why.NO_FUTURE)
def full_kl_for_the_sequence(logits, ref_logits):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@wrong("sequence", "reward", r"future term alone|own KL is missing")
def full_kl_detached_for_the_sequence(logits, ref_logits):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).detach()


@wrong("token", "loss", why.DEAD)
def full_kl_of_values(logits, ref_logits):
    p, q = logits.detach().log_softmax(-1), ref_logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@wrong("token", "loss", why.ALIAS, why.DEAD)
def both_sides_the_policy(logits, ref_logits):
    p = q = logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1) + 0 * ref_logits.sum(-1)


@wrong("token", "loss", why.TEMPERATURE, why.OTHER)
def student_alone_at_a_temperature(student_logits, teacher_logits, temperature=2.0):
    p, q = (student_logits / temperature).log_softmax(-1), teacher_logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@wrong("token-forward", "loss", why.TEMPERATURE, why.OTHER)
def both_at_a_temperature_that_is_not_sampled_at(student_logits, teacher_logits, temperature=2.0):
    p, q = ((x / temperature).log_softmax(-1) for x in (student_logits, teacher_logits))
    return temperature**2 * (q.exp() * (q - p)).sum(-1)


@wrong("token", "loss", r"probabilit|epsilon|smooth|within", why.OTHER)
def smoothed_by_a_constant(logits, ref_logits, eps=0.05):
    p, q = logits.softmax(-1) + eps, ref_logits.softmax(-1) + eps
    return (p * (p.log() - q.log())).sum(-1)


# --------------------------------------------------------------------------------------------- gather, shift


@wrong("sequence", "reward", why.SHIFTED, r"logits\[t\]|predict")
def shift_of_hugging_face(logits, ref_logits, labels, mask):
    """logits[:, t] predict token t + 1 in a causal model's output, and not here."""
    a, b = (x[:, :-1].log_softmax(-1) for x in (logits, ref_logits))
    index = labels[:, 1:, None]
    return ((a - b).gather(-1, index)[..., 0] * mask[:, 1:]).sum(-1)


@wrong("token", "loss", why.SHIFTED, r"logits\[t\]|predict")
def shift_of_hugging_face_in_a_loss(logits, ref_logps, input_ids, attention_mask):
    logp = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    real = attention_mask[:, 1:].bool()
    return 0.5 * keep(real, logp - ref_logps[:, 1:]).square().sum(-1).mean()


@wrong("sequence", "reward", why.SHIFTED, why.OTHER)
def gather_of_the_next_token(logits, ref_logits, labels):
    after = torch.roll(labels, -1, dims=1)[..., None]
    return (logits.log_softmax(-1) - ref_logits.log_softmax(-1)).gather(-1, after)[..., 0]


@wrong("sequence", "reward", r"token|argmax|sampled", why.OTHER)
def greedy_token_instead_of_the_sampled(logits, ref_logits):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    best = p.argmax(-1, keepdim=True)
    return (p - q).gather(-1, best)[..., 0]
