"""Models: the split into features and head, padding, the cache, perturbation, choice of parameters, bad names."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from klgrad.harness import models  # noqa: E402
from klgrad.harness.rollouts import pad_prompts, sample  # noqa: E402
from klgrad.harness.tabular import tabular_pair  # noqa: E402
from klgrad.synth.presets import preset  # noqa: E402


@pytest.fixture(scope="module")
def loaded(micro):
    return models.load(str(micro))


def test_tiny_has_about_450_000_parameters():
    model, tokenizer = models.tiny()
    assert 440_000 < models.parameter_count(model) < 460_000
    text = "c3,5,7>38="
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_features_and_head_are_the_model_s_logits(loaded):
    model, _ = loaded
    tokens = torch.randint(2, 20, (3, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        logits = model.model(tokens).logits
        assert model.split
        torch.testing.assert_close(model.head(model.features(tokens, mask)[0]), logits)
        model.split = False
        torch.testing.assert_close(model.head(model.features(tokens, mask)[0]), logits)
        model.split = True


def test_padding_in_front_changes_nothing(loaded):
    model, tokenizer = loaded
    prompts = [tokenizer(text)["input_ids"] for text in ("s431=", "s98=")]
    tokens, mask = pad_prompts(prompts, tokenizer.pad_token_id)
    with torch.no_grad():
        padded = model.features(tokens, mask)[0][1, -1]
        alone = model.features(*pad_prompts(prompts[1:], 0))[0][0, -1]
    torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-5)


def test_sampled_log_probs_are_those_of_a_full_pass(loaded):
    """The cache, positions and masks of sampling against one forward pass over everything."""
    from klgrad.harness.objective import token_terms

    model, tokenizer = loaded
    prompts = [tokenizer(text)["input_ids"] for text in ("s431=", "s98=", "s12345=")] * 4
    tokens, mask = pad_prompts(prompts, tokenizer.pad_token_id)
    generator = torch.Generator().manual_seed(0)
    drawn = sample(model, tokens, mask, 9, end=tokenizer.eos_token_id, generator=generator, temperature=0.7)
    terms = token_terms(drawn.features(model), model.head, drawn.responses, drawn.mask, temperature=0.7)
    torch.testing.assert_close(terms["log_probs"].detach(), drawn.behaviour, rtol=1e-3, atol=1e-4)
    ends = (drawn.responses == tokenizer.eos_token_id) & drawn.mask
    assert (ends.sum(1) <= 1).all()
    assert ends.any()
    assert not drawn.mask[:, 1:][ends[:, :-1]].any()  # nothing is real after the end


def test_the_sampler_draws_from_the_policy():
    """Tabular policy, 4,000 draws of two tokens: each of four sequences within 5 standard errors."""
    policy, _ = tabular_pair(preset("near"))
    tokens, mask = pad_prompts([[0]] * 4000, 0)
    drawn = sample(policy, tokens, mask, 2, end=None, generator=torch.Generator().manual_seed(0))
    code = drawn.responses[:, 0] * 2 + drawn.responses[:, 1]
    for value in range(4):
        where = code == value
        p = float(drawn.behaviour[where][0].sum().exp())
        assert abs(float(where.double().mean()) - p) < 5 * (p * (1 - p) / 4000) ** 0.5


def test_perturbation_leaves_the_original_alone(loaded):
    model, _ = loaded
    before = [p.detach().clone() for p in model.parameters()]
    other = models.perturbed(model, 0.5, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not torch.equal(next(iter(other.parameters())), before[0])


def test_choice_of_parameters(loaded):
    model, _ = loaded
    names = {
        choice: [n for n, _ in models.select_parameters(model, choice)] for choice in ("all", "last-block", "norm")
    }
    assert len(names["all"]) > len(names["last-block"]) > 0
    assert all(".layers.0." in name for name in names["last-block"])
    assert all("norm" in name for name in names["norm"])
    for choice in ("lora", "(", "no such thing"):
        with pytest.raises(ValueError, match="parameters"):
            models.select_parameters(model, choice)


def test_saved_and_loaded_is_the_same(loaded, tmp_path):
    model, tokenizer = loaded
    models.save(model, tokenizer, tmp_path / "copy")
    again, other = models.load(str(tmp_path / "copy"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert other.eos_token_id == tokenizer.eos_token_id


def test_bfloat16_forward_has_float32_statistics(micro):
    from klgrad.harness.objective import token_terms

    model, tokenizer = models.load(str(micro), dtype="bfloat16")
    tokens, mask = pad_prompts([tokenizer("s431=")["input_ids"]], 0)
    drawn = sample(model, tokens, mask, 4, end=None, generator=torch.Generator().manual_seed(0))
    terms = token_terms(drawn.features(model), model.head, drawn.responses, drawn.mask)
    assert terms["log_probs"].dtype == torch.float32


def test_bad_models(tmp_path, loaded):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is a folder that holds no complete model"):
        models.load(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="neither a folder nor a hub name"):
        models.load(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="unknown dtype"):
        models.load("x", dtype="float33")
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="is a file: give its folder"):
        models.load(str(tmp_path / "model.gguf"))
    model, tokenizer = loaded
    tokens, mask = pad_prompts([tokenizer("s431=")["input_ids"]], 0)
    with pytest.raises(ValueError, match="do not fit the model's context of 64"):
        sample(model, tokens, mask, 100, end=None, generator=torch.Generator())


def test_a_tokenizer_without_an_end_is_refused(loaded):
    import copy

    tokenizer = copy.deepcopy(loaded[1])
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end token"):
        models.checked_tokenizer(tokenizer, "x")


def test_a_checkpoint_without_some_weights_is_refused(micro, tmp_path):
    """transformers itself goes on with random ones."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(micro, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks the weights model\.norm\.weight"):
        models.load(str(tmp_path / "model"))


def test_a_tokenizer_of_another_model_is_refused(micro, tmp_path):
    import shutil

    shutil.copytree(micro, tmp_path / "model")
    _, tokenizer = models.load(str(micro))
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="tokenizer has 23 tokens and the model 22"):
        models.load(str(tmp_path / "model"))


def test_a_reference_needs_the_same_tokens_and_not_only_as_many(micro, tmp_path):
    import shutil

    policy, tokenizer = models.load(str(micro))
    reference = models.load_reference(str(micro), policy, tokenizer)
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    shutil.copytree(micro, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    text = file.read_text()
    seven, eight = (next(line for line in text.splitlines() if f'"{d}": ' in line) for d in "78")
    file.write_text(text.replace(seven, seven.replace('"7"', '"8"'), 1).replace(eight, eight.replace('"8"', '"7"'), 1))
    with pytest.raises(ValueError, match=r"has other tokens: '[78]' is \d+ there and \d+ for the policy"):
        models.load_reference(str(tmp_path / "model"), policy, tokenizer)
    other, tokens = models.tiny(0, hidden=32, layers=1)
    other.model.resize_token_embeddings(40)
    models.save(other, tokens, tmp_path / "wider")
    with pytest.raises(ValueError, match="vocabulary of 40"):
        models.load_reference(str(tmp_path / "wider"), policy, tokenizer)
