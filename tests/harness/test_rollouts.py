"""Responses evaluated with their prompts shared: the same log-probs and gradients as without, to rounding."""

import copy

import pytest

torch = pytest.importorskip("torch")
package = pytest.importorskip("transformers")

from klgrad.harness import objective as o  # noqa: E402
from klgrad.harness.models import CausalLM, tiny  # noqa: E402
from klgrad.harness.rollouts import pad_prompts, sample  # noqa: E402
from klgrad.harness.tabular import tabular_pair  # noqa: E402
from klgrad.synth.configurations import parse  # noqa: E402
from klgrad.synth.presets import preset  # noqa: E402

PROMPTS = [[5, 6, 7, 8], [9], [9], [3, 4]]  # the same prompt twice in a row is one group of six

KINDS = {
    "qwen2": lambda: package.Qwen2ForCausalLM(package.Qwen2Config(**SIZE, num_key_value_heads=2)),
    "llama": lambda: package.LlamaForCausalLM(package.LlamaConfig(**SIZE, num_key_value_heads=1)),
    "gpt2": lambda: package.GPT2LMHeadModel(
        package.GPT2Config(vocab_size=22, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    ),
    "mistral with a window of 4": lambda: package.MistralForCausalLM(
        package.MistralConfig(**SIZE, num_key_value_heads=2, sliding_window=4)
    ),
    "gemma 2 with capped logits": lambda: package.Gemma2ForCausalLM(
        package.Gemma2Config(**SIZE, num_key_value_heads=2, head_dim=8, sliding_window=4)
    ),
}
SIZE = {
    "vocab_size": 22, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


def model_of(kind, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inner = KINDS[kind]()
        with torch.no_grad():
            for parameter in inner.parameters():
                parameter.copy_(0.4 * torch.randn_like(parameter))  # far from uniform, so that positions matter
    return CausalLM(inner.double().eval())


def rollouts_of(model, length=6, end=1, prompts=PROMPTS):
    tokens, real = (x.repeat_interleave(3, 0) for x in pad_prompts(prompts, 0))
    return sample(model, tokens, real, length, end=end, generator=torch.Generator().manual_seed(0))


def unshared(rollouts, model):
    return model.features(rollouts.tokens[:, :-1], rollouts.real[:, :-1])[0][:, rollouts.prompt - 1 :]


def losses(policy, reference, rollouts, features, configuration):
    with torch.no_grad():
        theirs = features(rollouts, reference), reference.head
    terms = o.token_terms(
        features(rollouts, policy), policy.head, rollouts.responses, rollouts.mask,
        reference=theirs, summaries={**o.MONITORS, **o.estimator_summaries(configuration.estimator)},
    )  # fmt: skip
    objective = o.Objective(configuration, 0.7, 3, "grpo", "sequence-mean", ratio="token")
    advantages = torch.arange(len(rollouts.tokens)).double() - 4
    loss, _ = o.policy_loss(objective, terms, rollouts.mask, advantages, rollouts.behaviour)
    return terms, torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)


def check_shared_is_unshared(policy, reference, rollouts, name, tolerance=1e-6):
    """Terms in float64; gradients only as far as transformers' norms go, which are float32 inside but for GPT-2's."""
    (one, first), (two, second) = (
        losses(policy, reference, rollouts, how, parse(name)) for how in (type(rollouts).features, unshared)
    )
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-9, atol=1e-11)
    assert any(g is not None and g.abs().max() > 1e-3 for g in first)
    one, two = (torch.cat([g.reshape(-1) for g in found if g is not None]) for found in (first, second))
    assert (one - two).norm() < tolerance * two.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_shared_prompts_change_neither_terms_nor_gradients(kind):
    policy, reference = model_of(kind), model_of(kind, 1)
    assert policy.forks == ("window" not in kind and "gemma" not in kind)
    likely = int(rollouts_of(policy, end=None).responses[0, 1])
    rollouts = rollouts_of(policy, end=likely)
    assert len({int(n) for n in rollouts.mask.sum(1)}) > 1  # some ended early
    check_shared_is_unshared(
        policy, reference, rollouts, "k3-in-both+rtg+token-ratio+loo=3", 1e-13 if kind == "gpt2" else 1e-6
    )


@pytest.mark.parametrize("name", [
    "k1-in-reward+loo=3", "k1-in-reward+token", "k3-in-loss", "k3-in-both+future", "full-in-both+rtg",
    "k3-in-reward+prefix-ratio", "k1-in-reward+b=0.3",
])  # fmt: skip
def test_any_configuration_with_shared_prompts(name):
    policy, reference = model_of("qwen2"), model_of("qwen2", 1)
    check_shared_is_unshared(policy, reference, rollouts_of(policy), name)


def test_a_slice_of_rows_shares_too():
    """Memory splits cut groups off at their edges only, but nothing depends on it."""
    policy = model_of("qwen2")
    rollouts = rollouts_of(policy)
    for rows in (slice(0, 1), slice(2, 7), slice(8, 12)):
        part = rollouts.rows(rows)
        torch.testing.assert_close(part.features(policy), unshared(part, policy), rtol=1e-9, atol=1e-11)


def test_responses_of_one_token_need_only_the_prompts():
    policy = model_of("qwen2")
    rollouts = rollouts_of(policy, length=1)
    assert rollouts.features(policy).shape[:2] == (12, 1)
    torch.testing.assert_close(rollouts.features(policy), unshared(rollouts, policy), rtol=1e-9, atol=1e-11)


def test_a_tabular_policy_shares_its_one_prompt():
    policy, reference = tabular_pair(preset("far"))
    rollouts = rollouts_of(policy, end=None, prompts=[[0]] * 4)
    assert torch.equal(rollouts.features(policy), unshared(rollouts, policy))
    check_shared_is_unshared(policy, reference, rollouts, "k3-in-both+rtg+loo=3", 1e-13)


class Counted:
    """How many tokens a model is given."""

    def __init__(self, model):
        self.model, self.tokens = model, 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def features(self, tokens, *given, **more):
        self.tokens += tokens.numel()
        return self.model.features(tokens, *given, **more)


def test_each_prompt_is_read_once():
    model = Counted(model_of("qwen2"))
    rollouts = rollouts_of(model, length=5, end=None)
    prompts, responses = 3 * 4, 12 * 4  # three different prompts padded to 4; the last token is never read
    assert model.tokens == prompts + responses
    model.tokens = 0
    rollouts.features(model)
    assert model.tokens == prompts + responses


def test_the_sampled_log_probs_are_those_of_whole_sequences():
    for kind in ("qwen2", "mistral with a window of 4"):
        policy = model_of(kind)
        rollouts = rollouts_of(policy)
        terms = o.token_terms(unshared(rollouts, policy), policy.head, rollouts.responses, rollouts.mask)
        torch.testing.assert_close(terms["log_probs"].detach(), rollouts.behaviour, rtol=1e-9, atol=1e-11)


def test_a_cache_that_loses_the_graph_or_lies_is_not_forked():
    """The plain way is taken by trial, so a model with code of its own cannot be silently wrong."""

    class Detached(CausalLM):
        def features(self, tokens, mask, cache=None, *, keep=False):
            features, cache = super().features(tokens, mask, cache, keep=keep)
            for layer in getattr(cache, "layers", ()):
                layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
            return features, cache

    class Forgetful(CausalLM):
        def features(self, tokens, mask, cache=None, *, keep=False):
            return super().features(tokens, mask[:, -tokens.shape[1] :], keep=keep)

    inner = model_of("qwen2").model
    assert CausalLM(inner).forks
    assert not Detached(inner).forks
    assert not Forgetful(inner).forks


def test_gradient_checkpointing_takes_the_plain_way():
    model, _ = copy.deepcopy(tiny(0, hidden=16, layers=1))
    model.model.gradient_checkpointing_enable()
    assert model.eval().forks
    rollouts = rollouts_of(model)
    model.train()
    assert not model.forks
    torch.testing.assert_close(rollouts.features(model), unshared(rollouts, model))


def test_rollouts_can_be_trained_on():
    """They are drawn in inference mode, whose own tensors a graph may not hold."""
    rollouts = rollouts_of(model_of("qwen2"))
    assert not any(x.is_inference() for x in (rollouts.tokens, rollouts.real, rollouts.behaviour))
