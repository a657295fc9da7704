"""`--device`: another engine draws the same law, its tables and blocks say so, and what is not here is one sentence."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from klgrad import cli
from klgrad.analysis import montecarlo
from klgrad.analysis.montecarlo import simulate
from klgrad.synth import devices
from klgrad.synth.configurations import parse
from klgrad.synth.presets import preset

REQUEST = ["--lengths", "3,5", "--config", "k1-in-reward+loo", "--config", "k3-in-loss", "--trials", "6", "--samples"]
REQUEST += ["40", "-q"]


def run(*arguments):
    return CliRunner().invoke(cli.main, [str(a) for a in arguments])


@pytest.fixture
def no_cuda(monkeypatch, torch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def saved(tmp_path):
    done = run("compare", *REQUEST, "--device", "torch-cpu", "--out", tmp_path / "there")
    assert done.exit_code == 0, done.output
    return tmp_path / "there" / "compare.json"


def test_exact_rows_are_the_same_and_drawn_ones_are_not(tmp_path, saved):
    assert run("compare", *REQUEST, "--out", tmp_path / "here").exit_code == 0
    here, there = (p.read_text().splitlines() for p in (tmp_path / "here/compare.csv", saved.with_suffix(".csv")))
    assert [a for a in here if "exact" in a] == [b for b in there if "exact" in b]
    drawn = [(a, b) for a, b in zip(here, there, strict=True) if "monte_carlo" in a]
    assert len(drawn) == 4
    assert all(a != b for a, b in drawn)


def test_the_manifest_says_what_drew_and_comes_out_again(tmp_path, saved, torch):
    provenance = json.loads(saved.read_text())["manifest"]
    assert provenance["request"]["device"] == "torch-cpu"
    assert provenance["request"]["samplers"] == {"near": "paths"}
    assert provenance["device"] == f"torch {torch.__version__} on the CPU"
    done = run("reproduce", saved, "--out", tmp_path / "again")
    assert done.exit_code == 0, done.output
    assert "byte for byte" in done.output
    assert (tmp_path / "again/compare.json").read_bytes() == saved.read_bytes()


def drawn_on_cuda(saved):
    content = json.loads(saved.read_text())
    content["manifest"]["request"]["device"] = "cuda"
    saved.write_text(json.dumps(content))


def test_what_drew_is_not_at_hand(saved, no_cuda):
    drawn_on_cuda(saved)
    done = run("reproduce", saved)
    assert done.exit_code == 2
    assert "has no CUDA device" in done.stderr
    assert f"{saved} was drawn on cuda, and only there its numbers come out again" in done.stderr


def test_where_nothing_was_drawn_no_device_is_needed(tmp_path, no_cuda):
    assert run("compare", *REQUEST, "--exact-only", "--device", "torch-cpu", "--out", tmp_path).exit_code == 0
    assert "device" not in json.loads((tmp_path / "compare.json").read_text())["manifest"]
    drawn_on_cuda(tmp_path / "compare.json")
    assert run("reproduce", tmp_path / "compare.json").exit_code == 0


def test_other_hardware_is_named(saved):
    content = json.loads(saved.read_text())
    content["manifest"]["device"] = "torch 1.0 on a toaster\x1b[31m"
    saved.write_text(json.dumps(content))
    done = run("reproduce", saved)
    assert done.exit_code == 0
    assert "changed: device was torch 1.0 on a toaster\\x1b[31m, is torch " in done.output


def test_a_manifest_of_before_devices_is_of_the_cpu(tmp_path):
    assert run("compare", *REQUEST, "--out", tmp_path).exit_code == 0
    content = json.loads((tmp_path / "compare.json").read_text())
    assert content["manifest"]["request"].pop("device") == "cpu"
    assert "device" not in content["manifest"]
    (tmp_path / "compare.json").write_text(json.dumps(content))
    done = run("reproduce", tmp_path / "compare.json")
    assert done.exit_code == 0, done.output
    assert "changed" not in done.output


def test_figure1_draws_on_a_device(tmp_path):
    pytest.importorskip("torch")
    asked = ["--preset", "ending", "--lengths", "2,3", "--trials", "3", "--samples", "8", "-q", "--out", tmp_path]
    assert run("figure1", *asked, "--device", "torch-cpu").exit_code == 0
    assert json.loads((tmp_path / "figure1.json").read_text())["manifest"]["request"]["device"] == "torch-cpu"
    assert (tmp_path / "figure1.png").exists()
    assert not (tmp_path / ".klgrad-blocks").exists()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--device", "gpu"], "unknown device 'gpu': cpu (numpy, the reference), cuda, cuda:N, or torch-cpu"),
        (["--device", "cuda"], "this torch has no CUDA device"),
        (["--device", "cuda:1", "--exact-only"], "leave out --device to draw on the CPU"),
        (
            ["--device", "torch-cpu", "--scheduler", "tcp://nowhere:1"],
            "--scheduler tcp://nowhere:1 elsewhere: give one",
        ),
    ],
)
def test_a_device_that_cannot_be_is_one_sentence(tmp_path, no_cuda, asked, words):
    done = run("compare", *REQUEST, *asked, "--out", tmp_path)
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def blocks_of(store, device, seed=0):
    request = {"trials": 4, "samples": 10, "seed": seed, "device": device, "store": store}
    return simulate(preset("near"), [parse("k1-in-reward")], [4], **request).gradients[0]


def test_stored_blocks_of_devices_do_not_mix(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    here, there = blocks_of(tmp_path, "cpu"), blocks_of(tmp_path, "torch-cpu")
    assert not np.array_equal(here, there)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(devices, "TorchSampler", None)  # both are taken up again, each for its own device
    assert np.array_equal(blocks_of(tmp_path, "cpu"), here)
    assert np.array_equal(blocks_of(tmp_path, "torch-cpu"), there)
    monkeypatch.setattr(devices, "identity", lambda device: "another GPU")
    with pytest.raises(TypeError):
        blocks_of(tmp_path, "torch-cpu")


def test_the_name_of_the_hardware_is_part_of_the_request(tmp_path, monkeypatch, torch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card of {device}")
    assert montecarlo.identity("cuda:1") == f"torch {torch.__version__} on card of cuda:1"
    request = (preset("near"), [parse("k1-in-loss")], 2, 2, 0)
    keys = {montecarlo.store_of(tmp_path, *request, device) for device in ("cpu", "torch-cpu", "cuda", "cuda:1")}
    assert len(keys) == 4
    assert montecarlo.store_of(tmp_path, *request) in keys
