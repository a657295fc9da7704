"""Which argument is which: a function's parameters by their usual spellings, and the function from its file."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from klgrad.files import load_module

# what is offered -> the spellings it goes by; a name is compared in lower case without underscores
ROLES: dict[str, str] = {
    "log_probs": (
        "logp logps logprob logprobs log_prob log_p lp policy_logp policy_logps policy_log_probs "
        "policy_logprobs per_token_logps new_logp new_logps new_log_prob new_log_probs new_logprobs cur_logp "
        "current_logp current_log_probs action_log_probs log_pi logpi pi_logp actor_logp actor_log_probs "
        "model_logprobs student_logp log_probs_policy selected_logprobs token_logprobs response_log_probs"
    ),
    "reference": (
        "ref_logp ref_logps ref_logprob ref_logprobs ref_log_prob ref_log_probs reference_logp "
        "reference_logps reference_log_probs reference_logprobs log_probs_base base_logp base_log_probs "
        "base_logprobs log_ref logref ref_per_token_logps logp_ref logps_ref log_probs_ref log_prob_ref "
        "logprobs_ref ref reference_log_prob log_q logq teacher_logp ref_token_logprobs log_probs_reference "
        "base_action_log_probs ref_action_log_probs"
    ),
    "behaviour": (
        "old_logp old_logps old_logprob old_logprobs old_log_prob old_log_probs behaviour_logp behavior_logp "
        "behaviour_log_probs behavior_log_probs behavior rollout_logp rollout_logps rollout_log_probs "
        "rollout_logprobs sampling_logp sampling_log_probs sampling_logprobs sampler_logp sampler_log_probs "
        "log_mu mu_logp old_per_token_logps sampling_per_token_logps inference_logp inference_logprobs "
        "generator_logprobs logp_old log_probs_old old_action_log_probs rollout_log_prob"
    ),
    "mask": (
        "mask masks response_mask action_mask completion_mask loss_mask attention_mask padding_mask "
        "token_mask valid valid_mask eos_mask response_masks"
    ),
    "full_log_probs": (
        "full_log_prob full_logp full_logprobs all_logp all_log_probs all_logprobs vocab_log_probs "
        "vocab_logprobs policy_full_log_probs logits policy_logits new_logits student_logits actor_logits "
        "log_probs_full next_token_log_probs log_softmax"
    ),
    "full_reference": (
        "full_ref_logp full_ref_log_probs full_reference_log_probs ref_full_log_probs all_ref_logp "
        "all_ref_log_probs ref_all_log_probs ref_vocab_log_probs ref_logits reference_logits base_logits "
        "teacher_logits reference_full_log_probs ref_next_token_log_probs"
    ),
    "tokens": (
        "token_ids input_ids labels actions action ids response_ids completion_ids responses completions "
        "targets target_ids sampled"
    ),
    "log_ratio": "log_ratios logratio logratios kl_log_ratio delta",
    "reverse_log_ratio": "logr log_r",
    "advantages": "advantage adv advs token_advantages",
    "sequence_advantages": "seq_advantages",
    "rewards": "reward score scores sequence_rewards outcome_rewards r returns_outcome",
    "token_rewards": "per_token_rewards token_level_rewards token_level_scores",
    "beta": (
        "kl_coef kl_coeff kl_beta kl_loss_coef kl_loss_coeff init_kl_coef kl_coefficient kl_weight "
        "kl_penalty_coef kl_ctl"
    ),
}
SHAPES = {
    "log_probs": "[B, T] log-probs of the sampled tokens under the policy",
    "reference": "[B, T] under the reference",
    "behaviour": "[B, T] under the policy that sampled",
    "mask": "[B, T] 1 for real tokens",
    "full_log_probs": "[B, T, V] next-token log-probs (valid logits) of the policy",
    "full_reference": "[B, T, V] of the reference",
    "tokens": "[B, T] token numbers",
    "log_ratio": "[B, T] log pi / pi_ref",
    "reverse_log_ratio": "[B, T] log pi_ref / pi",
    "advantages": "[B, T] zeros",
    "sequence_advantages": "[B] zeros",
    "rewards": "[B] zeros",
    "token_rewards": "[B, T] zeros",
    "beta": "1.0",
}


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


_SPELLINGS = {_plain(name): role for role, names in ROLES.items() for name in (role, *names.split())}


@dataclass(frozen=True)
class Plan:
    """How to call a function.

    Args:
        roles: parameter -> what it is given, one of ``ROLES``.
        constants: parameter -> a value that stays the same.
        positional: the parameters that can only be given by position, in order.
    """

    roles: dict[str, str]
    constants: dict[str, Any]
    positional: tuple[str, ...] = ()

    def takes(self, role: str) -> bool:
        """Whether any parameter asks for it."""
        return role in self.roles.values()


def offered() -> str:
    """What a parameter can be given, for messages."""
    return "; ".join(f"{role} ({shape})" for role, shape in SHAPES.items())


def plan(function: Callable[..., Any], mapping: Mapping[str, str] = {}, constants: Mapping[str, Any] = {}) -> Plan:
    """Fill the function's parameters: by the mapping, by a constant, by its spelling, by its own default.

    Raises:
        ValueError: for a parameter that cannot be filled, or a mapping that names nothing; lists what is offered.
    """
    try:
        signature = inspect.signature(getattr(function, "forward", function))  # a torch module's own is (*args)
    except (TypeError, ValueError):
        raise ValueError(
            f"{function!r} does not say what arguments it takes: wrap it in a function that does"
        ) from None
    parameters = {
        name: p for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    roles: dict[str, str] = {}
    for theirs, ours in mapping.items():
        role = _SPELLINGS.get(_plain(ours))
        if role is None:
            raise ValueError(f"--map {theirs}={ours}: {ours!r} is not offered; there is {offered()}")
        if theirs not in parameters and not open_ended:
            raise ValueError(
                f"--map {theirs}={ours}: the function has no parameter {theirs!r}; it has {', '.join(parameters)}"
            )
        roles[theirs] = role
    fixed: dict[str, Any] = {}
    for theirs, value in constants.items():
        if theirs not in parameters and not open_ended:
            raise ValueError(
                f"--arg {theirs}: the function has no parameter {theirs!r}; it has {', '.join(parameters)}"
            )
        fixed[theirs] = value
    for name, parameter in parameters.items():
        if name in roles or name in fixed:
            continue
        role = _SPELLINGS.get(_plain(name))
        if role is not None:
            roles[name] = role
        elif parameter.default is parameter.empty:
            raise ValueError(
                f"cannot fill the parameter {name!r}: say what it is with --map {name}=..., or give it a value with "
                f"--arg {name}=...; there is {offered()}"
            )
    taken = [role for role in roles.values() if role != "beta"]
    double = next((role for role in taken if taken.count(role) > 1), None)
    if double is not None:
        names = " and ".join(name for name, role in roles.items() if role == double)
        raise ValueError(f"{names} would both be given {double}: tell them apart with --map")
    if not {"log_probs", "full_log_probs", "log_ratio", "reverse_log_ratio"} & set(taken):
        raise ValueError(
            f"no parameter of {', '.join(parameters) or 'the function'} asks for the policy's log-probs: "
            "name one with --map theirs=log_probs"
        )
    positional = tuple(
        name for name, p in parameters.items() if p.kind is p.POSITIONAL_ONLY and name in {**roles, **fixed}
    )
    return Plan(roles, fixed, positional)


def constant(text: str) -> tuple[str, Any]:
    """``name=value`` of ``--arg``: a Python literal, or the text itself."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise ValueError(f"--arg {text!r}: write name=value")
    try:
        return name.strip(), ast.literal_eval(value.strip())
    except (ValueError, SyntaxError):
        return name.strip(), value.strip()


def functions_in(path: str) -> str:
    """The functions a file defines, as ``NAME, or :OTHER``; read and not run, and NAME where it cannot be read."""
    from pathlib import Path

    try:
        parsed = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return "NAME"
    named = [each.name for each in parsed.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]
    return ", or :".join(named) or "NAME"


def load(target: str) -> Callable[..., Any]:
    """The function of ``FILE.py:NAME`` or ``package.module:NAME``; NAME may be dotted.

    Raises:
        ValueError: when there is no such file, module or function, or importing it fails; says which.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ValueError(f"{target!r} names no function: write FILE.py:NAME or package.module:NAME")
    try:
        module = load_module(place)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
            raise ValueError(f"{place} has no {name!r}; it has {', '.join(public) or 'no functions'}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{target} is {type(found).__name__}, not a function")
    return found
