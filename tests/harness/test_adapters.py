"""LoRA adapters by folder: the base under them, the probe and the loop on them, and what is not one."""

import json
import shutil
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from klgrad.harness import adapters, checkpoints, models  # noqa: E402
from klgrad.harness import probe as p  # noqa: E402
from klgrad.harness import train as t  # noqa: E402
from klgrad.harness.recipe import load as recipe  # noqa: E402
from klgrad.synth.configurations import parse  # noqa: E402

TOKENS = torch.randint(2, 20, (3, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(TOKENS, dtype=torch.bool)


def logits(model):
    with torch.no_grad():
        return model.head(model.features(TOKENS, MASK)[0])


@pytest.fixture(scope="module")
def folder(micro, tmp_path_factory):
    """An adapter of rank 2 with random weights, as peft itself saves one."""
    path = tmp_path_factory.mktemp("adapters") / "adapter"
    base, _ = models.load(str(micro))
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.5)
    model = peft.get_peft_model(base.model, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path)
    assert json.loads((path / adapters.CONFIG).read_text())["base_model_name_or_path"] == str(micro)
    return path


def test_an_adapter_is_its_base_with_peft_s_own_weights_merged(folder, micro):
    model, tokenizer = models.load(str(folder))
    base, _ = models.load(str(micro))
    merged = peft.PeftModel.from_pretrained(models.load(str(micro))[0].model, folder).merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(logits(model), merged(TOKENS).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(model), logits(base), atol=1e-2)
    assert tokenizer.eos_token == "$"


def test_only_the_adapter_takes_gradients(folder):
    model, _ = models.load(str(folder))
    assert all(("lora_" in name) == p.requires_grad for name, p in model.named_parameters())
    chosen = {choice: [n for n, _ in models.select_parameters(model, choice)] for choice in ("all", "lora")}
    assert chosen["all"] == chosen["lora"]
    assert len(chosen["lora"]) == 6


def test_the_base_under_it_is_the_base_and_leaves_no_trace(folder, micro):
    model, _ = models.load(str(folder))
    before, gradients = logits(model), [p.requires_grad for p in model.parameters()]
    base = models.own_reference(model)
    assert torch.equal(logits(base), logits(models.load(str(micro))[0]))
    assert torch.equal(logits(model), before)
    assert [p.requires_grad for p in model.parameters()] == gradients
    assert (base.vocabulary, base.context_window) == (model.vocabulary, model.context_window)


def test_the_probe_of_an_adapter_is_that_of_two_whole_models(folder, micro):
    """The base under the adapter against a second copy of it, to rounding."""
    model, tokenizer = models.load(str(folder))
    prompts = [tokenizer(text)["input_ids"] for text in ("s431=", "s98=")]
    setting = p.Setting(
        model, models.own_reference(model), prompts, tokenizer.eos_token_id, lengths=[3], samples=4, parameters="lora"
    )
    frames = [
        p.probe(replace(setting, reference=reference), [parse("k3-in-loss")], trials=3)
        for reference in (models.own_reference(model), models.load(str(micro))[0])
    ]
    assert frames[0].loc[0, "kl"] > 0.01
    for column in ("kl", "bias", "variance", "gradient_norm"):
        assert frames[0].loc[0, column] == pytest.approx(frames[1].loc[0, column], rel=1e-4)


def test_training_moves_the_adapter_alone_and_goes_on_exactly(folder, micro, tmp_path):
    changes = [f"model={folder}", "steps=2", "batch=2", "group=2", "kl=k3-in-loss", "beta=0.1", "evaluate_problems=2"]
    given = recipe("tiny-rloo", [*changes, "learning_rate=0.01", "checkpoint_every=1", "tasks=sort"])
    run = t.start(given)
    assert isinstance(run.reference, models.Base)
    lines = t.train(given, tmp_path / "whole")
    assert lines[-1]["kl"] > 0
    saved = tmp_path / "whole" / "step-2"
    assert (saved / "adapter_model.safetensors").stat().st_size < 20_000
    assert not (saved / "model.safetensors").exists()
    after, _ = models.load(str(saved))
    assert torch.equal(logits(models.own_reference(after)), logits(models.load(str(micro))[0]))
    assert not torch.equal(logits(after), logits(models.load(str(folder))[0]))
    t.train(replace(given, steps=1), tmp_path / "parts")
    t.train(given, tmp_path / "parts", resume=True)
    again, _ = models.load(str(tmp_path / "parts" / "step-2"))
    assert torch.equal(logits(after), logits(again))
    assert checkpoints.latest(tmp_path / "parts").name == "step-2"


def test_what_an_adapter_cannot_do_is_said(folder, tmp_path):
    with pytest.raises(ValueError, match="compared with its base"):
        t.start(recipe("tiny-rloo", [f"model={folder}", "reset_every=5"]))
    without = peft_hidden(folder)
    with pytest.raises(ValueError, match=r"need peft: install it with  pip install 'klgrad\[llm\]'"):
        without()


def peft_hidden(folder):
    def load():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(__import__("sys").modules, "peft", None)
            models.load(str(folder))

    return load


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"base_model_name_or_path": None}, "names no base"),
        ({"base_model_name_or_path": "gone"}, "its base 'gone' is neither a folder nor a hub name"),
        ({"base_model_name_or_path": "../adapter"}, "is an adapter itself"),
        ({"r": 3}, "does not load onto its base"),
        ({"peft_type": "PROMPT_TUNING"}, "does not load onto its base"),
        ("{", "adapter_config.json cannot be read"),
        ("no weights", "does not load onto its base"),
    ],
)
def test_bad_adapters(folder, tmp_path, change, sentence):
    copied = tmp_path / "adapter"
    shutil.copytree(folder, copied)
    config = json.loads((copied / adapters.CONFIG).read_text())
    if change == "no weights":
        (copied / "adapter_model.safetensors").unlink()
    else:
        text = change if isinstance(change, str) else json.dumps(config | change)
        (copied / adapters.CONFIG).write_text(text)
    with pytest.raises(ValueError, match=sentence) as raised:
        models.load(str(copied))
    assert "\n" not in str(raised.value)


def test_a_base_of_another_size_is_refused(folder, tmp_path):
    model, tokenizer = models.tiny(0, hidden=16, layers=1)
    models.save(model, tokenizer, tmp_path / "small")
    shutil.copytree(folder, tmp_path / "adapter")
    config = json.loads((folder / adapters.CONFIG).read_text()) | {"base_model_name_or_path": "../small"}
    (tmp_path / "adapter" / adapters.CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not load onto its base"):
        models.load(str(tmp_path / "adapter"))
