"""The sampled engine against the exact one, and its promises about seeds, workers and interruption.

z-tests use the exact standard error. Each of their thresholds is stated with its false-alarm rate; seeds are fixed.
"""

import time
from dataclasses import replace

import numpy as np
import pytest
from strategies import truncated_k3

from klgrad.analysis import montecarlo
from klgrad.analysis.montecarlo import blocks, simulate
from klgrad.synth import sampling
from klgrad.synth.automata import markov
from klgrad.synth.blocks import Block
from klgrad.synth.configurations import Configuration, parse
from klgrad.synth.estimators import estimator
from klgrad.synth.moments import full_fits, moments
from klgrad.synth.policies import PolicyPair, log_softmax, tabular
from klgrad.synth.presets import PRESETS, preset

ORDER_FREE = [
    f"{e}-in-{p}{o}" for e in ("k1", "k3", "full") for p in ("reward", "loss", "both") for o in ("", "+length-mean")
]
ORDER_FREE += ["k1-in-reward+loo", "k3-in-both+loo=4", "k1-in-reward+token", "k1-in-both+mean-baseline"]
ORDER_FREE += ["k1-in-reward+optimal-baseline-per-coordinate", "k3-in-reward+b=0.3+divide=7"]
ORDERED = ["k1-in-reward+rtg", "k3-in-both+rtg+loo", "full-in-both+future+optimal-baseline", "k1-in-reward+future"]
PATHS = ["k1-in-reward+rtg+length-mean", "k3-in-both+rtg+prefix-ratio", "full-in-both+prefix-ratio"]
PATHS += ["full-in-loss+prefix-ratio", "k3-in-both+prefix-ratio+loo"]
STALE = [e + r for e in ("k1-in-reward", "k3-in-loss", "full-in-both") for r in ("", "+token-ratio", "+sequence-ratio")]
STALE += ["k1-in-reward+rollout-value", "k1-in-reward+rtg+token-ratio"]

REQUESTS = {"counts": ORDER_FREE, "ordered": ORDER_FREE + ORDERED, "paths": ORDER_FREE + ORDERED + PATHS}


def z_scores(pair, names, length, trials=300, samples=100, seed=3):
    """Per configuration: z of every coordinate of the mean, of the KL estimate, and the ratio of variances."""
    configurations = [parse(name) for name in names]
    drawn = simulate(pair, configurations, [length], trials=trials, samples=samples, seed=seed)
    kind = "full" if full_fits(pair) else "diagonal"
    for c, m in enumerate(moments(pair, configurations, [length], covariance=kind, samples=samples)):
        each = np.diagonal(m.covariance[0]) if kind == "full" else m.covariance[0]
        noisy = each > 1e-16
        error = np.sqrt(each[noisy] / samples / trials)
        gradient, value = drawn.gradients[0][:, c], drawn.estimates[0][:, c]
        off = gradient.mean(axis=0) - m.mean[0]
        assert np.abs(off[~noisy]).max(initial=0.0) < 1e-12
        z_value = (value.mean() - m.estimate[0]) / max(np.sqrt(m.estimate_variance[0] / samples / trials), 1e-12)
        ratio = samples * gradient.var(axis=0, ddof=1).sum() / each.sum() if noisy.any() else 1.0
        yield str(m.configuration), np.append(off[noisy] / error, z_value), ratio


@pytest.mark.parametrize("name", ["near", "far", "counts", "handbook", "stale"])
@pytest.mark.parametrize("sampler", list(REQUESTS))
def test_samples_agree_with_the_exact_moments(name, sampler):
    """|z| < 4.5 for each of at most 150 numbers: false alarm 1e-3 a case. Variances within 40 %: beyond 5 sigma."""
    pair = preset(name, 6)
    names = REQUESTS[sampler] + (STALE if name == "stale" and sampler == "paths" else [])
    for configuration, z, ratio in z_scores(pair, names, 1 if name == "handbook" else 6):
        assert np.abs(z).max() < 4.5, configuration
        assert 0.6 < ratio < 1.6, configuration


@pytest.mark.parametrize("sampler", ["counts", "ordered"])
@pytest.mark.parametrize("name", ["near", "far", "stale"])
def test_tallied_samples_agree_with_the_exact_moments(name, sampler, monkeypatch):
    """Many sequences of few outcomes: |z| < 4.5, false alarm 1e-3 a case. Variances within 40 %: beyond 5 sigma."""
    tallied = []
    real = Block.tally
    monkeypatch.setattr(Block, "tally", lambda self, *a: tallied.append(a) or real(self, *a))
    off_policy = STALE[:-1] if name == "stale" else []
    names = [n for n in REQUESTS[sampler] + off_policy if "loo=" not in n]
    for configuration, z, ratio in z_scores(preset(name, 6), names, 6, samples=2_000):
        assert np.abs(z).max() < 4.5, configuration
        assert 0.6 < ratio < 1.6, configuration
    assert tallied


@pytest.mark.parametrize("others", [[], ["k1-in-reward+rtg"], ["k1-in-reward+rtg+length-mean"]])
@pytest.mark.parametrize("samples", [10, 1_000])
def test_what_is_never_drawn_weighs_nothing(samples, others):
    """A token at 1e-260 whose importance ratio overflows within three tokens: each sampler's sums stay finite."""
    automaton = markov(2, 1, start=(0,))
    behaviour = log_softmax(np.array([[0.0, -600.0], [0.0, -1.0]]))
    reference = log_softmax(np.array([[0.0, 1.0], [0.0, 0.3]]))
    pair = PolicyPair(automaton, tabular(automaton, np.zeros((2, 2))), reference, behaviour=behaviour)
    configurations = [parse(name) for name in ["k1-in-reward+sequence-ratio", *others]]
    drawn = simulate(pair, configurations, [3, 14], trials=3, samples=samples)
    assert all(np.isfinite(array).all() for array in drawn.gradients + drawn.estimates)


@pytest.mark.parametrize("group", [4, 50])
def test_orders_are_summed_alike_in_every_way(group, monkeypatch):
    """By how often each outcome came or sequence by sequence, in float32 while that is exact: the same sums."""

    def drawn():
        names = [f"k1-in-reward+rtg+loo={group}", "k3-in-both+rtg", "full-in-both+future"]
        return simulate(preset("near"), [parse(name) for name in names], [23], trials=3, samples=100).gradients[0]

    usual = drawn()
    for constant, value in (("_FEW", 0), ("_FEW", 1 << 20), ("_EXACT", 0), ("_BATCH_TOKENS", 1)):
        with monkeypatch.context() as changed:
            changed.setattr(sampling, constant, value)
            assert np.allclose(drawn(), usual, rtol=1e-12, atol=1e-12), constant


@pytest.mark.parametrize("names", [STALE[:-1], STALE])
def test_off_policy_samples_agree_with_the_exact_moments(names):
    """Count and order samplers off-policy; |z| < 4.5, false alarm below 1e-3."""
    for configuration, z, _ in z_scores(preset("stale"), names, 8):
        assert np.abs(z).max() < 4.5, configuration


def test_a_large_vocabulary_with_an_end_token_agrees():
    """240 coordinates x 4 configurations at |z| < 5: false alarm 6e-4."""
    names = ["k1-in-reward", "k3-in-loss+length-mean", "full-in-both+rtg", "k3-in-both+loo"]
    for configuration, z, ratio in z_scores(preset("words"), names, 5):
        assert np.abs(z).max() < 5, configuration
        assert 0.7 < ratio < 1.4, configuration


def test_a_wrong_expectation_is_caught():
    """Negative control: k3-in-loss samples are not the true gradient, and the z-test says so."""
    pair = preset("far")
    drawn = simulate(pair, [parse("k3-in-loss")], [8], trials=100, samples=100).gradients[0][:, 0]
    m = moments(pair, [parse("k1-in-reward")], [8])[0]
    exact = moments(pair, [parse("k3-in-loss")], [8], covariance="diagonal")[0].covariance[0]
    assert np.abs((drawn.mean(axis=0) - m.mean[0]) / np.sqrt(exact / 1e4)).max() > 10


@pytest.mark.parametrize("name", ["near", "words"])
def test_numbers_do_not_depend_on_workers(name):
    pair, configurations = preset(name), [parse("k1-in-reward"), parse("k3-in-loss")]
    one = simulate(pair, configurations, [3, 7], trials=130, samples=900, workers=1)
    two = simulate(pair, configurations, [3, 7], trials=130, samples=900, workers=3)
    for a, b in zip(one.gradients + one.estimates, two.gradients + two.estimates, strict=True):
        assert np.array_equal(a, b)


def test_a_configuration_asked_for_twice_is_given_twice():
    pair, configuration = preset("near"), parse("k1-in-reward+mean-baseline")
    drawn = simulate(pair, [configuration, parse("k1-in-loss"), configuration], [4], trials=3, samples=20).gradients[0]
    assert np.array_equal(drawn[:, 0], drawn[:, 2])


def test_an_interruption_starts_no_more_blocks(monkeypatch):
    """Also while the exception, and so every frame below it, is still held."""
    drawn = []
    real = montecarlo.Sampler.sums
    monkeypatch.setattr(montecarlo.Sampler, "sums", lambda self, *a: drawn.append(a) or real(self, *a))

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as held:
        simulate(preset("near"), [parse("k1-in-loss")], range(2, 60), trials=40, samples=5000, workers=2, progress=stop)
    started = len(drawn)
    time.sleep(0.2)
    assert held.value is not None
    assert len(drawn) == started < 100


def test_seeds_differ_and_repeat():
    def run(seed):
        return simulate(preset("near"), [parse("k1-in-reward")], [5], trials=5, samples=10, seed=seed).gradients[0]

    assert np.array_equal(run(1), run(1))
    assert not np.array_equal(run(1), run(2))


def test_order_free_and_path_samplers_draw_the_same_law():
    """The count sampler merges paths; merged or not, the mean over many sequences agrees (|z| < 4.5)."""
    pair, name = preset("far"), "k1-in-reward"
    counts = simulate(pair, [parse(name)], [60], trials=100, samples=500)
    paths = simulate(pair, [parse(name), parse("k1-in-reward+rtg+prefix-ratio")], [60], trials=100, samples=500)
    assert (counts.sampler, paths.sampler) == ("counts", "paths")
    exact = moments(pair, [parse(name)], [60], covariance="diagonal")[0].covariance[0]
    z = (counts.gradients[0][:, 0].mean(0) - paths.gradients[0][:, 0].mean(0)) / np.sqrt(2 * exact / 5e4)
    assert np.abs(z).max() < 4.5


@pytest.mark.parametrize("length", [3, 20])
@pytest.mark.parametrize("others", [[], [1024]])
def test_a_length_mean_counts_no_sequence_of_nothing(length, others):
    """With an end, blocks that start anywhere have an outcome of no tokens; at length 3 they are whole paths."""
    automaton = markov(4, 1, start=(0,), eos=True)
    logits = np.random.default_rng(0).normal(size=(2, *automaton.next_context.shape))
    pair = PolicyPair(automaton, tabular(automaton, logits[0]), log_softmax(logits[1]))
    drawn = simulate(pair, [parse("k1-in-loss+length-mean")], [length, *others], trials=4, samples=1000)
    exact = moments(pair, [parse("k1-in-loss+length-mean")], [length], covariance="diagonal")[0]
    error = np.sqrt(exact.covariance[0] / 4000)
    assert np.abs((drawn.gradients[0].mean(axis=(0, 1)) - exact.mean[0]) / error).max() < 5  # false alarm: 1e-5


@pytest.mark.parametrize("name", ["near", "stale", "words"])
def test_numbers_of_a_length_do_not_depend_on_the_others(name):
    """A store takes blocks up by length; so the same seed has to give them whatever else was asked for."""
    pair, names = preset(name), [parse("k1-in-reward"), parse("k3-in-loss+length-mean")]
    alone = simulate(pair, names, [120], trials=20, samples=1000)
    for lengths in ([120, 200], [20, 120, 600]):
        together = simulate(pair, names, lengths, trials=20, samples=1000)
        assert np.array_equal(together.gradients[lengths.index(120)], alone.gradients[0])


def test_blocks_partition_the_trials():
    for trials, samples in ((200, 1000), (7, 3), (3, 10**6)):
        seen = sorted(
            (b.length, t) for b in blocks([2, 5], trials, samples) for t in range(b.first, b.first + b.trials)
        )
        assert seen == [(n, t) for n in (2, 5) for t in range(trials)]


def test_an_interrupted_run_goes_on_from_its_finished_blocks(tmp_path, monkeypatch):
    pair, configurations = preset("near"), [parse("k1-in-reward")]
    request = {"trials": 80, "samples": 5000, "store": tmp_path}

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(pair, configurations, [4], progress=stop, **request)
    kept = list(tmp_path.rglob("*.npz"))
    assert len(kept) == 2
    assert not list(tmp_path.rglob("*.part"))
    drawn = []
    real = montecarlo.Sampler.sums
    monkeypatch.setattr(montecarlo.Sampler, "sums", lambda self, *a: drawn.append(a) or real(self, *a))
    resumed = simulate(pair, configurations, [4], **request)
    assert len(drawn) == len(blocks([4], 80, 5000)) - 2 > 0
    fresh = simulate(pair, configurations, [4], trials=80, samples=5000)
    assert np.array_equal(resumed.gradients[0], fresh.gradients[0])


def test_a_damaged_block_is_drawn_again(tmp_path):
    pair, configurations = preset("near"), [parse("k1-in-reward")]
    whole = simulate(pair, configurations, [4], trials=20, samples=5000, store=tmp_path)
    for file in tmp_path.rglob("*.npz"):
        file.write_bytes(file.read_bytes()[:50])
    again = simulate(pair, configurations, [4], trials=20, samples=5000, store=tmp_path)
    assert np.array_equal(whole.gradients[0], again.gradients[0])


def test_another_request_does_not_take_up_the_blocks(tmp_path):
    pair = preset("near")
    simulate(pair, [parse("k1-in-reward")], [4], trials=4, samples=10, store=tmp_path)
    other = simulate(pair, [parse("k1-in-reward")], [4], trials=4, samples=10, seed=1, store=tmp_path)
    fresh = simulate(pair, [parse("k1-in-reward")], [4], trials=4, samples=10, seed=1)
    assert np.array_equal(other.gradients[0], fresh.gradients[0])
    assert len(list(tmp_path.iterdir())) == 2


OWN = {  # by sampler: what each draws an own estimator with
    "counts": ("reward", {}), "ordered": ("both", {"credit": "rtg"}),
    "paths": ("both", {"credit": "rtg", "ratio": "prefix"}),
}  # fmt: skip


@pytest.mark.parametrize("sampler", OWN)
def test_an_own_estimator_that_was_changed_does_not_take_up_the_blocks(tmp_path, sampler):
    """The name is the same and the functions are not: those decide."""
    placement, options = OWN[sampler]
    request = {"trials": 4, "samples": 50, "store": tmp_path}
    before, after, same = (
        simulate(preset("far"), [Configuration(truncated_k3(bound), placement, **options)], [4], **request)
        for bound in (0.5, 2.0, 0.5)
    )
    assert before.sampler == sampler
    assert np.abs(after.gradients[0] - before.gradients[0]).max() > 1e-3
    assert np.array_equal(same.gradients[0], before.gradients[0])
    assert len(list(tmp_path.iterdir())) == 2  # the third took up the first one's


@pytest.mark.parametrize(
    ("name", "field"), [("k3", "value"), ("k3", "slope"), ("k3", "together"), ("full", "value"), ("full", "slope")]
)
def test_every_function_of_an_estimator_is_part_of_the_request(tmp_path, name, field):
    """A part in 1e9 more, far above what rounding can undo, is another request."""
    pair, est = preset("near"), estimator(name)
    function = getattr(est, field)
    changed = replace(est, **{field: lambda *given: (1 + 1e-9) * function(*given)})
    asked = [[Configuration(e, "both")] for e in (est, replace(est), changed)]
    one, again, other = (montecarlo.store_of(tmp_path, pair, configurations, 4, 10, 0) for configurations in asked)
    assert one == again != other


@pytest.mark.parametrize("device", ["cpu", "torch-cpu"])
def test_own_estimators_of_one_name_are_drawn_apart(device):
    """In one batch, where values are shared between configurations; so are exact constants, each its own."""
    options = {"credit": "rtg", "ratio": "prefix", "baseline": "optimal", "aggregation": "length-mean"}
    asked = [Configuration(truncated_k3(bound), "both", **options) for bound in (0.5, 2.0)]
    request = {"trials": 3, "samples": 20, "device": device}
    together = simulate(preset("far"), asked, [4], **request)
    for i, configuration in enumerate(asked):
        alone = simulate(preset("far"), [configuration], [4], **request)
        assert np.array_equal(alone.gradients[0][:, 0], together.gradients[0][:, i])
        assert np.array_equal(alone.estimates[0][:, 0], together.estimates[0][:, i])


@pytest.mark.parametrize(("bad", "words"), [({"trials": 1}, "trials = 1"), ({"samples": 1}, "samples = 1")])
def test_too_few_of_anything_is_refused(bad, words):
    with pytest.raises(ValueError, match=words):
        simulate(preset("near"), [parse("k1-in-reward")], [4], **bad)


def test_groups_must_divide_the_samples():
    with pytest.raises(ValueError, match="groups of 7"):
        simulate(preset("near"), [parse("k1-in-reward+loo=7")], [4], trials=2, samples=10)


def test_every_preset_can_be_sampled():
    for name in PRESETS:
        length = PRESETS[name].lengths[0]
        drawn = simulate(preset(name, length), [parse("k1-in-reward")], [length], trials=2, samples=4)
        assert np.isfinite(drawn.gradients[0]).all()


def test_more_estimates_than_fit_are_refused():
    with pytest.raises(ValueError, match="take fewer trials or lengths"):
        simulate(preset("near"), [parse("k1-in-reward")], [4], trials=10**9)


def test_more_groups_than_fit_are_refused():
    with pytest.raises(ValueError, match=r"samples = 1e\+09 in leave-one-out groups of 4 are 3.5e\+09 sums"):
        simulate(preset("near"), [parse("k1-in-reward+loo=4")], [4], trials=2, samples=10**9)


@pytest.mark.parametrize("names", [["k1-in-reward+loo=10"], ["k1-in-reward+rtg+loo=10"]])
@pytest.mark.parametrize("length", [3, 25])
def test_units_come_in_parts_too(names, length, monkeypatch):
    """Leave-one-out groups are drawn a few at a time; memory does not grow with their number. |z| < 4.5."""
    sizes = []
    real = sampling.Sampler._drawn
    monkeypatch.setattr(sampling, "_BATCH_SEQUENCES", 64)
    monkeypatch.setattr(sampling.Sampler, "_drawn", lambda self, *a: sizes.append(a[1:3]) or real(self, *a))
    for configuration, z, ratio in z_scores(preset("far"), names, length):
        assert np.abs(z).max() < 4.5, configuration
        assert 0.6 < ratio < 1.6, configuration
    assert set(sizes) == {(6, 10)}


@pytest.mark.parametrize("names", [["k1-in-reward+loo"], ["k1-in-reward+rtg+loo"]])
def test_large_samples_come_in_parts(monkeypatch, names):
    """Sums over parts of a trial: leave-one-out still spans the whole trial; |z| < 4.5, false alarm below 1e-4."""
    monkeypatch.setattr(sampling, "_BATCH_SEQUENCES", 64)
    for configuration, z, ratio in z_scores(preset("far"), names, 8):
        assert np.abs(z).max() < 4.5, configuration
        assert 0.6 < ratio < 1.6, configuration


@pytest.mark.slow
@pytest.mark.parametrize("name", ["near", "far", "counts", "stale", "words"])
def test_the_whole_protocol_agrees_with_the_exact_moments(name):
    """200 x 1000 at T = 20, every option; |z| < 5 for at most 20,000 correlated numbers: false alarm below 0.012."""
    length = 20
    pair = preset(name, length)
    for configuration, z, ratio in z_scores(pair, REQUESTS["paths"], length, trials=200, samples=1000):
        assert np.abs(z).max() < 5, configuration
        assert 0.5 < ratio < 2, configuration
