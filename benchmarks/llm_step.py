"""CPU seconds of a training step of klgrad's own loop and of TRL's stock RLOOTrainer: same model, batch and lengths.

    klgrad llm pretrain --out out/tiny && pip install trl
    python benchmarks/llm_step.py out/tiny [PROMPTS RESPONSES [SHOTS]]

One thread, CPU; 16 prompts x 5 responses (or as given) of at most 8 tokens, RLOO with k1 in the reward, AdamW, one
update a batch, gradients clipped to norm 1, a line of metrics a step on both sides. A prompt is a countdown problem of
some 10 tokens, with SHOTS solved ones before it (at most 3, of 15 tokens each). klgrad runs with its exact
full-vocabulary monitors and without. Sides take turns within a round, and what is compared is CPU time, so that other
load on the machine counts little. Prints one JSON object: for each side the median of the rounds' means over steps,
and the median, least and greatest of TRL's time over klgrad's within a round.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path

import torch

STEPS, ROUNDS = 8, 3


class Countdown:
    """Countdown with solved problems before each; their number comes with the environment, as the class by its name."""

    def __init__(self) -> None:
        from klgrad.harness.tasks import task

        self.task, self.shots = task("countdown"), int(os.environ["SHOTS"])

    def problems(self, split: str, seed: int):
        """One problem of every few; the others are its examples."""
        from klgrad.harness.tasks import Problem

        stream = self.task.problems(split, seed)
        while True:
            *solved, posed = islice(stream, self.shots + 1)
            yield Problem("".join(p.prompt + p.answer for p in solved) + posed.prompt, posed.answer, posed.data)

    def reward(self, problem, response: str) -> float:
        """Countdown's own."""
        return self.task.reward(problem, response)


def own(model: str, prompts: int, responses: int, *, monitor: bool) -> float:
    """Mean CPU seconds of a round, after one to warm up."""
    from klgrad.harness.recipe import load
    from klgrad.harness.train import start, train_round

    changes = [
        f'tasks=["{__file__}:Countdown"]',
        f"batch={prompts}",
        f"group={responses}",
        f"kl=k1-in-reward+loo={responses}",
        "beta=0.05",
    ]
    run = start(load("tiny-rloo", [f"model={model}", *changes, f"monitor={str(monitor).lower()}"]))
    with tempfile.TemporaryDirectory() as folder:
        train_round(run, Path(folder))
        began = time.process_time()
        for _ in range(STEPS):
            train_round(run, Path(folder))
    return (time.process_time() - began) / STEPS


def trl(model: str, prompts: int, responses: int) -> float:
    """Mean CPU seconds between the ends of steps, after the first."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import RLOOConfig, RLOOTrainer

    from klgrad.harness.models import load

    countdown = Countdown()
    problems = {p.prompt: p for p in islice(countdown.problems("train", 0), prompts * (STEPS + 2))}
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
            output_dir=folder, per_device_train_batch_size=prompts * responses, num_generations=responses,
            max_completion_length=8, beta=0.05, learning_rate=2e-4, max_steps=STEPS + 1, use_cpu=True, bf16=False,
            report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1, gradient_checkpointing=False,
        )  # fmt: skip
        RLOOTrainer(
            model=loaded.model, reward_funcs=reward, args=config, processing_class=tokenizer, callbacks=[Clock()],
            train_dataset=Dataset.from_dict({"prompt": list(problems)}),
        ).train()  # fmt: skip
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def main(model: str, prompts: str = "16", responses: str = "5", shots: str = "0") -> None:
    torch.set_num_threads(1)
    os.environ["SHOTS"] = shots
    if not Path(model).is_dir():
        sys.exit(f"{model} is no folder: make it with  klgrad llm pretrain --out {model}")
    shape = int(prompts), int(responses)
    found: dict[str, list[float]] = {"monitored": [], "bare": [], "trl": []}
    for _ in range(ROUNDS):
        found["monitored"].append(own(model, *shape, monitor=True))
        with redirect_stdout(sys.stderr):  # where TRL's lines of metrics go
            found["trl"].append(trl(model, *shape))
        found["bare"].append(own(model, *shape, monitor=False))
    ratios = {
        side: sorted(b / a for a, b in zip(found[side], found["trl"], strict=True)) for side in ("monitored", "bare")
    }
    print(json.dumps({
        "prompts": shape[0], "responses": shape[1], "shots": int(shots),
        "seconds": {side: statistics.median(times) for side, times in found.items()},
        "times": {side: [statistics.median(r), r[0], r[-1]] for side, r in ratios.items()},
        "all": found,
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
