"""klgrad's objective inside TRL's trainer: its generation, sharding and checkpoints; our rewards, advantages and loss.

A subclass of ``RLOOTrainer``, not of ``GRPOTrainer``: its loss is a plain mean over a micro-batch, which transformers
divides by the accumulation steps (GRPO's scales itself by one of eight loss types), and it scores what was sampled
with the trainer's own forward pass, so that importance ratios compare like with like. It is also the smaller one: no
tools, no turns. Imported only by ``trl_backend``, since TRL is an extra.

Rows travel in groups: what ``_generate_and_score_completions`` returns is ``[groups, samples, ...]``, so that TRL may
shuffle and split it and a group still stays whole, in one process and one micro-batch.
"""

from __future__ import annotations

import inspect
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback
from trl import RLOOConfig, RLOOTrainer
from trl.trainer.utils import use_adapter

from klgrad.harness import checkpoints
from klgrad.harness.models import DTYPES, CausalLM
from klgrad.harness.objective import ADVANTAGES, MONITORS, estimator_summaries, policy_loss, token_terms
from klgrad.harness.recipe import Recipe
from klgrad.harness.rollouts import Rollouts, check_fits, pad_prompts
from klgrad.harness.state import Run
from klgrad.harness.tasks import Problem, Task, decoded, encoded, judged
from klgrad.harness.train import Statistics, Stopped, evaluations, every, objective_of, used_up

# What is overridden or called, and the parameters each must begin with; more may follow if they have defaults.
HOOKS = {
    "_calculate_rewards": "self inputs prompts completions completion_ids_list",
    "_get_per_token_logps_and_entropies": (
        "self model input_ids attention_mask logits_to_keep batch_size compute_entropy"
    ),
    "_generate_and_score_completions": "self inputs",
    "_generate_single_turn": "self prompt_ids images multimodal_fields",
    "_compute_loss": "self model inputs",
    "_get_grad_norm": "self model grad_norm",
    "_save_checkpoint": "self model trial",
    "create_scheduler": "self num_training_steps optimizer",
    "get_decay_parameter_names": "self model",
}


def changed_hooks(trainer: type = RLOOTrainer) -> list[str]:
    """A sentence for each hook that is no longer what this subclass was written against; none where all is well."""
    found = []
    for name, wanted in HOOKS.items():
        hook = getattr(trainer, name, None)
        if hook is None:
            found.append(f"{trainer.__name__}.{name} is gone")
            continue
        given, names = list(inspect.signature(hook).parameters.values()), wanted.split()
        must = [p.name for p in given[len(names) :] if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        if [p.name for p in given[: len(names)]] != names or must:
            now, was = ", ".join(p.name for p in given), ", ".join(names)
            found.append(f"{trainer.__name__}.{name} takes ({now}) and no longer ({was})")
    if getattr(trainer, "loss_is_scaled_for_ga", None) is not False:
        found.append(f"{trainer.__name__}.loss_is_scaled_for_ga is not False: the loss would be scaled twice")
    return found


class Posed:
    """The problems of a run by number, taken from their stream in order; those of the last batch are kept."""

    def __init__(self, problems: Iterator[tuple[Task, Problem]], batch: int) -> None:
        self.stream, self.batch, self.next = problems, batch, 0
        self.kept: dict[int, tuple[Task, Problem]] = {}

    def __getitem__(self, number: int) -> tuple[Task, Problem]:
        while self.next <= number:
            try:
                self.kept[self.next] = next(self.stream)
            except StopIteration:
                raise used_up(self.next % self.batch, self.batch) from None
            self.kept.pop(self.next - 2 * self.batch, None)
            self.next += 1
        return self.kept[number]


class ObjectiveTrainer(RLOOTrainer):  # type: ignore[misc]  # TRL carries no types
    """``RLOOTrainer`` that descends ``objective.policy_loss`` of a recipe and writes its metrics, round by round.

    Args:
        recipe: the run.
        policy, tokenizer: at step 0.
        problems: the tasks' stream, the same in every process.
        arguments: from ``trl_backend.arguments``. TRL's ``beta`` only says whether there is a reference.
        out: folder of the run.
        peft_config: of a new adapter; the reference is then its base.
        after: called in the main process with each round's line.
        stop: asked after every round; True in any process saves a checkpoint and ends.
    """

    def __init__(
        self,
        recipe: Recipe,
        policy: CausalLM,
        tokenizer: Any,
        problems: Iterator[tuple[Task, Problem]],
        arguments: RLOOConfig,
        out: Path,
        *,
        peft_config: Any = None,
        after: Callable[[dict[str, Any]], None] = lambda line: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.recipe, self.objective, self.out = recipe, objective_of(recipe), out
        self.policy, self.posed = policy, Posed(problems, recipe.batch)
        self.after, self.stop = after, stop
        self.referenced = arguments.beta != 0
        self.summaries = dict(MONITORS) if recipe.monitor and self.referenced else {}
        if self.objective.configuration is not None and self.objective.penalised:
            self.summaries |= estimator_summaries(self.objective.configuration.estimator)

        def task_reward(prompts: list[str], completions: list[str], problem: list[int], **_: Any) -> list[float]:
            rewards, self.unjudged = judged([self.posed[number] for number in problem], completions)
            return rewards

        super().__init__(
            model=policy.model, reward_funcs=task_reward, args=arguments, processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"problem": list(range(recipe.steps * recipe.batch))}),
            peft_config=peft_config,
        )  # fmt: skip
        self.remove_callback(PrinterCallback)
        self.add_callback(_Rounds(self))
        self._begin_round()

    def _begin_round(self) -> None:
        self.began, self.seen = time.perf_counter(), Statistics()

    def _send_telemetry(self) -> None:
        """Nothing is sent anywhere."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Nothing: a round's line is written by ``finish_round``."""

    # ------------------------------------------------------------------------------------ as the own loop has them

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Linear warm-up in rounds, the first of which already moves."""
        if self.lr_scheduler is None:
            rounds, warmup = self.recipe.minibatches, max(self.recipe.warmup, 1)
            self.lr_scheduler: Any = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer if optimizer is None else optimizer, lambda step: min(1.0, (step // rounds + 1) / warmup)
            )
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """All of them."""
        return [name for name, _ in model.named_parameters()]

    # ---------------------------------------------------------------------------------------------------- sampling

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Responses by TRL's generation, rewards by its gathering, advantages by ours: ``[groups, samples, ...]``."""
        self._begin_round()
        recipe, device = self.recipe, self.accelerator.device
        prompts = [encoded(self._tokenizer, self.posed[row["problem"]][1]) for row in inputs]
        check_fits(self.policy, max(map(len, prompts)), recipe.length)
        answers = self._generate_single_turn(prompts, None, {})
        texts = [decoded(self._tokenizer, answer) for answer in answers]
        tokens, real = pad_prompts(prompts, self._tokenizer.pad_token_id)
        responses, mask = (x.flip(1) for x in pad_prompts([a[::-1] for a in answers], self._tokenizer.pad_token_id))
        rollouts = Rollouts(
            torch.cat([tokens, responses], 1).to(device), torch.cat([real, mask], 1).to(device), tokens.shape[1],
            torch.zeros(responses.shape, device=device),
        )  # fmt: skip
        rewards = self._calculate_rewards(inputs, prompts, texts, answers)[:, 0]  # of all processes, in their order
        advantages = ADVANTAGES[recipe.advantage](rewards, recipe.group)
        first = self.accelerator.process_index * len(prompts)
        lengths = self.accelerator.gather(rollouts.mask.sum(1))
        unjudged = self.accelerator.gather(torch.tensor([self.unjudged], device=device)).sum()
        self.sampled = {
            "reward": float(rewards.mean()), "unjudged": int(unjudged), "length": float(lengths.float().mean()),
        }  # fmt: skip
        found = {
            "prompt_ids": rollouts.tokens[:, : rollouts.prompt], "prompt_mask": rollouts.real[:, : rollouts.prompt],
            "completion_ids": rollouts.responses, "completion_mask": rollouts.mask,
            "advantages": advantages[first : first + len(prompts)],
        } | self._log_probs_when_sampled(rollouts)  # fmt: skip
        return {name: x.reshape(-1, recipe.group, *x.shape[1:]) for name, x in found.items()}

    @torch.no_grad()
    def _log_probs_when_sampled(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """The behaviour's where ratios are not 1; the reference's unless its whole distributions come with the loss."""
        found, rows = {}, self.args.per_device_train_batch_size
        if not self.recipe.on_policy:
            found["behaviour"], _ = self._log_probs(self.model, rollouts, rows)
        if self.referenced and not self.summaries:
            with self._as_reference() as reference:
                found["reference"], _ = self._log_probs(reference, rollouts, rows)
        return found

    @contextmanager
    def _as_reference(self) -> Iterator[Any]:
        """The reference as TRL keeps it: a model, or the policy with its adapter off or as it was at the start."""
        if self.ref_model is not None:
            yield self.ref_model
            return
        policy = self.accelerator.unwrap_model(self.model)
        with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
            yield self.model

    # --------------------------------------------------------------------------------------------------------- loss

    def _log_probs(
        self, model: Any, rollouts: Rollouts, rows: int | None = None, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """``[B, T]`` log-probs, and entropies, by TRL's fused head: logits never exist as a whole."""

        def placed(**given: Any) -> Any:  # padding in front must not shift positions, as when sampling
            return model(position_ids=_positions(given["attention_mask"]), **given)

        log_probs, entropies, _ = self._get_per_token_logps_and_entropies(
            placed, rollouts.tokens, rollouts.real.long(), rollouts.mask.shape[1], rows, compute_entropy=entropy
        )
        return torch.where(rollouts.mask, log_probs, 0.0), entropies

    def _logits(self, model: Any, rollouts: Rollouts) -> Tensor:
        """``[B, T, V]`` next-token logits for the responses."""
        length = rollouts.mask.shape[1]
        with self.accelerator.autocast():
            logits: Tensor = model(
                input_ids=rollouts.tokens, attention_mask=rollouts.real.long(), position_ids=_positions(rollouts.real),
                logits_to_keep=length + 1, use_cache=False,
            ).logits  # fmt: skip
        return logits[:, -length - 1 : -1]

    def _terms(self, model: Any, rollouts: Rollouts, reference: Tensor | None) -> dict[str, Tensor]:
        """What ``policy_loss`` needs; whole distributions only for full-vocabulary estimators and monitors."""
        if self.summaries:
            with torch.no_grad(), self._as_reference() as other:
                theirs = self._logits(other, rollouts)
            return token_terms(
                self._logits(model, rollouts), _same, rollouts.responses, rollouts.mask, reference=(theirs, _same),
                summaries=self.summaries, temperature=self.recipe.temperature,
            )  # fmt: skip
        log_probs, entropies = self._log_probs(model, rollouts, entropy=self.recipe.monitor)
        found = {"log_probs": log_probs}
        if entropies is not None:
            found["entropy"] = torch.where(rollouts.mask, entropies.detach(), 0.0)
        return found if reference is None else found | {"reference": reference}

    def _compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Mean over this process's micro-batch; processes and accumulation steps are averaged over outside."""
        rows = {name: value.flatten(0, 1) for name, value in inputs.items()}
        tokens = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
        real = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
        behaviour = rows.get("behaviour")
        rollouts = Rollouts(tokens, real, rows["prompt_ids"].shape[1], behaviour)  # type: ignore[arg-type]
        terms = self._terms(model, rollouts, rows.get("reference"))
        loss, counts = policy_loss(self.objective, terms, rollouts.mask, rows["advantages"], behaviour)
        if not self._everywhere(bool(torch.isfinite(loss.detach()))):
            self._stop("the loss")
        parts = self.args.gradient_accumulation_steps * self.accelerator.num_processes
        self.seen.add(terms, rollouts.mask, counts, self.objective.configuration, float(loss.detach()) / parts)
        return loss

    def _everywhere(self, fine: bool) -> bool:
        """Whether it is so in every process."""
        flag = torch.tensor([float(fine)], device=self.accelerator.device)
        return bool(self.accelerator.gather(flag).min() == 1)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        norm: float | None = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and not math.isfinite(norm):  # of all processes' mean gradient, the same in each
            self._stop("the gradient")
        self.seen.norms.append(math.nan if norm is None else float(norm))
        self.rate = self._get_learning_rate()
        return norm

    def _stop(self, what: str) -> None:
        done = self.state.global_step // self.recipe.minibatches
        folder = self.out / f"stopped-{done}"
        self.save_model(str(folder), _internal_call=True)
        raise Stopped(
            f"{what} is not finite in round {done + 1}: training stopped; the weights before that step are in {folder}"
        )

    # ------------------------------------------------------------------------------------------------------- rounds

    def finish_round(self, control: Any) -> None:
        """After the last optimiser step of a round: its line, evaluations, and what the trainer shall do next."""
        step, rest = divmod(self.state.global_step, self.recipe.minibatches)
        if rest:
            return
        line = self._line(step)
        done, asked = step == self.recipe.steps, not self._everywhere(not self.stop())
        if self.accelerator.is_main_process:
            checkpoints.append_line(self.out / "metrics.jsonl", line)
            self.after(line)
        if every(self.recipe.evaluate_every, step) or done:
            self._evaluate_tasks(step)
        control.should_save = every(self.recipe.checkpoint_every, step) or done or asked
        control.should_training_stop = control.should_training_stop or asked

    def _line(self, step: int) -> dict[str, Any]:
        """The round's metrics over all processes, under the own loop's names."""
        self.seen.sequences = {name: [x.cpu() for x in values] for name, values in self.seen.sequences.items()}
        everywhere = Statistics()
        for part in gather_object([self.seen]):
            everywhere.losses += part.losses
            everywhere.counts += part.counts
            for name, values in part.sequences.items():
                everywhere.sequences.setdefault(name, []).extend(values)
        everywhere.norms = self.seen.norms
        return {
            "step": step, "staleness": 0, **self.sampled, **everywhere.summary(), "learning_rate": self.rate,
            "seconds": time.perf_counter() - self.began,
        }  # fmt: skip

    def _evaluate_tasks(self, step: int) -> None:
        """Scores by the main process; a sharded policy is in no single process, and left to ``klgrad llm evaluate``."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return
        if self.accelerator.is_main_process:
            policy = self.accelerator.unwrap_model(self.model)
            policy = policy.get_base_model() if is_peft_model(policy) else policy
            policy.eval()
            autocast = DTYPES[self.recipe.dtype] if self.recipe.dtype != "float32" else None
            run = Run(self.recipe, CausalLM(policy, autocast), None, self._tokenizer, self.optimizer, iter(()))
            checkpoints.append_line(self.out / "evaluations.jsonl", {"step": step, **evaluations(run)})
            policy.train()
        self.accelerator.wait_for_everyone()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """``step-N`` as the own loop names it, which appears when it is whole; without TRL's model card."""
        Trainer._save_checkpoint(self, model, trial)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            written = self.out / f"checkpoint-{self.state.global_step}"
            (written / "recipe.json").write_text(json.dumps(self.recipe.to_dict(), indent=1) + "\n")
            folder = self.out / f"step-{self.state.global_step // self.recipe.minibatches}"
            shutil.rmtree(folder, ignore_errors=True)
            written.rename(folder)
        self.accelerator.wait_for_everyone()


class _Rounds(TrainerCallback):  # type: ignore[misc]  # transformers is skipped by the type checker
    """Tells the trainer that an optimiser step is over."""

    def __init__(self, trainer: ObjectiveTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.finish_round(control)


def _positions(mask: Tensor) -> Tensor:
    """``[B, L]`` place of each real token among the real ones."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def _same(logits: Tensor) -> Tensor:
    """The head of a model whose features are its logits."""
    return logits
