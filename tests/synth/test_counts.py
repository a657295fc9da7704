"""Blocks of counts against whole paths, and draws against the probabilities they are made from."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from strategies import worlds

from klgrad.synth import enumeration
from klgrad.synth.automata import Automaton, markov
from klgrad.synth.blocks import Block, edges_in_use, path_blocks
from klgrad.synth.counts import Counts
from klgrad.synth.policies import PolicyPair, log_softmax, tabular
from klgrad.synth.presets import preset


def law(block, context):
    """Outcome (last context, counts) -> probability, of a block from the given one of its contexts."""
    mass = np.diff(block.cumulative, prepend=0.0)
    here = np.ceil(block.cumulative - 1e-12) == context + 1
    out = {}
    for last, counts, p in zip(block.successor[here], block.counts[here], mass[here], strict=True):
        key = (int(last), *counts.astype(int).tolist())
        out[key] = out.get(key, 0.0) + p
    return out


@given(worlds(longest=4))
def test_counts_have_the_law_of_whole_paths(world):
    """Every context to start from, with an end and without; paths are enumerated, counts move by flow equations."""
    pair, edges, S = world.pair, edges_in_use(world.pair), world.pair.automaton.contexts
    counts = Counts(pair, edges)
    sizes = list(range(1, min(world.length, counts.largest(world.length, S)) + 1))
    if len(edges) > 16 or not sizes:
        return
    found, paths = counts.blocks(sizes, np.arange(S)), path_blocks(pair, edges, sizes, np.arange(S), "counts")
    single = counts.blocks(sizes, np.array([pair.automaton.start]))
    for k in sizes:
        assert np.array_equal(found[k].counts, np.rint(found[k].counts))
        for context in range(S):
            one, two = law(found[k], context), law(paths[k], context)
            assert max(abs(one.get(key, 0.0) - two.get(key, 0.0)) for key in {*one, *two, 0}) < 1e-14
            if context == pair.automaton.start:
                alone = law(single[k], 0)
                assert max(abs(one.get(key, 0.0) - alone.get(key, 0.0)) for key in {*one, *alone}) < 1e-14


@pytest.mark.parametrize("name", ["near", "far", "stale"])
def test_counts_leave_out_only_what_no_draw_could_tell(name):
    """Expected counts at a long length are those of the chain: what is cut off weighs nothing."""
    pair = preset(name, 150)
    edges = edges_in_use(pair)
    block = Counts(pair, edges).blocks([150], np.array([pair.automaton.start]))[150]
    probability = np.diff(block.cumulative, prepend=0.0)
    context, expected = np.eye(pair.automaton.contexts)[pair.automaton.start], np.zeros(len(edges))
    move = np.exp(pair.sampler)[edges.context, edges.token]
    for _ in range(150):
        emitted = context[edges.context] * move
        expected += emitted
        context = np.bincount(pair.automaton.next_context[edges.context, edges.token], emitted, len(context))
    assert np.allclose(probability @ block.counts, expected, rtol=1e-12)
    assert np.array_equal(block.counts.sum(axis=1), np.full(len(probability), 150.0))


def test_certain_tokens_and_separate_cycles_are_counted():
    """A chain that falls apart: two contexts that are never left need counts of their own."""
    automaton = markov(3, 1, start=(0,))
    logits = np.array([[-np.inf, 1.0, 0.0], [-np.inf, 0.0, -np.inf], [-np.inf, -np.inf, 0.0]])
    policy = tabular(automaton, np.where(np.isfinite(logits), logits, -800.0))
    pair = PolicyPair(automaton, policy, log_softmax(np.zeros((3, 3))))
    edges = edges_in_use(pair)
    found = law(Counts(pair, edges).blocks([7], np.array([0]))[7], 0)
    drawn = {key: p for key, p in found.items() if p > 1e-12}
    assert sorted(drawn) == sorted(
        (v, *(np.bincount(edges.number[[0] + [v] * 6, [v] * 7], minlength=len(edges)))) for v in (1, 2)
    )
    assert drawn[next(key for key in drawn if key[0] == 1)] == pytest.approx(1 / (1 + np.exp(-1)), abs=1e-12)


@pytest.mark.parametrize("bits", [4, 16])
def test_draws_follow_the_probabilities(bits, monkeypatch):
    """Chi-square over 200,000 draws at a false-alarm rate of 1e-4; with few bits most draws are resolved finely."""
    from scipy.stats import chi2

    monkeypatch.setattr("klgrad.synth.blocks._GUIDE_ENTRIES", 1 << bits)
    pair = preset("near", 12)
    block = Counts(pair, edges_in_use(pair)).blocks([12], np.array([pair.automaton.start]))[12]
    assert block.bits == bits
    expected = 200_000 * np.diff(block.cumulative, prepend=0.0)
    drawn = block.draw(200_000, 0, np.random.Generator(np.random.SFC64(5)))
    seen = np.bincount(drawn, minlength=len(expected))
    often = expected > 10
    terms = (seen[often] - expected[often]) ** 2 / expected[often]
    assert terms.sum() < chi2.isf(1e-4, often.sum())
    assert seen[~often].sum() < expected[~often].sum() + 5 * np.sqrt(expected[~often].sum()) + 5


@pytest.mark.parametrize("size", [5, 300, 20_000])
@pytest.mark.parametrize(("name", "length"), [("near", 30), ("far", 60)])
def test_tallies_follow_the_multinomial_law(name, length, size):
    """Chi-square of the totals, and of how units scatter about theirs: false alarm 1e-4 each. Rare ones included."""
    from scipy.stats import chi2

    pair, units = preset(name, length), 400
    block = Counts(pair, edges_in_use(pair)).blocks([length], np.array([pair.automaton.start]))[length]
    p, common = block.probability / block.probability.sum(), block.common(size)
    assert len(common) < len(p)  # or no rare outcome is tested
    assert p[common].tolist() == sorted(p[common], reverse=True)
    assert np.delete(p, common).max() * size < 1 <= p[common].min(initial=1.0) * size
    seen = block.tally(units, size, common, np.random.Generator(np.random.SFC64(11)))
    assert np.array_equal(seen.sum(axis=1), np.full(units, size))
    expected, total = units * size * p, seen.sum(axis=0)
    often = expected > 10
    cells = np.append(total[often], total[~often].sum()), np.append(expected[often], expected[~often].sum())
    assert ((cells[0] - cells[1]) ** 2 / cells[1]).sum() < chi2.isf(1e-4, often.sum())
    few = np.delete(np.arange(len(p)), common)
    came = seen[:, few].sum()
    assert abs(came - expected[few].sum()) < 5 * np.sqrt(expected[few].sum()) + 1
    likely = size * p > 10
    if likely.any():
        each = np.column_stack([seen[:, likely], size - seen[:, likely].sum(axis=1)])
        mean = np.append(size * p[likely], size * p[~likely].sum())
        scatter, freedom = ((each - mean) ** 2 / mean).sum(), units * likely.sum()
        assert chi2.isf(1 - 1e-4, freedom) < scatter < chi2.isf(1e-4, freedom)


def test_one_outcome_is_tallied_each_time():
    """A policy that is certain of every token."""
    automaton = markov(2, 1, start=(0,))
    pair = PolicyPair(
        automaton, tabular(automaton, np.array([[0.0, -800.0], [0.0, -800.0]])), log_softmax(np.zeros((2, 2)))
    )
    block = Counts(pair, edges_in_use(pair)).blocks([9], np.array([0]))[9]
    seen = block.tally(3, 50, block.common(50), np.random.Generator(np.random.SFC64(1)))
    assert seen.max(axis=1).tolist() == [50.0] * 3
    assert seen.sum(axis=1).tolist() == [50.0] * 3


@pytest.mark.parametrize("bits", [6, 16])
def test_draws_from_any_context_follow_its_probabilities(bits, monkeypatch):
    """Chi-square over 100,000 draws from each context at 1e-4; at 6 bits nearly all are resolved finely."""
    from scipy.stats import chi2

    monkeypatch.setattr("klgrad.synth.blocks._GUIDE_ENTRIES", 2 << bits)
    pair = preset("near", 12)
    block = Counts(pair, edges_in_use(pair)).blocks([12], np.arange(2))[12]
    assert block.bits == bits
    assert bits < 16 or (block.guide >= 0).mean() > 0.98  # or the guide is of no use
    rng = np.random.Generator(np.random.SFC64(6))
    for context in range(2):
        here = block.origin == context
        expected = 100_000 * np.where(here, block.probability, 0.0)
        together = rng.permutation(np.repeat([0, 1], 100_000)) << block.bits
        for drawn in (
            block.draw(100_000, context << bits, rng),
            block.draw(200_000, together, rng)[together == context << bits],
        ):
            seen = np.bincount(drawn, minlength=len(expected))
            assert seen[~here].sum() == 0
            often = expected > 10
            assert ((seen[often] - expected[often]) ** 2 / expected[often]).sum() < chi2.isf(1e-4, often.sum())


def test_more_outcomes_than_sixteen_bits_number_are_drawn():
    """Forty contexts of 1,024 paths each, of even chances: every quarter of the outcomes gets its share."""
    automaton = markov(40, 1, start=(0,))
    logits = np.full((40, 40), -800.0)
    logits[np.arange(40), np.arange(1, 41) % 40] = logits[np.arange(40), np.arange(7, 47) % 40] = 0.0
    pair = PolicyPair(automaton, tabular(automaton, logits), log_softmax(np.zeros((40, 40))))
    block = path_blocks(pair, edges_in_use(pair), [10], np.arange(40), "edges")[10]
    assert len(block.successor) == 40 << 10
    context = np.repeat(np.arange(40), 2_000)
    drawn = block.draw(len(context), context << block.bits, np.random.Generator(np.random.SFC64(3)))
    assert np.array_equal(block.origin[drawn], context)
    quarter = np.bincount(drawn % 1024 // 256, minlength=4)
    assert np.abs(quarter - 20_000).max() < 5 * np.sqrt(20_000 * 0.75)


def test_the_largest_random_number_is_tallied_as_the_last_rare_outcome():
    class Largest:
        def multinomial(self, size, shares, units):
            return np.array([[size, *[0] * (len(shares) - 1)]] * units)

        def random(self, n):
            return np.full(n, 1 - 2.0**-53)

    for third in (0.0575, 0.0625, 0.08):  # 0.125 in all is a power of two
        block = Block(1, np.zeros(4, int), np.array([0.6, 0.0625, third, 0.3375 - third]), np.zeros(4, int))
        assert block.tally(2, 5, block.common(5), Largest()).tolist() == [[0, 0, 5, 0]] * 2


@pytest.mark.parametrize(("automaton", "logits"), [
    (Automaton(np.array([[0, 0], [0, 1]]), start=1, end=0), [[0.0, 0.0], [0.4, 0.0]]),  # context 0 is the end
    (markov(2, 1, start=(0,)), [[0.3, 0.0], [-np.inf, 0.0]]),  # no end, and the last context cannot emit token 0
])  # fmt: skip
def test_padding_comes_after_an_end_and_nowhere_else(automaton, logits):
    flat, behaviour = log_softmax(np.zeros((2, 2))), log_softmax(np.array(logits))
    pair = PolicyPair(automaton, tabular(automaton, np.zeros((2, 2))), flat, behaviour=behaviour)
    edges = edges_in_use(pair)
    block = path_blocks(pair, edges, [3], np.array([automaton.start]), "edges")[3]
    every = enumeration.sequences(automaton, 3)
    chance = np.exp(enumeration.log_probability(every, behaviour))
    number = np.where(every.mask, edges.number[every.contexts, every.tokens], len(edges))
    expected = {tuple(row): p for row, p in zip(number.tolist(), chance, strict=True) if p > 1e-30}
    assert {tuple(row): p for row, p in zip(block.edges.tolist(), block.probability, strict=True)} == pytest.approx(
        expected
    )


def test_contexts_that_are_never_left_but_for_the_end_need_no_equations():
    """Two tokens that stay and none that ends: with an end there is no length to tell their counts by."""
    pair = PolicyPair(
        Automaton(np.array([[0, 0], [1, 1]]), start=0, end=1),
        tabular(Automaton(np.array([[0, 0], [1, 1]]), start=0, end=1), np.zeros((2, 2))),
        log_softmax(np.zeros((2, 2))),
    )
    found = law(Counts(pair, edges_in_use(pair)).blocks([3], np.array([0]))[3], 0)
    assert found == pytest.approx({(0, 0, 3): 1 / 8, (0, 1, 2): 3 / 8, (0, 2, 1): 3 / 8, (0, 3, 0): 1 / 8})


def test_the_largest_random_number_is_the_last_outcome_of_its_own_context():
    """The bucket plus the largest uniform is rounded to one: to the next context, or to no outcome at all."""

    class Largest:
        bit_generator = SimpleNamespace(random_raw=lambda n: np.full(n, 2**64 - 1, np.uint64))

        def random(self, n):
            return np.full(n, 1 - 2.0**-53)

    pair = preset("near", 12)
    S = pair.automaton.contexts
    block = Counts(pair, edges_in_use(pair)).blocks([12], np.arange(S))[12]
    last = [np.flatnonzero(np.ceil(block.cumulative) == context + 1)[-1] for context in range(S)]
    assert (block.guide.reshape(S, -1)[:, -1] == -1).any()  # else nothing would be resolved
    for context in range(S):
        assert block.draw(5, context << block.bits, Largest()).tolist() == [last[context]] * 5
        assert block.draw(5, np.full(5, context << block.bits), Largest()).tolist() == [last[context]] * 5
