"""The probe on policies whose every expectation is known: the two worlds must give the same answers."""

from dataclasses import replace

import numpy as np
import pytest
from strategies import assert_close, build_world, truncated_k3

from klgrad.analysis.results import COLUMNS, compare
from klgrad.figures import figure1
from klgrad.synth.configurations import CREDITS, Configuration, parse
from klgrad.synth.enumeration import enumerate_configuration, log_probability, sequences
from klgrad.synth.estimators import ESTIMATORS
from klgrad.synth.exact import true_gradient
from klgrad.synth.presets import preset

torch = pytest.importorskip("torch")

from klgrad.harness import fields as f  # noqa: E402
from klgrad.harness import objective as o  # noqa: E402
from klgrad.harness import probe as p  # noqa: E402
from klgrad.harness import statistics  # noqa: E402
from klgrad.harness.tabular import tabular_pair  # noqa: E402

SIX = [f"{k}-in-{place}" for k in ("k1", "k3") for place in ("reward", "loss", "both")]


def everything(name, length, configurations):
    """Every sequence of a pair through the probe's own terms, with its probability."""
    pair = preset(name) if name != "ends" else build_world("markov", 3, length, eos=True, seed=3).pair
    policy, reference = tabular_pair(pair)
    every = sequences(pair.automaton, length)
    tokens, mask = torch.as_tensor(every.tokens), torch.as_tensor(every.mask)
    whole = torch.cat([torch.zeros_like(tokens[:, :1]), tokens], 1)
    names = f.wanted(configurations)
    terms = o.token_terms(
        policy.features(whole, whole)[0][:, :-1], policy.head, tokens, mask,
        reference=(reference.features(whole, whole)[0][:, :-1], reference.head),
        summaries=f.summaries_of(names, configurations),
    )  # fmt: skip
    probability = torch.as_tensor(np.exp(log_probability(every, pair.policy.log_probs)))
    return pair, policy, terms, mask, probability


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", ["far", "ends"])
def test_summing_out_the_own_token_keeps_the_expectation(estimator, name):
    """T = 2, all sequences: the Rao-Blackwellised form and the sampled form have one mean."""
    credits = [f"{estimator}-in-{place}+{credit}" for place in ("reward", "both") for credit in CREDITS]
    configurations = [parse(text) for text in (*credits, f"{estimator}-in-loss", f"{estimator}-in-both+divide=3")]
    pair, policy, terms, mask, probability = everything(name, 2, configurations)
    for configuration in configurations:
        loss = sum(w * f.field_loss(name, terms, mask, 1) for name, w in f.fields(configuration).items())
        gradient = torch.zeros_like(policy.theta)
        if f.fields(configuration):
            (gradient,) = torch.autograd.grad((probability * loss).sum(), [policy.theta], retain_graph=True)
        assert_close(gradient.numpy(), enumerate_configuration(configuration, pair, 2).mean)


@pytest.mark.parametrize("name", ["far", "ends"])
def test_the_truth_is_the_true_gradient(name):
    pair, policy, terms, mask, probability = everything(name, 3, [])
    loss = sum(w * f.field_loss(name, terms, mask, 1) for name, w in f.TRUTH.items())
    (gradient,) = torch.autograd.grad((probability * loss).sum(), [policy.theta])
    assert_close(gradient.numpy(), true_gradient(pair, [3])[0])


def test_the_baseline_of_the_others_costs_nothing():
    """Over all pairs of sequences, the mean with the other one as baseline is the mean without."""
    _, policy, terms, mask, probability = everything("far", 2, [])
    n = len(mask)
    first, second = torch.arange(n).repeat_interleave(n), torch.arange(n).repeat(n)
    index = torch.stack([first, second], 1).reshape(-1)
    pairs = {key: value[index] for key, value in terms.items()}
    weight = (probability[first] * probability[second]).repeat_interleave(2) / 2
    found = [
        torch.autograd.grad((w * f.field_loss("future:full", t, m, g)).sum(), [policy.theta], retain_graph=True)[0]
        for w, t, m, g in ((weight, pairs, mask[index], 2), (probability, terms, mask, 1))
    ]
    assert_close(*(g.numpy() for g in found))


@pytest.fixture(scope="module")
def probed():
    policy, reference = tabular_pair(preset("near"))
    setting = p.Setting(policy, reference, [[0], [1]], None, lengths=[2, 6], samples=32)
    return p.probe(setting, [parse(text) for text in SIX], trials=50, seed=1, name="near")


def test_bias_and_variance_are_the_exact_ones(probed):
    """z-tests over 12 rows: bias within 5 standard errors (at least), variance in a 99.99 % interval or so."""
    exact = compare(preset("near"), [parse(text) for text in SIX], [2, 6], exact_only=True)
    for (_, row), (_, truth) in zip(probed.iterrows(), exact.iterrows(), strict=True):
        assert (row.configuration, row.length) == (truth.configuration, truth.length)
        assert abs(row.relative_bias - truth.relative_bias) < 5 * row.relative_bias_error + 1e-7
        assert row.variance_low / 1.5 < truth.variance < row.variance_high * 1.5
        assert row.kl == pytest.approx(truth.kl, rel=0.1)
        assert row.gradient_norm == pytest.approx(truth.gradient_norm, rel=0.1)


def test_known_biases(probed):
    at = probed[probed.length == 6].set_index("configuration")
    assert at.loc["k1-in-reward", "relative_bias"] == 0  # by identity
    assert at.loc["k1-in-loss", "relative_bias"] == pytest.approx(1, abs=1e-6)
    assert at.loc["k3-in-both", "relative_bias"] < 1e-6
    assert at.loc["k3-in-loss", "bias_low"] > 0


def test_same_columns_and_figure_as_the_foundation(probed):
    assert list(probed.columns) == [*COLUMNS, "relative_bias_error"]
    figure = figure1(probed)
    assert len(figure.axes) == 2


def test_shorter_lengths_are_prefixes_of_the_same_samples():
    policy, reference = tabular_pair(preset("words"))
    setting = p.Setting(policy, reference, [[0]], 15, lengths=[2, 5], samples=8)
    both = p.run_trials(setting, [parse("k1-in-reward")], trials=3)
    assert (both[2].kl < both[5].kl).all()


def test_a_part_of_the_model_has_its_part_of_the_whole_gradient(micro):
    """Through the vocabulary once a term (the last block) against once a loss (everything, its tied head included)."""
    from klgrad.harness import models

    model, tokenizer = models.load(str(micro))
    before = [parameter.requires_grad for parameter in model.parameters()]
    prompts = [tokenizer(text)["input_ids"] for text in ("s431=", "s98=")]
    setting = p.Setting(
        model, models.perturbed(model, 0.3, 0), prompts, tokenizer.eos_token_id, lengths=[2, 5], samples=3,
        coordinates=1 << 30, chunk=100,
    )  # fmt: skip
    configurations = [parse(text) for text in ("k3-in-reward", "full-in-loss", "k1-in-both")]
    part, whole = (
        p.run_trials(replace(setting, parameters=choice), configurations, trials=2) for choice in ("last-block", "all")
    )
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    block = {name for name, _ in models.select_parameters(model, "last-block")}
    columns = np.concatenate([
        np.full(parameter.numel(), name in block) for name, parameter in models.select_parameters(model, "all")
    ])  # fmt: skip
    for length in (2, 5):
        for kind in ("fields", "sampled"):
            for name, rows in getattr(part[length], kind).items():
                others = getattr(whole[length], kind)[name][:, columns]
                np.testing.assert_allclose(rows, others, rtol=1e-3, atol=1e-6 * np.abs(others).max())


def test_a_sketch_keeps_norms():
    g = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(20_000, generator=g))
    sketch = p.Sketch(20_000, 4096, 0, torch.device("cpu"))
    row = sketch([parameter.detach()], [parameter])
    assert (row**2).sum() == pytest.approx(float((parameter.detach() ** 2).sum()), rel=5 * (2 / 4096) ** 0.5)
    assert p.Sketch(10, 4096, 0, torch.device("cpu")).exact


def test_jackknife_and_u_statistic():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 7, 3))
    value, without = statistics.inner(a, b)
    plain = np.mean([a[i] @ b[j] for i in range(7) for j in range(7) if i != j])
    assert_close(value, plain)
    assert_close(without[2], statistics.inner(np.delete(a, 2, 0), np.delete(b, 2, 0))[0])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompts": []}, "the data is empty"),
        ({"samples": 1}, "at least 3 trials and 2 samples"),
        ({"parameters": "nothing"}, "choose nothing"),
        ({"reference": tabular_pair(preset("words"))[0]}, "vocabulary of 16"),
    ],
)
def test_bad_settings(change, sentence):
    policy, reference = tabular_pair(preset("near"))
    setting = replace(p.Setting(policy, reference, [[0]], None), **change)
    with pytest.raises(ValueError, match=sentence):
        p.probe(setting, [parse("k1-in-loss")], trials=4)


def test_a_length_mean_has_no_such_form():
    with pytest.raises(ValueError, match="use sum or divide=K"):
        f.fields(parse("k1-in-loss+length-mean"))


def test_two_estimators_of_one_name_are_refused():
    policy, reference = tabular_pair(preset("near"))
    two = [Configuration(truncated_k3(bound), "reward") for bound in (0.5, 2.0)]
    with pytest.raises(ValueError, match="'truncated-k3': give each a name of its own"):
        p.probe(p.Setting(policy, reference, [[0]], None), two, trials=4)
