"""klgrad lint: what it prints, its exit codes, and what it says to bad input."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from klgrad import cli

CONFIGS = Path(__file__).parents[1] / "configs"


def run(*arguments, text=None):
    return CliRunner().invoke(cli.main, ["lint", *map(str, arguments)], input=text)


def test_a_wrong_file_fails_with_its_line():
    path = CONFIGS / "verl" / "wrong.yaml"
    done = run(path, "--library", "verl")
    assert done.exit_code == 1
    assert "penalty       0.001 x k3-clamped(20,10)-in-reward+token-ratio+loo=8+rollout-value+token-mean" in done.output
    assert "verdict       (sequence - token-forward) / E|y|, provided no clamp is hit" in done.output
    assert f"{path}:5: error: k3-in-reward:" in done.output
    assert "on words      T = 10: KL 0.9907" in done.output


def test_a_right_file_passes_and_its_library_is_guessed():
    done = run(CONFIGS / "verl" / "right.sh")
    assert done.exit_code == 0
    assert "library       verl, by " in done.output
    assert "verdict       sequence / E|y|" in done.output
    assert "relative 0 at the best scale" in done.output
    assert "error" not in done.output


def test_standard_input():
    done = run("-", text="algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl")
    assert done.exit_code == 1
    assert "\nstdin:1: error: k3-in-reward" in done.output


def test_settings_on_the_command_line_count_before_the_files():
    path = CONFIGS / "verl" / "wrong.yaml"
    done = run(path, "--library", "verl", "--set", "algorithm.kl_penalty=kl", "--set", "rollout.n=4")
    assert done.exit_code == 0
    assert "k1-in-reward+token-ratio+loo=4" in done.output


def test_json():
    done = run(CONFIGS / "slime" / "wrong.sh", "--json")
    content = json.loads(done.stdout)
    assert done.exit_code == 1
    assert content["library"] == "slime"
    assert content["verdict"] == "none"
    assert content["penalties"] == []
    assert content["settings"]["kl_coef"] == {"value": 0.01, "given": True, "line": 3}
    (finding,) = content["findings"]
    assert (finding["id"], finding["level"], finding["line"]) == ("not-applied", "error", 3)


def test_json_has_the_exact_numbers_and_null_for_what_is_not_finite():
    done = run(CONFIGS / "tunix-grpo" / "wrong.json", "--library", "tunix-grpo", "--json")
    content = json.loads(done.stdout)
    (measured,) = content["numbers"]
    assert content["verdict"] == "zero"
    assert measured["cosine"] is None
    assert measured["method"] == "exact"
    assert measured["variance"] > 0
    assert content["provided"] == []


def test_another_pair_and_lengths():
    done = run(CONFIGS / "trl-rloo" / "right.yaml", "--library", "trl-rloo", "--preset", "far", "--lengths", "5,10")
    assert done.exit_code == 0
    assert [line.split(":")[0] for line in done.output.splitlines() if line.startswith("on far")] == [
        "on far        T = 5",
        "on far        T = 10",
    ]
    assert "bias 0, relative 0" in done.output


def test_a_pairs_own_lengths_where_none_are_given():
    done = run(CONFIGS / "trl-rloo" / "right.yaml", "--library", "trl-rloo", "--preset", "handbook")
    assert done.exit_code == 0
    assert "on handbook   T = 1: KL 0.02101" in done.output


def test_stale_samples():
    fresh = run(CONFIGS / "trl-rloo" / "right.yaml", "--library", "trl-rloo", "--preset", "near", "--lengths", "5")
    stale = run(CONFIGS / "trl-rloo" / "right.yaml", "--library", "trl-rloo", "--preset", "stale", "--lengths", "5")
    assert "bias 0," in fresh.output
    assert "bias 0," not in stale.output


def test_what_is_sampled_says_so_with_its_noise():
    done = run("-", "--library", "transparent-grpo", "--lengths", "6", text="beta=0.1")
    assert done.exit_code == 0
    assert "(sampling)" in done.output
    assert " +- " in done.output


def test_settings_that_are_not_read_are_named_when_asked():
    done = run("-", "--library", "trl-rloo", text="beta=0.1 num_iterations=4")
    assert "not read" not in done.output
    done = run("-", "-v", "--library", "trl-rloo", text="beta=0.1 num_iterations=4")
    assert "not read      1 other setting: num_iterations\n" in done.output


@pytest.mark.parametrize("text", ["", "{}", "# all by default"])
def test_nothing_given_is_the_defaults_of_a_library_that_is_named(text):
    done = run("-", "--library", "trl-rloo", text=text)
    assert done.exit_code == 0
    assert done.output == run("-", "--library", "trl-rloo", text="other=1").output


def test_a_key_that_is_written_twice_is_warned_of_at_the_line_that_counts(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("beta: 0.1\nbeta: 0.2\n")
    done = run(path, "--library", "trl-rloo")
    assert "penalty       0.2 x" in done.output
    assert f"{path}:2: warning: beta is written twice, in lines 1 and 2" in done.output


@pytest.mark.parametrize(
    ("arguments", "text", "says"),
    [
        (["missing.yaml"], None, "cannot read missing.yaml: No such file"),
        (["-"], "", "standard input holds no settings"),
        (["-"], "beta: 0.1", "equally well: say --library"),
        (["-", "--library", "varl"], "a=1", "did you mean 'verl'"),
        (["-", "--library", "trl"], "beta=1", "trl has several trainers: say which"),
        (["-", "--library", "verl", "--set", "x"], "a=1", "--set x: write KEY=VALUE"),
        (["-", "--library", "trl-rloo", "--preset", "nowhere"], "beta=1", "unknown preset 'nowhere'"),
        (["-", "--library", "verl"], "a: [1", "no valid YAML: line"),
        (["."], None, "cannot read .: Is a directory"),
    ],
)
def test_bad_use_is_one_sentence_and_exit_code_2(arguments, text, says):
    done = run(*arguments, text=text)
    assert done.exit_code == 2
    assert says in done.output
    assert done.output.startswith("Error: ")
    assert "Traceback" not in done.output


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00\x01")
    done = run(path, "--library", "verl")
    assert done.exit_code == 2
    assert "no UTF-8 text file" in done.output


def test_without_a_penalty_there_is_nothing_to_measure():
    done = run(CONFIGS / "verl" / "default.yaml", "--library", "verl")
    assert done.exit_code == 0
    assert "verdict       no KL penalty" in done.output
    assert "on words" not in done.output


SHAPES = {
    "run.sh": "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True",
    "child.yaml": "defaults:\n  - parent\n  - _self_\nactor_rollout_ref:\n  actor:\n    kl_loss_type: mse\n",
    "parent.yaml": "algorithm:\n  adv_estimator: grpo\nactor_rollout_ref:\n  actor:\n    use_kl_loss: true\n",
}


def written(folder, name, text=None):
    path = folder / name
    path.write_text(SHAPES[name] if text is None else text)
    return path


def test_a_verdict_that_would_rest_on_a_guess_is_none_and_exit_code_2(tmp_path):
    path = written(tmp_path, "run.sh", SHAPES["run.sh"] + " actor_rollout_ref.actor.kl_warmup=10")
    done = run(path)
    assert done.exit_code == 2
    assert "verdict       not known: unknown-key\n" in done.output
    assert "without it    token-forward / E|y|, provided no clamp is hit\n" in done.output
    assert "on words" not in done.output
    assert f"{path}:1: open: actor_rollout_ref.actor.kl_warmup is no setting of verl 0.9.1" in done.output
    content = json.loads(run(path, "--json").stdout)
    assert (content["open"], content["verdict"]) == (True, "not known")


def test_a_parent_beside_the_file_is_read_and_a_missing_one_leaves_the_verdict_open(tmp_path):
    child, parent = written(tmp_path, "child.yaml"), written(tmp_path, "parent.yaml")
    done = run(child)
    assert done.exit_code == 0
    assert "verdict       token / E|y|\n" in done.output
    parent.unlink()
    gone = run(child, "--library", "verl")
    assert gone.exit_code == 2
    assert "takes its defaults from parent, which is not there: use_kl_in_reward" in gone.output
    keys = "algorithm.use_kl_in_reward=false actor_rollout_ref.actor.use_kl_loss=true distillation.enabled=false"
    more = " actor_rollout_ref.actor.kl_loss_coef=0.1 actor_rollout_ref.actor.loss_agg_mode=token-mean"
    rest = " algorithm.adv_estimator=grpo distillation.distillation_loss.use_policy_gradient=false"
    every = keys + more + rest + " distillation.distillation_loss.loss_mode=k3"
    said = run(child, "--library", "verl", *[word for key in every.split() for word in ("--set", key)])
    assert said.exit_code == 0  # nothing that decides is left to the parent
    assert "warning: " in said.output


def test_the_librarys_own_config_is_its_defaults(tmp_path):
    path = written(tmp_path, "child.yaml", SHAPES["child.yaml"].replace("parent", "ppo_trainer"))
    done = run(path)
    assert done.exit_code == 0
    assert "missing-file" not in done.output


def test_several_values_give_several_verdicts(tmp_path):
    text = f"for K in k1 mse; do\n  {SHAPES['run.sh']} actor_rollout_ref.actor.kl_loss_type=$K\ndone\n"
    path = written(tmp_path, "run.sh", text)
    done = run(path)
    assert done.exit_code == 1
    assert [line for line in done.output.splitlines() if line.startswith(("run ", "verdict "))] == [
        "run           K=k1", "verdict       zero", "run           K=mse", "verdict       token / E|y|",
    ]  # fmt: skip
    runs = json.loads(run(path, "--json").stdout)["runs"]
    assert [(each["run"], each["verdict"]) for each in runs] == [("K=k1", "zero"), ("K=mse", "token")]


def test_versions_and_months_can_be_said():
    text = "algorithm.adv_estimator=gae algorithm.kl_ctrl.kl_coef=0.005"
    undated = run("-", text="python3 -m verl.trainer.main_ppo " + text)
    assert undated.exit_code == 1
    assert "kl_coef = 0.005 is set and silently not applied" in undated.output
    assert "or            sequence / E|y| (0.005 x k1-in-reward" in undated.output
    for said in ("verl@0.2.0", "verl@2025-02"):
        done = run("-", "--library", said, text=text)
        assert done.exit_code == 0
        assert "penalty       0.005 x k1-in-reward" in done.output
        assert "assumed" not in done.output


def test_a_training_that_is_not_covered_is_told_as_what_it_is():
    done = run("-", text="swift rlhf --rlhf_type dpo --model m --beta 0.1 --loss_type sigmoid")
    assert done.exit_code == 2
    assert done.output.startswith("ms-swift alignment other than GRPO and PPO\n")
    assert "penalty" not in done.output
    assert "[not-covered]" in done.output
