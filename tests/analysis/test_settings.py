"""Settings from every format: values, lines, and bad input in one sentence; nothing is executed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klgrad.analysis.composition import read
from klgrad.analysis.settings import plain

NESTED = {"a": {"use_kl": True, "coef": 0.001, "kind": "k1", "off": None}, "n": 8}
FLAT = {"a.use_kl": True, "a.coef": 0.001, "a.kind": "k1", "a.off": None, "n": 8}

YAML = """\
# a comment
a:
  use_kl: true
  coef: 1e-3
  kind: "k1"
  off: null
n: 8
"""
TOML = """\
n = 8

[a]  # a table
use_kl = true
coef = 1e-3
kind = "k1"
off = "none"
"""
FLAGS = """\
# a comment
python -m trainer --a.use_kl \\
  --a.coef 1e-3 --a.kind=k1 \\
  a.off=null +n=8
"""


def pairs(document):
    return {s.key: s.value for s in document.settings}


def lines(document):
    return {s.key: s.line for s in document.settings}


@pytest.mark.parametrize(
    ("text", "name"),
    [(YAML, "f.yaml"), (json.dumps(NESTED), "f.json"), (TOML, "f.toml"), (FLAGS, "f.sh")],
)
def test_every_format_gives_the_same_settings_by_its_suffix_and_by_its_looks(text, name):
    for called in (name, "-"):
        document = read(text, called)
        assert pairs(document) == FLAT
        assert document.format == read(text, name).format


def test_lines_where_the_format_gives_them():
    assert lines(read(YAML, "f.yml")) == {"a.use_kl": 3, "a.coef": 4, "a.kind": 5, "a.off": 6, "n": 7}
    assert lines(read(TOML, "f.toml")) == {"n": 1, "a.use_kl": 4, "a.coef": 5, "a.kind": 6, "a.off": 7}
    assert lines(read(FLAGS, "f.sh")) == {"a.use_kl": 2, "a.coef": 3, "a.kind": 3, "a.off": 4, "n": 4}
    indented = json.dumps(NESTED, indent="\t")
    assert lines(read(indented, "f.json")) == {"a.use_kl": 3, "a.coef": 4, "a.kind": 5, "a.off": 6, "n": 8}


TREES = st.recursive(
    st.one_of(st.booleans(), st.integers(-999, 999), st.sampled_from(["k1", "low_var_kl", "token-mean", "a b"])),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b_c", "d-e", "kl"]), inner, min_size=1, max_size=3),
    max_leaves=8,
)


def flat(tree, path=""):
    if not isinstance(tree, dict):
        return {path[1:]: tree}
    return {key: value for name, inner in tree.items() for key, value in flat(inner, f"{path}.{name}").items()}


@given(st.dictionaries(st.sampled_from(["a", "b_c", "kl"]), TREES, min_size=1))
def test_json_yaml_and_overrides_agree_on_any_tree(tree):
    """Two formats written by others' code or by hand come out alike, whatever the tree."""
    expected = flat(tree)
    text = json.dumps(tree)
    assert pairs(read(text, "f.json")) == pairs(read(text, "f.yaml")) == expected
    overrides = "\n".join(f"'{key}={json.dumps(v) if isinstance(v, bool) else v}'" for key, v in expected.items())
    assert pairs(read(overrides, "f.sh")) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", True), ("false", False), ("1e-3", 1e-3), ("8", 8), ("-0.5", -0.5), ("None", None), ("~", None),
        ("", None), ("k3+", "k3+"), ("infinity", "infinity"), ("nan", "nan"), ("1_0", 10), ("E", "E"),
    ],
)  # fmt: skip
def test_plain_values(text, value):
    assert plain(text) == value
    assert type(plain(text)) is type(value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--kl-coef 0.01 --use-kl-loss", {"kl-coef": 0.01, "use-kl-loss": True}),
        ("--kl-coef=-0.5 --x -1", {"kl-coef": -0.5, "x": -1}),
        ("++a.b=1 ~c.d +e=f", {"a.b": 1, "c.d": None, "e": "f"}),
        ("'a.b=\"x y\"' c='d'", {"a.b": '"x y"', "c": "d"}),
        ("KL=0.2\nrun a.b=$KL c=${KL} d=${NO:-0.3} e=$NO", {"a.b": 0.2, "c": 0.2, "d": 0.3, "e": "$NO"}),
        ('A="${A:-0.5}"\n: "${B:=true}"\nrun x.a=$A x.b=${B} x.c="$C"', {"x.a": 0.5, "x.b": True, "x.c": "$C"}),
        ("ARGS+=(x.a=1)\nif true; then ARGS+=(x.b=2 x.c=3); fi", {"x.a": 1, "x.b": 2, "x.c": 3}),
        ("ARGS=(\n --kl-coef 0.1\n)\nrun ${ARGS[@]} --last k2)", {"kl-coef": 0.1, "last": "k2"}),
        ("a=1 a=2", {"a": 2}),
    ],
)
def test_command_lines(line, expected):
    assert pairs(read(line, "f.sh")) == expected


def test_yaml_anchors_merges_lists_and_references():
    text = """\
base: &base
  kl: k1
  coef: ${other.coef}
other:
  <<: *base
  coef: 0.5
same: *base
overrides:
  - a.b=3
  - just text
sizes: [1, 2]
empty: []
"""
    found = pairs(read(text, "f.yaml"))
    assert found["other.kl"] == found["same.kl"] == "k1"
    assert found["other.coef"] == 0.5
    assert found["base.coef"] == 0.5  # filled in from the same text
    assert found["a.b"] == 3
    assert found["empty"] is None
    assert "sizes" not in found


def test_quoted_and_tagged_yaml_is_text_and_nothing_is_constructed(tmp_path):
    target = tmp_path / "made"
    text = f"a: !!python/object/apply:pathlib.Path.touch ['{target}']\nb: !custom {{c: 1}}\nd: 1\n"
    found = pairs(read(text, "f.yaml"))
    assert found["b.c"] == found["d"] == 1
    assert not target.exists()


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("a: [1", "f.yaml", r"f\.yaml is no valid YAML: line \d"),
        ("a: 1\n\tb: 2", "f.yaml", "line 2"),
        ("a: 1\n---\nb: 2", "f.yaml", "YAML"),
        ("a: &x [*x]", "f.yaml", "an anchor holds itself"),
        ("42", "f.yaml", "a single value"),
        ("", "f.yaml", "holds no settings"),
        ("# nothing\n", "-", "holds no settings"),
        ('{"a": }', "f.json", "no valid JSON: line 1"),
        ('{"a": 1', "-", "no valid JSON"),
        ("a = = 1", "f.toml", "no valid TOML"),
        ("run a=1 'b=2", "f.sh", "line 1: a quotation is not closed"),
        ("beta = 1", "f.py", "is Python and is not executed"),
        ("a: \0", "f.yaml", "no text file"),
        ("[" * 3000 + "]" * 3000, "f.json", "deep|JSON|settings"),
        ("a: " + "[" * 600 + "]" * 600, "f.yaml", "deep"),
    ],
)
def test_bad_input_is_one_sentence(text, name, says):
    with pytest.raises(ValueError, match=says):
        read(text, name)


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "{ }\n", "---\n"])
def test_an_empty_text_is_no_error_where_it_may_be_empty(text):
    for name in ("-", "f.yaml", "f.json", "f.toml", "f.sh"):
        assert read(text, name, may_be_empty=True).settings == ()
    with pytest.raises(ValueError, match="holds no settings"):
        read("words alone", "-", may_be_empty=True)


def test_standard_input_has_a_name():
    with pytest.raises(ValueError, match=r"^standard input holds no settings"):
        read("", "-")


def test_a_key_that_is_written_twice_is_told_and_the_later_one_replaces_it_whole():
    found = read("a:\n  kl: k1\n  coef: 1\na:\n  kl: k3\n  kl: k2\nb: 1\n", "f.yaml")
    assert pairs(found) == {"a.kl": "k2", "b": 1}
    assert [(r.key, r.first, r.line) for r in found.repeated] == [("a", 1, 4), ("a.kl", 5, 6)]
    merged = read("a: &a {kl: k1}\nb:\n  <<: *a\n  kl: k2\n", "f.yaml")
    assert merged.repeated == ()


def test_a_bomb_of_anchors_is_refused():
    steps = "\n".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 40))
    with pytest.raises(ValueError, match="more than"):
        read(f"a0: &a0 {{x: 1}}\n{steps}", "f.yaml")
