"""Where a transformers model is: a folder, the hub's cache, or the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


class Refused(Exception):
    """Why a model cannot be loaded, as the end of a sentence."""


def read(package: Any, path: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer: of a folder, the hub's cache or the hub, whose client retries for minutes without one.

    Args:
        package: transformers.

    Raises:
        Refused: when there is none, or weights are missing.
    """

    def from_place(place: str) -> tuple[Any, Any]:
        loader, given = package.AutoModelForCausalLM, {"trust_remote_code": False}
        model, found = loader.from_pretrained(place, dtype=dtype, output_loading_info=True, **given)
        if found["missing_keys"]:  # transformers would go on with random ones
            some = ", ".join(sorted(found["missing_keys"])[:3])
            raise ValueError(f"it lacks the weights {some}")
        return model, _tokenizer_class(package, Path(place)).from_pretrained(place, **given)

    def first_line(error: Exception) -> str:
        return next(iter(str(error).strip().splitlines()), type(error).__name__)

    if Path(path).is_file():
        raise Refused("is a file: give its folder")
    try:  # the loader raises whatever the disk, the network or a config gives
        return from_place(path if Path(path).is_dir() else _cached(path))
    except Exception as error:
        if Path(path).is_dir():
            raise Refused(f"is a folder that holds no complete model ({first_line(error)})") from None
    try:
        _ask_hub(path)
    except Exception as error:
        why = "" if path.count("/") > 1 or path[0] in "/.~" else f" ({first_line(error)})"  # it can only be a folder
        raise Refused(f"is neither a folder nor a hub name at hand{why}") from None
    try:
        return from_place(path)
    except Exception as error:
        raise Refused(f"cannot be loaded from the hub ({first_line(error)})") from None


def _tokenizer_class(package: Any, folder: Path) -> Any:
    """AutoTokenizer, but for what was saved as the plain one: by a Qwen2 it would be read as Qwen2's own.

    That one drops characters that it does not know without a word.
    """
    config = folder / "tokenizer_config.json"
    plain = config.is_file() and json.loads(config.read_text()).get("tokenizer_class") == "TokenizersBackend"
    return package.PreTrainedTokenizerFast if plain else package.AutoTokenizer


def _cached(name: str) -> str:
    """The folder of a hub name in the cache; no network is asked."""
    import huggingface_hub

    return str(huggingface_hub.snapshot_download(name, local_files_only=True))


def _ask_hub(name: str, patience: float = 5.0) -> None:
    """One question, not retried: whether the hub has the model and would give it."""
    import huggingface_hub

    huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, "config.json"), timeout=patience)
