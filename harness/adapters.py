"""LoRA adapters: where their base is, an adapter put on it, and the adapter switched off for a while."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONFIG = "adapter_config.json"


def is_adapter(path: str) -> bool:
    """Whether a folder holds an adapter and not a whole model."""
    return (Path(path) / CONFIG).is_file() and not (Path(path) / "config.json").is_file()


def base_of(path: str) -> str:
    """Folder or hub name of an adapter's base; a relative folder counts from here, or from the adapter's own.

    Raises:
        ValueError: when its configuration does not say, or names another adapter.
    """
    try:
        base = json.loads((Path(path) / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"adapter {path!r}: {CONFIG} cannot be read ({error})") from None
    if not isinstance(base, str) or not base:
        raise ValueError(f"adapter {path!r}: {CONFIG} names no base: write it as base_model_name_or_path")
    for place in (Path(base), Path(path) / base):
        if place.is_dir():
            base = str(place.resolve())
            break
    if is_adapter(base):
        raise ValueError(
            f"adapter {path!r}: its base {base!r} is an adapter itself: merge that one into its base first"
        )
    return base


def attach(model: Any, path: str, base: str) -> None:
    """Put the adapter of a folder on a transformers model; only the adapter's parameters then take gradients.

    Raises:
        ValueError: without peft, or when the adapter does not fit this base.
    """
    try:
        import peft  # noqa: F401
    except ImportError:
        raise ValueError("LoRA adapters need peft: install it with  pip install 'klgrad[llm]'") from None
    model.requires_grad_(False)
    try:
        found = model.load_adapter(str(path), is_trainable=True, adapter_kwargs={"local_files_only": True})
        if odd := [*found.missing_keys, *found.mismatched_keys, *found.unexpected_keys]:
            raise ValueError(f"{len(odd)} of its weights are missing or of another model, such as {odd[0]}")
    except Exception as error:  # whatever peft, the disk or the files give
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"adapter {path!r} does not load onto its base {base!r} ({first})") from None
    for config in model.peft_config.values():
        config.base_model_name_or_path = base  # a checkpoint of it is read from another folder


def is_adapted(model: Any) -> bool:
    """Whether a transformers model carries an adapter."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """A transformers model as its base, for a while."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    gradients = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, wanted in gradients:  # switching an adapter also switches whether it takes gradients
            parameter.requires_grad_(wanted)
