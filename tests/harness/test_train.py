"""The loop: exact resume, staleness, minibatches, memory splits, resets, no reference at beta 0, safe stops."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from klgrad.harness import checkpoints  # noqa: E402
from klgrad.harness import train as t  # noqa: E402
from klgrad.harness.recipe import Recipe  # noqa: E402

TIMED = ("seconds",)


@pytest.fixture
def recipe(micro):
    def make(**changes):
        given = {
            "model": str(micro), "tasks": ("sort",), "in_domain": ("sort",), "out_of_domain": (), "steps": 4,
            "batch": 4, "group": 2, "length": 6, "learning_rate": 1e-3, "evaluate_problems": 4,
            "kl": "k1-in-reward+loo=2", "beta": 0.1,
        }  # fmt: skip
        return Recipe(**{**given, **changes})

    return make


def bare(lines):
    return [{key: value for key, value in line.items() if key not in TIMED} for line in lines]


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("changes", [{}, {"staleness": 2, "kl": "k1-in-reward+token-ratio+loo=2", "ratio": "token"}])
def test_a_resumed_run_is_the_run_that_was_never_stopped(recipe, tmp_path, changes):
    made = recipe(reset_every=3, **changes)
    whole = t.train(made, tmp_path / "whole")
    rounds = iter([False, True])
    t.train(made, tmp_path / "parts", stop=lambda: next(rounds))
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')  # what a crash leaves
    parts = t.train(made, tmp_path / "parts", resume=True)
    assert bare(parts) == bare(whole)
    one, two = (weights(tmp_path / name / "step-4") for name in ("whole", "parts"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert checkpoints.read_lines(tmp_path / "parts" / "metrics.jsonl") == json.loads(json.dumps(parts))


UNJUDGED = """
from klgrad.harness.tasks import Sort
class Broken(Sort):
    failed = 0
    def reward(self, problem, response):
        self.failed += response[:1] < "5"
        return 0.0
"""


def test_responses_that_could_not_be_judged_are_counted(recipe, tmp_path):
    """With the round that trains on them, also after a checkpoint: a judge that always fails is not only reward 0."""
    (tmp_path / "broken.py").write_text(UNJUDGED)
    made = recipe(tasks=(f"{tmp_path / 'broken.py'}:Broken",), staleness=1)
    whole = t.train(made, tmp_path / "whole")
    assert len({line["unjudged"] for line in whole}) > 1
    assert all(0 <= line["unjudged"] <= 8 for line in whole)
    rounds = iter([True])
    t.train(made, tmp_path / "parts", stop=lambda: next(rounds))
    assert bare(t.train(made, tmp_path / "parts", resume=True)) == bare(whole)
    assert {line["unjudged"] for line in t.train(recipe(), tmp_path / "sort")} == {0}


def test_staleness_grows_to_what_was_asked(recipe, tmp_path):
    lines = t.train(recipe(staleness=2), tmp_path)
    assert [line["staleness"] for line in lines] == [0, 1, 2, 2]
    assert lines[0]["ratio_max"] == pytest.approx(1, abs=1e-3)
    assert lines[3]["ratio_max"] > 1.001


def test_memory_splits_change_nothing(recipe, tmp_path):
    lines = [t.train(recipe(micro=micro, steps=2), tmp_path / str(micro)) for micro in (0, 1)]
    for key in ("loss", "gradient_norm", "kl", "kl_estimate_variance", "clamp_share"):
        assert lines[0][1][key] == pytest.approx(lines[1][1][key], rel=1e-3, abs=1e-6)


def test_minibatches_step_more_often(recipe, tmp_path):
    made = recipe(minibatch=1, ratio="token", clip_low=0.2, clip_high=0.2, kl="k1-in-reward+token-ratio+loo=2")
    lines = t.train(made, tmp_path)
    assert max(line["ratio_max"] for line in lines) > 1.001
    assert all(0 <= line["clip_share"] <= 1 for line in lines)


def test_no_reference_in_memory_at_beta_0(recipe, tmp_path):
    made = recipe(beta=0.0, kl="", monitor=False, steps=1)
    assert t.start(made).reference is None
    (line,) = t.train(made, tmp_path)
    assert "kl" not in line
    assert t.start(recipe(beta=0.0, kl="")).reference is not None  # to measure the KL


def test_the_kl_starts_at_0_and_a_reset_takes_it_back(recipe, tmp_path):
    lines = t.train(recipe(reset_every=2, learning_rate=1e-2), tmp_path)
    kls = [line["kl"] for line in lines]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert kls[1] > 1e-4
    assert kls[2] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kl", ["k3-in-both+loo=2", "full-in-both+rtg", "k3-clamped(0.01,10)-in-loss", "k1-in-loss"])
def test_any_configuration_trains(recipe, tmp_path, kl):
    lines = t.train(recipe(kl=kl, steps=2), tmp_path)
    assert lines[1]["kl_estimate_variance"] >= 0
    assert (lines[1]["clamp_share"] > 0) == ("clamped" in kl)


def test_a_strong_full_kl_holds_the_policy(recipe, tmp_path):
    """The exact per-token KL in the loss has no noise: with a weight of 50 the policy stays three times nearer."""
    found = [
        t.train(recipe(kl="full-in-loss", beta=beta, steps=8, learning_rate=3e-3), tmp_path / str(beta))[-1]["kl"]
        for beta in (0.0, 50.0)
    ]
    assert found[1] < found[0] / 3


def test_what_is_not_finite_stops_with_the_state_saved(recipe, tmp_path, monkeypatch):
    real = t.policy_loss

    def poisoned(*given):
        loss, counts = real(*given)
        return loss * (float("nan") if (tmp_path / "metrics.jsonl").exists() else 1.0), counts

    monkeypatch.setattr(t, "policy_loss", poisoned)
    with pytest.raises(t.Stopped, match=r"the loss is not finite in round 2: .*stopped-1"):
        t.train(recipe(), tmp_path)
    assert (tmp_path / "stopped-1" / "model.safetensors").is_file()
    assert len(checkpoints.read_lines(tmp_path / "metrics.jsonl")) == 1


def test_a_full_disk_leaves_the_last_checkpoint(recipe, tmp_path, monkeypatch):
    made = recipe(checkpoint_every=1)
    real, calls = torch.save, []

    def full(*given, **more):
        calls.append(1)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        real(*given, **more)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left on device; checkpoints there are whole"):
        t.train(made, tmp_path)
    monkeypatch.undo()
    assert checkpoints.latest(tmp_path).name == "step-2"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert bare(t.train(made, tmp_path, resume=True)) == bare(t.train(made, tmp_path / "whole"))


def test_other_recipes_do_not_mix(recipe, tmp_path):
    t.train(recipe(steps=1), tmp_path)
    with pytest.raises(ValueError, match="holds a run already"):
        t.train(recipe(steps=1), tmp_path)
    with pytest.raises(ValueError, match=r"trained with beta = 0\.1"):
        t.train(recipe(beta=0.2), tmp_path, resume=True)
    assert len(t.train(recipe(steps=2), tmp_path, resume=True)) == 2


def test_bad_runs(recipe, tmp_path):
    for changes, sentence in (
        ({"model": str(tmp_path)}, "holds no complete model"),
        ({"length": 100}, "do not fit the model's context"),
        ({"tasks": ("nothing",)}, "unknown task"),
        ({"dtype": "float16"}, "train in float32"),
    ):
        with pytest.raises(ValueError, match=sentence):
            t.train(recipe(**changes), tmp_path / "out")


def test_a_reference_with_another_vocabulary(recipe, tmp_path):
    from klgrad.harness import models

    model, tokenizer = models.tiny(0, hidden=16, layers=1)
    model.model.resize_token_embeddings(40)
    models.save(model, tokenizer, tmp_path / "other")
    with pytest.raises(ValueError, match="vocabulary of 40 and the policy of 22"):
        t.start(recipe(reference=str(tmp_path / "other")))


def test_tensorboard_is_written(recipe, tmp_path):
    pytest.importorskip("tensorboard")
    t.train(recipe(steps=1), tmp_path, tensorboard=True)
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_data_that_runs_out_is_said_and_what_was_trained_is_saved(recipe, tmp_path):
    def few(problems):
        (tmp_path / "mine.py").write_text(
            "from klgrad.harness.tasks import Problem\n"
            "class Few:\n"
            f"    def problems(self, split, seed):\n        yield from [Problem('s1=', '1')] * {problems}\n"
            "    def reward(self, problem, response):\n        return 1.0\n"
        )
        return recipe(tasks=(f"{tmp_path / 'mine.py'}:Few",), checkpoint_every=0)

    with pytest.raises(ValueError, match="only 1 problems left: batch = 4 needs more data; round 1 is saved in"):
        t.train(few(5), tmp_path / "out")
    with pytest.raises(ValueError, match=r"only 3 problems left: batch = 4 needs more data$"):
        t.train(few(3), tmp_path / "none")
    assert not list((tmp_path / "none").glob("step-*"))
    with pytest.raises(ValueError, match="only 1 problems left"):  # with the same data, the same
        t.train(few(5), tmp_path / "out", resume=True)
    assert len(t.train(few(16), tmp_path / "out", resume=True)) == 4


@pytest.mark.parametrize("limit", [20_000, 90_000])
def test_a_disk_that_takes_no_more_is_one_sentence(recipe, tmp_path, limit):
    """Files may have no more than so many bytes: the weights (53 kB), or the optimiser's state, do not fit."""
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write to .*; checkpoints there are whole, free some space"):
            t.train(recipe(steps=1), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
