"""Whose file it is: by evidence, and refused where there is none that decides."""

import pytest

from klgrad.analysis.composition import documents
from klgrad.analysis.libraries import library
from klgrad.analysis.lint import examine
from klgrad.analysis.recognition import is_main, recognise

SHARED = "beta: 0.1\nnum_generations: 8\nmax_completion_length: 512\n"


def of(text, name="f.yaml"):
    return recognise(documents(text, name)[0])


@pytest.mark.parametrize(
    ("text", "candidates"),
    [
        ("beta: 0.1\n", ("trl-grpo", "trl-rloo", "tunix-grpo", "open-instruct")),
        (SHARED, ("trl-grpo", "ms-swift-other")),
        ("kl_coef: 0.1\ngamma: 1.0\n", ("trl-ppo", "slime")),
        ("lr: 0.1\n", ("no setting names a library",)),
        ("beta: 0.1\n" + "".join(f"mine{i}: 1\n" for i in range(9)), ("no setting names a library",)),
    ],
)
def test_what_several_share_decides_nothing(text, candidates):
    with pytest.raises(ValueError, match="say --library") as problem:
        of(text)
    assert all(candidate in str(problem.value) for candidate in candidates)
    assert "@" not in str(problem.value)  # trainers, not their editions


def test_one_key_of_its_own_or_a_name_decides():
    assert of(SHARED + "model_name_or_path: m\n").entry.name == "trl-grpo"
    assert of(SHARED + "rlhf_type: grpo\n").entry.name == "ms-swift"
    assert of("swift rlhf --rlhf_type grpo --beta 0.1", "f.sh").entry.name == "ms-swift"
    assert of("trl rloo --beta 0.1", "f.sh").entry.name == "trl-rloo"
    assert of("python3 -m verl.trainer.main_ppo data.train_files=x", "f.sh").entry.name == "verl"


def test_names_in_paths_and_comments_are_no_evidence():
    text = "# verl openrlhf trlx\ncd src/verl\npython mine.py --out runs/openrlhf --wandb_project trl"
    with pytest.raises(ValueError, match="no setting names a library"):
        of(text, "f.sh")


def test_a_value_that_a_library_does_not_take_speaks_against_it():
    assert of("kl_estimator: kl2\nbeta: 0.1\n").entry.name == "open-instruct@2025-11"
    assert of("kl_estimator: 1\nbeta: 0.1\n").entry.name == "open-instruct"


def test_other_readings_are_told_where_their_verdict_differs():
    (run,) = examine(documents("model_name_or_path: m\n" + SHARED, "f.yaml"))
    told = {o.resolution.library.name: o.reading.name for o in run.others}
    assert run.report.reading.name == "token"
    assert told["trl-rloo"] == "sequence"
    assert told["trl-grpo@1.10.0.dev0"] == "token-forward"
    (alike,) = examine(documents("model_name_or_path: m\nbeta: 0.0\nnum_generations: 8\n", "f.yaml"))
    assert "trl-rloo" not in {o.resolution.library.name for o in alike.others}
    (said,) = examine(documents(SHARED, "f.yaml"), library("trl-grpo"))
    assert said.others == ()


def test_a_file_that_its_flags_date_has_one_reading():
    text = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae algorithm.kl_ctrl.kl_coef=0.005"
    (undated,) = examine(documents(text, "f.sh"))
    assert [o.resolution.library.name for o in undated.others] == ["verl@0.2"]
    (dated,) = examine(documents(text + " algorithm.use_kl_in_reward=False trainer.val_before_train=False", "f.sh"))
    assert dated.others == ()


def test_entry_points():
    verl = library("verl")
    assert is_main("verl.trainer.main_ppo", verl)
    assert is_main("verl/trainer/main_ppo.py", verl)
    assert not is_main("my_project.train_policy", verl)
    assert not is_main("tinker_cookbook.recipes.math_rl.train", library("slime"))
    for program in ("my_project.train_policy", "recipe.dapo.main_dapo"):
        text = f"python3 -m {program} algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True"
        (run,) = examine(documents(text, "f.sh"))
        (finding,) = [f for f in run.report.findings if f.id == "entry-point"]
        assert finding.level == "note"
        assert program in finding.message


def test_a_script_of_several_runs_has_a_verdict_for_each_that_differs():
    kinds = "for KIND in k1 k2 k2; do\n"
    body = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=True data.seed={} "
    text = kinds + body.format("$KIND") + "actor_rollout_ref.actor.kl_loss_type=$KIND\ndone\n"
    text = "python3 prepare_data.py --local_dir data\n" + text
    runs = examine(documents(text, "f.sh"))
    assert [(run.label, run.report.reading.name) for run in runs] == [("KIND=k1", "zero"), ("KIND=k2", "token")]
