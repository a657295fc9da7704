"""Every setting that a version of a library knows, by name, read from its source without importing it.

The lists in ``entries/keys`` tell libraries apart and tell a misspelt setting from one that klgrad merely does not
read. ``extract`` makes one from the files of a package or a checkout: argument parsers, dataclasses with what is nested
in them, and YAML files; ``klgrad audit --keys`` writes them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "entries" / "keys"


@dataclass(frozen=True)
class Source:
    """Where a version's settings stand.

    Args:
        name: the list's, an entry's or that of entries with the same settings.
        package: the module that is installed, or the folder of a checkout.
        files: below it, as glob patterns.
        roots: ``Class`` or ``Class:section``; with none, the files' argument parsers and YAML keys.
        also: further files by module, as ``("transformers", "training_args.py")``.
    """

    name: str
    package: str
    files: tuple[str, ...]
    roots: tuple[str, ...] = ()
    also: tuple[tuple[str, str], ...] = ()


@cache
def known_keys(name: str) -> frozenset[str]:
    """The names in a list; empty where there is none."""
    path = FOLDER / f"{name}.txt"
    if not path.is_file():
        return frozenset()
    return frozenset(line for line in path.read_text(encoding="utf-8").splitlines() if line and line[0] != "#")


def extract(folder: Path, source: Source, others: Sequence[Path] = ()) -> list[str]:
    """The names of all settings in the files of a source, sorted.

    Raises:
        ValueError: where there is no such file, or a class is not in it.
    """
    paths = [path for pattern in source.files for path in sorted(folder.glob(pattern))]
    if not paths:
        raise ValueError(f"{source.name}: there is no {' or '.join(source.files)} in {folder}")
    found: set[str] = set()
    if source.roots:
        trees = [ast.parse(path.read_text(encoding="utf-8")) for path in [*paths, *others] if path.suffix == ".py"]
        classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        aliases = {name: text for tree in trees for name, text in _aliases(tree)}
        for root in source.roots:
            name, _, section = root.partition(":")
            if name not in classes:
                raise ValueError(f"{source.name}: there is no class {name} in {', '.join(source.files)}")
            found |= {f"{section}.{key}" if section else key for key in _fields(name, classes, aliases, ())}
    for path in paths:
        if path.suffix in (".yaml", ".yml"):
            found |= set(_leaves(path.read_text(encoding="utf-8")))
        elif not source.roots:
            found |= set(_arguments(ast.parse(path.read_text(encoding="utf-8"))))
    return sorted(found)


def _aliases(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names that a module gives to types: ``Loss = A | B``."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(target, ast.Name) and node.value is not None:
            yield target.id, ast.unparse(node.value)


def _fields(
    name: str, classes: dict[str, ast.ClassDef], aliases: dict[str, str], above: tuple[str, ...]
) -> Iterator[str]:
    """A dataclass's fields, its bases' first, and below a field those of the class it holds."""
    if name in above or name not in classes:
        return
    for base in classes[name].bases:
        yield from _fields(ast.unparse(base).rpartition(".")[2], classes, aliases, (*above, name))
    for node in classes[name].body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        key = node.target.id
        if key.startswith("_") or "ClassVar" in ast.unparse(node.annotation):
            continue
        yield key
        words = re.findall(r"\w+", ast.unparse(node.annotation))
        for held in dict.fromkeys([*words, *(w for word in words for w in re.findall(r"\w+", aliases.get(word, "")))]):
            if held in classes and held != name:
                yield from (f"{key}.{inner}" for inner in _fields(held, classes, aliases, (*above, name)))


def _arguments(tree: ast.Module) -> Iterator[str]:
    """Names of ``add_argument`` calls, and whatever else is written as ``"--flag"``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("add_argument", "reset_arg"):
            for given in node.args:
                if isinstance(given, ast.Constant) and str(given.value).startswith("--"):
                    yield str(given.value)[2:].replace("-", "_")


def _leaves(text: str) -> Iterator[str]:
    """The dotted keys of a YAML file, sections included."""
    import yaml

    def walk(node: object, path: tuple[str, ...]) -> Iterator[str]:
        if path:
            yield ".".join(path)
        if isinstance(node, dict):
            for key, value in node.items():
                yield from walk(value, (*path, str(key)))

    yield from walk(yaml.safe_load(text), ())


def folder_of(module: str) -> Path | None:
    """Where an installed package stands, which is not imported; None where it is not installed."""
    from importlib.util import find_spec

    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


@dataclass(frozen=True)
class Comparison:
    """A list and what the installed package has: its version, all its settings, those added and those gone."""

    source: Source
    version: str
    keys: tuple[str, ...]
    added: tuple[str, ...]
    gone: tuple[str, ...]


def compare(names: Sequence[str] = ()) -> Iterator[Comparison | tuple[Source, str]]:
    """Each list against the package that is installed, or why it could not be: ``(source, sentence)``.

    Args:
        names: lists; all of the newest versions if empty.
    """
    from importlib.metadata import PackageNotFoundError, packages_distributions, version

    for source in SOURCES:
        if source.name not in names and (names or "@" in source.name):
            continue
        folder = folder_of(source.package)
        if folder is None:
            yield source, "not installed"
            continue
        try:
            others = [place / file for module, file in source.also if (place := folder_of(module)) is not None]
            keys = extract(folder, source, others)
            installed = version(packages_distributions().get(source.package, [source.package])[0])
        except (OSError, SyntaxError, ValueError, PackageNotFoundError) as error:
            yield source, f"cannot be read: {error}"
            continue
        listed = known_keys(source.name)
        yield Comparison(
            source, installed, tuple(keys), tuple(sorted(set(keys) - listed)), tuple(sorted(listed - set(keys)))
        )


def write(source: Source, version: str, keys: Sequence[str], folder: Path = FOLDER) -> Path:
    """A list with what it was read from in its first line."""
    path = folder / f"{source.name}.txt"
    head = f"# {source.package} {version}: {', '.join(source.files)}"
    path.write_text("\n".join([head, *keys]) + "\n", encoding="utf-8")
    return path


_TRAINING = ("transformers", "training_args.py")


def _trl(name: str, *roots: str) -> Source:
    files = ("trainer/*_config.py", "experimental/*/*_config.py", "scripts/utils.py", "scripts/*.py")
    return Source(name, "trl", files, (*roots, "ScriptArguments", "ModelConfig"), (_TRAINING,))


SOURCES: tuple[Source, ...] = (
    Source("verl", "verl", (
        "trainer/config/_generated_*.yaml", "trainer/config/distillation/*.yaml",
        "trainer/config/legacy_reward_impl.yaml",
    )),
    Source("verl@0.2", "verl", ("trainer/config/ppo*.yaml",)),
    _trl("trl-grpo", "GRPOConfig", "GRPOScriptArguments"),
    _trl("trl-rloo", "RLOOConfig", "RLOOScriptArguments"),
    _trl("trl-dpo", "DPOConfig"),
    _trl("trl-sft", "SFTConfig"),
    _trl("trl-kto", "KTOConfig"),
    _trl("trl-reward", "RewardConfig"),
    _trl("trl-gkd", "GKDConfig"),
    _trl("trl-distillation", "DistillationConfig"),
    Source("trl-ppo@0.11.4", "trl", ("trainer/ppo_config.py",), ("PPOConfig",)),
    Source("roll", "roll", (
        "configs/base_config.py", "configs/worker_config.py", "pipeline/rlvr/rlvr_config.py",
        "pipeline/agentic/agentic_config.py",
    ), ("RLVRConfig", "AgenticConfig")),
    Source("openrlhf", "openrlhf", ("cli/train_ppo_ray.py",)),
    Source("openrlhf@0.8.0", "openrlhf", ("cli/train_ppo_ray.py",)),
    Source("openrlhf-dpo", "openrlhf", ("cli/train_dpo.py",)),
    Source("skyrl", "skyrl", ("train/config/config.py", "backends/**/config*.py"), ("SkyRLTrainConfig",)),
    Source("areal", "areal", ("api/cli_args.py",), ("GRPOConfig", "PPOConfig")),
    Source("ms-swift", "swift", (
        "arguments/rlhf_args.py", "arguments/sft_args.py", "arguments/base_args/*.py", "arguments/tuner_args.py",
        "arguments/infer_args.py", "rlhf_trainers/args_mixin.py", "trainers/arguments.py", "arguments/deploy_args.py",
        "megatron/arguments/*.py",
    ), ("RLHFArguments", "MegatronRLHFArguments"), (_TRAINING,)),
    Source("slime", "slime", ("utils/arguments.py", "backends/*/arguments.py")),
    Source("miles", "miles", ("utils/arguments.py", "backends/*/arguments.py")),
    Source("nemo-rl", "nemo-rl", ("examples/configs/grpo_math_1B.yaml", "examples/configs/ppo_math_1B.yaml")),
    Source("prime-rl", "prime-rl", ("packages/prime-rl-configs/src/prime_rl/configs/*.py",), ("RLConfig",)),
    Source("open-instruct", "open_instruct", ("*.py", "utils/*.py"), (
        "GRPOExperimentConfig", "TokenizerConfig", "ModelConfig", "StreamingDataLoaderConfig", "VLLMConfig",
    )),
    Source("easyr1", "easyr1", (
        "verl/trainer/config.py", "verl/workers/**/config.py", "verl/workers/config.py",
    ), ("PPOConfig",)),
    Source("search-r1", "search-r1", ("verl/trainer/config/ppo_trainer.yaml",)),
    Source("cosmos-rl", "cosmos_rl", ("policy/config/__init__.py",), ("Config",)),
    Source("trinity-rft", "trinity", ("common/config.py",), ("Config",)),
    Source("axolotl", "axolotl", ("utils/schemas/*.py",), ("AxolotlInputConfig", "TRLConfig")),
    Source("tinker-cookbook", "tinker_cookbook", ("rl/train.py",), ("Config",)),
)  # fmt: skip
