"""TRL's trainer against the own loop: hooks as they were, one batch one loss one gradient, whole runs, refusals."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from strategies import assert_close

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("trl", reason="the second backend is an extra: pip install 'klgrad[trl]'")

from safetensors.torch import load_file  # noqa: E402
from trl import RLOOConfig, RLOOTrainer  # noqa: E402
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict  # noqa: E402

from klgrad.harness import checkpoints, models, trl_backend, trl_trainer  # noqa: E402
from klgrad.harness import train as own  # noqa: E402
from klgrad.harness.objective import ADVANTAGES, policy_loss  # noqa: E402
from klgrad.harness.recipe import Recipe  # noqa: E402
from klgrad.harness.rollouts import Rollouts, pad_prompts  # noqa: E402
from klgrad.harness.state import Experience, Run  # noqa: E402

PROMPTS = ("s31=", "s5120=", "s907=", "s44=")  # of different lengths: padding stands in front of some
TASK = f"""
from klgrad.harness.tasks import Problem
class Low:
    def problems(self, split, seed):
        while True:
            for prompt in {PROMPTS}:
                yield Problem(prompt, "1")
    def reward(self, problem, response):
        return sum(letter in "01234" for letter in response) / 6
"""


@pytest.fixture
def recipe(micro, tmp_path):
    (tmp_path / "low.py").write_text(TASK)
    task = (f"{tmp_path / 'low.py'}:Low",)

    def make(**changes):
        given = {
            "model": str(micro), "tasks": task, "in_domain": task, "out_of_domain": (), "steps": 2, "batch": 4,
            "group": 2, "length": 6, "learning_rate": 1e-3, "evaluate_problems": 4,
            "kl": "k1-in-reward+loo=2", "beta": 0.3,
        }  # fmt: skip
        return Recipe(**{**given, **changes})

    return make


# -------------------------------------------------------------------------------------------------------- contract


def test_the_hooks_are_those_that_were_subclassed():
    assert trl_trainer.changed_hooks() == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"_compute_loss": lambda self, model, inputs, items: None},
            "_compute_loss takes (self, model, inputs, items)",
        ),
        ({"_calculate_rewards": lambda self, inputs: None}, "_calculate_rewards takes (self, inputs) and no longer"),
        ({"_generate_and_score_completions": None}, "_generate_and_score_completions is gone"),
        ({"loss_is_scaled_for_ga": True}, "the loss would be scaled twice"),
    ],
)
def test_a_changed_hook_is_named(changes, sentence):
    (found,) = trl_trainer.changed_hooks(type("Later", (RLOOTrainer,), changes))
    assert sentence in found


# ---------------------------------------------------------------------------------------------------------- parity


def answers_to(prompts, _images, _fields, length=6, vocabulary=22, end=1):
    """Responses that depend on the prompt and on which sample of it this is, some ended and some cut off."""
    seen, found = {}, []
    for prompt in prompts:
        seen[tuple(prompt)] = seen.get(tuple(prompt), 0) + 1
        rng = random.Random(f"{prompt} {seen[tuple(prompt)]}")
        size = rng.randint(1, length)
        found.append([rng.randrange(2, vocabulary) for _ in range(size)] + ([end] if size < length else []))
    return found


def trainer_of(recipe, folder, **more):
    """The trainer on a float64 policy, with its responses fixed."""
    policy, tokenizer = models.load(recipe.model, dtype="float64")
    arguments = RLOOConfig(**trl_backend.arguments(recipe, folder))
    made = trl_trainer.ObjectiveTrainer(recipe, policy, tokenizer, own.problems_of(recipe), arguments, folder, **more)
    made._generate_single_turn = answers_to
    return made


def moved(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter))


def fixed_batch(recipe, tokenizer):
    """The same rollouts and rewards, made without TRL."""
    posed = [next(problems) for problems in [own.problems_of(recipe)] for _ in range(recipe.batch)]
    posed = [each for each in posed for _ in range(recipe.group)]
    prompts = [own.encoded(tokenizer, problem) for _, problem in posed]
    answers = answers_to(prompts, None, None)
    width = max(map(len, answers))
    tokens, real = pad_prompts(prompts, 0)
    mask = torch.tensor([[i < len(a) for i in range(width)] for a in answers])
    responses = torch.tensor([a + [0] * (width - len(a)) for a in answers])
    rollouts = Rollouts(torch.cat([tokens, responses], 1), torch.cat([real, mask], 1), tokens.shape[1], mask.double())
    rewards = [judge.reward(p, text) for (judge, p), text in zip(posed, own.responses(tokenizer, responses, mask))]  # noqa: B905
    return rollouts, torch.tensor(rewards)


OFF = {"minibatch": 2, "ratio": "token", "clip_low": 0.1, "clip_high": 0.1}
CASES = {
    "k1 in the reward": {},
    "k1 in the reward, without monitors": {"monitor": False},
    "accumulated": {"micro": 1, "monitor": False},
    "standardised, outside": {"kl": "k3-in-loss", "advantage": "grpo", "aggregation": "sequence-mean", **OFF},
    "clipped with the advantage": {
        "kl": "k1-in-reward+token-ratio+loo=2", "advantage": "dr-grpo", "aggregation": "constant",
        "kl_aggregation": "policy", "micro": 1, **OFF,
    },
    "reward-to-go in both": {"kl": "k2-in-both+rtg+prefix-ratio", "monitor": False, "minibatch": 1},
    "whole vocabulary": {"kl": "full-in-both+rtg+prefix-ratio", "monitor": False, "minibatch": 2, "micro": 1},
    "whole vocabulary at a temperature": {"kl": "full-in-loss", "temperature": 0.7},
    "a sequence's ratio": {"kl": "", "beta": 0.0, "monitor": False, **OFF, "ratio": "sequence"},
    "a mean over all tokens": {"kl": "k3-in-both", "aggregation": "token-mean", "monitor": False},
    "a mean over each": {"kl": "k1-in-loss+length-mean", "aggregation": "sequence-mean", "micro": 2},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_batch_has_the_own_loop_s_loss_and_gradient(case, recipe, tmp_path):
    """Tight where every log-prob comes from logits in float64, looser where some come from TRL's float32 fused head.

    Not to float64's rounding: norms in transformers are float32 inside, and the own loop reads a prompt once for all.
    """
    made = recipe(**CASES[case])
    trainer = trainer_of(made, tmp_path)
    policy = models.CausalLM(trainer.model)
    reference = models.load(made.model, dtype="float64")[0] if trainer.referenced else None
    rollouts, rewards = fixed_batch(made, trainer.processing_class)
    run = Run(made, policy, reference, trainer.processing_class, None, iter(()))

    moved(trainer.model, 0)
    rows = [{"problem": i} for i in range(made.batch) for _ in range(made.group)]
    inputs = trainer._generate_and_score_completions(rows)
    behaviour = None if made.on_policy else own.score(run, rollouts)["log_probs"].detach()
    moved(trainer.model, 1)

    parts = split_tensor_dict(shuffle_sequence_dict(inputs), trainer.args.steps_per_generation)
    theirs = sum(trainer._compute_loss(trainer.model, part) for part in parts) / len(parts)
    advantages = ADVANTAGES[made.advantage](rewards, made.group)
    terms = own.score(run, rollouts)
    ours, _ = policy_loss(own.objective_of(made), terms, rollouts.mask, advantages, behaviour)
    assert abs(float(ours.detach())) > 1e-3
    tolerance = 1e-6 if trainer.summaries and made.on_policy else 1e-4
    assert_close(theirs.detach().numpy(), ours.detach().numpy(), tolerance)
    weights = list(trainer.model.parameters())
    one, two = (torch.autograd.grad(loss, weights, allow_unused=True) for loss in (theirs, ours))
    one, two = (torch.cat([g.flatten() for g in gradients if g is not None]).numpy() for gradients in (one, two))
    assert abs(two).max() > 1e-3
    assert_close(one, two, tolerance)


def test_what_was_measured_is_what_the_own_loop_measures(recipe, tmp_path):
    made = recipe(kl="k3-in-loss+token-ratio", **OFF, micro=1)
    trainer = trainer_of(made, tmp_path)
    rollouts, rewards = fixed_batch(made, trainer.processing_class)
    reference = models.load(made.model, dtype="float64")[0]
    run = Run(made, models.CausalLM(trainer.model), reference, trainer.processing_class, None, iter(()))
    inputs = trainer._generate_and_score_completions([{"problem": i} for i in range(4) for _ in range(2)])
    behaviour = own.score(run, rollouts)["log_probs"].detach()
    moved(trainer.model, 2)
    for part in split_tensor_dict(inputs, trainer.args.steps_per_generation):
        trainer._compute_loss(trainer.model, part)
    trainer.seen.norms, trainer.rate = [1.0], 0.0
    line = trainer._line(1)
    terms, seen = own.score(run, rollouts), own.Statistics()
    advantages = ADVANTAGES[made.advantage](rewards, made.group)
    _, counts = policy_loss(own.objective_of(made), terms, rollouts.mask, advantages, behaviour)
    seen.add(terms, rollouts.mask, counts, made.configuration, 0.0)
    seen.norms = [1.0]
    for name in ("kl", "forward_kl", "entropy", "kl_estimate", "kl_estimate_variance", "ratio_max"):
        assert line[name] == pytest.approx(seen.summary()[name], rel=1e-5), name
    assert line["reward"] == pytest.approx(float(rewards.mean()))
    assert line["length"] == pytest.approx(float(rollouts.mask.sum(1).float().mean()))


STEP = {"steps": 1, "warmup": 3, "weight_decay": 0.5, "max_norm": 0.3, "learning_rate": 0.1, "micro": 2}
ROUNDED = 1e-5  # of a tensor's largest gradient: float32's 6e-8 over the some 10^4 terms of one, in two orders


def own_step(made, folder):
    """The own loop after one round on the fixed responses, and its line."""
    run = own.start(made)
    run.queue.append(Experience(*fixed_batch(made, run.tokenizer), 0))
    return run, own.train_round(run, folder)


def off_by(saved, run):
    """The largest difference of a weight, in units of what rounding of its gradient g explains.

    Adam's first step, rate g / (|g| + eps), is steep where |g| is about eps: two gradients that differ by rounding
    alone may end a whole step apart there, and nowhere else. Keys' biases have no gradient but rounding.
    """
    (group,) = run.optimizer.param_groups
    rate, eps, decay = group["lr"], group["eps"], group["betas"][0]
    worst = 0.0
    for name, parameter in run.policy.model.named_parameters():
        if name.endswith("k_proj.bias"):
            continue
        g = run.optimizer.state[parameter]["exp_avg"] / (1 - decay)
        moved = ROUNDED * g.abs().max()
        low, here, high = (rate * x / (x.abs() + eps) for x in (g - moved, g, g + moved))
        allowed = torch.maximum(high - here, here - low) + 1e-6 * (parameter.abs() + rate)
        worst = max(worst, float(((saved[name] - parameter).abs() / allowed).detach().max()))
    return worst


def test_a_step_ends_at_the_own_loop_s_weights(recipe, tmp_path, monkeypatch):
    """Warm-up, weight decay, gradient clipping and the optimiser too."""
    monkeypatch.setattr(trl_trainer.ObjectiveTrainer, "_generate_single_turn", lambda self, *given: answers_to(*given))
    made = recipe(**STEP)
    before = models.load(made.model)[0].model.state_dict()
    run, ours = own_step(made, tmp_path)
    (theirs,) = trl_backend.train(made, tmp_path)
    for name in ("learning_rate", "gradient_norm", "loss", "reward"):
        assert theirs[name] == pytest.approx(ours[name], rel=1e-4), name
    saved = load_file(tmp_path / "step-1" / "model.safetensors")
    assert off_by(saved, run) < 1
    assert max(float((saved[name] - before[name]).abs().max()) for name in saved) > 0.02


@pytest.mark.parametrize(
    "wrong",
    [{"advantage": "grpo"}, {"aggregation": "sequence-mean"}, {"weight_decay": 0.49}, {"max_norm": 0.0}],
    ids=str,
)
def test_a_step_by_another_loss_would_be_seen(recipe, tmp_path, wrong):
    """Weights alone tell a wrong loss, however Adam scales it."""
    right, _ = own_step(recipe(**STEP), tmp_path)
    other, _ = own_step(recipe(**STEP | wrong), tmp_path)
    assert off_by(other.policy.model.state_dict(), right) > 10


# -------------------------------------------------------------------------------------------------------- whole runs


def bare(lines):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def test_a_run_writes_the_own_loop_s_files(recipe, tmp_path):
    made = recipe(checkpoint_every=1, evaluate_every=1, **OFF)
    theirs, ours = trl_backend.train(made, tmp_path / "trl"), own.train(made, tmp_path / "own")
    assert [list(line) for line in theirs] == [list(line) for line in ours]
    assert checkpoints.read_lines(tmp_path / "trl" / "metrics.jsonl") == json.loads(json.dumps(theirs))
    assert theirs[0]["ratio_max"] > 1
    assert theirs[0]["kl"] > 0
    for name in ("metrics.jsonl", "evaluations.jsonl", "step-1", "step-2"):
        assert (tmp_path / "trl" / name).exists()
    assert not list((tmp_path / "trl").glob("checkpoint-*"))
    assert models.load(str(tmp_path / "trl" / "step-2"))[0].vocabulary == 22
    with pytest.raises(ValueError, match=r"lacks state\.pt: go on with the backend that wrote it"):
        own.train(made, tmp_path / "trl", resume=True)
    with pytest.raises(ValueError, match=r"lacks trainer_state\.json: go on with the backend"):
        trl_backend.train(made, tmp_path / "own", resume=True)


def test_a_resumed_run_is_the_run_that_was_never_stopped(recipe, tmp_path):
    made = recipe(steps=3, minibatch=2, ratio="token")
    whole = trl_backend.train(made, tmp_path / "whole")
    trl_backend.train(made, tmp_path / "parts", stop=lambda: True)
    with pytest.raises(ValueError, match=r"trained with beta = 0\.3"):
        trl_backend.train(recipe(steps=3, beta=0.2, minibatch=2, ratio="token"), tmp_path / "parts", resume=True)
    parts = trl_backend.train(made, tmp_path / "parts", resume=True)
    assert bare(parts) == bare(whole)
    one, two = (load_file(tmp_path / name / "step-3" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert trl_backend.train(made, tmp_path / "parts", resume=True) == parts  # nothing is left to do


@pytest.mark.parametrize("reset", [0, 1])
def test_the_reference_becomes_the_policy_where_it_should(recipe, tmp_path, reset):
    lines = trl_backend.train(recipe(reset_every=reset, learning_rate=1e-2), tmp_path)
    assert lines[0]["kl"] == 0
    assert (lines[1]["kl"] == 0) == bool(reset)


def test_without_a_kl_there_is_no_reference(recipe, tmp_path):
    made = recipe(beta=0.0, kl="", monitor=False)
    assert trainer_of(made, tmp_path).ref_model is None
    assert "kl" not in trl_backend.train(made, tmp_path)[0]


def test_an_adapter_is_trained_and_its_base_is_the_reference(recipe, tmp_path):
    pytest.importorskip("peft")
    for monitor in (True, False):
        made = recipe(kl="k3-in-loss", monitor=monitor, learning_rate=1e-2, dtype="bfloat16" if monitor else "float32")
        lines = trl_backend.train(made, tmp_path / str(monitor), lora=2)
        assert lines[0]["kl_estimate"] == 0
        assert lines[1]["kl_estimate"] > 0
        assert (tmp_path / str(monitor) / "step-2" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("what", ["the loss", "the gradient"])
def test_what_is_not_finite_stops_with_the_weights_saved(recipe, tmp_path, monkeypatch, what):
    real = policy_loss

    def poisoned(*given):
        loss, counts = real(*given)
        return (loss * float("nan") if what == "the loss" else torch.sqrt(loss - loss.detach()) + loss), counts

    monkeypatch.setattr(trl_trainer, "policy_loss", poisoned)
    with pytest.raises(own.Stopped, match=rf"{what} is not finite in round 1: .*stopped-0"):
        trl_backend.train(recipe(), tmp_path)
    assert (tmp_path / "stopped-0" / "model.safetensors").is_file()


def test_problems_are_taken_in_order_and_not_all_kept():
    posed = trl_trainer.Posed(iter([(None, i) for i in range(9)]), 2)
    assert [posed[i][1] for i in (0, 0, 1, 3, 2, 7)] == [0, 0, 1, 3, 2, 7]
    assert len(posed.kept) == 4
    with pytest.raises(ValueError, match="only 1 problems left: batch = 2 needs more data"):
        posed[9]


# ------------------------------------------------------------------------------------------------------- refusals

REFUSED = {
    "staleness = 3: .*use --backend own": ({"staleness": 3}, {}),
    "reference = 'other': .*use --backend own": ({"reference": "other"}, {}),
    "reset_every = 2: an adapter's base": ({"reset_every": 2}, {"lora": 4}),
    "reset_every = 2: TRL's checkpoints": ({"reset_every": 2}, {"resume": True}),
    "train in float32": ({"dtype": "float16"}, {}),
    "this torch has no CUDA device": ({"device": "cuda"}, {}),
    "batch = 4 prompts are not shared evenly by 3": ({}, {"processes": 3}),
    "minibatch = 2 prompts are not shared evenly by 4": ({"minibatch": 2}, {"processes": 4}),
    "micro = 4 prompts do not divide the 6": ({"batch": 12, "micro": 4}, {"processes": 2}),
    "token-mean divides": ({"aggregation": "token-mean"}, {"processes": 2}),
    r"couples the whole batch and 2 processes split it: write \+loo=2": ({"kl": "k1-in-reward+loo"}, {"processes": 2}),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_trl_cannot_do_is_said(sentence, recipe, monkeypatch):
    changes, more = REFUSED[sentence]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=sentence):
        trl_backend.refuse(recipe(**changes), **more)


def test_evaluations_that_cannot_be_posed_are_said_before_a_training(recipe, tmp_path):
    with pytest.raises(ValueError, match="unknown task"):
        trl_backend.train(recipe(out_of_domain=("nonsense",)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_responses_that_could_not_be_judged_are_counted(recipe, tmp_path):
    (tmp_path / "broken.py").write_text(
        TASK.replace("def reward(", "failed = 0\n    def reward(").replace("return sum", "self.failed += 1; return sum")
    )
    (line,) = trl_backend.train(recipe(steps=1, tasks=(f"{tmp_path / 'broken.py'}:Low",)), tmp_path / "out")
    assert line["unjudged"] == 4 * 2


def test_an_adapter_names_its_base_from_the_root(recipe, micro, tmp_path, monkeypatch):
    monkeypatch.chdir(micro.parent)
    trl_backend.train(recipe(steps=1, model=micro.name), tmp_path / "out", lora=2)
    monkeypatch.chdir(tmp_path)
    adapted, _ = models.load("out/step-1")
    assert adapted.adapted


def test_a_package_that_an_option_needs_is_one_sentence(recipe, tmp_path, monkeypatch):
    def missing(*given, **more):
        raise ImportError("vLLM is not available\nat all")

    monkeypatch.setattr(trl_trainer, "ObjectiveTrainer", missing)
    with pytest.raises(ValueError, match=r"^--trl use_vllm=true: vLLM is not available$"):
        trl_backend.train(recipe(), tmp_path / "out", options=["use_vllm=true"])


def test_options_of_trl():
    found = trl_backend.own_options(["use_vllm=true", "vllm_mode=colocate"])
    assert found == {"use_vllm": True, "vllm_mode": "colocate"}
    assert trl_backend.own_options(["vllm_server_timeout=9", "fsdp=full_shard"])["vllm_server_timeout"] == 9.0
    for text, sentence in (
        ("learning_rate=1", "learning_rate: the recipe decides that"),
        ("use_vlm=true", "did you mean 'use_vllm'"),
        ("use_vllm", "write KEY=VALUE, such as --trl use_vllm=true"),
        ("adam_beta1=much", "--trl adam_beta1 = 'much' must be a number"),
        ("use_vllm=1", "--trl use_vllm = 1 must be true or false"),
    ):
        with pytest.raises(ValueError, match=sentence):
            trl_backend.own_options([text])


def test_another_trl_is_refused(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(trl_trainer.HOOKS, "_compute_loss", "self model inputs scale")
    with pytest.raises(
        ValueError, match=r"not the one that was tested \(RLOOTrainer\._compute_loss takes .*klgrad\[trl"
    ):
        trl_backend.train(recipe(), tmp_path)


# ------------------------------------------------------------------------------------------------- several processes

SCRIPT = """
import json, sys
sys.path.insert(0, {here!r})
from test_trl import answers_to
from klgrad.harness import trl_backend, trl_trainer
from klgrad.harness.recipe import Recipe
from pathlib import Path
trl_trainer.ObjectiveTrainer._generate_single_turn = lambda self, *given: answers_to(*given)
given = json.loads(Path(sys.argv[1]).read_text())
given |= {{name: tuple(given[name]) for name in ("tasks", "in_domain", "out_of_domain")}}
trl_backend.train(Recipe(**given), Path(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"advantage": "grpo", "monitor": False}, {"micro": 1, "kl": "k3-in-both+loo=2", "aggregation": "constant"}],
)
def test_two_processes_end_where_one_does(recipe, tmp_path, changes):
    """Groups stay whole, gradients are averaged: the same responses give the same weights and the same metrics."""
    made = recipe(learning_rate=1e-2, warmup=2, **changes)
    (tmp_path / "recipe.json").write_text(json.dumps(made.to_dict()))
    (tmp_path / "script.py").write_text(SCRIPT.format(here=str(Path(__file__).parent)))
    for processes in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += ["script.py", "recipe.json", str(processes)]
        paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    one, two = (checkpoints.read_lines(tmp_path / name / "metrics.jsonl") for name in "12")
    for a, b in zip(bare(one), bare(two), strict=True):
        for name in set(a) - {"clip_share", "clamp_share"}:  # shares are means over micro-batches
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name
    first, second = (load_file(tmp_path / name / "step-2" / "model.safetensors") for name in "12")
    start = load_file(Path(made.model) / "model.safetensors")
    for name in first:
        assert_close(first[name].numpy(), second[name].numpy(), 1e-3)
    assert max(float((first[name] - start[name]).abs().max()) for name in first) > 1e-3
