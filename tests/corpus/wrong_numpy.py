"""Wrong code, numpy."""

import numpy as np
from corpus import causes as why
from corpus.entries import Corpus

CORPUS = Corpus()
wrong = CORPUS.wrong


@wrong("sequence", "reward", why.SIGN, why.SWAPPED)
def swapped_difference(logp, ref_logp):
    return np.subtract(ref_logp, logp)


@wrong("sequence", "reward", r"0\.434\d* times|log10|base 10")
def log10_of_the_ratio(logp, ref_logp):
    return np.log10(np.exp(logp - ref_logp))


@wrong("sequence", "reward", r"1\.44\d* times|log2|base 2")
def log2_of_the_ratio(logp, ref_logp, mask):
    return np.where(mask, np.log2(np.exp(logp) / np.exp(ref_logp)), 0.0).sum(-1)


@wrong("token", "loss", r"\b2 times|divide by 2")
def squares(logp, ref_logp):
    return (logp - ref_logp) ** 2


@wrong("sequence", "reward", why.K3_IN_REWARD)
def k3_reward(logp, ref_logp, mask):
    d = np.where(mask, ref_logp - logp, 0.0)
    return (np.exp(d) - 1 - d).sum(axis=1)


@wrong("sequence", "reward", why.OTHER)
def absolute(logp, ref_logp):
    return np.abs(logp - ref_logp)


@wrong("sequence", "reward", why.AT_ZERO, r"negative")
def floored(logp, ref_logp):
    return np.maximum(logp - ref_logp, 0.0)


@wrong("sequence", "reward", why.CLAMPED, shows="drift", level="any")
def clipped_at_three(logp, ref_logp):
    return np.clip(logp - ref_logp, -3.0, 3.0)


@wrong("sequence", "reward", why.NORMALISE)
def raw_logits_taken(logits, ref_logits, tokens):
    at = np.asarray(tokens)[..., None]
    return (np.take_along_axis(logits, at, -1) - np.take_along_axis(ref_logits, at, -1))[..., 0]


@wrong("sequence", "both", why.NORMALISE)
def softmax_of_one_side(logits, ref_logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    return (p * (np.log(p) - ref_logits)).sum(-1)


@wrong("token", "loss", why.BY_V, never=(why.BY_PADDING,))
def vocabulary_mean(full_log_probs, ref_full_log_probs):
    p = full_log_probs - np.log(np.exp(full_log_probs).sum(-1, keepdims=True))
    return (np.exp(p) * (p - ref_full_log_probs)).mean(axis=-1)


@wrong("token", "loss", why.TWO_TOKENS, never=(why.BY_PADDING,))
def bernoulli_of_the_token(logp, ref_logp):
    p, q = np.exp(logp), np.exp(ref_logp)
    with np.errstate(divide="ignore", invalid="ignore"):
        return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


@wrong("sequence", "reward", why.BY_T, why.OTHER)
def reply_mean(logp, ref_logp, mask):
    n = np.maximum(np.asarray(mask).sum(axis=1), 1)
    return np.where(mask, logp - ref_logp, 0.0).sum(axis=1) / n


@wrong("sequence", "reward", why.BY_T, why.PADDING, why.MASK_FREE)
def mean_over_padding(logp, ref_logp, mask):
    return np.where(mask, logp - ref_logp, 0.0).mean(axis=1)


@wrong("sequence", "reward", why.EMPTY, why.NAN, shows="empty")
def times_length_over_length(logp, ref_logp, mask):
    n = np.asarray(mask).sum(axis=1)
    with np.errstate(all="ignore"):
        return np.where(mask, logp - ref_logp, 0.0).sum(axis=1) / n * n


@wrong("sequence", "reward", why.HOLES, why.LEFT, shows="holes")
def sliced_by_length(logp, ref_logp, mask):
    n = np.asarray(mask).astype(int).sum(axis=1)
    return np.array([(a[:k] - b[:k]).sum() for a, b, k in zip(logp, ref_logp, n, strict=True)])


@wrong("sequence", "reward", why.HOLES, shows="holes", returns="return")
def leak_into_returns(logp, ref_logp, mask):
    paid = ref_logp - logp
    return np.cumsum(paid[:, ::-1], axis=1)[:, ::-1] * np.asarray(mask)


@wrong("sequence", "reward", why.LAST)
def last_token_dropped(logp, ref_logp, mask):
    real = np.asarray(mask).astype(bool)
    real = real & np.pad(real[:, 1:], ((0, 0), (0, 1)))
    return np.where(real, logp - ref_logp, 0.0)


@wrong("sequence", "reward", why.FIRST)
def first_token_lost(logp, ref_logp, mask):
    real = np.asarray(mask).astype(bool)
    real = real & np.pad(real[:, :-1], ((0, 0), (1, 0)))
    return np.where(real, logp - ref_logp, 0.0).sum(-1)


@wrong("sequence", "reward", why.SHIFTED)
def shifted_reference(logp, ref_logp):
    return logp - np.roll(ref_logp, 1, axis=1)


@wrong("sequence", "reward", r"direction|past|earlier", why.NO_FUTURE, returns="return")
def cumulative_from_the_left(logp, ref_logp, mask):
    return np.cumsum(np.where(mask, ref_logp - logp, 0.0), axis=1)


@wrong("sequence", "reward", r"discount|future term", why.OTHER, returns="return")
def discounted(logp, ref_logp, mask, gamma=0.5):
    paid, gain = np.where(mask, ref_logp - logp, 0.0), 0.0
    out = np.zeros_like(paid)
    for t in range(paid.shape[1] - 1, -1, -1):
        gain = paid[:, t] + gamma * gain
        out[:, t] = gain
    return out


@wrong("sequence", "reward", why.GROUP, why.OTHER, group=2, returns="return")
def whitened_over_the_batch(logp, ref_logp, mask):
    real = np.asarray(mask).astype(bool)
    k = np.where(real, logp - ref_logp, 0.0)
    mean = k.sum() / real.sum()
    spread = np.sqrt((np.where(real, k - mean, 0.0) ** 2).sum() / real.sum()) + 1e-8
    return -np.where(real, (k - mean) / spread, 0.0)


@wrong("sequence", "reward", why.TEMPERATURE, why.IDENTITY)
def one_side_divided(logp, ref_logp):
    return logp / 0.8 - ref_logp / 1.0


@wrong("sequence", "reward", r"mask is inverted|inverted|masked places|padd", why.ALIAS)
def masked_where_it_should_count(logp, ref_logp, mask):
    return np.where(np.asarray(mask) == 0, logp - ref_logp, 0.0).sum(-1)


@wrong("sequence", "reward", why.HALF, shows="rounding", level="any")
def float16_inside(logp, ref_logp):
    return np.asarray(logp, np.float16) - np.asarray(ref_logp, np.float16)


@wrong("sequence", "reward", why.RANDOM, shows="random")
def noise_inside(logp, ref_logp):
    return logp - ref_logp + 1e-3 * np.random.default_rng().normal(size=logp.shape)
