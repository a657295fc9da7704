"""Texts with what they refer to: defaults lists, here-documents, configs beside, references, several runs."""

import pytest

from klgrad.analysis.composition import documents

RUN = "python3 -m verl.trainer.main_ppo"


def pairs(document):
    return {setting.key: setting.value for setting in document.settings}


def gaps(document):
    return [(gap.id, gap.level, gap.decisive) for gap in document.gaps]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("defaults:\n  - base\n  - _self_\na: 1\n", {"a": 1, "b": 2}),
        ("defaults:\n  - _self_\n  - base\na: 1\n", {"a": 0, "b": 2}),
        ("defaults:\n  - base\na: 1\n", {"a": 1, "b": 2}),
        ("defaults: base.yaml\na: 1\n", {"a": 1, "b": 2}),
        ("defaults: [base.yaml, more.yaml]\na: 1\n", {"a": 1, "b": 3}),
        ("defaults:\n  - group: base\n  - override hydra/job_logging: none\na: 1\n", {"a": 1, "group.a": 5}),
        ("defaults:\n  - group@other: base\na: 1\n", {"a": 1, "other.a": 5}),
        ("defaults:\n  - nested\na: 1\n", {"a": 1, "b": 2, "c": 4}),
    ],
)
def test_a_defaults_list_is_read_in_its_order(text, expected):
    files = {
        "base.yaml": "a: 0\nb: 2\n", "more.yaml": "b: 3\n", "group/base.yaml": "a: 5\n",
        "nested.yaml": "defaults:\n  - base\nc: 4\n",
    }  # fmt: skip
    (found,) = documents(text, "f.yaml", files.get)
    assert pairs(found) == expected
    assert found.gaps == ()


def test_a_parent_that_is_not_there_is_a_gap_that_decides():
    (found,) = documents("defaults: gone.yaml\na: 1\n", "f.yaml")
    assert gaps(found) == [("missing-file", "warning", True)]
    assert found.gaps[0].message == "f.yaml takes its defaults from gone.yaml, which is not there"
    endless = documents("defaults: f.yaml\na: 1\n", "f.yaml", {"f.yaml": "defaults: f.yaml\na: 1\n"}.get)
    assert pairs(endless[0]) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: ${b.c}\nb:\n  c: 3\n", {"a": 3, "b.c": 3}),
        ("a: ${oc.env:X,0.5}\nb: ${oc.env:Y,${oc.env:Z,k1}}\n", {"a": 0.5, "b": "k1"}),
        ("a:\n  b: ${.c}\n  c: 2\n", {"a.b": 2, "a.c": 2}),
        ("a: x${b}y\nb: 1\n", {"a": "x1y", "b": 1}),
        ("a: ${gone}\nb: ${oc.env:NO}\nc: ${now:%Y}\n", {"a": "${gone}", "b": "${oc.env:NO}", "c": "${now:%Y}"}),
        ("a: ${b}\nb: ${a}\n", {"a": "${b}", "b": "${a}"}),
    ],
)
def test_references_are_filled_in(text, expected, monkeypatch):
    monkeypatch.setenv("NO", "ours")  # the environment here is not that of the run
    monkeypatch.setenv("X", "9")
    assert pairs(documents(text, "f.yaml")[0]) == expected


def test_what_the_environment_can_change_is_noted():
    (found,) = documents("kl: ${oc.env:KLC,0.03}\n", "f.yaml")
    assert gaps(found) == [("environment", "note", False)]
    assert "KLC" in found.gaps[0].message
    assert "0.03" in found.gaps[0].message
    assert found.gaps[0].key == "kl"


def test_the_config_of_a_command_comes_before_its_overrides():
    files = {"conf/run.yaml": "a: 1\nb: 1\n", "run.yaml": "a: 7\n"}
    for command in (
        f"{RUN} --config-path=conf --config-name=run b=2", f"{RUN} --config-path conf --config-name run.yaml b=2",
        "trl grpo --config conf/run.yaml --b 2", "python train.py config=conf/run.yaml b=2",
        "uv run rl @ conf/run.yaml --b 2",
    ):  # fmt: skip
        found = pairs(documents(command, "f.sh", files.get)[0])
        assert (found["a"], found["b"]) == (1, 2), command
    (gone,) = documents("trl grpo --config gone.yaml --b 2", "f.sh")
    assert gaps(gone) == [("missing-file", "warning", True)]


def test_a_here_document_is_the_config_of_the_command_after_it():
    text = f"for K in k1 k2; do\ncat > run.yaml <<EOF\nkl: $K\nEOF\n{RUN} --config-path=. --config-name=run\ndone\n"
    found = documents(text, "f.sh")
    assert [pairs(run)["kl"] for run in found] == ["k1", "k2"]
    assert [run.label for run in found] == ["K=k1", "K=k2"]


def test_programs_are_told_from_what_starts_them():
    for command, program in (
        (f"ray job submit --address=x --runtime-env-json='{{\"a\": 1}}' -- {RUN} a=1", "verl.trainer.main_ppo"),
        ("torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer a=1", "verl.trainer.fsdp_sft_trainer"),
        ("accelerate launch --config_file z.yaml src/open_r1/grpo.py --beta 1", "src/open_r1/grpo.py"),
        ("nohup env X=1 python -u train.py --kl-coef 1 > log 2>&1 &", "train.py"),
        ("CUDA_VISIBLE_DEVICES=0 swift rlhf --beta 1", "swift rlhf"),
        ("bash -c 'python -m a.b c=1'", "a.b"),
    ):
        (run,) = documents(command, "f.sh")
        assert run.names[0] == program
        assert "address" not in pairs(run)
        assert "config_file" not in pairs(run)


def test_a_variable_that_nothing_sets_is_said_and_the_scripts_own_arguments_are_not():
    (found,) = documents(f'{RUN} a=1 $EXTRA "$@"', "f.sh")
    assert gaps(found) == [("unresolved", "warning", False)]
    assert "$EXTRA" in found.gaps[0].message
    assert pairs(found) == {"a": 1}


def test_a_script_inside_of_a_config_is_read():
    text = f"name: job\nrun: |\n  export K=k1\n  {RUN} \\\n    a.kl=$K\n"
    assert [pairs(run).get("a.kl") for run in documents(text, "f.yaml")] == [None, "k1"]


def test_hydras_multirun_is_a_run_for_each_value():
    found = documents(f"{RUN} --multirun a.kl=k1,k2 a.n=1 a.list=[1,2]", "f.sh")
    assert [(run.label, pairs(run)["a.kl"], pairs(run)["a.n"]) for run in found] == [
        ("a.kl=k1", "k1", 1), ("a.kl=k2", "k2", 1),
    ]  # fmt: skip
    (one,) = documents(f"{RUN} a.kl=k1,k2", "f.sh")
    assert pairs(one)["a.kl"] == "k1,k2"


def test_a_text_without_a_program_is_all_settings():
    (found,) = documents("lr=1\nKL=0.2\nrun.kl=$KL\nARGS=(a.b=3)\n--flag 4", "f.sh")
    assert pairs(found) == {"lr": 1, "run.kl": 0.2, "a.b": 3, "flag": 4}
