"""Right code, torch: divergences over the whole vocabulary, as in distillation trainers."""

import torch
import torch.nn.functional as F
from corpus.entries import FLOAT16, IMPOSSIBLE, OVERFLOW, POISON, TAIL, UNREACHED, VALUE, Corpus
from torch.distributions import Categorical, kl_divergence

CORPUS = Corpus()
right = CORPUS.right
# -inf in both vocabularies is 0 x (-inf - -inf) to most library code; one token out of reach is an infinite KL
INFINITE = (IMPOSSIBLE, UNREACHED, TAIL, OVERFLOW, FLOAT16)


def keep(mask, x):
    return torch.where(mask.bool(), x, torch.zeros_like(x))


@right("token", "loss", warns=INFINITE)
def categorical_library(logits, ref_logits):
    return kl_divergence(Categorical(logits=logits), Categorical(logits=ref_logits))


@right("token", "loss", warns=INFINITE)
def kl_div_log_target(logits, ref_logits):
    """F.kl_div(input, target) is KL(target || input)."""
    return F.kl_div(
        ref_logits.log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)  # fmt: skip


@right("token", "loss", warns=INFINITE)
def kl_div_probabilities(logits, ref_logits):
    return F.kl_div(F.log_softmax(ref_logits, dim=-1), F.softmax(logits, dim=-1), reduction="none").sum(dim=-1)


@right("token-forward", "loss", warns=(*INFINITE, VALUE))
def teacher_first(student_logits, teacher_logits):
    """Forward KL, as word-level distillation has it."""
    return F.kl_div(
        F.log_softmax(student_logits, -1), F.log_softmax(teacher_logits, -1), reduction="none", log_target=True
    ).sum(-1)  # fmt: skip


@right("token-forward", "loss", warns=(*INFINITE, VALUE))
def teacher_probabilities(student_logits, teacher_logits):
    target = teacher_logits.softmax(-1)
    return F.kl_div(student_logits.log_softmax(-1), target, reduction="none").sum(-1)


@right("token-forward", "loss", warns=(*INFINITE, VALUE))
def soft_cross_entropy(student_logits, teacher_logits):
    """Without the teacher's entropy, which holds no gradient."""
    return -(teacher_logits.softmax(-1) * student_logits.log_softmax(-1)).sum(-1)


@right("token-forward", "loss", warns=(*INFINITE, VALUE))
def soft_cross_entropy_library(student_logits, teacher_logits, mask):
    flat = F.cross_entropy(
        student_logits.flatten(0, 1), teacher_logits.softmax(-1).flatten(0, 1), reduction="none"
    )  # fmt: skip
    return keep(mask, flat.view(mask.shape))


@right("token", "loss", warns=INFINITE)
def plain_softmax(logits, ref_logits):
    p = logits.softmax(-1)
    return (p * (logits.log_softmax(-1) - ref_logits.log_softmax(-1))).sum(-1)


@right("token", "loss", warns=INFINITE)
def logarithms_of_probabilities(logits, ref_logits):
    p, q = logits.softmax(-1), ref_logits.softmax(-1)
    return (p * (p.log() - q.log())).sum(-1)


@right("token", "loss", warns=INFINITE)
def entropy_and_cross_entropy(logits, ref_logits):
    p, logp, logq = logits.softmax(-1), logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (p * logp).sum(-1) - (p * logq).sum(-1)


@right("token", "loss", warns=(UNREACHED,))
def guarded(logits, ref_logits, mask):
    """Tokens that either side cannot emit are left out."""
    a, b = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    possible = torch.isfinite(a) & torch.isfinite(b)
    a, b = (torch.where(possible, x, torch.zeros_like(x)) for x in (a, b))
    return keep(mask, torch.where(possible, a.exp() * (a - b), torch.zeros_like(a)).sum(-1))


@right("token", "loss", warns=INFINITE)
def already_normalised(full_log_probs, ref_full_log_probs):
    p = full_log_probs.log_softmax(-1)
    return (p.exp() * (p - ref_full_log_probs)).sum(-1)


@right("token", "loss", warns=INFINITE)
def chunked_over_positions(logits, ref_logits):
    out = []
    for start in range(0, logits.shape[1], 2):
        a, b = (x[:, start : start + 2].log_softmax(-1) for x in (logits, ref_logits))
        out.append((a.exp() * (a - b)).sum(-1))
    return torch.cat(out, dim=1)


@right("sequence", "both", warns=INFINITE)
def full_in_both(logits, ref_logits):
    p, q = F.log_softmax(logits, -1), F.log_softmax(ref_logits, -1)
    return torch.sum(p.exp() * (p - q), dim=-1)


@right("future", "reward", warns=INFINITE)
def full_detached(logits, ref_logits):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).detach()


@right("jensen-shannon", "loss", warns=(*INFINITE, VALUE))
def jensen_shannon(student_logits, teacher_logits):
    p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    m = torch.logaddexp(p, q) - torch.log(torch.tensor(2.0, dtype=p.dtype))
    return 0.5 * ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1))


@right("jensen-shannon", "loss", warns=(*INFINITE, VALUE))
def generalised_jsd_at_a_half(student_logits, teacher_logits, share=0.5):
    student, teacher = F.log_softmax(student_logits, dim=-1), F.log_softmax(teacher_logits, dim=-1)
    share = torch.tensor(share, dtype=student.dtype)
    mixture = torch.logsumexp(torch.stack([student + torch.log1p(-share), teacher + torch.log(share)]), dim=0)
    from_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    from_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    return (share * from_teacher + (1 - share) * from_student).sum(-1)


@right("entropy", "loss", warns=(*INFINITE, VALUE))
def entropy_bonus(logits):
    p = logits.log_softmax(-1)
    return (p.exp() * p).sum(-1)


@right("entropy", "loss", returns="reward", warns=(*INFINITE, VALUE))
def entropy_by_library(logits):
    return Categorical(logits=logits).entropy()


@right("entropy", "reward", returns="reward", warns=(VALUE,))
def surprise_in_the_reward(logp):
    """Sampled: -log pi is paid, the rest of the reply included."""
    return -logp


@right("chi-squared", "loss", warns=(*INFINITE, VALUE))
def chi_squared(logits, ref_logits):
    p, q = logits.softmax(-1), ref_logits.softmax(-1)
    return (q * q / p).sum(-1) - 1


@right("token", "loss", warns=(*INFINITE, VALUE))
def head_and_sampled_tail(logits, ref_logits, labels):
    """Exact on the reference's two likeliest tokens, sampled elsewhere with the score's own term."""
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    head = q.topk(2, dim=-1).indices
    exact = (p.gather(-1, head).exp() * (p.gather(-1, head) - q.gather(-1, head))).sum(-1)
    own, other = (x.gather(-1, labels[..., None])[..., 0] for x in (p, q))
    tail = (head != labels[..., None]).all(-1)
    return exact + keep(tail, (own - other + 1).detach() * own)


@right("token", "loss", warns=(*INFINITE, POISON))
def gkd_reverse_mean_per_batch(student_logits, teacher_logits, mask):
    p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    each = keep(mask, (p.exp() * (p - q)).sum(-1))
    return each.sum() / mask.shape[0]


@right("token-forward", "loss", warns=(*INFINITE, POISON))
def gkd_forward_sum_per_reply(student_logits, teacher_logits, mask):
    p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return keep(mask, (q.exp() * (q - p)).sum(-1)).sum(-1).mean()


@right("jensen-shannon", "loss", warns=(*INFINITE, POISON))
def gkd_jsd_loss(student_logits, teacher_logits, mask):
    return keep(mask, jensen_shannon(student_logits, teacher_logits)).sum(-1).mean()
