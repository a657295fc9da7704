"""Whatever is typed or handed over: ValueError with one sentence, or an answer; exit codes 0, 1, 2; no half file."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from extremes import extreme_pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from klgrad import cli
from klgrad.analysis import reproduce
from klgrad.commands.options import Lengths
from klgrad.files import LOCK, PART
from klgrad.synth import automata
from klgrad.synth.configurations import OPTIONS, PLACEMENTS, parse
from klgrad.synth.estimators import ESTIMATORS, estimator
from klgrad.synth.policies import Policy, PolicyPair, linear, load_pair, log_of_probs, log_softmax, tabular
from klgrad.synth.presets import PRESETS, preset

words = st.sampled_from([
    *ESTIMATORS, *PLACEMENTS, *OPTIONS, "-in-", "+", "=", "(", ")", ",", " ", "0", "1", "-1", "2.5", "1e400", "nan",
])  # fmt: skip
nearly_names = st.lists(words, max_size=8).map("".join) | st.text(max_size=20)
numbers = arrays.arrays(
    st.sampled_from([np.float64, np.float32, np.int64, np.bool_, np.complex128, "U3"]),
    st.sampled_from([(2, 2), (2, 2, 2), (2, 2, 1)])
    | arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
logit_like = arrays.arrays(np.float64, (2, 2), elements=st.sampled_from([0.0, 1.0, -np.inf, np.inf, np.nan, 1e308]))
RING = automata.markov(2, 1, start=(0,))


def answers(function, *given):
    """The function's answer, or None where it said in one sentence what is wrong."""
    said = ""
    try:
        return function(*given)
    except ValueError as error:
        said = str(error)
    assert said.strip()
    return None


@given(text=nearly_names)
def test_configurations_parse_or_say_why(text):
    found = answers(parse, text)
    if found is not None:
        assert parse(str(found)) == found
        assert str(parse(str(found))) == str(found)


@given(text=nearly_names)
def test_estimators_and_presets_and_lengths_by_any_name(text):
    answers(estimator, text)
    answers(preset, text)
    answers(lambda: Lengths().convert(text, None, None))
    answers(load_pair, text.replace(":", "").replace("\0", ""))


@given(table=numbers, start=st.integers(-2, 3) | st.none(), end=st.integers(-2, 3) | st.booleans())
def test_automata_from_anything(table, start, end):
    answers(automata.Automaton, table, start, end)


@given(vocabulary=st.integers(-1, 4), order=st.integers(-1, 3), length=st.integers(-1, 3), eos=st.booleans())
def test_automata_of_any_size(vocabulary, order, length, eos):
    answers(lambda: automata.markov(vocabulary, order, eos=eos))
    for build in (automata.positional, automata.history, automata.counts):
        answers(lambda build=build: build(vocabulary, length, eos=eos))


@given(array=numbers | logit_like, other=numbers | logit_like)
def test_policies_from_anything(array, other):
    for found in (answers(log_softmax, array), answers(log_of_probs, array)):
        if found is not None:
            assert not np.isnan(found).any()
    policy = answers(tabular, RING, array)
    answers(linear, RING, array, other)
    if policy is not None:
        assert np.isfinite(policy.scores).all()
        answers(lambda: PolicyPair(RING, policy, other))
    answers(lambda: PolicyPair(RING, Policy(array, other, np.zeros(1)), array))


FIELDS = ("next_context", "start", "end", "policy_logits", "reference_logits", "behaviour_logits", "features", "theta")


@given(data=st.data())
def test_archives_of_anything(tmp_path, data):
    whole = {"next_context": RING.next_context, "start": np.array(0), "end": np.array(-1)}
    whole |= {"policy_logits": np.eye(2), "reference_logits": np.zeros((2, 2))}
    for name in data.draw(st.sets(st.sampled_from(FIELDS), max_size=3)):
        whole[name] = data.draw(numbers | logit_like)
    for name in data.draw(st.sets(st.sampled_from(sorted(whole)), max_size=1)):
        del whole[name]
    np.savez(tmp_path / "pair.npz", **whole)
    answers(load_pair, str(tmp_path / "pair.npz"))


@given(cut=st.integers(0, 2000), flip=st.integers(0, 2000), byte=st.integers(1, 255))
def test_damaged_archives(tmp_path, cut, flip, byte):
    buffer = io.BytesIO()
    np.savez(
        buffer, next_context=RING.next_context, start=0, end=-1, policy_logits=np.eye(2), reference_logits=np.eye(2)
    )
    content = bytearray(buffer.getvalue())
    content[flip % len(content)] ^= byte
    (tmp_path / "pair.npz").write_bytes(content[: max(cut, 4)] if cut % 2 else content)
    answers(load_pair, str(tmp_path / "pair.npz"))


def test_an_archive_may_lie_about_its_sizes(tmp_path):
    """A header that claims an array of 8 exabytes is refused, not allocated."""
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000, 1000000000), }"
    header += b" " * (64 - (len(header) + 11) % 64) + b"\n"
    with zipfile.ZipFile(tmp_path / "pair.npz", "w") as archive:
        archive.writestr("next_context.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(ValueError, match=r"cannot be read as \.npz"):
        load_pair(str(tmp_path / "pair.npz"))


plain = st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats(allow_nan=False) | st.text(max_size=5)
tree = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)


@given(data=st.data())
def test_manifests_of_anything(data):
    asked = {
        "sources": [{"preset": "near", "pair": None, "behaviour": None}], "lengths": [[2]], "exact_only": True,
        "configurations": ["k1-in-loss"], "trials": 2, "samples": 2, "seed": 0, "rank": None,
    }  # fmt: skip
    for name in data.draw(st.sets(st.sampled_from(sorted(asked)), max_size=2)):
        asked[name] = data.draw(tree)
    manifest = {"command": data.draw(st.just("klgrad compare") | tree), "request": asked, "software": data.draw(tree)}
    found = answers(reproduce.request, manifest)
    if found is not None:
        json.dumps(found)
    reproduce.changes(manifest, [])


OPTION_VALUES = {
    "--preset": st.sampled_from([*PRESETS, "fur", ""]),
    "--config": nearly_names | st.sampled_from(["k1-in-reward", "k3-in-both+loo", "full-in-loss+prefix-ratio"]),
    "--lengths": st.sampled_from(["1", "1:3", "3:1", "2,1", "0", "", "a", "1:9:4", "9" * 30]),
    "--trials": st.sampled_from(["2", "3", "1", "-1", "x", "9" * 30]),
    "--samples": st.sampled_from(["2", "4", "1", "0", "1e3"]),
    "--seed": st.sampled_from(["0", "-1", "9" * 30, "x"]),
    "--workers": st.sampled_from(["1", "2", "0"]),
    "--behaviour": st.sampled_from(["policy", "reference", "uniform", "nobody", "x.npz", ""]),
    "--pair": st.sampled_from(["pair.npz", "nowhere.npz", "a:b", ":", "pair.npz:f", ""]),
    "--rank": st.sampled_from(["variance", "bias"]),
    "--error": st.sampled_from(["0.1", "0", "-1", "nan", "inf"]),
    "--json": None, "--exact-only": None, "--out": st.just("out"), "--no-such-option": None,
}  # fmt: skip


@st.composite
def command_lines(draw):
    line = [
        draw(st.sampled_from(["compare", "compare", "exact", "table1", "estimators", "presets", "no-such-command"]))
    ]
    for option in draw(st.lists(st.sampled_from(sorted(OPTION_VALUES)), max_size=5)):
        values = OPTION_VALUES[option]
        line += [option] if values is None else [option, draw(values)]
    return [*line, "--lengths", "1:2", "--trials", "2", "--samples", "2"] if draw(st.booleans()) else line


@settings(max_examples=40)
@given(line=command_lines(), world=extreme_pairs())
def test_command_lines(tmp_path, monkeypatch, line, world):
    """Exit code 0, 1 or 2, no traceback, strict JSON, whole files."""
    if line[0] == "compare" and "--lengths" not in line:
        line = [*line, "--lengths", "1:2"]
    if line[0] == "compare" and "--exact-only" not in line and not {"--trials", "--samples"} & set(line):
        line = [*line, "--trials", "2", "--samples", "2"]
    monkeypatch.chdir(tmp_path)
    save(world[0], tmp_path / "pair.npz")
    done = CliRunner().invoke(cli.main, line)
    assert done.exit_code in (0, 1, 2), (line, done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), (line, done.exception)
    assert "Traceback" not in done.output
    if done.exit_code == 0 and "--json" in line and "--help" not in line:
        json.loads(done.stdout, parse_constant=pytest.fail)
    names = [path.name for path in Path("out").rglob("*")]
    assert not [name for name in names if name.endswith(PART) or name == LOCK]
    assert ("compare.csv" in names) == ("compare.json" in names)


def save(pair, path):
    """The pair as a file, its scores as features."""
    end = pair.automaton.end
    arrays = {"next_context": pair.automaton.next_context, "start": pair.automaton.start, "end": end}
    arrays |= {"policy_logits": pair.policy.log_probs, "reference_logits": pair.reference}
    if pair.behaviour is not None:
        arrays["behaviour_logits"] = pair.behaviour
    np.savez(path, **arrays)
