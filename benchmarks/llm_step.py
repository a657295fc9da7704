"""CPU seconds of a training step of klgrad's own loop and of TRL's stock RLOOTrainer: same model, batch and lengths.

    klgrad llm pretrain --out out/tiny && pip install trl && python benchmarks/llm_step.py out/tiny

One thread, CPU; 16 prompts x 5 responses of at most 8 tokens, RLOO with k1 in the reward. klgrad's time holds the exact
full-vocabulary monitors, TRL's its own logging. CPU time on one thread, so that other load on the machine counts
little; the two are measured in turn. Prints one JSON object: the median over repetitions of the mean over steps.
"""

import json
import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch

STEPS, ROUNDS = 8, 3


def own(model: str) -> float:
    """Mean CPU seconds of a round, after one to warm up."""
    from klgrad.harness.recipe import load
    from klgrad.harness.train import start, train_round

    run = start(load("tiny-rloo", [f"model={model}", "beta=0.05"]))
    with tempfile.TemporaryDirectory() as folder:
        train_round(run, Path(folder))
        began = time.process_time()
        for _ in range(STEPS):
            train_round(run, Path(folder))
    return (time.process_time() - began) / STEPS


def trl(model: str) -> float:
    """Mean CPU seconds between the ends of steps, after the first."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import RLOOConfig, RLOOTrainer

    from klgrad.harness.models import load
    from klgrad.harness.tasks import task

    countdown = task("countdown")
    problems = {p.prompt: p for p in islice(countdown.problems("train", 0), 16 * (STEPS + 2))}
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.process_time())

    def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        return [countdown.reward(problems[p], c) for p, c in zip(prompts, completions, strict=True)]

    loaded, tokenizer = load(model)
    tokenizer.padding_side = "left"
    with tempfile.TemporaryDirectory() as folder:
        config = RLOOConfig(
            output_dir=folder, per_device_train_batch_size=80, num_generations=5, max_completion_length=8, beta=0.05,
            learning_rate=2e-4, max_steps=STEPS + 1, use_cpu=True, bf16=False, report_to=[], save_strategy="no",
            disable_tqdm=True, logging_steps=1, gradient_checkpointing=False,
        )  # fmt: skip
        RLOOTrainer(
            model=loaded.model, reward_funcs=reward, args=config, processing_class=tokenizer, callbacks=[Clock()],
            train_dataset=Dataset.from_dict({"prompt": list(problems)}),
        ).train()  # fmt: skip
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def main(model: str) -> None:
    torch.set_num_threads(1)
    if not Path(model).is_dir():
        sys.exit(f"{model} is no folder: make it with  klgrad llm pretrain --out {model}")
    ours, theirs = zip(*((own(model), trl(model)) for _ in range(ROUNDS)), strict=True)
    a, b = statistics.median(ours), statistics.median(theirs)
    print(json.dumps({"klgrad_s": a, "trl_s": b, "times": b / a, "klgrad_all": ours, "trl_all": theirs}))


if __name__ == "__main__":
    main(*sys.argv[1:])
