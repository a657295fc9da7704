"""Causal language models behind one small face: features, head, vocabulary; and ``tiny``, which needs no download.

A model gives *features* for each position and a *head* that turns features into next-token logits, so that logits
over the vocabulary exist only for a chunk at a time. transformers is imported where it is used.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from klgrad.files import whole_folder
from klgrad.harness import adapters, hub
from klgrad.synth.devices import absence
from klgrad.synth.estimators import unknown

CHARACTERS = "0123456789+-*()=,>cs"
PAD, END = "_", "$"
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LanguageModel(Protocol):
    """What the harness asks of a model; an ``nn.Module`` with these is enough."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens V."""

    @property
    def context_window(self) -> int | None:
        """The most tokens it can read; ``None`` for any number."""

    def features(self, tokens: Tensor, mask: Tensor, cache: Any = None, *, keep: bool = False) -> tuple[Tensor, Any]:
        """``[B, L, H]`` features of new tokens ``[B, L]``, and with ``keep`` the cache for the next call.

        ``mask [B, past + L]`` is True for real tokens, those in the cache included; padding comes first.
        """

    @property
    def forks(self) -> bool:
        """Whether ``fork`` can be used; without, every response reads its own prompt."""

    def fork(self, cache: Any, rows: Tensor) -> Any:
        """The cache of these rows ``[B']`` of it, any of them more than once, with its graph; ends the one given."""

    def head(self, features: Tensor) -> Tensor:
        """``[..., H] -> [..., V]`` next-token logits."""


class CausalLM(nn.Module):
    """A transformers causal LM as features and head.

    Models whose logits are not plainly their output embedding (soft-capped or scaled ones) are recognised on their
    first logits, and then the logits themselves are the features. With ``autocast`` the forward pass runs in that
    precision over weights that stay as they are.
    """

    def __init__(self, model: Any, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast
        self.split = self._is_plain()
        self._can_fork = self._forks()

    def _is_plain(self) -> bool:
        token = torch.zeros((1, 1), dtype=torch.long, device=self.model.device)
        with torch.no_grad():
            hidden = self.model.base_model(token).last_hidden_state
            out = self.model.get_output_embeddings()
            return out is not None and torch.allclose(out(hidden), self.model(token).logits, rtol=1e-3, atol=1e-3)

    def _forks(self) -> bool:
        """Whether a forked cache gives the features of whole sequences, and keeps the graph: tried on three.

        Dropout makes two answers of one question, so a model that has it on does not.
        """
        prompts = torch.arange(6, device=self.model.device).reshape(2, 3) % self.vocabulary
        real = torch.tensor([[True] * 3, [False, True, True]], device=prompts.device)
        rows = torch.tensor([0, 0, 1], device=prompts.device)
        answers = prompts.reshape(3, 2)
        mask = torch.cat([real[rows], torch.ones_like(answers, dtype=torch.bool)], 1)
        with torch.enable_grad():
            last, cache = self.features(prompts, real, keep=True)
        if not _plain_cache(cache) or (last.requires_grad and not cache.layers[-1].values.requires_grad):
            return False
        with torch.no_grad():
            whole = self.features(torch.cat([prompts[rows], answers], 1), mask)[0][:, 3:].float()
            forked = self.features(answers, mask, self.fork(cache, rows))[0].float()
        return bool((whole - forked).norm() <= torch.finfo(last.dtype).eps ** 0.5 * whole.norm())

    @property
    def vocabulary(self) -> int:
        """Number of tokens V."""
        return int(self.model.config.vocab_size)

    @property
    def adapted(self) -> bool:
        """Whether it is an adapter on a base."""
        return adapters.is_adapted(self.model)

    @property
    def context_window(self) -> int | None:
        """The most tokens it can read."""
        window = getattr(self.model.config, "max_position_embeddings", None)
        return None if window is None else int(window)

    def features(self, tokens: Tensor, mask: Tensor, cache: Any = None, *, keep: bool = False) -> tuple[Tensor, Any]:
        """See ``LanguageModel``."""
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        given = {
            "input_ids": tokens, "attention_mask": mask.long(), "position_ids": positions,
            "past_key_values": cache, "use_cache": keep,
        }  # fmt: skip
        with self._precision():
            out = (self.model.base_model if self.split else self.model)(**given)
        return out.last_hidden_state if self.split else out.logits, out.past_key_values if keep else None

    @property
    def forks(self) -> bool:
        """See ``LanguageModel``; gradient checkpointing keeps no cache."""
        return self._can_fork and not (self.training and getattr(self.model, "is_gradient_checkpointing", False))

    def fork(self, cache: Any, rows: Tensor) -> Any:
        """See ``LanguageModel``."""
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.index_select(0, rows), layer.values.index_select(0, rows)
        return cache

    def head(self, features: Tensor) -> Tensor:
        """See ``LanguageModel``."""
        with self._precision():
            logits: Tensor = self.model.get_output_embeddings()(features) if self.split else features
        return logits

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, self.autocast, enabled=self.autocast is not None)


def _plain_cache(cache: Any) -> bool:
    """Keys and values of everything read, and nothing else: no sliding window, no recurrent or compressed state."""
    return {type(layer).__name__ for layer in getattr(cache, "layers", ())} == {"DynamicLayer"}


class Base:
    """A model with its adapter off, over the same weights: a reference that needs no second copy of them."""

    def __init__(self, adapted: CausalLM) -> None:
        self.adapted = adapted

    @property
    def vocabulary(self) -> int:
        """Number of tokens V."""
        return self.adapted.vocabulary

    @property
    def context_window(self) -> int | None:
        """The most tokens it can read."""
        return self.adapted.context_window

    def features(self, tokens: Tensor, mask: Tensor, cache: Any = None, *, keep: bool = False) -> tuple[Tensor, Any]:
        """See ``LanguageModel``."""
        with adapters.switched_off(self.adapted.model):
            return self.adapted.features(tokens, mask, cache, keep=keep)

    @property
    def forks(self) -> bool:
        """See ``LanguageModel``."""
        return self.adapted.forks

    def fork(self, cache: Any, rows: Tensor) -> Any:
        """See ``LanguageModel``."""
        return self.adapted.fork(cache, rows)

    def head(self, features: Tensor) -> Tensor:
        """See ``LanguageModel``."""
        with adapters.switched_off(self.adapted.model):
            return self.adapted.head(features)


class Tokenizer(Protocol):
    """What the harness asks of a tokenizer; transformers' are such."""

    pad_token_id: int
    eos_token_id: int

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Text of tokens."""


# ------------------------------------------------------------------------------------------------------ loading


def transformers() -> Any:
    """The package, or a sentence that says how to get it."""
    try:
        import transformers
    except ImportError:
        raise ValueError("language models need transformers: install it with  pip install 'klgrad[llm]'") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def load(path: str, *, dtype: str = "float32", device: str = "cpu") -> tuple[CausalLM, Any]:
    """A causal LM and its tokenizer, by folder or hub name; the folder of a LoRA adapter gives it on its base.

    A name in the hub's cache is taken from there; the hub is asked, once, only for what is not.

    Raises:
        ValueError: when there is none, weights are missing, the tokenizer lacks an end token or fits another model, or
            the device is not here.
    """
    check_device(device)
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, list(DTYPES))
    if not str(path):
        raise ValueError("no model is named: give a folder or a hub name, or make one with  klgrad llm pretrain")
    package = transformers()
    base = adapters.base_of(path) if adapters.is_adapter(path) else ""
    called = f"adapter {path!r}: its base" if base else "model"
    try:
        model, tokenizer = hub.read(package, base or path, DTYPES[dtype])
    except hub.Refused as refused:
        raise ValueError(f"{called} {base or path!r} {refused}") from None
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"model {path!r}: its tokenizer has {len(tokenizer)} tokens and the model {model.config.vocab_size}: "
            "they do not belong together"
        )
    found = CausalLM(model.to(device)).eval()
    if base:
        adapters.attach(model, path, base)
    return found.eval(), checked_tokenizer(tokenizer, path)


def placed(name: str) -> str:
    """A folder named from the root, so that it is found from elsewhere too; a hub name as it is."""
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name


def check_device(device: str) -> None:
    """cpu, cuda or cuda:N, and here.

    Raises:
        ValueError: otherwise.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"unknown device {device!r}: cpu, cuda, or cuda:N")
    if why := absence(device):
        raise ValueError(f"device = {device!r}: {why}")


def checked_tokenizer(tokenizer: Any, path: str) -> Any:
    """The tokenizer with an end and a padding token; padding is never read, so the end token may serve.

    Raises:
        ValueError: without an end token, since a response could then never end.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {path!r} has no end token (eos_token): responses could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def save(model: CausalLM, tokenizer: Any, folder: Path) -> None:
    """Write a model and its tokenizer as transformers reads them: whole, or not at all.

    Raises:
        ValueError: where that would take other things away.
        OSError: when the disk refuses.
    """
    check_replaceable(folder)
    with whole_folder(folder) as fresh, disk_errors():
        model.model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)


def check_replaceable(folder: Path) -> None:
    """A model is put in the place of its folder: only of one that is empty or holds a model, and nothing besides.

    Raises:
        ValueError: for a file, or a folder with other things in it.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give another folder with --out")
    held = list(folder.iterdir()) if folder.exists() else []
    if held and (not (folder / "config.json").is_file() or any(path.is_dir() for path in held)):
        raise ValueError(
            f"{folder} holds other things than a model, which would be lost: give a folder of the model's own with "
            f"--out, such as {folder / 'model'}"
        )


@contextmanager
def disk_errors() -> Iterator[None]:
    """What safetensors and torch raise of their own when the disk refuses, as the OSError that it is."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        raise OSError(str(error).strip().splitlines()[0]) from error


def check_same_vocabulary(policy: LanguageModel, reference: LanguageModel) -> None:
    """A KL needs the same tokens in both.

    Raises:
        ValueError: when the sizes differ.
    """
    if policy.vocabulary != reference.vocabulary:
        raise ValueError(
            f"the reference has a vocabulary of {reference.vocabulary} and the policy of {policy.vocabulary}: "
            "a KL needs the same tokens in both"
        )


def check_same_tokens(tokenizer: Any, reference: Any) -> None:
    """A KL needs the same token under each number, and not only as many.

    Raises:
        ValueError: naming the first token that has another number in the reference's tokenizer.
    """
    theirs = reference.get_vocab()
    for token, number in tokenizer.get_vocab().items():
        if theirs.get(token, number) != number:
            raise ValueError(
                f"the reference has other tokens: {token!r} is {theirs[token]} there and {number} for the policy, and "
                "a KL needs the same tokens in both"
            )


def load_reference(
    path: str, policy: LanguageModel, tokenizer: Any, *, dtype: str = "float32", device: str = "cpu"
) -> CausalLM:
    """The model that a policy is compared with, without gradients.

    Raises:
        ValueError: as ``load``, and when its tokens are not the policy's.
    """
    reference, other = load(path, dtype=dtype, device=device)
    check_same_vocabulary(policy, reference)
    check_same_tokens(tokenizer, other)
    return reference.requires_grad_(False)


def own_reference(policy: CausalLM) -> CausalLM | Base:
    """What a policy is compared with by default: an adapter's base, or the policy as it is now."""
    return Base(policy) if policy.adapted else copy.deepcopy(policy).requires_grad_(False)


def perturbed(model: CausalLM, size: float, seed: int) -> CausalLM:
    """A copy with Gaussian noise on every weight, of ``size`` times the weight's own standard deviation."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            spread = float(parameter.float().std()) if parameter.numel() > 1 else 0.0
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(size * spread * noise)
    return other


def select_parameters(model: nn.Module, choice: str) -> list[tuple[str, nn.Parameter]]:
    """Named parameters by choice: ``all``, ``last-block``, ``lora``, or a regular expression of names.

    Of those that take gradients: with an adapter, its own.

    Raises:
        ValueError: when nothing is chosen, with some names that there are.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    blocks = [int(m[1]) for name, _ in named if (m := re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", f".{name}"))]
    patterns = {"all": "", "lora": "lora_", "last-block": rf"\.(?:layers|h|blocks)\.{max(blocks, default=0)}\."}
    try:
        pattern = re.compile(patterns.get(choice, choice))
    except re.error as error:
        raise ValueError(
            f"parameters {choice!r}: not all, last-block, lora or a regular expression ({error})"
        ) from None
    chosen = [(name, p) for name, p in named if pattern.search(f".{name}")]
    if not chosen:
        some = ", ".join(name for name, _ in named[:4])
        raise ValueError(f"parameters {choice!r} choose nothing: the model has {some}, ...")
    return chosen


# --------------------------------------------------------------------------------------------------------- tiny


def character_tokenizer() -> Any:
    """One token per character of the small tasks, with an end and a padding token."""
    package = transformers()
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate([PAD, END, *CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return package.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=END, unk_token=PAD, clean_up_tokenization_spaces=False
    )


def tiny(seed: int = 0, *, hidden: int = 96, layers: int = 4, window: int = 64) -> tuple[CausalLM, Any]:
    """A Qwen2 from its configuration, about 450,000 parameters at the defaults, untrained, with its tokenizer."""
    package = transformers()
    tokenizer = character_tokenizer()
    config = package.Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=window, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = package.Qwen2ForCausalLM(config)
    return CausalLM(model.eval()), tokenizer


def parameter_count(model: nn.Module) -> int:
    """Number of parameters, shared ones once."""
    return sum(p.numel() for p in model.parameters())
