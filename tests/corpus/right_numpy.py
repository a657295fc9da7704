"""Right code, numpy: as in tests, notebooks and reward workers that hold no torch."""

import numpy as np
from corpus.entries import CANCEL, FLOAT16, IMPOSSIBLE, OVERFLOW, POISON, TAIL, UNREACHED, Corpus

CORPUS = Corpus()
right = CORPUS.right
FAR = (TAIL, OVERFLOW, FLOAT16, CANCEL)


@right("sequence", "reward")
def difference(logp, ref_logp):
    return np.subtract(logp, ref_logp)


@right("sequence", "reward")
def masked_total(log_probs, ref_log_probs, mask):
    return np.where(mask, log_probs - ref_log_probs, 0.0).sum(axis=1)


@right("sequence", "reward", warns=(POISON,))
def inner_product_with_the_mask(logp, ref_logp, mask):
    return np.einsum("bt,bt->b", logp - ref_logp, np.asarray(mask, dtype=logp.dtype))


@right("sequence", "reward", returns="reward")
def shaped_reward(logp, ref_logp, mask, rewards, beta):
    if beta == 0:
        return np.array(rewards)
    return rewards - beta * np.sum(np.where(mask, logp - ref_logp, 0.0), axis=-1)


@right("sequence", "reward", returns="return")
def returns_by_flipping(logp, ref_logp, mask, token_level_rewards, beta):
    kl = logp - ref_logp if beta else np.zeros_like(logp)
    paid = np.where(mask, token_level_rewards - beta * kl, 0.0)
    return np.flip(np.cumsum(np.flip(paid, axis=1), axis=1), axis=1)


@right("sequence", "reward", returns="return", warns=(UNREACHED,))
def returns_by_total_minus_past(logp, ref_logp, mask):
    paid = np.where(mask, ref_logp - logp, 0.0)
    return paid.sum(axis=1, keepdims=True) - np.cumsum(paid, axis=1) + paid


@right("token", "loss")
def squared_half(logp, ref_logp, mask):
    return np.where(mask, (logp - ref_logp) ** 2 / 2, 0.0)


@right("token-forward", "loss", warns=FAR)
def k3_expm1(logp, ref_logp):
    d = ref_logp - logp
    return np.expm1(d) - d


@right("token-forward", "loss", warns=FAR)
def k3_with_probabilities(logp, ref_logp):
    ratio = np.exp(ref_logp) / np.exp(logp)
    return ratio - 1 - np.log(ratio)


@right("sequence", "both", warns=FAR)
def k3_both_places(logp, ref_logp, mask):
    d = np.where(mask, ref_logp - logp, 0.0)
    return (np.exp(d) - d - 1).sum(axis=1)


@right("token", "loss", warns=(*FAR, UNREACHED, IMPOSSIBLE))
def exact_categorical(full_log_probs, ref_full_log_probs):
    p = np.exp(full_log_probs)
    return np.sum(p / p.sum(-1, keepdims=True) * (
        full_log_probs - np.log(p.sum(-1, keepdims=True)) - ref_full_log_probs
    ), axis=-1)  # fmt: skip


@right("token", "loss", warns=(*FAR, UNREACHED, IMPOSSIBLE))
def softmax_by_hand(logits, ref_logits, mask):
    def log_softmax(x):
        shifted = x - x.max(axis=-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

    a, b = log_softmax(logits), log_softmax(ref_logits)
    return np.where(mask, (np.exp(a) * (a - b)).sum(axis=-1), 0.0)


@right("sequence", "reward")
def single_precision(logp, ref_logp, mask):
    gap = np.asarray(logp, np.float32) - np.asarray(ref_logp, np.float32)
    return np.where(mask, gap, np.float32(0)).sum(-1)


@right("sequence", "reward")
def gathered_by_index(logits, ref_logits, tokens):
    def taken(x):
        peak = x.max(-1, keepdims=True)
        norm = peak[..., 0] + np.log(np.exp(x - peak).sum(-1))
        return np.take_along_axis(x, np.asarray(tokens)[..., None], axis=-1)[..., 0] - norm

    return taken(logits) - taken(ref_logits)


@right("sequence", "reward", warns=(POISON,))
def broadcast_mask_product(logp, ref_logp, mask):
    return (logp - ref_logp) * np.asarray(mask, float)


@right("token", "reward", returns="return")
def distillation_reward(student_logp, teacher_logp, valid):
    return np.where(valid, teacher_logp - student_logp, 0.0)
