"""The torch engine: its draws against exact probabilities, its sums against the plain formula and the numpy engine.

What is asked of a device is asked of ``cuda`` too where torch has one; elsewhere those cases are skipped. Tensors
without numbers show even there that nothing mixes devices or has the host wait for a value.
"""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from extremes import extreme_pairs
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy import stats
from strategies import BASELINES, Plain, assert_close, build_world, configurations, worlds

from klgrad.analysis.montecarlo import simulate
from klgrad.synth import devices
from klgrad.synth.blocks import edges_in_use
from klgrad.synth.configurations import parse
from klgrad.synth.devices import TorchSampler, alias_tables
from klgrad.synth.enumeration import expected_loss_gradient, log_probability, sequences, torch_batches, torch_policy
from klgrad.synth.moments import full_fits, moments
from klgrad.synth.policies import PolicyPair, log_softmax, tabular
from klgrad.synth.presets import preset
from klgrad.synth.sampling import Sampler

PATHS = parse("k1-in-reward+rtg+prefix-ratio+length-mean")  # what makes the numpy engine keep whole paths
NAMES = ["k1-in-reward", "k3-in-loss+token-ratio+length-mean", "full-in-both+rtg+prefix-ratio", "k3-in-both+loo"]
NAMES += ["full-in-loss+sequence-ratio", "k1-in-reward+future+optimal-baseline-per-coordinate", "k2-in-loss+divide=7"]
NAMES += ["k1-in-both+token+loo=4", "k3-in-reward+rollout-value+mean-baseline", "jeffreys-in-both+rtg+b=0.3"]
# what shares sums by edge where it may, and must not where its weights run ahead of the token
SHARED = [
    "full-in-both+prefix-ratio+loo",
    "k3-in-loss+prefix-ratio",
    "full-in-loss+token-ratio",
    "k1-in-both+token-ratio",
]


@pytest.fixture(params=["torch-cpu", "cuda"])
def device(request):
    if why := devices.absence(request.param):
        pytest.skip(why)
    return request.param


def generator(sampler, seed=0):
    return sampler.generator(np.random.SeedSequence(seed))


def every_path(pair, length):
    """``(edges [M, T], probability [M])`` of every sequence that the sampler can emit."""
    every, edges = sequences(pair.automaton, length), edges_in_use(pair)
    probability = np.exp(log_probability(every, pair.sampler))
    path = np.where(every.mask, edges.number[every.contexts, every.tokens], len(edges))
    return path[probability > 0], probability[probability > 0]


def reduced(sampler, path, unit, units):
    """The sums of given paths, as numpy arrays."""
    at = [devices._tensor(np.asarray(array), sampler.device) for array in (path, unit)]
    return [[part.cpu().numpy() for part in total] for total in sampler.reduce(*at, units)]


# --------------------------------------------------------------------------------------------------- the draw


@given(seed=st.integers(0, 999), rows=st.integers(1, 4), tokens=st.integers(1, 7), scale=st.sampled_from((0.1, 3, 300)))
def test_alias_tables_hold_the_distribution(seed, rows, tokens, scale):
    rng = np.random.default_rng(seed)
    logits = scale * rng.normal(size=(rows, tokens))
    logits[:, 1:][rng.random((rows, tokens - 1)) < 0.3] = -np.inf
    probs = np.exp(log_softmax(logits))
    keep, other = alias_tables(probs * (1 + 1e-7))  # rows need not sum to one exactly
    got = keep.clip(0) / tokens
    for s, column in np.ndindex(probs.shape):
        got[s, other[s, column]] += (1 - keep[s, column]) / tokens
    assert_close(got, probs, 1e-14)
    assert (keep[probs == 0] <= 0).all()
    assert (np.take_along_axis(probs, other, 1)[keep < 1] > 0).all()


@given(world=worlds())
def test_paths_have_their_exact_probabilities(device, world):
    """Chi-square over every sequence, those expected less than 5 times together: p > 1e-6, false alarm 3e-5 in all."""
    path, probability = every_path(world.pair, world.length)
    n, sampler = 20_000, TorchSampler(world.pair, [], device)
    drawn = sampler.paths(world.length, n, generator(sampler)).cpu().numpy()
    radix = (len(sampler.edges) + 1) ** np.arange(world.length)
    names = path @ radix
    order = names.argsort()
    place = np.searchsorted(names[order], drawn @ radix)
    assert (names[order][place] == drawn @ radix).all()  # nothing else is ever drawn
    seen = np.zeros(len(path))
    seen[order] = np.bincount(place, minlength=len(path))
    rare = n * probability < 5
    seen, expected = (np.append(a[~rare], a[rare].sum()) for a in (seen, n * probability))
    off = (seen - expected) ** 2 / np.where(expected > 0, expected, 1)
    assert stats.chi2.sf(off.sum(), max(1, np.count_nonzero(expected) - 1)) > 1e-6


@given(given_pair=extreme_pairs(), seed=st.integers(0, 99))
def test_what_has_probability_zero_is_never_drawn(device, given_pair, seed):
    """Exact zeros, certain tokens and early ends: every token is an edge in use until the end, and none after it."""
    pair, longest = given_pair
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        sampler = TorchSampler(pair, [], device)
    path = sampler.paths(longest, 50, generator(sampler, seed)).cpu().numpy()
    edges, context = sampler.edges, np.full(50, pair.automaton.start)
    for t in range(longest):
        over = context == pair.automaton.end
        assert (over == (path[:, t] == len(edges))).all()
        at = path[~over, t]
        assert (edges.context[at] == context[~over]).all()
        context[~over] = pair.automaton.next_context[edges.context[at], edges.token[at]]


# ---------------------------------------------------------------------------------------------- the reduction


@given(world=worlds(cap=100), configuration=configurations(baselines=BASELINES))
def test_sums_are_those_of_the_plain_formula(device, world, configuration):
    """Every sequence as a unit of its own, against the line-by-line transcription."""
    path, probability = every_path(world.pair, world.length)
    p, x, y, c = Plain(world).parts(configuration)
    got = reduced(TorchSampler(world.pair, [configuration], device), path, np.arange(len(path)), len(path))[0]
    assert_close(got[0], x[p > 0])
    assert_close(got[3], c[p > 0])
    if configuration.baseline != "none":  # y is a difference of two x, and what cancels there is as large as they are
        assert_close(got[1], y[p > 0], 1e-10 * max(1.0, np.abs(x).max()))
    assert_close(probability @ got[4], moments(world.pair, [configuration], [world.length])[0].estimate[0])


@given(
    world=worlds(),
    asked=st.lists(configurations(baselines=(*BASELINES, "loo", "loo=3")), min_size=1, max_size=4),
    size=st.integers(1, 3),
)
@example(world=build_world("markov", 3, 3, off=True), asked=[parse(name) for name in SHARED], size=2)
def test_the_same_paths_give_the_same_sums_as_the_numpy_engine(device, world, asked, size):
    path, _ = every_path(world.pair, world.length)
    units = len(path) // size
    assume(units > 0)
    path = path[: units * size]
    here = Sampler(world.pair, [*asked, PATHS], [world.length])
    assert here.name == "paths"
    here.paths = lambda length, n, rng: path
    there = TorchSampler(world.pair, [*asked, PATHS], device)
    got = reduced(there, path, np.arange(units * size) // size, units)
    for configuration, a, b in zip([*asked, PATHS], here.sums(world.length, units, size, None), got, strict=True):
        for field, mine, other in zip(a._fields, b, a, strict=True):
            if field != "y" or configuration.baseline != "none":  # this engine leaves out what no baseline asks for
                assert_close(mine, other, 1e-11)


@given(given_pair=extreme_pairs(), configuration=configurations(baselines=("", "b=0.7", "loo")))
def test_extreme_numbers_are_those_of_the_numpy_engine(device, given_pair, configuration):
    """Where products overflow, both say so: the same entries are finite, and agree."""
    pair, longest = given_pair
    with np.errstate(all="ignore"):
        there = TorchSampler(pair, [configuration, PATHS], device)
        path = there.paths(longest, 40, generator(there)).cpu().numpy()
        here = Sampler(pair, [configuration, PATHS], [longest])
        here.paths = lambda length, n, rng: path
        a, b = here.sums(longest, 40, 1, None)[0], reduced(there, path, np.arange(40), 40)[0]
    for field, mine, other in zip(a._fields, b, a, strict=True):
        if field != "y" or configuration.baseline != "none":
            finite = np.isfinite(other)
            assert (np.isfinite(mine) == finite).all()
            size = np.abs(other[finite]).max(initial=0)
            assert_close(mine[finite] / max(size, 1), other[finite] / max(size, 1), 1e-9)


# ---------------------------------------------------------------------------------------------- the whole engine


@given(world=worlds(cap=60), configuration=configurations(baselines=BASELINES))
def test_estimates_on_random_models_agree_with_enumeration(device, world, configuration):
    """Within Bernstein's bound at 1e-7 a coordinate, which rare large weights do not break: 2e-5 to fail by chance.

    About 5.8 standard errors, and a third of 17 times the largest deviation over n: nothing is assumed of the tail.
    """
    plain, trials, samples = Plain(world), 30, 100
    p, x, y, _ = plain.parts(configuration)
    g = x - plain.baseline(configuration) * y
    drawn = simulate(world.pair, [configuration], [world.length], trials=trials, samples=samples, device=device)
    off, n, level = np.abs(drawn.gradients[0][:, 0].mean(axis=0) - p @ g), trials * samples, np.log(2e7)
    most, spread = np.abs(g - p @ g)[p > 0].max(axis=0) * level / 3, p @ (g - p @ g) ** 2
    rounding = 1e-12 * np.abs(x).max()  # g may be nothing but the rounding of x less its baseline
    assert (off <= (most + np.sqrt(most**2 + 2 * n * spread * level)) / n + rounding).all()


def z_scores(pair, names, length, device, trials=200, samples=100, seed=5):
    """``[C]`` the largest |z| over coordinates and the KL estimate, and the ratio of variances, against exact ones."""
    asked = [parse(name) for name in names]
    drawn = simulate(pair, asked, [length], trials=trials, samples=samples, seed=seed, device=device)
    assert drawn.sampler == "paths"
    kind = "full" if full_fits(pair) else "diagonal"
    for i, m in enumerate(moments(pair, asked, [length], covariance=kind, samples=samples)):
        variance = np.diagonal(m.covariance[0]) if kind == "full" else m.covariance[0]
        noisy = variance > 1e-16
        gradient, value = drawn.gradients[0][:, i], drawn.estimates[0][:, i]
        z = ((gradient.mean(axis=0) - m.mean[0]) / np.sqrt(np.where(noisy, variance, 1) / trials / samples))[noisy]
        z_value = (value.mean() - m.estimate[0]) / max(np.sqrt(m.estimate_variance[0] / trials / samples), 1e-12)
        ratio = samples * gradient.var(axis=0, ddof=1).sum() / variance.sum() if noisy.any() else 1.0
        yield str(m.configuration), np.abs(np.append(z, z_value)).max(), ratio


@pytest.mark.parametrize("name", ["near", "far", "stale", "ending", "words"])
def test_samples_agree_with_the_exact_moments(name, device):
    """|z| < 5.2 for at most 2,420 numbers a case, 4e-4 to fail by chance; variances within 40 %: beyond 4 sigma."""
    for configuration, z, ratio in z_scores(preset(name, 6), NAMES, 6, device):
        assert z < 5.2, configuration
        assert 0.6 < ratio < 1.6, configuration


def test_a_wrong_expectation_is_caught(device):
    """Negative control: the draws of another pair are 10 standard errors away."""
    pair = preset("far")
    other = replace(pair, policy=tabular(pair.automaton, np.array([[0.0, 0.3], [0.5, 0.0]])))
    drawn = simulate(other, [parse("k1-in-reward")], [8], trials=100, samples=100, device=device).gradients[0][:, 0]
    m = moments(pair, [parse("k1-in-reward")], [8], covariance="diagonal")[0]
    assert np.abs((drawn.mean(axis=0) - m.mean[0]) / np.sqrt(m.covariance[0] / 1e4)).max() > 10


def test_units_larger_than_a_part_agree(monkeypatch, device):
    """Leave-one-out over a trial that comes in parts, each of at least two sequences; |z| < 4.5."""
    parts = []
    real = TorchSampler.paths
    monkeypatch.setattr(TorchSampler, "paths", lambda self, T, n, rng: parts.append(n) or real(self, T, n, rng))
    monkeypatch.setattr(devices, "_room", lambda device: 1 << 14)
    for configuration, z, ratio in z_scores(preset("far"), ["k1-in-reward+rtg+loo", "k3-in-both"], 8, device, 40, 50):
        assert z < 4.5, configuration
        assert 0.4 < ratio < 2.5, configuration
    assert len(parts) > 50
    assert min(parts) >= 2


def drawn_again(device, **request):
    asked = [parse(name) for name in ("k1-in-reward+rtg+loo", "full-in-both+prefix-ratio", "k3-in-loss+length-mean")]
    drawn = simulate(preset("words"), asked, [3, 6], trials=130, samples=900, device=device, **request)
    return b"".join(array.tobytes() for array in drawn.gradients + drawn.estimates)


def test_the_same_seed_gives_the_same_bytes(device, torch):
    threads = torch.get_num_threads()
    first = drawn_again(device)
    torch.set_num_threads(threads + 1)
    try:
        assert drawn_again(device, workers=3) == first
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert drawn_again(device, seed=1) != first


def test_nothing_is_in_float32(device):
    world = build_world("markov", 3, 4, off=True)
    automaton, policy = world.pair.automaton, world.pair.policy
    narrow = (
        a.astype(np.float32) for a in (policy.log_probs, policy.scores, world.pair.reference, world.pair.behaviour)
    )
    log_probs, scores, reference, behaviour = narrow
    pair = PolicyPair(automaton, replace(policy, log_probs=log_probs, scores=scores), reference, behaviour)
    sampler = TorchSampler(pair, [parse(name) for name in NAMES], device)
    held = [t for t in vars(sampler).values() if hasattr(t, "is_floating_point")]
    held += [t for table in sampler.tables for t in table[1:] if t is not None]
    assert {str(t.dtype) for t in held} == {"torch.float64", "torch.int64"}
    totals = sampler.totals(4, 2, 3, generator(sampler))
    assert {str(part.dtype) for total in totals for part in total} == {"torch.float64"}


def test_no_room_on_the_device_is_one_sentence(monkeypatch, torch):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    monkeypatch.setattr(TorchSampler, "totals", full)
    with pytest.raises(ValueError, match=r"out of memory \(CUDA out of memory\): leave room on it") as held:
        simulate(preset("near"), [parse("k1-in-loss")], [3], trials=2, samples=2, device="torch-cpu")
    assert "\n" not in str(held.value)


# ----------------------------------------------------------------------------------------- a GPU that is not there


@contextmanager
def only_on_meta():
    """Every operation takes tensors of the ``meta`` device alone: no other device is mixed in, no value is asked for.

    ``meta`` tensors know shape and type and hold no numbers, so that what needs one raises.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class OneDevice(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = {t.device.type for t in tree_leaves((args, kwargs)) if hasattr(t, "device")}
            moves = "_to_copy" in str(function) or "lift_fresh" in str(function)  # a table on its way
            assert found <= {"meta"} or moves, f"{function} takes tensors on {found}"
            return function(*args, **(kwargs or {}))

    with OneDevice():
        yield


def on_meta(monkeypatch, pair, names):
    """A sampler whose device is ``meta``, in parts of a few hundred sequences."""
    monkeypatch.setattr(devices, "_room", lambda device: 1 << 20)
    return TorchSampler(pair, [parse(name) for name in names], "meta")


@pytest.mark.parametrize("name", ["words", "stale"])
def test_everything_stays_on_the_device_without_asking_it_for_values(monkeypatch, torch, name):
    sampler = on_meta(monkeypatch, preset(name), [*NAMES, str(PATHS)])
    assert sampler.rows(7, 100) < 500  # so that it comes in parts
    with only_on_meta():
        totals = sampler.totals(7, 5, 100, None)
    assert {str(part.device) for total in totals for part in total} == {"meta"}


@pytest.mark.parametrize("stray", ["keep", "number", "scores", "log_rho"])
def test_a_table_left_on_the_host_would_be_seen(monkeypatch, torch, stray):
    sampler = on_meta(monkeypatch, preset("stale"), ["k1-in-reward+token-ratio"])
    setattr(sampler, stray, torch.zeros_like(getattr(sampler, stray), device="cpu"))
    with pytest.raises((AssertionError, RuntimeError), match="cpu"), only_on_meta():
        sampler.totals(7, 5, 20, None)


def test_a_value_asked_for_would_be_seen(torch):
    with pytest.raises(RuntimeError, match="meta"), only_on_meta():
        torch.ones(3, device="meta").sum().item()


# ------------------------------------------------------------------------------------------------- enumeration


def enumerated(world, device):
    """The expected gradient of a loss that uses all of a batch, over every sequence, on torch's device."""
    import torch

    def constant(log_probs):
        table = torch.as_tensor(np.array(log_probs), device=device)
        return lambda contexts: table[contexts]

    theta, model = torch_policy(world.pair, world.features, device=device)

    def loss(batch):
        full = (batch.full_log_probs.exp() * (batch.full_log_probs - batch.full_reference)).sum(-1)
        each = (batch.log_probs - batch.reference).exp() * (batch.log_probs - batch.behaviour).exp() + full
        return torch.where(batch.mask, each * (1 + batch.tokens), torch.zeros_like(each)).sum(1)

    def batches():
        return torch_batches(
            model, constant(world.pair.reference), world.pair.automaton, world.length,
            behaviour=constant(world.pair.sampler), chunk=20, device=device,
        )  # fmt: skip

    return expected_loss_gradient(loss, theta, batches)[0]


@pytest.mark.parametrize("parameters", [0, 3])
@pytest.mark.parametrize("eos", [False, True])
def test_enumeration_on_a_device_gives_the_same_gradient(device, parameters, eos):
    world = build_world("markov", 3, 4, off=True, eos=eos, parameters=parameters, seed=2)
    there = enumerated(world, device.removeprefix("torch-"))
    assert_close(there.cpu().numpy(), enumerated(world, None).numpy(), 1e-13)
    assert there.abs().max() > 1e-3


@pytest.mark.parametrize("parameters", [0, 3])
def test_enumeration_leaves_nothing_on_the_host(torch, parameters):
    world = build_world("markov", 3, 4, off=True, eos=True, parameters=parameters)
    with only_on_meta():
        assert str(enumerated(world, "meta").device) == "meta"


# --------------------------------------------------------------------------------------------------- the names


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:01", "mps", "", "CPU", "cuda:0 "])
def test_an_unknown_device_is_named(name):
    with pytest.raises(ValueError, match=r"unknown device .*: cpu"):
        devices.absence(name)


def test_what_is_not_here_says_why(monkeypatch, torch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for built, why in ((None, "is built without it"), ("12.8", "finds no GPU or no driver")):
        monkeypatch.setattr(torch.version, "cuda", built)
        assert devices.absence("cuda") == f"this torch has no CUDA device: torch {torch.__version__} {why}"
    assert devices.absence("torch-cpu") == devices.absence("cpu") == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.absence("cuda:1") == devices.absence("cuda") == ""
    assert devices.absence("cuda:2") == "there is no cuda:2: the last CUDA device here is cuda:1"
