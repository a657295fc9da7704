"""The audit on stand-ins for the libraries: right ones agree, wrong ones raise the alarm, missing ones are said so."""

import sys

import numpy as np
import pytest

from klgrad.analysis.adapters import ADAPTERS
from klgrad.analysis.auditing import audit, bare, deviation
from klgrad.analysis.libraries import libraries
from klgrad.analysis.recipes import parse_recipe

pytest.importorskip("torch")

KL = '''
import torch

def kl(logp, ref, kind, bound=None, weight=None):
    """The textbook estimators, written once for all the stand-ins."""
    d = logp - ref
    out = {"k1": d, "k2": d * d / 2, "abs": d.abs(), "k3": torch.exp(-d.clamp(-40, 40)) - 1 + d}[kind]
    out = out if weight is None else out * weight
    return out if bound is None else out.clamp(-bound, bound)
'''
NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "mse_kl": "k2"}

# the right functions, as the survey describes them; file -> source
RIGHT = {
    "verl/trainer/ppo/core_algos.py": """
def kl_penalty(logprob, ref_logprob, kl_penalty):
    names = {"kl": "k1", "k1": "k1", "mse": "k2", "abs": "abs", "low_var_kl": "k3", "k3": "k3"}
    kind = names[kl_penalty.rstrip("+")]
    value = kl(logprob, ref_logprob, kind, 10.0 if kind == "k3" else None)
    if not kl_penalty.endswith("+"):
        return value
    through = kl(logprob, ref_logprob, "k2")
    return through - through.detach() + value.detach()
""",
    "slime/utils/ppo_utils.py": """
def compute_approx_kl(log_probs, log_probs_base, kl_loss_type, importance_ratio=None):
    kind = "k3" if kl_loss_type == "low_var_kl" else kl_loss_type
    return kl(log_probs.float(), log_probs_base.float(), kind, 10 if kl_loss_type == "low_var_kl" else None,
              importance_ratio)
""",
    "nemo_rl/algorithms/utils.py": """
def calculate_kl(
    logprobs, logprobs_reference, kl_type="k3", input_clamp_value=20.0, output_clamp_value=10.0, weights=None
):
    return kl(logprobs, logprobs_reference, kl_type, output_clamp_value, weights)
""",
    "roll/utils/functionals.py": """
def compute_approx_kl(log_probs, log_probs_base, action_mask=None, kl_penalty="kl"):
    kind = {"kl": "k1", "mse": "k2", "abs": "abs", "k3": "k3"}[kl_penalty]
    return kl(log_probs, log_probs_base, kind, 10.0 if kind == "k3" else None)
""",
    "areal/utils/data.py": """
class KLEstimator:
    def __init__(self, kl_estimator="k1"):
        self.kind = kl_estimator

    def __call__(self, log_probs, log_probs_base):
        return kl(log_probs.float(), log_probs_base.float(), self.kind, 10.0)
""",
    "open_instruct/model_utils.py": """
def estimate_kl(ref_logprobs_diff, ratio):
    d = ref_logprobs_diff.clamp(-40, 40)
    return torch.stack([d, d**2 / 2, torch.expm1(-d) + d, ratio * d])
""",
    "torchtune/rlhf/__init__.py": """
def get_rewards_ppo(scores, logprobs, ref_logprobs, kl_coeff, valid_score_idxs=None):
    kl_reward = -kl_coeff * (logprobs - ref_logprobs)
    return kl_reward + scores[:, None], logprobs - ref_logprobs, kl_reward
""",
}
BY_MODULE = {adapter.module: adapter for adapter in ADAPTERS}


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Write a stand-in for a library where it will be found, and forget it afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(place, source):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in path.relative_to(tmp_path).parents:
            (tmp_path / folder / "__init__.py").touch()
        path.write_text(KL + source)
        return BY_MODULE[place.partition("/")[0]]

    yield write
    tops = {place.partition("/")[0] for place in RIGHT}
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in tops:
            del sys.modules[name]


def rows(adapter):
    return list(audit([adapter]))


@pytest.mark.parametrize("place", RIGHT)
def test_a_library_that_does_what_its_entry_says_agrees(place, library):
    adapter = library(place, RIGHT[place])
    found = rows(adapter)
    assert len(found) == len(adapter.cases)
    assert [(row.status, row.message) for row in found if row.status != "agrees"] == []
    assert {row.version for row in found} == {"unknown"}
    assert all(row.expected == row.found for row in found)


def statuses(found):
    return {row.status for row in found}


def test_a_clamp_that_went_is_a_drift_and_is_located(library):
    adapter = library(
        "verl/trainer/ppo/core_algos.py", RIGHT["verl/trainer/ppo/core_algos.py"].replace("10.0 if", "None if")
    )
    alarms = [row for row in rows(adapter) if row.alarm]
    assert {row.settings.rpartition("=")[2] for row in alarms} == {"low_var_kl"}
    assert {row.placement for row in alarms} == {"reward", "loss"}
    assert all(row.status == "drift" and "log pi/pi_ref = -" in row.message for row in alarms)


def test_another_estimator_of_the_same_name_is_a_drift(library):
    source = RIGHT["roll/utils/functionals.py"].replace('"mse": "k2"', '"mse": "abs"')
    alarms = [row for row in rows(library("roll/utils/functionals.py", source)) if row.alarm]
    assert [row.settings for row in alarms] == ["add_token_level_kl=true, kl_penalty=mse"]


def test_a_weight_that_is_detached_is_a_drift(library):
    """The value is the same; only the gradient tells."""
    source = RIGHT["slime/utils/ppo_utils.py"].replace(
        "importance_ratio)", "importance_ratio if importance_ratio is None else importance_ratio.detach())"
    )
    alarms = [row for row in rows(library("slime/utils/ppo_utils.py", source)) if row.alarm]
    assert {row.status for row in alarms} == {"drift"}
    assert all("use_unbiased_kl=true" in row.settings for row in alarms)
    assert all("gradient is off" in row.message for row in alarms)


@pytest.mark.parametrize(
    ("source", "status", "says"),
    [
        ("def other(): pass", "broken", "AttributeError"),
        ("def kl_penalty(logprob, ref_logprob): return logprob", "broken", "TypeError"),
        ("def kl_penalty(logprob, ref_logprob, kl_penalty): raise RuntimeError('no')", "broken", "RuntimeError: no"),
        ("def kl_penalty(logprob, ref_logprob, kl_penalty): return (logprob - ref_logprob)[0]", "broken", "the shape"),
        ("def kl_penalty(logprob, ref_logprob, kl_penalty): return (logprob - ref_logprob).detach()", "broken", ""),
        ("import a_package_that_is_not_there", "not importable", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "not importable", "exits with 3"),
        ("raise ValueError('needs a GPU')", "not importable", "needs a GPU"),
    ],
)  # fmt: skip
def test_what_has_changed_or_cannot_be_imported_is_told_and_not_raised(source, status, says, library):
    found = rows(library("verl/trainer/ppo/core_algos.py", source))
    assert status in statuses(found)
    assert any(says in row.message for row in found)


def test_a_parameter_that_is_gone_is_a_finding(library):
    source = RIGHT["nemo_rl/algorithms/utils.py"].replace(", weights=None", "").replace(", weights)", ")")
    found = rows(library("nemo_rl/algorithms/utils.py", source))
    assert {row.status for row in found if row.placement == "loss"} == {"broken"}
    assert {row.status for row in found if row.placement == "reward"} == {"agrees"}


def test_what_a_library_prints_stays_off_the_terminal(library, capfd):
    library("torchtune/rlhf/__init__.py", "print('hello')\n" + RIGHT["torchtune/rlhf/__init__.py"])
    assert statuses(rows(BY_MODULE["torchtune"])) == {"agrees"}
    assert capfd.readouterr() == ("", "")


def test_a_library_that_is_not_there_is_said_so():
    if "slime" in sys.modules:  # pragma: no cover
        pytest.skip("slime is installed")
    (row,) = rows(BY_MODULE["slime"])
    assert (row.status, row.alarm) == ("not installed", False)


def test_every_adapter_has_an_entry_and_its_cases_switch_one_penalty_on():
    from klgrad.analysis.resolution import resolve
    from klgrad.analysis.settings import Setting

    for adapter in ADAPTERS:
        assert adapter.library in libraries()
        for case in adapter.cases:
            resolution = resolve(libraries()[adapter.library], [Setting(k, v) for k, v in case.settings.items()])
            assert len(resolution.penalties) == 1
            assert resolution.unread == ()
            assert [identity for identity, _, _ in resolution.problems if identity != "group-size"] == []


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("k1-in-loss", "k2"), ("k2-in-loss", "k1"), ("k3-in-loss", "k2"), ("k3-clamped(20,10)-in-loss", "k3")],
)
def test_the_deviation_sees_another_function(name, wrong, torch):
    """Negative control, and the right function beside it."""
    space = {}
    exec(KL, space)
    recipe = parse_recipe(name)
    base = recipe.configuration.estimator.name.partition("-")[0]
    bound = 10.0 if "clamped" in name else None
    right = deviation(lambda p, q, mu, m: space["kl"](p, q, base, bound), recipe, "loss")[0]
    assert right < 1e-9
    assert deviation(lambda p, q, mu, m: space["kl"](p, q, wrong), recipe, "loss")[0] > 0.1


def test_what_is_audited_is_the_function_and_not_what_stands_around_it():
    recipe = parse_recipe("k1-in-reward+rtg+token-ratio+rollout-value+clamp=10+token-mean")
    assert str(bare(recipe, "reward")) == "k1-in-reward+clamp=10"
    assert str(bare(parse_recipe("k3-in-loss+live-token-ratio+clamp=10+length-mean"), "loss")) == str(
        parse_recipe("k3-in-loss+live-token-ratio+clamp=10")
    )
    assert np.isfinite(deviation(lambda p, q, mu, m: p - q, bare(recipe, "reward"), "reward")[0])
