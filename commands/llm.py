"""`klgrad llm`: the questions asked of a language model."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from klgrad.commands.display import Progress, dump, number, table
from klgrad.commands.options import Lengths, config_option, configurations_of, json_option, out_option

if TYPE_CHECKING:
    from klgrad.harness.recipe import Recipe

MODEL = "out/tiny"

seed_option = click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Same seed, same run."
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress or summary.")
set_option = click.option(
    "--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key of the recipe; may be repeated."
)
device_option = click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")


@click.group(short_help="The same questions asked of a language model.")
def llm() -> None:
    """Bias and variance of KL gradients on a real causal LM, and what training with each of them does.

    `pretrain` makes the model `tiny` in about a minute, so that everything runs without a download; any transformers
    causal LM is taken by folder or hub name. Needs the extra: pip install 'klgrad[llm]'.
    """


@llm.command(short_help="Make tiny: 450,000 parameters taught small tasks.")
@click.option("--task", "tasks", multiple=True, default=("countdown", "sort"), show_default=True, help="What to teach.")
@click.option("--steps", type=click.IntRange(min=1), default=800, show_default=True, help="Optimiser steps.")
@click.option("--batch", type=click.IntRange(min=1), default=64, show_default=True, help="Answers a step.")
@seed_option
@click.option("--out", type=click.Path(path_type=Path), default=Path(MODEL), show_default=True, help="Folder to write.")
@quiet_option
def pretrain(tasks: tuple[str, ...], steps: int, batch: int, seed: int, out: Path, quiet: bool) -> None:
    """Train a Qwen2 of 450,000 parameters from scratch on answers to small tasks, with a character tokenizer."""
    from klgrad.analysis.results import writable_folder
    from klgrad.harness import models
    from klgrad.harness.pretrain import pretrain as teach

    writable_folder(out.parent)
    model, tokenizer = models.tiny(seed)
    with Progress("pretraining", quiet) as progress:
        found = teach(model, tokenizer, tasks, steps=steps, batch=batch, seed=seed, progress=progress)
    models.save(model, tokenizer, out)
    if not quiet:
        scores = ", ".join(f"{name} {100 * found[name]:.0f} %" for name in tasks)
        click.echo(f"{models.parameter_count(model):,} parameters; right when sampled: {scores}\nwrote {out}")


@llm.command(short_help="Figure 1 on a language model.")
@click.option("--policy", default=MODEL, show_default=True, metavar="MODEL", help="Folder or hub name.")
@click.option("--reference", metavar="MODEL", help="Folder or hub name. Default: the policy with noise on its weights.")
@click.option(
    "--perturb", type=click.FloatRange(min=0, min_open=True), default=0.1, show_default=True,
    help="That noise, in standard deviations of each weight; without --reference only.",
)  # fmt: skip
@click.option("--task", default="countdown", show_default=True, help="Where prompts come from.")
@click.option(
    "--prompts", type=click.IntRange(min=1), default=8, show_default=True, help="How many, the same each trial."
)
@click.option("--lengths", type=Lengths(), default="2,4,6", show_default=True, help="Response lengths (tokens).")
@click.option("--samples", type=int, default=8, show_default=True, help="Responses a prompt and trial.")
@click.option("--trials", type=int, default=32, show_default=True, help="Gradient estimates.")
@click.option(
    "--parameters", default="all", show_default=True, help="all, last-block, lora, or a regular expression of names."
)
@click.option(
    "--dtype", default="float32", show_default=True, help="Of the forward pass; statistics are float32 or better."
)
@config_option
@seed_option
@device_option
@out_option
@json_option
@quiet_option
def probe(
    policy: str, reference: str | None, perturb: float, task: str, prompts: int, lengths: list[int], samples: int,
    trials: int, parameters: str, dtype: str, configs: tuple[str, ...], seed: int, device: str, out: Path,
    as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Bias and variance of each configuration's KL gradient on a language model, by response length.

    Bias is measured with each configuration's own token summed out over the vocabulary (same expectation, without the
    tail that hides it), variance as it would be trained. Writes probe.png, .pdf, .csv and .json to the --out folder.
    """
    from klgrad.analysis import results
    from klgrad.harness import models
    from klgrad.harness import probe as engine
    from klgrad.harness.tasks import encoded, take
    from klgrad.harness.tasks import task as named

    configurations = configurations_of(configs, [], quiet)
    posed = take(named(task).problems("test", seed), prompts)
    results.writable_folder(out)
    model, tokenizer = models.load(policy, dtype=dtype, device=device)
    other = (
        models.load(reference, dtype=dtype, device=device)[0] if reference else models.perturbed(model, perturb, seed)
    )
    setting = engine.Setting(
        model, other, [encoded(tokenizer, problem) for problem in posed], tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id, lengths=lengths, samples=samples, parameters=parameters,
    )  # fmt: skip
    name = Path(policy).name
    with Progress(name, quiet or as_json) as progress:
        frame = engine.probe(setting, configurations, trials=trials, seed=seed, name=name, progress=progress)
    from klgrad.figures import figure1, save_figure

    save_figure(figure1(frame), out / "probe")
    request = {
        "policy": policy, "reference": reference or f"the policy with noise of {perturb:g}", "task": task,
        "prompts": prompts, "samples": samples, "trials": trials, "lengths": lengths, "parameters": parameters,
        "dtype": dtype, "configurations": [str(c) for c in configurations], "seed": seed, "device": device,
        "peak_memory_mib": _peak(device),
    }  # fmt: skip
    results.save(frame, results.manifest("klgrad llm probe", [], request), out / "probe")
    if as_json:
        dump(results.records(frame))
    elif not quiet:
        _probe_table(frame)
        click.echo(f"peak memory {_peak(device):,} MiB; wrote {', '.join(str(out / f'probe.{k}') for k in _KINDS)}")


_KINDS = ("png", "pdf", "csv", "json")


def _probe_table(frame: Any) -> None:
    longest = frame["length"].max()
    rows = [
        [
            row.configuration, f"{number(row.relative_bias)} +- {number(row.relative_bias_error, 2)}",
            number(row.scale), number(row.cosine), number(row.variance),
        ]
        for row in frame[frame["length"] == longest].itertuples()
    ]  # fmt: skip
    head = frame.iloc[-1]
    title = (
        f"{head['preset']}, T = {longest}: KL {number(head['kl'])} nats, true gradient {number(head['gradient_norm'])}"
    )
    table(title, ["configuration", "relative bias", "scale", "cosine", "N x variance"], rows)


def _peak(device: str) -> int:
    """Most memory used so far, MiB: the device's, or this process's."""
    if device != "cpu":
        import torch

        return int(torch.cuda.max_memory_allocated() >> 20)
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(used >> (20 if platform.system() == "Darwin" else 10))


# ------------------------------------------------------------------------------------------------------- training


@llm.command(short_help="RL fine-tuning by a recipe.")
@click.argument("recipe")
@set_option
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in the --out folder.")
@click.option("--tensorboard", is_flag=True, help="Also write TensorBoard events.")
@out_option
@quiet_option
@click.pass_context
def train(
    ctx: click.Context, recipe: str, changes: tuple[str, ...], resume: bool, tensorboard: bool, out: Path, quiet: bool
) -> None:
    """Fine-tune with verifiable rewards and a KL by RECIPE, a TOML file or the name of one that comes with klgrad.

    Writes metrics.jsonl, evaluations.jsonl and checkpoints to the --out folder. Interrupt once and it stops after the
    round with a checkpoint; --resume goes on exactly from there.

    \b
    klgrad llm train tiny-rloo --set model=out/tiny --set beta=0.1 --out out/run
    klgrad llm recipes
    """
    from klgrad.harness.train import Stopped
    from klgrad.harness.train import train as run

    given = _recipe(recipe, changes)
    with _patience() as stop, Progress(recipe, quiet) as progress:
        try:
            lines = run(given, out, resume=resume, tensorboard=tensorboard, progress=progress, stop=stop)
        except Stopped as stopped:
            raise click.ClickException(str(stopped)) from None
    if lines and lines[-1]["step"] < given.steps:
        raise KeyboardInterrupt(
            f": round {lines[-1]['step']} is saved in {out}; the same command with --resume goes on"
        )
    if not quiet and lines:
        last = lines[-1]
        parts = [f"{name} {number(last[name])}" for name in ("reward", "kl", "entropy") if last.get(name) is not None]
        click.echo(
            f"round {last['step']}: {', '.join(parts)}\nwrote {out / 'metrics.jsonl'} and {out}/step-{last['step']}"
        )


class _patience:
    """The first interrupt lets the round end and be saved; the second stops at once."""

    def __enter__(self) -> Any:
        import signal

        self.asked = False
        self.before = signal.signal(signal.SIGINT, self._ask)
        return lambda: self.asked

    def _ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        click.echo("stopping after this round; interrupt again to stop at once", err=True)

    def __exit__(self, *_: object) -> None:
        import signal

        signal.signal(signal.SIGINT, self.before)


def _recipe(name: str, changes: tuple[str, ...]) -> Recipe:
    """The recipe; ``tiny`` as a model stands for where `pretrain` writes it."""
    from klgrad.harness.recipe import changed, load

    given = load(name, changes)
    return changed(given, [f"model={MODEL}"]) if given.model == "tiny" else given


@llm.command(short_help="What a recipe needs.")
@click.argument("recipe")
@set_option
@click.option("--measure", is_flag=True, help="Time a few rounds on this machine.")
@json_option
def plan(recipe: str, changes: tuple[str, ...], measure: bool, as_json: bool) -> None:
    """Memory and tokens of RECIPE by arithmetic and, with --measure, hours from a few rounds on this machine."""
    from klgrad.harness import plan as engine

    given = _recipe(recipe, changes)
    parameters, vocabulary = engine.parameters_of(given)
    found = engine.needs(given, parameters, vocabulary)
    found["total_gib"] = engine.total_gib(found)
    if measure:
        found |= engine.measured(given)
    if as_json:
        dump(found)
        return
    rows = [[name.replace("_", " ").replace(" gib", " (GiB)"), _plain(value)] for name, value in found.items()]
    table(recipe, ["", ""], rows)
    click.echo("activations and the key-value cache come on top" + ("" if measure else "; --measure times it here"))


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else number(value, 3)


@llm.command(short_help="The recipes that come with klgrad.")
@json_option
def recipes(as_json: bool) -> None:
    """The recipes that come with klgrad: the paper's runs, and their twins at the size of tiny."""
    from klgrad.harness import recipe

    found = {name: recipe.load(name) for name in recipe.names()}
    if as_json:
        dump({name: each.to_dict() for name, each in found.items()})
        return
    rows = [[name, each.model, each.kl or "no KL", f"{each.beta:g}", each.note] for name, each in found.items()]
    table("", ["recipe", "model", "KL", "beta", ""], rows, left=5)


@llm.command(short_help="Scores, KL and entropy of checkpoints.")
@click.argument("models", nargs=-1, required=True)
@click.option("--reference", metavar="MODEL", help="Also KL, forward KL and entropy against this model.")
@click.option(
    "--task", "tasks", multiple=True, default=("countdown", "sort"), show_default=True, help="Where prompts come from."
)
@click.option("--problems", type=click.IntRange(min=1), default=200, show_default=True, help="Test problems a task.")
@click.option(
    "--samples", type=click.IntRange(min=1), default=4, show_default=True, help="Responses a problem (mean@k)."
)
@click.option("--length", type=click.IntRange(min=1), default=12, show_default=True, help="Most response tokens.")
@seed_option
@device_option
@json_option
def evaluate(
    models: tuple[str, ...], reference: str | None, tasks: tuple[str, ...], problems: int, samples: int, length: int,
    seed: int, device: str, as_json: bool,
) -> None:  # fmt: skip
    """Scores of MODELS on test problems: mean@k with its standard error and pass@1 (the likeliest response)."""
    from klgrad.harness import evaluate as engine
    from klgrad.harness.models import load

    other = load(reference, device=device)[0] if reference else None
    rows = []
    for path in models:
        model, tokenizer = load(path, device=device)
        for name in tasks:
            options: dict[str, Any] = {
                "problems": problems,
                "samples": samples,
                "length": length,
                "seed": seed,
                "device": device,
            }
            row = {"model": path, "task": name, **vars(engine.evaluate(model, tokenizer, name, **options))}
            if other is not None:
                row |= engine.divergences(model, other, tokenizer, name, **options)
            rows.append(row)
    if as_json:
        dump(rows)
        return
    extra = ("kl", "forward_kl", "entropy") if other is not None else ()
    cells = [
        [
            r["model"],
            r["task"],
            f"{r['mean']:.3f} +- {r['error']:.3f}",
            f"{r['greedy']:.3f}",
            *(number(r[k]) for k in extra),
        ]
        for r in rows
    ]
    head = ["model", "task", f"mean@{samples}", "pass@1", *(name.replace("_", " ") for name in extra)]
    table(f"{problems} problems a task; nats", head, cells, left=2)


@llm.command(short_help="The paper's grid on a small model.")
@click.option("--recipe", default="tiny-rloo", show_default=True, help="What every run has in common.")
@click.option(
    "--kl",
    "kls",
    multiple=True,
    metavar="NAME",
    help="'no KL' or a configuration; may be repeated. Default: the paper's.",
)
@click.option(
    "--beta", "betas", type=float, multiple=True, default=(0.3, 1.0), show_default=True, help="May be repeated."
)
@click.option("--seeds", type=int, default=3, show_default=True, help="Runs of each.")
@click.option(
    "--staleness", "stale", type=int, multiple=True, default=(0, 10), show_default=True, help="May be repeated."
)
@click.option(
    "--processes", type=click.IntRange(min=1), default=2, show_default=True, help="Runs at once, a thread each."
)
@set_option
@out_option
@quiet_option
def study(
    recipe: str, kls: tuple[str, ...], betas: tuple[float, ...], seeds: int, stale: tuple[int, ...], processes: int,
    changes: tuple[str, ...], out: Path, quiet: bool,
) -> None:  # fmt: skip
    """Train with every KL recipe, beta, seed and staleness, and draw reward, KL, scores and the reward-KL frontier.

    Runs are kept in the --out folder and what is finished is not run again; an interrupted study goes on where it
    was. Writes study.csv (a row a run), study.json (means over seeds, with what was asked) and a figure for each
    staleness.
    """
    import json

    from klgrad.analysis import results
    from klgrad.figures import save_figure
    from klgrad.figures import study as draw
    from klgrad.files import write_whole
    from klgrad.harness import study as engine

    base = _recipe(recipe, changes)
    cells = engine.grid(kls or engine.KLS, betas, seeds, stale)
    runs = results.writable_folder(out) / "runs"
    with Progress(f"{len(cells)} runs", quiet) as progress:
        try:
            engine.run(cells, base, runs, processes=processes, progress=progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f": the same command goes on from {runs}") from None
    final = engine.final(cells, base, runs)
    means, curves = engine.summary(final), engine.curves(cells, runs)
    write_whole(out / "study.csv", final.to_csv(index=False, lineterminator="\n").encode())
    request = {
        "recipe": base.to_dict(),
        "kls": list(kls or engine.KLS),
        "betas": betas,
        "seeds": seeds,
        "staleness": stale,
    }
    content = {"manifest": results.manifest("klgrad llm study", [], request), "rows": results.records(means)}
    write_whole(out / "study.json", (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    for value in stale:
        figure = draw(curves[curves["staleness"] == value], means[means["staleness"] == value])
        save_figure(figure, out / f"study-staleness-{value}")
    if not quiet:
        _study_table(means)
        click.echo(f"wrote {out / 'study.csv'}, {out / 'study.json'} and study-staleness-*.png and .pdf")


def _study_table(means: Any) -> None:
    def cell(row: dict[str, Any], name: str) -> str:
        return f"{number(row[name], 3)} +- {number(row[f'{name}_error'], 2)}"

    rows = [
        [row["configuration"], f"{row['beta']:g}", str(row["staleness"]), str(row["seeds"]), str(row["stopped"])]
        + [cell(row, name) for name in ("reward", "kl", "in_domain", "out_of_domain")]
        for row in means.to_dict("records")
    ]
    head = ["KL", "beta", "staleness", "seeds", "stopped", "reward", "KL (nats)", "in-domain", "out-of-domain"]
    table("means over seeds with standard errors; reward and KL over the last fifth of the rounds", head, rows)
