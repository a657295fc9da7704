"""Lint: every silent failure is caught with the right sentence, at the right line; what is right passes clean."""

import math
from pathlib import Path

import numpy as np
import pytest

from klgrad.analysis.composition import read
from klgrad.analysis.findings import _reaches
from klgrad.analysis.libraries import libraries, library
from klgrad.analysis.lint import active, lint, numbers
from klgrad.analysis.recipes import expected, parse_recipe
from klgrad.synth.estimators import estimator
from klgrad.synth.exact import true_gradient
from klgrad.synth.presets import preset

CONFIGS = Path(__file__).parents[1] / "configs"


def report(text, name, suffix="f.sh"):
    return lint(library(name), read(text, suffix).settings)


def said(found, identity):
    """The one finding of that id."""
    (finding,) = [f for f in found.findings if f.id == identity]
    return finding


# settings, library -> id, level, words of its sentence, line
SILENT = [
    ("--advantage-estimator grpo\n--kl-coef 0.01", "slime", "not-applied", "error", "silently not applied", 2),
    ("--advantage-estimator gspo --kl-coef 0.01", "slime", "not-applied", "error", "the reference forward is paid", 1),
    ("--advantage-estimator cispo --kl-coef 0.01", "slime", "not-applied", "error", "no penalty", 1),
    ("loss_fn.use_kl_in_reward=true", "nemo-rl", "not-applied", "error", "no penalty at all", 1),
    ("loss_fn.use_kl_in_reward=true grpo.adv_estimator.name=gdpo", "nemo-rl", "not-applied", "error", "gdpo", 1),
    ("--use-kl-loss --kl-loss-coef 0.1", "slime", "zero-gradient", "error", "kl_loss_type is still its default k1", 1),
    ("num_generations=4", "tunix-grpo", "zero-gradient", "error", "kl_loss_mode is still its default kl", None),
    ("beta=0.1 gae_lambda=1", "tunix-ppo", "k3-in-reward", "error", "kl_method is still its default low_var_kl", None),
    (
        "a=1\ntrainer.algorithm.use_kl_in_reward=true\ntrainer.algorithm.use_kl_loss=false", "skyrl", "k3-in-reward",
        "error", "kl_estimator_type is still its default k3: only the placement was switched", 2,
    ),
    (
        "loss_fn.use_kl_in_reward=true grpo.adv_estimator.name=reinforce_plus_plus", "nemo-rl", "k3-in-reward",
        "error", "token - token-forward", 1,
    ),
    (
        "--use-kl-loss --kl-loss-coef 1 --use-unbiased-kl\n--kl-loss-type k2", "slime", "ratio-times-k2", "error",
        "k2-in-loss with a live ratio: the gradient of E[k2]", 1,
    ),
    ("x=1\nloss_fn.reference_policy_kl_type=k2", "nemo-rl", "ratio-times-k2", "error", "k2 is right without", 2),
    (
        "beta=0.1\nimportance_sampling_level=sequence", "trl-grpo", "geometric-ratio", "error",
        "exp(mean log rho) for every token", 2,
    ),
    ("beta=0.1 importance_sampling_level=sequence", "unsloth", "geometric-ratio", "error", "token-level ratio", 1),
    ("actor.kl_ctl=0.2", "areal", "no-reference", "error", "an entropy bonus and no KL", 1),
    ("actor.path=m", "areal", "no-reference", "error", "kl_ctl = 0.1 with no ref", None),
    (
        "trainer.algorithm.loss_reduction=token_mean", "skyrl", "length-mismatch", "warning",
        "replies of 2 and 8 tokens have effective coefficients of 2.5 and 0.625 times 0.001", 1,
    ),
    (
        "actor_rollout_ref.actor.use_kl_loss=True", "verl", "clamp-kills-gradient", "warning",
        "a token with pi_ref/pi > 13.6 has no gradient", None,
    ),
    ("loss_fn.kl_output_clamp_value=5", "nemo-rl", "clamp-kills-gradient", "warning", "k3 is clipped at 5", 1),
    ("--advantage_estimator grpo --kl_in_reward true", "ms-swift", "group-std", "warning", "has no effect", 1),
    ("--kl_estimator 0", "open-instruct", "zero-gradient", "error", "mean zero whatever the reference", 1),
    ("--beta 0.1 --load_ref_policy false", "open-instruct", "no-reference", "error", "there is no reference", 1),
    ("trainer.loss.kl_tau=0.1", "prime-rl", "no-reference", "error", "not to a reference", 1),
    ("beta=-0.1", "trl-rloo", "wrong-sign", "error", "drifting from the reference is rewarded", 1),
    (
        "actor_rollout_ref.actor.kl_loss_coef=0.1", "verl", "not-applied", "error",
        "kl_loss_coef = 0.1 is set and silently not applied: use_kl_loss is false by default", 1,
    ),
    ("--use-kl-loss", "slime", "not-applied", "error", "its coefficient kl_loss_coef is 0 by default", 1),
    ("add_token_level_kl=true kl_penalty=abs", "roll", "biased-in-reward", "error", "abs-in-reward", 1),
    (
        "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=abs", "verl", "no-divergence",
        "error", "abs-in-loss", 1,
    ),
    ("lam=0.9", "trl-ppo", "assumes", "warning", "only if the critic is exact (lam = 0.9 < 1)", 1),
    ("add_token_level_kl=true gamma=0.9\nlambd=1", "roll", "assumes", "warning", "gamma = 0.9", 1),
]  # fmt: skip


@pytest.mark.parametrize(("text", "name", "identity", "level", "words", "line"), SILENT)
def test_silent_failures_are_caught_with_the_right_sentence(text, name, identity, level, words, line):
    finding = said(report(text, name), identity)
    assert finding.level == level
    assert words in finding.message
    assert finding.line == line


@pytest.mark.parametrize(
    ("text", "name", "identity"),
    [
        ("--advantage-estimator reinforce_plus_plus --kl-coef 0.01 --calculate-per-token-loss", "slime", "not-applied"),
        ("loss_fn.use_kl_in_reward=true grpo.adv_estimator.name=reinforce_plus_plus", "nemo-rl", "not-applied"),
        ("--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k2", "slime", "zero-gradient"),
        ("actor.kl_ctl=0.2 ref.path=m", "areal", "no-reference"),
        ("actor.kl_ctl=0", "areal", "no-reference"),
        ("trainer.algorithm.loss_reduction=sequence_mean", "skyrl", "length-mismatch"),
        ("loss_fn.kl_output_clamp_value=null", "nemo-rl", "clamp-kills-gradient"),
        # switched off by hand: a coefficient that is left over is no surprise
        (
            "actor_rollout_ref.actor.kl_loss_coef=0.1 actor_rollout_ref.actor.use_kl_loss=False", "verl", "not-applied",
        ),
    ],
)  # fmt: skip
def test_what_is_right_is_not_caught(text, name, identity):
    assert identity not in {f.id for f in report(text, name).findings}


def test_two_places_are_judged_together():
    both = (
        "algorithm.use_kl_in_reward=True algorithm.adv_estimator=rloo actor_rollout_ref.rollout.n=4 "
        "algorithm.kl_penalty=k3 actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=k3 "
    )
    alike = report(both, "verl")
    assert alike.reading.unbiased
    assert "k3-in-reward" not in {f.id for f in alike.findings}
    assert "together 0.001 sequence / E|y|" in said(alike, "two-places").message
    apart = report(both + "algorithm.kl_ctrl.kl_coef=0.1", "verl")
    assert not apart.reading.unbiased
    assert said(apart, "k3-in-reward").level == "error"


def test_two_places_with_two_coefficients_are_added_as_they_stand():
    found = report(
        "algorithm.use_kl_in_reward=True algorithm.adv_estimator=rloo actor_rollout_ref.rollout.n=4 "
        "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=mse "
        "actor_rollout_ref.actor.kl_loss_coef=0.01",
        "verl",
    )
    assert "together (0.001 sequence + 0.01 token) / E|y|" in said(found, "two-places").message
    assert found.verdict == "(0.1 sequence + token) / E|y|, in units of 0.01"


@pytest.mark.parametrize(
    ("text", "name", "key"),
    [
        ("--advantage-estimator reinforce_plus_plus_baseline --kl-coef 0.01", "slime", "advantage_estimator"),
        (
            "loss_fn.use_kl_in_reward=true grpo.adv_estimator.name=reinforce_plus_plus "
            "loss_fn.reference_policy_kl_type=k1", "nemo-rl", "grpo.adv_estimator.name",
        ),
    ],
)  # fmt: skip
def test_k1_in_the_reward_credited_to_its_own_token_alone(text, name, key):
    finding = said(report(text, name), "token-level")
    assert finding.message.startswith("k1-in-reward: ")
    assert finding.message.endswith("reward-to-go or the sum over the reply has it")
    assert key in dict(finding.keys)


@pytest.mark.parametrize("value", ["full", "full+"])
def test_what_verl_does_not_implement_is_refused(value):
    for text in (
        f"algorithm.use_kl_in_reward=True algorithm.kl_penalty={value}",
        f"actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type={value}",
    ):
        finding = said(report(text, "verl"), "refused")
        assert (finding.level, finding.line) == ("error", 1)
        assert "NotImplementedError" in finding.message


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("algorithm.kl_coef=0.1", "is no setting of verl 0.9.1", "did you mean algorithm.kl_ctrl.kl_coef?"),
        ("actor_rollout_ref.actor.use_kl_los=True", "is no setting of verl 0.9.1", "use_kl_loss?"),
        ("actor.use_kl_los=True", "is no setting of verl 0.9.1", "use_kl_loss?"),
        ("reward.kl_thing=1", "it speaks of the KL", ""),
        ("trainer.reference_decay=0.9", "it speaks of the KL", ""),
        ("trainer.my_beta=0.9", "it speaks of the KL", ""),
        ("trainer.drift_penalty=0.9", "it speaks of the KL", ""),
    ],
)
def test_a_verdict_does_not_stand_on_unknown_settings_about_the_kl(text, says, hint):
    found = report(text, "verl")
    finding = said(found, "unknown-key")
    assert found.open
    assert finding.level == "open"
    assert says in finding.message
    assert hint in finding.message


@pytest.mark.parametrize(
    "text",
    [
        "reward.kl_thing=0", "reward.kl_thing=null", "reward.kl_thing=False", "rollout.repetition_penalty=1.1",
        "reward.overlong_penalty=1", "optim.betas=1", "optim.beta1=0.9", "trainer.project_name=kl_study", "x.prefer=1",
        "actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.1", "actor_rollout_ref.ref.log_prob_micro_batch_size=1",
    ],
)  # fmt: skip
def test_what_is_off_or_about_something_else_leaves_the_verdict(text):
    assert [f.id for f in report(text, "verl").findings] == ["no-penalty"]


def test_a_common_last_name_elsewhere_is_not_ours():
    found = report("name=run logger.name=x", "nemo-rl")
    assert "read-as" not in {f.id for f in found.findings}
    other = report("optimizer.beta=0.9", "trl-grpo")
    assert other.open
    assert other.resolution.values["beta"] == 0


def test_a_near_miss_of_a_whole_setting_is_told_and_a_last_name_in_common_is_none():
    found = report("algorithm.adv_estimater=grpo", "verl")
    assert said(found, "unknown-key").level == "warning"
    assert "did you mean algorithm.adv_estimator?" in said(found, "unknown-key").message
    shared = (
        "actor_rollout_ref.rollout.val_kwargs.n=4 critic.loss_agg_mode=token-mean actor_rollout_ref.model.lora.type=x"
    )
    assert {f.id for f in report(shared + " logger.type=x other.gamma=1", "verl").findings} == {"no-penalty"}


def test_settings_that_are_not_read_are_named_and_left_alone():
    found = report("optim.lr=1e-6 data.path=x trainer.epochs=3 actor.clock=1 model.block=2", "verl")
    assert found.not_read == ("optim.lr", "data.path", "trainer.epochs", "actor.clock", "model.block")
    other = report("actor_rollout_ref.actor.policy_loss.ppo_kl_coef=0.1 policy_loss.kl_cov_ratio=0.2", "verl")
    assert {f.id for f in other.findings} == {"no-penalty"}
    assert {f.id for f in found.findings} == {"no-penalty"}


def test_unknown_values_and_shorter_names_are_told():
    found = report("algorithm.use_kl_in_reward=True algorithm.kl_penalty=k5 rollout.n=8", "verl")
    assert found.open
    assert "k5 is no value" in said(found, "unknown-value").message
    assert "its default kl is assumed" in said(found, "unknown-value").message
    assert said(found, "read-as").message == "rollout.n is read as actor_rollout_ref.rollout.n"


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("beta=1 kl_clamp_value=-1", "tunix-grpo", "kl_clamp_value = -1 cannot be: the bound -1"),
        ("beta=1 loss_type=dr_grpo max_completion_length=0", "trl-grpo", "max_completion_length = 0 cannot be"),
        ("beta=1 loss_denominator=many", "open-instruct", "loss_denominator = many cannot be"),
    ],
)
def test_values_that_cannot_be_are_named(text, name, says):
    with pytest.raises(ValueError, match=says):
        report(text, name)


def test_errors_come_first():
    levels = [f.level for f in report("beta=0.1", "tunix-ppo").findings]
    assert levels == sorted(levels, key=["error", "warning", "note"].index)
    assert levels[0] == "error"


@pytest.mark.parametrize(("base", "bound"), [("k3", 10.0), ("k3", 0.3), ("k2", 10.0), ("k1", 7.0)])
def test_where_a_clamp_bites(base, bound):
    """The bound that the sentence names is where the estimator's value is the clamp."""
    text = _reaches(base, bound)
    edge = float(text.rpartition(" ")[2])
    delta = -math.log(edge) if base == "k3" else edge
    assert abs(float(estimator(base).value(np.array(delta)))) == pytest.approx(bound, rel=0.02)


# ------------------------------------------------------------------------------------------------- the config files

FILES = sorted(path for path in CONFIGS.glob("*/*"))
# folder -> (field, errors) of its right, wrong and default files; "none" is no penalty
EXPECTED = {
    "areal": [("sequence", []), ("none", ["no-reference"]), ("none", ["no-reference"])],
    "llama-factory": [("sequence", []), ("sequence", []), ("sequence", [])],
    "ms-swift": [("sequence", []), ("scaled-sequence", ["refused"]), ("token-forward", [])],
    "nemo-rl": [("sequence", []), ("none", ["not-applied"]), ("token", [])],
    "open-instruct": [("token", []), ("zero", ["zero-gradient"]), ("token-forward", [])],
    "openrlhf": [("sequence", []), ("zero", ["zero-gradient"]), ("sequence", [])],
    "prime-rl": [("none", []), ("none", ["no-reference"]), ("none", [])],
    "rl4lms": [("sequence", []), ("wrong-sign", ["wrong-sign"]), ("sequence", [])],
    "roll": [("sequence", []), ("other", ["biased-in-reward"]), ("none", [])],
    "skyrl": [("sequence", []), ("other", ["k3-in-reward"]), ("token-forward", [])],
    "slime": [("sequence", []), ("none", ["not-applied"]), ("none", [])],
    "torchtune-grpo": [("token-forward", []), ("none", ["sequence-k3"]), ("token-forward", [])],
    "torchtune-ppo": [("sequence", []), ("wrong-sign", ["wrong-sign"]), ("sequence", [])],
    "transparent-grpo": [("scaled-sequence", []), ("wrong-sign", ["wrong-sign"]), ("scaled-sequence", [])],
    "trl-grpo": [("token", []), ("other", ["geometric-ratio"]), ("none", [])],
    "trl-ppo": [("sequence", []), ("other", ["k3-in-reward"]), ("sequence", [])],
    "trl-rloo": [("sequence", []), ("wrong-sign", ["wrong-sign"]), ("sequence", [])],
    "trlx": [("sequence", []), ("wrong-sign", ["wrong-sign"]), ("sequence", [])],
    "tunix-grpo": [("token", []), ("zero", ["zero-gradient"]), ("zero", ["zero-gradient"])],
    "tunix-ppo": [("sequence", []), ("other", ["biased-in-reward"]), ("other", ["k3-in-reward"])],
    "unsloth": [("token", []), ("other", ["geometric-ratio"]), ("none", [])],
    "verl": [("sequence", []), ("other", ["k3-in-reward"]), ("none", [])],
    "easyr1": [("sequence", []), ("other", ["k3-in-reward"]), ("scaled-sequence", [])],
    "search-r1": [("sequence", []), ("zero", ["zero-gradient"]), ("sequence", [])],
    "axolotl": [("token", []), ("other", ["geometric-ratio"]), ("none", [])],
    "cosmos-rl": [("token", []), ("other", ["wrong-sign"]), ("none", [])],
    "tinker-cookbook": [("token", []), ("other", ["wrong-sign"]), ("none", [])],
    "trinity-rft": [("token", []), ("zero", ["zero-gradient"]), ("token", [])],
    "miles": [("sequence", []), ("none", ["not-applied"]), ("none", [])],
    "ms-swift-ppo": [("sequence", []), ("wrong-sign", ["wrong-sign"]), ("sequence", [])],
}


def test_every_library_has_its_files():
    kinds = {path.parent.name: sorted(p.stem for p in path.parent.iterdir()) for path in FILES}
    assert kinds == {name: ["default", "right", "wrong"] for name in libraries()}
    assert set(EXPECTED) == set(kinds)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_config_files(path):
    found = lint(library(path.parent.name), read(path.read_text(), path.name).settings)
    field, errors = EXPECTED[path.parent.name][["right", "wrong", "default"].index(path.stem)]
    assert (found.reading.name if found.reading else "none") == field
    assert [f.id for f in found.findings if f.level == "error"] == errors
    for finding in found.findings:  # a line is that of a key that is named
        if finding.line is not None:
            line = path.read_text().splitlines()[finding.line - 1].lower().replace("-", "_")
            ends = [key.lower().replace("-", "_").rpartition(".")[2] for key, at in finding.keys if at == finding.line]
            assert any(end in line for end in ends), (finding, line)


# ---------------------------------------------------------------------------------------------------- the numbers


def test_numbers_are_the_engines():
    terms = active(report("--advantage-estimator rloo --beta 0.1 --loss_type dapo", "ms-swift").resolution)
    pair = preset("words", 4)
    found = numbers(terms, pair, 4)
    outcome = expected([(1.0, terms[0][1])], pair, 4)
    truth = true_gradient(pair, [4])[0]
    assert found["bias"] == pytest.approx(np.linalg.norm(outcome.mean - truth))
    assert found["rescaled_bias"] < 1e-7
    assert found["cosine"] == pytest.approx(1.0)
    assert found["scale"] == pytest.approx(np.linalg.norm(outcome.mean) / np.linalg.norm(truth))
    assert found["method"] == "exact"


def test_a_gradient_that_points_away_has_no_good_scale():
    terms = [(1.0, parse_recipe("k3-in-reward"))]
    found = numbers(terms, preset("words", 10), 10)
    assert found["cosine"] < 0
    assert found["rescaled_bias"] == 1.0
    nothing = numbers([(1.0, parse_recipe("k1-in-loss"))], preset("near", 5), 5)
    assert math.isnan(nothing["cosine"])


def test_a_default_that_was_not_read_is_said_where_it_decides():
    """The verdict on RL4LMs' defaults rests on a lambda that its entry only assumes; given, nothing is assumed."""
    from klgrad.analysis.findings import findings
    from klgrad.analysis.libraries import library
    from klgrad.analysis.resolution import resolve
    from klgrad.analysis.settings import Setting

    entry = library("rl4lms")

    def assumed(*settings):
        found = findings(resolve(entry, [Setting(key, value) for key, value in settings]), None)
        return [each.message for each in found if each.id == "assumed-default"]

    assert any("gae_lambda = 0.95" in message for message in assumed())
    assert assumed(("alg.args.gamma", 1.0), ("alg.args.gae_lambda", 1.0)) == []
