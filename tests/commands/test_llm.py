"""`klgrad llm`: each command end to end on a model of a few thousand parameters, and wrong input in one sentence."""

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = (
    "1"  # a name that is not at hand is then said at once; read when transformers is imported
)

import pandas as pd
import pytest
from click.testing import CliRunner

from klgrad import cli, files

pytest.importorskip("torch")
pytest.importorskip("transformers")

SMALL = (
    *("--set", "steps=2", "--set", "batch=2", "--set", "group=2"),
    *("--set", "kl=k3-in-loss", "--set", "evaluate_problems=4"),
)


def run(*arguments):
    return CliRunner().invoke(cli.main, ["llm", *map(str, arguments)])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The smallest pretraining that the command does."""
    folder = tmp_path_factory.mktemp("llm") / "model"
    done = run("pretrain", "--steps", "2", "--batch", "4", "--out", folder)
    assert done.exit_code == 0, done.output
    assert "446,496 parameters" in done.output
    return folder


def test_probe_ends_in_the_foundation_s_table_and_figure(model, tmp_path):
    from klgrad.analysis.results import COLUMNS

    done = run(
        "probe", "--policy", model, "--lengths", "1,2", "--prompts", "1", "--samples", "2", "--trials", "3",
        "--parameters", "last-block", "--config", "k3-in-loss", "--config", "k1-in-reward", "--out", tmp_path,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "peak memory" in done.output
    frame = pd.read_csv(tmp_path / "probe.csv")
    assert list(frame.columns)[: len(COLUMNS)] == list(COLUMNS)
    assert (frame.loc[frame.configuration == "k1-in-reward", "bias"] == 0).all()
    manifest = json.loads((tmp_path / "probe.json").read_text())["manifest"]
    assert manifest["request"]["parameters"] == "last-block"
    assert (tmp_path / "probe.png").stat().st_size > 10_000


@pytest.mark.parametrize("arguments", [("probe",), ("train", "tiny-rloo"), ("study",)])
def test_a_folder_in_use_is_refused_before_any_work(arguments, tmp_path):
    with files.sole_use(tmp_path):
        done = run(*arguments, "--out", tmp_path)
    assert done.exit_code == 2
    assert done.output.startswith(f"Error: {tmp_path} is in use by another klgrad (process {os.getpid()})")
    assert list(tmp_path.iterdir()) == []


def test_train_evaluate_and_go_on(model, tmp_path):
    out = tmp_path / "run"
    done = run("train", "tiny-rloo", "--set", f"model={model}", *SMALL, "--out", out)
    assert done.exit_code == 0, done.output
    assert "round 2: reward" in done.output
    again = run("train", "tiny-rloo", "--set", f"model={model}", *SMALL, "--set", "steps=3", "--resume", "--out", out)
    assert again.exit_code == 0, again.output
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    before = (out / "metrics.jsonl").read_bytes()
    done = run("train", "tiny-rloo", "--set", f"model={model}", *SMALL, "--set", "steps=3", "--resume", "--out", out)
    assert done.exit_code == 0, done.output
    assert "nothing was left to train" in done.output
    assert "wrote" not in done.output
    assert (out / "metrics.jsonl").read_bytes() == before
    scores = run(
        "evaluate",
        out / "step-3",
        "--reference",
        model,
        "--task",
        "sort",
        "--problems",
        "3",
        "--samples",
        "2",
        "--json",
    )
    (row,) = json.loads(scores.output)
    assert row["kl"] >= 0
    assert row["entropy"] > 0
    assert 0 <= row["mean"] <= 1


def test_one_problem_has_no_standard_error(model):
    one = ("evaluate", model, "--task", "sort", "--problems", "1", "--samples", "2")
    done = run(*one)
    assert (done.exit_code, "+-" in done.output, "nan" in done.output) == (0, False, False), done.output
    assert json.loads(run(*one, "--json").output)[0]["error"] is None
    assert "+-" in run("evaluate", model, "--task", "sort", "--problems", "2", "--samples", "2").output


def test_what_cannot_be_evaluated_is_said_before_any_answer(model, monkeypatch):
    from klgrad.harness import evaluate

    monkeypatch.setattr(evaluate, "evaluate", lambda *a, **b: pytest.fail("work was done"))
    done = run("evaluate", model, "--task", "sort", "--task", "contdown")
    assert (done.exit_code, "did you mean 'countdown'" in done.output) == (2, True), done.output
    assert run("evaluate", model, "--length", "60").exit_code == 2


def test_fewer_problems_than_asked_for_are_said(model, tmp_path):
    (tmp_path / "few.py").write_text(
        "from klgrad.harness.tasks import Problem\n"
        "class Few:\n"
        "    failed = 0\n"
        "    def problems(self, split, seed):\n"
        "        return iter([Problem('s21=')] * 2)\n"
        "    def reward(self, problem, response):\n"
        "        self.failed += 1\n"
        "        return 0.0\n"
    )
    done = run("evaluate", model, "--task", f"{tmp_path / 'few.py'}:Few", "--problems", "5", "--samples", "1")
    assert done.exit_code == 0, done.output
    assert "up to 5 problems a task" in done.output
    assert "4 answers or problems failed in isolation and count 0" in done.output


def test_plan(model):
    found = json.loads(run("plan", "tiny-rloo", "--set", f"model={model}", *SMALL, "--measure", "--json").output)
    assert found["parameters"] == 446_496
    assert found["hours"] > 0
    text = run("plan", "math-qwen2.5-7b-rloo").output
    assert "327,680,000" in text


def test_study_and_recipes(model, tmp_path):
    done = run(
        "study", "--set", f"model={model}", *SMALL, "--kl", "no KL", "--kl", "k1-in-reward", "--beta", "1",
        "--seeds", "1", "--staleness", "0", "--processes", "1", "--out", tmp_path,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "k1-in-reward" in done.output
    assert len(pd.read_csv(tmp_path / "study.csv")) == 2
    assert (tmp_path / "study-staleness-0.png").exists()
    assert "tiny-async" in run("recipes").output
    assert json.loads(run("recipes", "--json").output)["tiny-grpo"]["kl_aggregation"] == "outside"


BAD = {
    ("probe", "--policy", "nowhere"): "neither a folder nor a hub name",
    ("probe", "--task", "contdown"): "did you mean 'countdown'",
    ("train", "tiny-rlo"): "did you mean 'tiny-rloo'",
    ("train", "tiny-rloo", "--set", "beta"): "write KEY=VALUE",
    ("train", "tiny-rloo", "--set", "model=nowhere"): "neither a folder nor a hub name",
    ("train", "tiny-rloo", "--lora", "4"): "--lora is for TRL's trainer: add --backend trl",
    ("train", "tiny-rloo", "--trl", "use_vllm=true"): "--trl is for TRL's trainer: add --backend trl",
    ("train", "tiny-rloo", "--set", "evaluate_problems=0"): "evaluate_problems = 0 must be 1 or more",
    ("train", "tiny-rloo", "--set", "device=gpu"): "unknown device 'gpu': cpu, cuda, or cuda:N",
    ("train", "tiny-rloo", "--backend", "trl", "--set", "device=gpu"): "unknown device 'gpu': cpu, cuda, or cuda:N",
    (
        "probe",
        "--reference",
        "other",
        "--perturb",
        "0.2",
    ): "--perturb 0.2 makes a reference of the policy, and --reference",
    ("probe", "--device", "gpu"): "unknown device 'gpu': cpu, cuda, or cuda:N",
    ("evaluate", "nowhere", "--device", "gpu"): "unknown device 'gpu': cpu, cuda, or cuda:N",
    ("plan", "none.toml"): "does not exist",
    ("pretrain", "--task", "soort", "--steps", "1"): "did you mean 'sort'",
    ("study", "--kl", "k9-in-loss"): "unknown estimator",
    ("evaluate", "nowhere"): "neither a folder nor a hub name",
    ("fetch", "smolm2"): "did you mean 'smollm2'",
    ("fetch", "smollm2", "--from", "nowhere.whl"): "nowhere.whl is no file",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert BAD[arguments] in done.output
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []  # not even the folder that was made to write to


@pytest.mark.parametrize("command", [("pretrain", "--steps", "1", "--batch", "2"), ("fetch", "smollm2")])
def test_a_model_takes_the_place_of_nothing_but_a_model(command, model, tmp_path):
    note, folder = tmp_path / "note.txt", tmp_path / "results"
    note.write_text("mine\n")
    (folder / "run").mkdir(parents=True)
    for taken, sentence in ((note, "is a file"), (folder, "holds other things than a model, which would be lost")):
        done = run(*command, "--out", taken)
        assert (done.exit_code, done.output.startswith(f"Error: {taken} {sentence}")) == (2, True), done.output
    (folder / "config.json").write_text("{}")  # a run inside a model's folder
    assert run(*command, "--out", folder).exit_code == 2
    assert note.read_text() == "mine\n"
    assert (folder / "run").is_dir()


def test_training_by_trl(model, tmp_path):
    pytest.importorskip("trl")
    out = tmp_path / "run"
    done = run("train", "tiny-rloo", "--backend", "trl", "--set", f"model={model}", *SMALL, "--out", out)
    assert done.exit_code == 0, done.output
    assert "round 2: reward" in done.output
    assert (out / "step-2" / "model.safetensors").is_file()
    wrong = run("train", "tiny-async", "--backend", "trl", "--set", f"model={model}", "--out", tmp_path / "no")
    assert wrong.exit_code == 2
    assert "staleness = 10: TRL's trainer keeps no queue of older rollouts: use --backend own" in wrong.output


def test_training_by_trl_without_it(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    done = run("train", "tiny-rloo", "--backend", "trl", "--set", f"model={model}", "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert "--backend trl needs the package trl: pip install 'klgrad[trl]'" in done.output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
