"""The state of a run, saved so that it can go on exactly, and its lines of metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from klgrad.files import whole_folder, write_whole
from klgrad.harness.models import CausalLM, disk_errors, load
from klgrad.harness.recipe import Recipe
from klgrad.harness.rollouts import Rollouts
from klgrad.harness.state import Experience, Run

STATE = "state.pt"  # what only a checkpoint of the own loop holds


def save(run: Run, out: Path, *, name: str = "") -> Path:
    """Write ``out/step-N``: the model and tokenizer as transformers reads them, and the rest of the state.

    Raises:
        OSError: when the disk refuses; nothing is then left of it.
    """
    folder = out / (name or f"step-{run.step}")
    with whole_folder(folder) as fresh, disk_errors():
        run.policy.model.save_pretrained(fresh)
        run.tokenizer.save_pretrained(fresh)
        (fresh / "recipe.json").write_text(json.dumps(run.recipe.to_dict(), indent=1) + "\n")
        reference = None
        if isinstance(run.reference, CausalLM) and run.recipe.reset_every:
            reference = run.reference.state_dict()
        state = {
            "step": run.step, "drawn": run.drawn, "optimizer": run.optimizer.state_dict(), "reference": reference,
            "queue": [(vars(e.rollouts), e.rewards, e.version, e.unjudged) for e in run.queue],
        }  # fmt: skip
        torch.save(state, fresh / STATE)
    return folder


def latest(out: Path, state: str = STATE) -> Path | None:
    """The checkpoint of the most rounds, if there is one.

    Raises:
        ValueError: when it was written by the other backend, whose state is another file.
    """
    found = [path for path in out.glob("step-*") if path.name[5:].isdigit()]
    folder = max(found, key=lambda path: int(path.name[5:]), default=None)
    if folder is not None and not (folder / state).is_file():
        raise ValueError(f"{folder} lacks {state}: go on with the backend that wrote it, or remove it")
    return folder


def check_recipe(folder: Path, recipe: Recipe) -> None:
    """A run goes on with the recipe it began with; only ``steps`` and how often things are written may differ.

    Raises:
        ValueError: for a checkpoint of another recipe.
    """
    then, now = json.loads((folder / "recipe.json").read_text()), json.loads(json.dumps(recipe.to_dict()))
    free = ("steps", "checkpoint_every", "evaluate_every", "device", "source", "note")
    other = [key for key in now if key not in free and then.get(key) != now[key]]
    if other:
        was = ", ".join(f"{key} = {then.get(key)!r}" for key in other)
        raise ValueError(f"{folder} was trained with {was}: resume with the same recipe, or give another --out")


def restore(run: Run, out: Path) -> None:
    """Put the last checkpoint of ``out`` into a run at step 0; nothing without one.

    Raises:
        ValueError: for a checkpoint of another recipe.
    """
    folder = latest(out)
    if folder is None:
        return
    check_recipe(folder, run.recipe)
    try:
        state = torch.load(folder / STATE, map_location=run.recipe.device, weights_only=True)
    except Exception as error:
        raise ValueError(f"{folder / STATE} cannot be read ({error}): remove that checkpoint") from None
    saved, _ = load(str(folder), device=run.recipe.device)
    run.policy.model.load_state_dict(saved.model.state_dict())
    run.optimizer.load_state_dict(state["optimizer"])
    if state["reference"] is not None and isinstance(run.reference, CausalLM):
        run.reference.load_state_dict(state["reference"])
    run.step, run.drawn = state["step"], state["drawn"]
    run.queue = [Experience(Rollouts(**rollouts), *rest) for rollouts, *rest in state["queue"]]


def append_line(path: Path, line: dict[str, Any]) -> None:
    """One JSON line at the end of a file; not-a-number becomes null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(plain(line)) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file; none where there is no file."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # a line that was cut off when the disk was full or the machine stopped
            break
    return found


def truncate(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the lines after ``step``, and one that was cut off; returns those that stay."""
    lines = [line for line in read_lines(path) if line["step"] <= step]
    if path.is_file():
        write_whole(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return lines
