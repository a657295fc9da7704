"""mean@k, its error and pass@1 against a table worked by hand; a recipe's in- and out-of-domain sets with a model."""

import json
import string

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from klgrad.harness import evaluate as e  # noqa: E402
from klgrad.harness import models, recipe, train  # noqa: E402


def test_mean_at_k_by_hand(micro, tmp_path):
    (tmp_path / "given.py").write_text(
        "from klgrad.harness.tasks import Problem\n"
        "class Given:\n"
        "    failed = 0\n"
        "    def __init__(self):\n"
        "        self.rewards = iter([1, 0,  1, 1,  0, 0,   1, 1, 0])\n"
        "    def problems(self, split, seed):\n"
        "        yield from (Problem(f's{i}=') for i in range(3))\n"
        "    def reward(self, problem, response):\n"
        "        self.failed += 1\n"
        "        return next(self.rewards)\n"
    )
    model, tokenizer = models.load(str(micro))
    found = e.evaluate(model, tokenizer, f"{tmp_path / 'given.py'}:Given", problems=9, samples=2, length=3, batch=4)
    assert found.mean == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert found.error == pytest.approx(0.5 / 3**0.5)  # means 1/2, 1, 0: a deviation of 1/2 over the root of 3 problems
    assert found.greedy == pytest.approx(2 / 3)
    assert (found.problems, found.samples, found.unjudged) == (3, 2, 9)


@pytest.fixture
def reader(monkeypatch, tmp_path):
    """A model that has learnt nothing, over all of ASCII."""
    monkeypatch.setattr(models, "CHARACTERS", string.printable)
    model, tokenizer = models.tiny(0, hidden=32, layers=1, window=512)
    models.save(model, tokenizer, tmp_path / "reader")
    return tmp_path / "reader"


def test_a_recipes_evaluation_sets(reader, tmp_path, monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    made = recipe.load(
        "math-qwen2.5-7b-rloo",
        [f"model={reader}", "device=cpu", "dtype=float32", "length=8", "evaluate_samples=2", "batch=2", "steps=1"],
    )
    kinds = {"math": {"problem": "1+1?", "answer": "2"}}
    kinds["choices"] = {"question": "Force?", "subject": "college_physics", "choices": ["J", "N"], "answer": 1}
    for name in {*made.tasks, *made.in_domain, *made.out_of_domain}:
        kind, _, path = name.partition(":")
        (tmp_path / path).write_text("\n".join([json.dumps(kinds[kind])] * 3))
    said = ["", "\\boxed{2.0}", "\\boxed{B}"]
    monkeypatch.setattr(e, "responses", lambda tokenizer, tokens, mask: (said * len(tokens))[: len(tokens)])
    found = train.evaluations(train.start(made))
    assert set(found) == {*made.in_domain, *made.out_of_domain}
    for result in found.values():
        assert result["mean"] == pytest.approx(1 / 3)  # six answers, two of each
        assert result["greedy"] == pytest.approx(1 / 3)
        assert (result["problems"], result["samples"], result["unjudged"]) == (3, 2, 0)


def test_what_cannot_be_evaluated_is_found_before_the_training(micro, tmp_path):
    common = ["model=" + str(micro), "steps=1"]
    with pytest.raises(ValueError, match=r"nowhere\.jsonl cannot be read"):
        train.start(recipe.load("tiny-rloo", [*common, "out_of_domain=choices:nowhere.jsonl"]))
    (tmp_path / "mmlu.jsonl").write_text('{"question": "Force?", "choices": ["J", "N"], "answer": 1}')
    with pytest.raises(ValueError, match="the tokenizer lacks tokens"):
        train.start(recipe.load("tiny-rloo", [*common, f"in_domain=choices:{tmp_path / 'mmlu.jsonl'}"]))
    with pytest.raises(ValueError, match="the data is empty"):
        e.check_tasks([f"{empty(tmp_path)}:Empty"], None, None, length=1)


def test_prompts_that_do_not_fit_are_found_before_the_training(micro, tmp_path):
    (tmp_path / "long.py").write_text(
        "from klgrad.harness.tasks import Problem\n"
        "class Long:\n"
        "    reward = None.__ne__\n"
        "    def problems(self, split, seed):\n"
        "        return (Problem('s' + '1' * n + '=') for n in (3, 3, 60 if split == 'test' else 3))\n"
    )
    common = ["model=" + str(micro), "steps=1", "out_of_domain=sort"]
    task = f"{tmp_path / 'long.py'}:Long"
    train.start(recipe.load("tiny-rloo", [*common, f"tasks={task}", f"in_domain={task}", "evaluate_problems=2"]))
    with pytest.raises(ValueError, match="a prompt of 62 tokens and a response of 8 do not fit"):
        train.start(recipe.load("tiny-rloo", [*common, f"in_domain={task}"]))  # its third problem
    with pytest.raises(ValueError, match="a prompt of 5 tokens and a response of 60 do not fit"):
        train.start(
            recipe.load("tiny-rloo", [*common, f"tasks={task}", "in_domain=[]", "out_of_domain=[]", "length=60"])
        )


def empty(folder):
    (folder / "empty.py").write_text(
        "class Empty:\n    def problems(self, split, seed):\n        return iter(())\n    reward = problems\n"
    )
    return folder / "empty.py"
