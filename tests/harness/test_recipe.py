"""Recipes: every one that comes with klgrad is whole, and wrong ones are refused in a sentence."""

import pytest

from klgrad.harness import recipe as r

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", r.names())
def test_every_recipe_is_whole(name):
    from klgrad.harness.plan import needs, total_gib
    from klgrad.harness.train import objective_of

    made = r.load(name)
    objective = objective_of(made)
    assert objective.penalised
    assert made.source
    assert made.model == "tiny" or made.parameters > 1e9
    found = needs(made, made.parameters or 446_496)
    assert total_gib(found) > 16 * (made.parameters or 446_496) / 2**30


def test_the_paper_s_numbers():
    made = r.load("math-qwen2.5-7b-rloo")
    assert (made.batch, made.group, made.length, made.learning_rate, made.steps) == (256, 5, 1024, 1e-6, 250)
    made = r.load("countdown-qwen3-4b-async")
    assert (made.batch * made.group, made.group, made.length, made.beta, made.steps) == (512, 16, 4096, 0.005, 350)
    made = r.load("math-qwen2.5-7b-minibatch")
    assert (made.batch * made.group, made.minibatch * made.group) == (1024, 256)


def test_changes():
    made = r.load("tiny-rloo", ["beta=0.1", "kl=k3-in-loss", "tasks=sort", "steps=3", "monitor=false"])
    assert (made.beta, made.kl, made.tasks, made.steps, made.monitor) == (0.1, "k3-in-loss", ("sort",), 3, False)
    assert r.load("tiny-rloo", ["beta=1"]).beta == 1.0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("beta", "write KEY=VALUE"),
        ("bta=1", "did you mean 'beta'"),
        ("steps=many", "must be a whole number"),
        ("steps=0", "must be 1 or more"),
        ("minibatch=5", "do not divide 16"),
        ("kl=k9-in-loss", "unknown estimator"),
        ("kl=", "name a configuration"),
        ("learning_rate=0", "must be positive"),
        ("monitor=1", "true or false"),
    ],
)
def test_bad_changes(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        r.load("tiny-rloo", [change])


def test_what_couples_a_batch_cannot_be_split():
    with pytest.raises(ValueError, match=r"write \+loo=5"):
        r.load("tiny-rloo", ["kl=k1-in-reward+loo", "micro=4"])
    with pytest.raises(ValueError, match="token-mean"):
        r.load("tiny-rloo", ["aggregation=token-mean", "micro=4"])


def test_bad_files(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'tiny-rloo'"):
        r.load("tiny-rlo")
    with pytest.raises(ValueError, match="does not exist"):
        r.load(str(tmp_path / "no.toml"))
    (tmp_path / "bad.toml").write_text("beta = = 1")
    with pytest.raises(ValueError, match="is not TOML"):
        r.load(str(tmp_path / "bad.toml"))
