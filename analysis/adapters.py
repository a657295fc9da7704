"""How each library's KL function is imported and called; one ``Adapter`` per library, run only where it is installed.

Nothing of a library is copied here: its function is called where its user has installed it.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from typing import Any

from klgrad.analysis.auditing import Adapter, Case

Call = Callable[..., Any]


def _attribute(path: str) -> Any:
    """``package.module:name``, imported; past ``torch.compile`` where a library wraps it."""
    module, _, name = path.partition(":")
    found = getattr(import_module(module), name)
    return getattr(found, "_torchdynamo_orig_callable", found)


def _pairwise(**options: Any) -> Callable[[Any], Call]:
    """``function(log_probs, reference, **options)``."""

    def adapt(function: Any) -> Call:
        return lambda log_probs, reference, behaviour, mask: function(log_probs, reference, **options)

    return adapt


def _weighted(parameter: str, **options: Any) -> Callable[[Any], Call]:
    """The same with the live importance ratio as ``parameter``: the first one whose name holds that word.

    In single precision, as trainers have it.
    """

    def adapt(function: Any) -> Call:
        names = [name for name in inspect.signature(function).parameters if parameter in name]
        if not names:
            raise TypeError(f"it has no parameter for the {parameter}: {inspect.signature(function)}")
        return lambda log_probs, reference, behaviour, mask: function(
            log_probs, reference, **options, **{names[0]: (log_probs.float() - behaviour.float()).exp()}
        )

    return adapt


@contextmanager
def _stubbed(**modules: Any) -> Iterator[None]:
    """Empty modules in the place of those that are missing, for the time of an import."""
    added = {name: module for name, module in modules.items() if find_spec(name) is None}
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            sys.modules.pop(name, None)


# ------------------------------------------------------------------------------------------------------ by library


def _openrlhf() -> Any:
    """By path: the package itself imports what only a GPU machine has."""
    from pathlib import Path

    package = find_spec("openrlhf")
    if package is None or not package.submodule_search_locations:
        raise ImportError("openrlhf is no package")
    path = Path(package.submodule_search_locations[0]) / "models" / "utils.py"
    spec = spec_from_file_location("openrlhf_models_utils", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no {path.name} in openrlhf/models")
    module = module_from_spec(spec)
    with _stubbed(deepspeed=types.ModuleType("deepspeed")):
        spec.loader.exec_module(module)
    return module.compute_approx_kl


def _skyrl() -> Any:
    """Before Python 3.12 pydantic wants the TypedDict of typing_extensions."""
    import typing

    before = typing.TypedDict
    try:
        if sys.version_info < (3, 12):
            import typing_extensions

            typing.TypedDict = typing_extensions.TypedDict
        return _attribute("skyrl.backends.skyrl_train.utils.ppo_utils:compute_approx_kl")
    finally:
        typing.TypedDict = before


def _skyrl_call(kind: str) -> Callable[[Any], Call]:
    return lambda function: (
        lambda log_probs, reference, behaviour, mask: function(
            log_probs, reference, loss_mask=mask.to(log_probs.dtype), kl_estimator_type=kind
        )
    )


def _openrlhf_call(kind: str, *, unbiased: bool = False) -> Callable[[Any], Call]:
    return lambda function: (
        lambda log_probs, reference, behaviour, mask: (
            function(log_probs, reference, log_probs_old=behaviour, kl_estimator=kind, unbiased_gradient=unbiased)
            if unbiased
            else function(log_probs, reference, kl_estimator=kind)
        )
    )


def _jax_call(method: str) -> Callable[[Any], Call]:
    """A JAX function as a torch one, its own derivative passed on."""

    def adapt(function: Any) -> Call:
        import jax
        import numpy as np
        import torch

        class Through(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, log_probs: Any, reference: Any) -> Any:
                fixed = np.asarray(reference.detach())
                value, ctx.pull = jax.vjp(
                    lambda x: function(x, jax.numpy.asarray(fixed), method),
                    jax.numpy.asarray(log_probs.detach().numpy()),
                )
                return torch.tensor(np.asarray(value), dtype=log_probs.dtype)

            @staticmethod
            def backward(ctx: Any, *outer: Any) -> Any:
                (pulled,) = ctx.pull(jax.numpy.asarray(outer[0].numpy(), "float32"))
                return torch.tensor(np.asarray(pulled), dtype=outer[0].dtype), None

        return lambda log_probs, reference, behaviour, mask: Through.apply(log_probs, reference)  # type: ignore[no-untyped-call]

    return adapt


def _trl() -> Any:
    return _attribute("trl.trainer.grpo_trainer:GRPOTrainer")._compute_loss


def _trl_call(*, corrected: bool, level: str = "token") -> Callable[[Any], Call]:
    """The trainer's loss on a stand-in for the trainer; advantages of zero leave the KL alone, ``luspo`` sums it."""

    def adapt(function: Any) -> Call:
        from collections import defaultdict

        import torch

        def loss(log_probs: Any, reference: Any, behaviour: Any, mask: Any) -> Any:
            same = types.SimpleNamespace(
                gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x,
                num_processes=1, sync_gradients=True,
            )  # fmt: skip
            trainer = types.SimpleNamespace(
                beta=1.0, loss_type="luspo", importance_sampling_level=level, epsilon_low=0.2, epsilon_high=0.2,
                args=types.SimpleNamespace(use_bias_correction_kl=corrected, delta=None, steps_per_generation=1),
                model=types.SimpleNamespace(training=False), accelerator=same, top_entropy_quantile=1.0,
                off_policy_mask_threshold=None, aux_loss_enabled=False, use_vllm=False, _entropy_bonus_enabled=False,
                vllm_importance_sampling_correction=False, current_gradient_accumulation_steps=1,
                use_adaptive_entropy=False, max_completion_length=1,
                _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
                _get_per_token_logps_and_entropies=lambda *a, **k: (log_probs, torch.zeros_like(log_probs), None),
            )  # fmt: skip
            rows, number = mask.shape[0], mask.to(log_probs.dtype)
            tokens = torch.zeros(mask.shape, dtype=torch.long)
            inputs = {
                "prompt_ids": tokens[:, :1], "prompt_mask": torch.ones(rows, 1), "completion_ids": tokens,
                "completion_mask": number, "advantages": torch.zeros(rows, dtype=log_probs.dtype),
                "old_per_token_logps": behaviour, "ref_per_token_logps": reference,
                "num_items_in_batch": number.sum(),
            }  # fmt: skip
            return function(trainer, None, inputs)

        return loss

    return adapt


def _open_instruct_call(number: int) -> Callable[[Any], Call]:
    return lambda function: (
        lambda log_probs, reference, behaviour, mask: function(log_probs - reference, (log_probs - behaviour).exp())[
            number
        ]
    )


def _torchtune_call(function: Any) -> Call:
    def kl(log_probs: Any, reference: Any, behaviour: Any, mask: Any) -> Any:
        import torch

        scores, last = torch.zeros(len(mask), dtype=log_probs.dtype), torch.zeros(len(mask), dtype=torch.long)
        return -function(scores, log_probs, reference, 1.0, last)[2]

    return kl


def _areal_call(kind: str) -> Callable[[Any], Call]:
    return lambda estimator: lambda log_probs, reference, behaviour, mask: estimator(kind)(log_probs, reference)


def _verl_cases() -> tuple[Case, ...]:
    reward, loss = "algorithm.kl_penalty", "actor_rollout_ref.actor.kl_loss_type"
    cases = [
        Case({"algorithm.use_kl_in_reward": True, reward: kind}, _pairwise(kl_penalty=kind))
        for kind in ("kl", "mse", "abs", "low_var_kl")
    ]
    cases += [
        Case({"actor_rollout_ref.actor.use_kl_loss": True, loss: kind}, _pairwise(kl_penalty=kind))
        for kind in ("kl", "mse", "abs", "low_var_kl", "k1+", "k3+")
    ]
    return tuple(cases)


def _skyrl_cases() -> tuple[Case, ...]:
    prefix = "trainer.algorithm"
    cases = []
    for kind in ("k1", "k2", "k3", "abs"):
        cases.append(Case({f"{prefix}.kl_estimator_type": kind}, _skyrl_call(kind)))
        in_reward = {f"{prefix}.use_kl_in_reward": True, f"{prefix}.use_kl_loss": False}
        cases.append(Case({**in_reward, f"{prefix}.kl_estimator_type": kind}, _skyrl_call(kind)))
    return tuple(cases)


def _openrlhf_cases() -> tuple[Case, ...]:
    cases = []
    for kind in ("k1", "k2", "k3"):
        cases.append(Case({"algo.kl.estimator": kind}, _openrlhf_call(kind)))
        in_loss = {"algo.kl.use_loss": True, "algo.kl.estimator": kind}
        cases.append(Case(in_loss, _openrlhf_call(kind)))
        unbiased = {**in_loss, "algo.kl.unbiased_gradient": True}
        cases.append(Case(unbiased, _openrlhf_call(kind, unbiased=True)))
    return tuple(cases)


def _slime_cases() -> tuple[Case, ...]:
    kinds = ("k1", "k2", "k3", "low_var_kl")
    on = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    plain = [Case({**on, "kl_loss_type": kind}, _pairwise(kl_loss_type=kind)) for kind in kinds]
    weighted = [
        Case({**on, "kl_loss_type": kind, "use_unbiased_kl": True}, _weighted("ratio", kl_loss_type=kind))
        for kind in kinds
    ]
    return (*plain, *weighted)


def _nemo_cases() -> tuple[Case, ...]:
    kinds = ("k1", "k2", "k3")
    prefix = "loss_fn.reference_policy_kl_type"
    loss = [Case({prefix: kind}, _weighted("weight", kl_type=kind)) for kind in kinds]
    reward = [
        Case(
            {"loss_fn.use_kl_in_reward": True, "ppo.adv_estimator.gae_lambda": 1, prefix: kind}, _pairwise(kl_type=kind)
        )
        for kind in kinds
    ]
    return (*loss, *reward)


def _roll_cases() -> tuple[Case, ...]:
    reward = [
        Case({"add_token_level_kl": True, "kl_penalty": kind}, _pairwise(kl_penalty=kind))
        for kind in ("kl", "abs", "mse")
    ]
    return (*reward, Case({"use_kl_loss": True, "kl_loss_coef": 0.1}, _pairwise(kl_penalty="k3")))


def _tunix_cases(switch: Mapping[str, Any], key: str) -> tuple[Case, ...]:
    return tuple(Case({**switch, key: kind}, _jax_call(kind)) for kind in ("kl", "mse_kl", "low_var_kl"))


_TUNIX = ("google-tunix", "tunix", "tunix.rl.common.compute_kl_divergence")
_load_tunix = partial(_attribute, "tunix.rl.common:compute_kl_divergence")
_TRL = "trl.GRPOTrainer._compute_loss on a stand-in for the trainer"

ADAPTERS: tuple[Adapter, ...] = (
    Adapter("trl-grpo", "trl", "trl", _TRL, _trl, (
        Case({"beta": 0.1, "loss_type": "luspo"}, _trl_call(corrected=True)),
        Case({"beta": 0.1, "loss_type": "luspo", "use_bias_correction_kl": False}, _trl_call(corrected=False)),
        Case({"beta": 0.1, "loss_type": "luspo", "importance_sampling_level": "sequence"},
             _trl_call(corrected=True, level="sequence")),
    )),
    Adapter("verl", "verl", "verl", "verl.trainer.ppo.core_algos.kl_penalty",
            partial(_attribute, "verl.trainer.ppo.core_algos:kl_penalty"), _verl_cases()),
    Adapter("openrlhf", "openrlhf", "openrlhf", "openrlhf/models/utils.py: compute_approx_kl", _openrlhf,
            _openrlhf_cases()),
    Adapter("skyrl", "skyrl", "skyrl", "skyrl.backends.skyrl_train.utils.ppo_utils.compute_approx_kl", _skyrl,
            _skyrl_cases()),
    Adapter("tunix-grpo", *_TUNIX, _load_tunix, _tunix_cases({"beta": 0.1}, "kl_loss_mode")),
    Adapter("tunix-ppo", *_TUNIX, _load_tunix, _tunix_cases({"beta": 0.1, "gae_lambda": 1}, "kl_method")),
    Adapter("slime", "slime", "slime", "slime.utils.ppo_utils.compute_approx_kl",
            partial(_attribute, "slime.utils.ppo_utils:compute_approx_kl"), _slime_cases()),
    Adapter("nemo-rl", "nemo-rl", "nemo_rl", "nemo_rl.algorithms.utils.calculate_kl",
            partial(_attribute, "nemo_rl.algorithms.utils:calculate_kl"), _nemo_cases()),
    Adapter("roll", "roll", "roll", "roll.utils.functionals.compute_approx_kl",
            partial(_attribute, "roll.utils.functionals:compute_approx_kl"), _roll_cases()),
    Adapter("areal", "areal", "areal", "areal.utils.data.KLEstimator",
            partial(_attribute, "areal.utils.data:KLEstimator"),
            tuple(Case({"ref.path": "m", "actor.kl_estimator": k}, _areal_call(k)) for k in ("k1", "k2", "k3"))),
    Adapter("open-instruct", "open-instruct", "open_instruct", "open_instruct.model_utils.estimate_kl",
            partial(_attribute, "open_instruct.model_utils:estimate_kl"),
            tuple(Case({"beta": 0.1, "kl_estimator": n}, _open_instruct_call(n)) for n in range(4))),
    Adapter("torchtune-ppo", "torchtune", "torchtune", "torchtune.rlhf.get_rewards_ppo",
            partial(_attribute, "torchtune.rlhf:get_rewards_ppo"), (Case({"lmbda": 1}, lambda f: _torchtune_call(f)),)),
)  # fmt: skip
