"""`klgrad llm probe`: Figure 1 on a language model."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import click

from klgrad.commands.display import Progress, dump, number, table
from klgrad.commands.folders import held, present, told
from klgrad.commands.llm.options import MODEL, device_option, quiet_option, seed_option
from klgrad.commands.options import Lengths, config_option, configurations_of, json_option, out_option
from klgrad.files import legible

_KINDS = ("png", "pdf", "csv", "json")


@click.command(short_help="Figure 1 on a language model.")
@click.option("--policy", default=MODEL, show_default=True, metavar="MODEL", help="Folder or hub name.")
@click.option(
    "--reference", metavar="MODEL",
    help="Folder or hub name. Default: the base of a LoRA adapter; else the policy with noise on its weights.",
)  # fmt: skip
@click.option(
    "--perturb", type=click.FloatRange(min=0, min_open=True), show_default="0.1",
    help="That noise, in standard deviations of each weight.",
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
    policy: str, reference: str | None, perturb: float | None, task: str, prompts: int, lengths: list[int],
    samples: int, trials: int, parameters: str, dtype: str, configs: tuple[str, ...], seed: int, device: str, out: Path,
    as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Bias and variance of each configuration's KL gradient on a language model, by response length.

    Bias is measured with each configuration's own token summed out over the vocabulary (same expectation, without the
    tail that hides it), variance as it would be trained. Writes probe.png, .pdf, .csv and .json to the --out folder.
    """
    from klgrad.analysis import results
    from klgrad.figures import figure1, save_figure
    from klgrad.harness import models
    from klgrad.harness import probe as engine
    from klgrad.harness.tasks import encoded, take
    from klgrad.harness.tasks import task as named

    if reference and perturb is not None:
        raise ValueError(f"--perturb {perturb:g} makes a reference of the policy, and --reference names one: give one")
    configurations = configurations_of(configs, [], quiet)
    posed = take(named(task).problems("test", seed), prompts)
    there = present(out)
    with held(out):
        model, tokenizer = models.load(policy, dtype=dtype, device=device)
        other: models.LanguageModel
        if reference:
            other = models.load_reference(reference, model, tokenizer, dtype=dtype, device=device)
            origin = reference
        elif model.adapted and perturb is None:
            other, origin = models.own_reference(model), "the adapter's base"
        elif model.adapted:
            raise ValueError(
                f"--perturb {perturb:g}: {policy} is a LoRA adapter, whose reference is its base; leave it out"
            )
        else:
            noise = 0.1 if perturb is None else perturb
            other, origin = models.perturbed(model, noise, seed), f"the policy with noise of {noise:g}"
        setting = engine.Setting(
            model, other, [encoded(tokenizer, problem) for problem in posed], tokenizer.eos_token_id,
            pad=tokenizer.pad_token_id, lengths=lengths, samples=samples, parameters=parameters,
        )  # fmt: skip
        name = legible(Path(policy).name)
        with Progress(name, quiet or as_json) as progress:
            frame = engine.probe(setting, configurations, trials=trials, seed=seed, name=name, progress=progress)
        save_figure(figure1(frame), out / "probe")
        request = {
            "policy": policy, "reference": origin, "task": task,
            "prompts": prompts, "samples": samples, "trials": trials, "lengths": lengths, "parameters": parameters,
            "dtype": dtype, "configurations": [str(c) for c in configurations], "seed": seed, "device": device,
            "peak_memory_mib": _peak(device),
        }  # fmt: skip
        results.save(frame, results.manifest("klgrad llm probe", [], request, torch=True), out / "probe")
    if as_json:
        dump(results.records(frame))
    elif not quiet:
        _probe_table(frame)
        files = told([out / f"probe.{kind}" for kind in _KINDS], there)
        click.echo(f"peak memory {_peak(device):,} MiB; {files}")


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
