"""Lists of all settings: read from source that is not imported, and written again the same."""

import pytest

from klgrad.analysis import keylists
from klgrad.analysis.keylists import SOURCES, Source, compare, extract, known_keys, write
from klgrad.analysis.libraries import entries

CONFIG = """
import sys
from dataclasses import dataclass
sys.exit("imported")

Loss = "A | B"
@dataclass
class A:
    eps: float = 0.1
class B:
    tau: float = 0.0
    shared: ClassVar[int] = 1
LossConfig = A | B
class Base:
    lr: float = 1.0
class Config(Base):
    loss: LossConfig = None
    inner: list[A] = None
    again: "Config" = None
    _hidden: int = 0
"""
PARSER = """
parser.add_argument("--kl-coef", type=float)
parser.add_argument("-q", "--quiet")
parser.add_argument("file")
"""


def test_dataclasses_with_what_they_hold_and_inherit(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    found = extract(tmp_path, Source("x", "x", ("config.py",), ("Config", "B:at")))
    assert found == [
        "again", "at.tau", "inner", "inner.eps", "loss", "loss.eps", "loss.tau", "lr",
    ]  # fmt: skip


def test_parsers_and_yaml(tmp_path):
    (tmp_path / "arguments.py").write_text(PARSER)
    (tmp_path / "conf.yaml").write_text("a:\n  b: 1\n  c: {d: 2}\n")
    assert extract(tmp_path, Source("x", "x", ("*.py", "*.yaml"))) == ["a", "a.b", "a.c", "a.c.d", "kl_coef", "quiet"]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (Source("x", "x", ("none.py",)), "there is no none.py"),
        (Source("x", "x", ("config.py",), ("No",)), "no class No"),
    ],
)
def test_what_is_not_there_is_said(tmp_path, source, says):
    (tmp_path / "config.py").write_text(CONFIG)
    with pytest.raises(ValueError, match=says):
        extract(tmp_path, source)


def test_every_list_has_a_source_and_an_entry_and_every_source_a_list():
    lists = {path.stem for path in keylists.FOLDER.glob("*.txt")}
    assert lists == {source.name for source in SOURCES}
    used = {entry.known or entry.name for entry in entries().values()} | {entry.trainer for entry in entries().values()}
    assert lists <= used
    assert all(len(known_keys(name)) > 30 for name in lists)


def test_the_installed_trl_has_the_settings_that_are_listed():
    pytest.importorskip("trl")
    for found in compare(["trl-grpo", "trl-rloo"]):
        assert not isinstance(found, tuple)
        if found.version == "1.16.0":
            assert "use_bias_correction_kl" in known_keys("trl-grpo")
            own = [key for key in (*found.added, *found.gone) if "kl" in key or key in ("beta", "num_generations")]
            assert own == []


def test_a_list_is_written_with_its_origin(tmp_path):
    path = write(Source("x", "pkg", ("a.py",)), "1.2", ["a", "b"], tmp_path)
    assert path.read_text() == "# pkg 1.2: a.py\na\nb\n"


def test_what_is_not_installed_is_no_difference(monkeypatch):
    monkeypatch.setattr(keylists, "folder_of", lambda module: None)
    assert [reason for _, reason in compare(["verl"])] == ["not installed"]
