"""Which argument is which: a function's parameters by their usual spellings, and a guess at others."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from klgrad.analysis.checking.inputs import REWARDS

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
        "vocab_logprobs policy_full_log_probs log_probs_full next_token_log_probs log_softmax"
    ),
    "logits": "policy_logits new_logits student_logits actor_logits model_logits cur_logits current_logits",
    "full_reference": (
        "full_ref_logp full_ref_log_probs full_reference_log_probs ref_full_log_probs all_ref_logp "
        "all_ref_log_probs ref_all_log_probs ref_vocab_log_probs reference_full_log_probs ref_next_token_log_probs"
    ),
    "reference_logits": "ref_logits base_logits teacher_logits logits_ref",
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
    "full_log_probs": "[B, T, V] next-token log-probs of the policy",
    "full_reference": "[B, T, V] of the reference",
    "logits": "[B, T, V] the policy's logits, not normalised; logits[t] predict token t",
    "reference_logits": "[B, T, V] the reference's",
    "tokens": "[B, T] token numbers",
    "log_ratio": "[B, T] log pi / pi_ref",
    "reverse_log_ratio": "[B, T] log pi_ref / pi",
    "advantages": "[B, T] zeros, then others, alike and unlike from row to row",
    "sequence_advantages": "[B] the same",
    "rewards": "[B] the same",
    "token_rewards": "[B, T] the same at the last token",
    "beta": "1.0; then 0, 0.5 and 2",
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
        kept: parameter -> its own default, which stays.
    """

    roles: dict[str, str]
    constants: dict[str, Any]
    positional: tuple[str, ...] = ()
    kept: dict[str, Any] = field(default_factory=dict)

    def takes(self, role: str) -> bool:
        """Whether any parameter asks for it."""
        return role in self.roles.values()

    @property
    def full(self) -> bool:
        """Whether it looks at the policy's whole next-token distribution."""
        return self.takes("full_log_probs") or self.takes("logits")

    @property
    def normalised(self) -> Plan:
        """The same with log-probs where it is given logits."""
        roles = {"logits": "full_log_probs", "reference_logits": "full_reference"}
        return replace(self, roles={name: roles.get(role, role) for name, role in self.roles.items()})

    def given(self) -> list[str]:
        """What each parameter was given, a sentence each."""
        lines = [f"{name}: {role}, {SHAPES[role]}" for name, role in self.roles.items()]
        lines += [f"{name}: {value!r}, as you said" for name, value in self.constants.items()]
        return lines + [f"{name}: {value!r}, its default; --map {name}=... gives it something" for name, value in
                        self.kept.items()]  # fmt: skip


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
    kept: dict[str, Any] = {}
    unknown: list[str] = []
    for name, parameter in parameters.items():
        if name in roles or name in fixed:
            continue
        role = _SPELLINGS.get(_plain(name))
        if role is not None and not _stays(parameter.default, role, parameter.empty):
            roles[name] = role
        elif parameter.default is parameter.empty:
            unknown.append(name)
        else:
            kept[name] = parameter.default
    if unknown:
        raise ValueError(_unfilled(unknown, set(roles.values())))
    taken = [role for role in roles.values() if role != "beta"]
    double = next((role for role in taken if taken.count(role) > 1), None)
    if double is not None:
        names = " and ".join(name for name, role in roles.items() if role == double)
        raise ValueError(f"{names} would both be given {double}: tell them apart with --map")
    if not {"log_probs", "full_log_probs", "logits", "log_ratio", "reverse_log_ratio"} & set(taken):
        raise ValueError(
            f"no parameter of {', '.join(parameters) or 'the function'} asks for the policy's log-probs: "
            "name one with --map theirs=log_probs"
        )
    positional = tuple(
        name for name, p in parameters.items() if p.kind is p.POSITIONAL_ONLY and name in {**roles, **fixed}
    )
    return Plan(roles, fixed, positional, kept)


def _stays(default: Any, role: str, empty: Any) -> bool:
    """Whether a default is kept although the name is known: a number or a word is; None where rewards would go.

    The coefficient of the KL is what it is called for, whatever its default.
    """
    if default is empty or role == "beta":
        return False
    return role in REWARDS if default is None else isinstance(default, (bool, int, float, str))


# parts of a name, in the order in which they are looked for, and what such a parameter probably is
_HINTS = (
    ("mask pad valid", "mask"), ("adv", "advantages"), ("rew score outcome", "rewards"),
    ("kl beta coef", "beta"), ("old behav rollout sampl infer mu", "behaviour"),
    ("ids token label action", "tokens"),
    ("ref teach base anchor init frozen q", "reference"),
)  # fmt: skip


def _guess(name: str, taken: set[str]) -> str | None:
    """What a parameter of another spelling probably is; None where it is probably no array."""
    plain = _plain(name)
    logits = "logit" in plain or "full" in plain
    for parts, role in _HINTS:
        if any(part in plain if len(part) > 2 else plain == part for part in parts.split()):
            return "reference_logits" if role == "reference" and logits else role
    policy, reference = ("logits", "reference_logits") if logits else ("log_probs", "reference")
    return next((role for role in (policy, reference) if role not in taken), None)


def _unfilled(names: list[str], taken: set[str]) -> str:
    """One sentence for parameters that cannot be filled, with options ready to paste."""
    guessed: dict[str, str | None] = {}
    for name in sorted(names, key=lambda name: _guess(name, set()) in ("log_probs", "logits")):
        guessed[name] = _guess(name, taken | {role for role in guessed.values() if role})
    paste = " ".join(f"--map {n}={guessed[n]}" if guessed[n] else f"--arg {n}=VALUE" for n in names)
    listed = " and ".join(
        f"cannot fill the parameter {name!r}" if not i else repr(name) for i, name in enumerate(names)
    )
    return f"{listed}: if this is what it is, add {paste}; there is {offered()}"


def constant(text: str) -> tuple[str, Any]:
    """``name=value`` of ``--arg``: a Python literal, or the text itself."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise ValueError(f"--arg {text!r}: write name=value")
    try:
        return name.strip(), ast.literal_eval(value.strip())
    except (ValueError, SyntaxError):
        return name.strip(), value.strip()
