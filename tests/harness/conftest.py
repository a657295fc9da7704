"""A causal LM of a few thousand parameters, made once: the whole path runs on it in seconds."""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = (
    "1"  # a name that is not at hand is then said at once; read when transformers is imported
)


@pytest.fixture(scope="session")
def micro(tmp_path_factory):
    """Folder of a Qwen2 with one layer, taught for a moment so that it ends its responses."""
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from klgrad.harness import models
    from klgrad.harness.pretrain import pretrain

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models") / "micro"
    model, tokenizer = models.tiny(0, hidden=32, layers=1)
    pretrain(model, tokenizer, ["sort"], steps=60, batch=32, learning_rate=1e-2)
    models.save(model, tokenizer, folder)
    return folder
