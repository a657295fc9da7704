"""What each sampler makes of the sequences it drew, against the plain formula on the same sequences."""

import numpy as np
import pytest
from strategies import build_world

from klgrad.synth import sampling
from klgrad.synth.configurations import parse
from klgrad.synth.enumeration import sequence_gradient, token_values
from klgrad.synth.sampling import Sampler
from klgrad.synth.sums import estimates, joined, total

TRIALS, SAMPLES, UNIT = 3, 8, 4
COUNTS = ["k1-in-reward+loo", "k3-in-both+loo=4+divide=7", "k1-in-both+sequence-ratio+loo=4", "k3-in-loss+token-ratio"]
COUNTS += ["full-in-both+token+length-mean", "k1-in-reward+b=0.3+divide=7", "k2-in-reward+sequence-ratio+length-mean"]
ORDERED = [*COUNTS, "k1-in-reward+rtg+loo=4+divide=3", "full-in-both+future", "k3-in-both+rtg+token-ratio+loo"]
PATHS = [*ORDERED, "k1-in-reward+rtg+length-mean+loo", "k3-in-both+rtg+prefix-ratio+loo=4+divide=7"]
PATHS += ["k1-in-reward+prefix-ratio", "full-in-both+prefix-ratio+length-mean", "full-in-both+rtg+token-ratio"]
REQUESTS = {"counts": COUNTS, "ordered": ORDERED, "paths": PATHS}


def a_pair(eos):
    return build_world("markov", 3, 4, eos=eos, off=True, seed=3).pair


def formula(configuration, pair, contexts, tokens):
    """``[trials, d]`` gradient and ``[trials]`` value estimates of TRIALS x SAMPLES sequences, one by one."""
    each = list(zip(contexts, tokens, strict=True))
    x, at_one = (np.array([sequence_gradient(configuration, pair, s, v, b) for s, v in each]) for b in (0.0, 1.0))
    y, c = x - at_one, np.array([sum(token_values(configuration, pair, s, v)) for s, v in each])
    b = np.full(len(each), configuration.baseline_value if configuration.baseline == "constant" else 0.0)
    if configuration.baseline == "loo":
        groups = c.reshape(-1, configuration.group(SAMPLES))
        b = ((groups.sum(axis=1, keepdims=True) - groups) / (groups.shape[1] - 1)).ravel()
    values = np.array([weighted_value(configuration, pair, s, v) for s, v in each])
    gradients = (x - b[:, None] * y).reshape(TRIALS, SAMPLES, -1).mean(axis=1)
    return gradients, values.reshape(TRIALS, SAMPLES).mean(axis=1)


def weighted_value(configuration, pair, contexts, tokens):
    """The sum of a sequence's values, each with the weight of its token in the loss."""
    rho = np.exp(pair.policy.log_probs - pair.sampler)[contexts, tokens]
    so_far, full, T = np.cumprod(rho), configuration.estimator.full, len(tokens)
    weight = {
        "none": np.ones(T),
        "token": np.ones(T) if full else rho,
        "prefix": np.append(1.0, so_far[:-1]) if full else so_far,
        "sequence": np.full(T, so_far[-1]),
    }[configuration.ratio]
    divisor = {"sum": 1.0, "divide": configuration.divisor, "length-mean": T}[configuration.aggregation]
    return weight @ token_values(configuration, pair, contexts, tokens) / divisor


def drawn(pair, length):
    """Paths ``[n, T]`` of a paths sampler, and each sequence's contexts and tokens."""
    sampler = Sampler(pair, [parse("k1-in-reward+rtg+prefix-ratio")], [length])
    path = sampler.paths(length, TRIALS * SAMPLES, np.random.Generator(np.random.SFC64(8)))
    real = [row[row < len(sampler.edges)] for row in path]
    return path, [sampler.edges.context[r].tolist() for r in real], [sampler.edges.token[r].tolist() for r in real]


def statistics(path, E):
    """``[U, UNIT, E]`` how often each edge came, and ``[U, E * E]`` how often one came before another."""
    hot = np.eye(E + 1)[path][..., :E]
    before = np.cumsum(hot, axis=1) - hot
    order = np.einsum("nta,ntb->nab", before, hot).reshape(-1, UNIT, E * E).sum(axis=1)
    return hot.sum(axis=1).reshape(-1, UNIT, E), order


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("name", ["counts", "ordered", "paths"])
@pytest.mark.parametrize("tokens", [1 << 19, 5])
def test_each_sampler_reduces_its_sequences_by_the_formula(name, eos, tokens, monkeypatch):
    """Leave-one-out, constants and divisors too; paths in one batch or sequence by sequence."""
    pair, configurations = a_pair(eos), [parse(n) for n in REQUESTS[name]]
    path, contexts, emitted = drawn(pair, 4)
    sampler = Sampler(pair, configurations, [4])
    assert sampler.name == name
    monkeypatch.setattr(sampling, "_BATCH_TOKENS", tokens)
    if name == "paths":
        rows = iter(path)
        monkeypatch.setattr(sampler, "paths", lambda length, n, rng: np.array([next(rows) for _ in range(n)]))
        sums = sampler.sums(4, len(path) // UNIT, UNIT, np.random.default_rng(0))
    else:
        n, order = statistics(path, len(sampler.edges))
        sums = sampler._from_counts(n, order if name == "ordered" else None)
    for configuration, each in zip(configurations, sums, strict=True):
        constant = configuration.baseline_value if configuration.baseline == "constant" else 0.0
        found, values = estimates(configuration, each, TRIALS, SAMPLES, np.full(pair.policy.parameters, constant))
        plain, plain_values = formula(configuration, pair, contexts, emitted)
        assert np.allclose(found, plain, rtol=1e-10, atol=1e-12), configuration
        assert np.allclose(values, plain_values, rtol=1e-10, atol=1e-12), configuration


@pytest.mark.parametrize("name", ["counts", "ordered"])
def test_tallies_and_parts_give_the_sums_of_their_sequences(name):
    """How often each outcome came, a unit's sequences or the units in two parts: every sum is that of its sequences."""
    pair, configurations = a_pair(False), [parse(n) for n in REQUESTS[name]]
    sampler = Sampler(pair, configurations, [4])
    (block,) = sampler.plan[4]
    outcome = block.draw(6 * UNIT, 0, np.random.Generator(np.random.SFC64(2))).reshape(6, UNIT)
    seen = np.stack([np.bincount(row, minlength=len(block.successor)) for row in outcome]).astype(float)

    def of(part):
        order = block.order[part].sum(axis=1) if name == "ordered" else None
        return sampler._from_counts(block.counts[part], order)

    whole = of(outcome)
    halves = total([of(outcome[:, :1]), of(outcome[:, 1:])]), joined([of(outcome[:2]), of(outcome[2:])])
    for other in (sampler._from_tally(4, seen), *halves):
        for one, two in zip(whole, other, strict=True):
            for a, b in zip(one, two, strict=True):
                assert np.allclose(a, b, rtol=1e-10, atol=1e-12)
