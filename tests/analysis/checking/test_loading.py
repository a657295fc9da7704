"""Functions from where users name them: a sentence that mends for whatever cannot be called, and options to paste."""

import re
import sys
import textwrap
import time

import pytest

from klgrad.analysis import check
from klgrad.analysis.checking.signature import plan


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "trainers"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "common.py").write_text("def difference(a, b):\n    return a - b\n")
    (folder / "kl.py").write_text(
        textwrap.dedent("""
            from .common import difference

            def k1(logp, ref_logp):
                return difference(logp, ref_logp)
        """)
    )
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
            class Penalty:
                def __call__(self, logp, ref_logp):
                    return logp - ref_logp

                def term(self, logp, ref_logp):
                    return logp - ref_logp

                @staticmethod
                def static(logp, ref_logp):
                    return logp - ref_logp

            made = Penalty()
        """)
    )
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "trainers"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mine.py:Penalty", "is a class: give an instance; write checked = Penalty(...) in mine.py"),
        (
            "mine.py:Penalty.term",
            "is a method of the class Penalty: give an instance; write checked = Penalty(...).term",
        ),
        ("trainers/kl.py:k1", "imports relatively, so it is part of a package: write trainers.kl:k1"),
        (".:k1", "is a folder: name the file"),
    ],
)
def test_what_cannot_be_called_is_mended_in_a_sentence(package, name, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        check(name, placement="reward")


@pytest.mark.parametrize("name", ["mine.py:made", "mine.py:Penalty.static", "mine.py:made.term", "trainers.kl:k1"])
def test_what_the_sentences_say_works(package, name):
    assert check(name, placement="reward", sections=("gradient",)).passed


def test_the_time_limit_covers_the_import(package):
    (package / "slow.py").write_text(
        "import time\ntime.sleep(30)\n\ndef k(logp, ref_logp):\n    return logp - ref_logp\n"
    )
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"importing slow.py takes more than 0\.2 seconds"):
        check("slow.py:k", timeout=0.2)
    assert time.monotonic() - start < 25


def rare(actor_lp, anchor_lp, keep_mask, strength):
    return strength * (actor_lp - anchor_lp) * keep_mask


def letters(p, q):
    return p - q


def alphabet(a, b, c):
    return a - b + 0 * c


@pytest.mark.parametrize(
    ("function", "paste"),
    [
        (rare, "--map actor_lp=log_probs --map anchor_lp=reference --map keep_mask=mask --arg strength=VALUE"),
        (letters, "--map p=log_probs --map q=reference"),
        (alphabet, "--map a=log_probs --map b=reference --arg c=VALUE"),
    ],
)
def test_options_are_printed_ready_to_paste(function, paste):
    with pytest.raises(ValueError, match="cannot fill the parameter") as caught:
        check(function)
    assert paste in str(caught.value)
    options = [option.split("=") for option in paste.replace("--arg", "--map").split("--map ")[1:]]
    mapping = {k: v.strip() for k, v in options if v.strip() != "VALUE"}
    arguments = {k: 1.0 for k, v in options if v.strip() == "VALUE"}
    found = check(function, placement="reward", mapping=mapping, arguments=arguments, sections=("gradient",))
    assert found.passed, str(found)


def test_what_each_parameter_is_given():
    def ours(logp, ref_logp, mask, beta=0.04, eps=0.2, reward=1.0, scores=None, old_logp=None):
        return logp

    found = plan(ours, {}, {"eps": 0.1})
    assert found.roles == {
        "logp": "log_probs", "ref_logp": "reference", "mask": "mask", "beta": "beta", "old_logp": "behaviour",
    }  # fmt: skip
    assert found.kept == {"reward": 1.0, "scores": None}
    lines = "\n".join(found.given())
    assert "eps: 0.1, as you said" in lines
    assert "reward: 1.0, its default" in lines
    assert plan(ours, {"reward": "rewards"}).roles["reward"] == "rewards"
