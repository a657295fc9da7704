"""`klgrad llm`: the questions asked of a language model, a module for each one or two commands."""

from __future__ import annotations

import click

from klgrad.commands.groups import Suggesting
from klgrad.commands.llm.fetch import fetch
from klgrad.commands.llm.models import evaluate, pretrain
from klgrad.commands.llm.probe import probe
from klgrad.commands.llm.recipes import plan, recipes
from klgrad.commands.llm.study import study
from klgrad.commands.llm.train import train


@click.group(cls=Suggesting, short_help="The same questions asked of a language model.")
def llm() -> None:
    """Bias and variance of KL gradients on a real causal LM, and what training with each of them does.

    `pretrain` makes the model `tiny` in about a minute, so that everything runs without a download; `fetch` gets a
    pretrained one of 135M. Any transformers causal LM is taken by folder or hub name, a LoRA adapter by folder.
    Needs the extra: pip install 'klgrad[llm]'.
    """


for _command in (pretrain, fetch, probe, train, plan, recipes, evaluate, study):
    llm.add_command(_command)
