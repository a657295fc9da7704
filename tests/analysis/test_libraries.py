"""Entries and their resolution: each entry is held to its laws, so a new one is tested by being there."""

import dataclasses

import pytest

from klgrad.analysis.composition import read
from klgrad.analysis.libraries import FOLDER, Key, Library, editions, entries, libraries, library, load
from klgrad.analysis.lint import lint, survey
from klgrad.analysis.recipes import parse_recipe
from klgrad.analysis.recognition import recognise
from klgrad.analysis.resolution import ASSUMED_GROUP, resolve, written
from klgrad.analysis.settings import Setting

NAMES = sorted(libraries())
FAMILIES = {
    "trl", "verl", "openrlhf", "skyrl", "prime-rl", "slime", "areal", "nemo-rl", "roll", "ms-swift", "open-instruct",
    "torchtune", "tunix", "unsloth", "llama-factory", "trlx", "rl4lms", "transparent-grpo", "easyr1", "search-r1",
    "miles", "axolotl", "cosmos-rl", "tinker-cookbook", "trinity-rft",
}  # fmt: skip

# what each is expected to give, written by hand from the survey of their code: the default, and with a penalty
FIELD = {
    "areal": ("none", "sequence"), "llama-factory": ("sequence", "sequence"), "ms-swift": ("token-forward",) * 2,
    "nemo-rl": ("token", "token"), "open-instruct": ("token-forward",) * 2, "openrlhf": ("sequence",) * 2,
    "prime-rl": ("none", "none"), "rl4lms": ("sequence",) * 2, "roll": ("none", "token-forward"),
    "skyrl": ("token-forward",) * 2, "slime": ("none", "zero"), "torchtune-grpo": ("token-forward",) * 2,
    "torchtune-ppo": ("sequence",) * 2, "transparent-grpo": ("scaled-sequence",) * 2, "trl-grpo": ("none", "token"),
    "trl-ppo": ("sequence",) * 2, "trl-rloo": ("sequence",) * 2, "trlx": ("sequence",) * 2,
    "tunix-grpo": ("zero", "zero"), "tunix-ppo": ("other", "other"), "unsloth": ("none", "token"),
    "verl": ("none", "token-forward"), "easyr1": ("scaled-sequence",) * 2, "search-r1": ("sequence",) * 2,
    "miles": ("none", "zero"), "ms-swift-ppo": ("sequence",) * 2,
    "axolotl": ("none", "token-forward"), "cosmos-rl": ("none", "token-forward"),
    "tinker-cookbook": ("none", "token"), "trinity-rft": ("token",) * 2,
}  # fmt: skip
CANNOT = {
    "llama-factory", "open-instruct", "prime-rl", "torchtune-grpo", "transparent-grpo", "trl-grpo", "tunix-grpo",
    "unsloth", "axolotl", "cosmos-rl", "tinker-cookbook", "trinity-rft",
}  # fmt: skip


def settings(mapping):
    return [Setting(key, value, i) for i, (key, value) in enumerate(mapping.items(), 1)]


def field_of(report):
    return report.reading.name if report.reading else "none"


# -------------------------------------------------------------------------------------------------- laws of an entry


def test_every_library_of_the_field_has_an_entry():
    assert {family for family in FAMILIES if any(name.startswith(family) for name in NAMES)} == FAMILIES
    assert set(FIELD) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_says_what_was_read_where_and_when(name):
    entry = libraries()[name]
    assert entry.title
    assert entry.version in entry.read or entry.version == "1.10.0.dev0"
    assert any(word in entry.read for word in ("wheel", "git"))
    assert entry.source
    assert all(key.means for key in entry.keys.values())


@pytest.mark.parametrize("name", NAMES)
def test_every_default_and_advice_is_a_value_the_entry_knows(name):
    entry = libraries()[name]
    for key in entry.keys.values():
        assert not key.values or written(key.default) in map(written, key.values)
    for advice in (entry.unbiased, entry.closest, entry.switched_on):
        resolution = resolve(entry, settings(advice))
        assert resolution.unread == ()
        assert resolution.problems == ()


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_every_key_resolves_to_a_recipe(name):
    """One key at a time, from the settings that turn a penalty on: no choice of an entry is left without a text."""
    entry = libraries()[name]
    for base in (entry.switched_on, entry.unbiased, entry.closest):
        for key, known in entry.keys.items():
            for value in known.values:
                for penalty in resolve(entry, settings({**base, key: value})).penalties:
                    assert parse_recipe(str(penalty.recipe)) == penalty.recipe


@pytest.mark.parametrize("name", NAMES)
def test_what_the_engine_finds_is_what_the_survey_says(name):
    entry = libraries()[name]
    default, on = lint(entry, []), lint(entry, settings(entry.switched_on))
    assert (field_of(default), field_of(on)) == FIELD[name]


@pytest.mark.parametrize("name", NAMES)
def test_recommended_settings_pass_clean(name):
    entry = libraries()[name]
    assert (name in CANNOT) == (not entry.unbiased)
    assert entry.unbiased or entry.cannot
    if entry.unbiased:
        report = lint(entry, settings(entry.unbiased))
        assert report.reading.unbiased
        assert [f for f in report.findings if f.level != "note"] == []
        assert set(report.provided) <= {"no clamp is hit"}
    if entry.closest:
        report = lint(entry, settings(entry.closest))
        assert report.errors == 0
        assert field_of(report) == "token"


def test_the_survey_has_a_row_for_each_and_its_words_are_computed(monkeypatch):
    frame = survey()
    assert list(frame["name"]) == NAMES
    assert frame["default"].str.len().min() > 0
    row = survey(["areal"]).iloc[0]
    assert row["default"] == "no KL penalty [no-reference]"
    # another estimator in the entry is another verdict in the table: no column is written by hand
    entry = libraries()["trl-rloo"]
    worse = dataclasses.replace(entry, terms=({**entry.terms[0], "estimator": "k3"},))
    assert lint(worse, []).verdict == "sequence - token-forward"


def test_other_versions_change_what_they_say():
    new, old = library("trl-grpo"), library("trl-grpo@1.10.0.dev0")
    on = settings({"beta": 0.1})
    assert (field_of(lint(new, on)), field_of(lint(old, on))) == ("token", "token-forward")
    assert library("trl-grpo@1.16.0") is new
    (finding,) = [f for f in lint(library("verl@0.7"), []).findings if f.id == "unknown-version"]
    assert finding.level == "warning"
    assert "verl 0.7 was not read" in finding.message
    assert "0.9.1 are assumed" in finding.message


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("verl@0.2.0", "verl@0.2"), ("verl@0.3.0", "verl@0.2"), ("verl@2025-02", "verl@0.2"), ("verl@2025-04", "verl"),
        ("verl@0.4.0", "verl"), ("verl@0.9.1", "verl"), ("openrlhf@2026-04-18", "openrlhf@0.8.0"),
        ("openrlhf@2026-04-19", "openrlhf"), ("open-instruct@2025-11-30", "open-instruct@2025-11"),
        ("trl-grpo@0.15.2", "trl-grpo@0.14.0"), ("trl-grpo@0.18", "trl-grpo@0.17.0"),
        ("trl-grpo@2026-01", "trl-grpo@1.10.0.dev0"), ("trl-grpo@1.9", "trl-grpo@1.10.0.dev0"),
        ("trl-grpo@1.10.0", "trl-grpo"), ("prime-rl@2026-08", "prime-rl@0.8.0"),
    ],
)  # fmt: skip
def test_a_version_or_a_month_finds_the_edition_that_held_then(asked, found):
    assert library(asked).name == found


@pytest.mark.parametrize("name", [name for name in entries() if "@" in name])
def test_an_edition_has_an_end_and_a_recipe_for_every_value(name):
    entry = entries()[name]
    assert entry.until
    assert entry.until_version
    assert editions(entry)[0].name == entry.trainer
    for key, known in entry.keys.items():
        for value in known.values:
            for penalty in resolve(entry, settings({**entry.switched_on, key: value})).penalties:
                assert parse_recipe(str(penalty.recipe)) == penalty.recipe


def test_editions_differ_where_they_say_so():
    on = settings({"beta": 0.1})
    found = [
        (e.version, lint(e, on).reading.phrase, lint(e, []).reading is None) for e in editions(library("trl-grpo"))
    ]
    assert found == [
        ("1.16.0", "token / E|y|", True), ("1.10.0.dev0", "token-forward / E|y|", True),
        ("0.22.0", "token-forward / E|y|", True), ("0.19.0", "token-forward / E|y|", True),
        ("0.17.0", "token-forward / E|y|", False), ("0.16.0", "token-forward / E|y|", False),
        ("0.14.0", "token-forward / T", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "says"), [("trl", "trl-grpo or trl-ppo or trl-rloo"), ("varl", "did you mean 'verl'")]
)
def test_an_unknown_library_is_one_sentence(name, says):
    with pytest.raises(ValueError, match=says):
        library(name)


HEAD = 'title="x"\nversion="1"\nread="r"\n'
KEYS = '[keys]\na={default=0,means="m"}\n'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("title = ", "no library entry"),
        ('title = "x"', "no library entry: 'keys'"),
        (f"{HEAD}odd=1\n{KEYS}", "odd"),
        (f'{HEAD}{KEYS}[[terms]]\nwhen={{b=1}}\ncoefficient="a"', "speaks of b"),
        (f'{HEAD}{KEYS}[[findings]]\nid="i"\nlevel="note"\ntext="{{c}}"\nkeys=[]', "speaks of c"),
        (f'{HEAD}{KEYS}[[findings]]\nid="i"\nlevel="bad"\ntext=""\nkeys=[]', "the level of i is none of open"),
    ],
)
def test_a_broken_entry_says_what_is_wrong(tmp_path, content, says):
    path = tmp_path / "x.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=says):
        load(path)


def test_a_library_is_added_by_adding_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'title="Mine"\nversion="1"\nread="wheel 1"\nsource=["m.py"]\n[keys]\nkl={default=0.1,means="coefficient"}\n'
        '[[terms]]\nplacement="reward"\nwhen={kl="!0"}\ncoefficient="kl"\nestimator="k1"\noptions=["token-mean"]\n'
    )
    assert lint(load(path), []).verdict == "sequence / E|y|"


# -------------------------------------------------------------------------------------------------------- resolution

ENTRY = Library(
    name="mine", title="Mine", version="1", read="wheel 1", source=("m.py",),
    keys={
        "a.use": Key(False, "switch", (True, False)), "a.kind": Key("k1", "estimator", ("k1", "k3")),
        "a.coef": Key(0.1, "coefficient"), "n": Key(1, "group"), "ref": Key(None, "model", section=True),
        "b.n_steps": Key(3, "steps"),
    },
    terms=(
        {"placement": "reward", "when": {"a.use": True}, "coefficient": "a.coef",
         "estimator": {"of": "a.kind", "k1": "k1", "otherwise": "k3"},
         "options": ["loo={n}", [{"when": {"b.n_steps": ">3"}, "is": "rtg"}, {"is": ""}]]},
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "recipes"),
    [
        ({}, []),
        ({"a.use": True, "n": 4}, ["k1-in-reward+loo=4"]),
        ({"use": "true", "n": 4}, ["k1-in-reward+loo=4"]),  # an end of a key, and text
        ({"top.a.use": True, "A.Kind": "k3", "n": 2}, ["k3-in-reward+loo=2"]),  # a key inside a section, another case
        ({"a.use": True, "n": 4, "b.n-steps": 4}, ["k1-in-reward+rtg+loo=4"]),  # a dash
        ({"a.use": True, "n": 4, "b.n_steps": 3}, ["k1-in-reward+loo=4"]),
        ({"a.use": True, "n": 4, "a.coef": None}, []),  # no coefficient, no penalty
    ],
)
def test_resolution(given, recipes):
    resolution = resolve(ENTRY, settings(given))
    assert [str(p.recipe) for p in resolution.penalties] == recipes
    assert resolution.unread == ()


def test_a_later_setting_counts_and_the_key_itself_before_one_that_ends_in_it():
    later = [Setting("a.kind", "k3", 1), Setting("a.kind", "k1", 2)]
    assert resolve(ENTRY, later).values["a.kind"] == "k1"
    assert resolve(ENTRY, later).given["a.kind"].line == 2
    nested = [Setting("a.kind", "k3"), Setting("other.a.kind", "k1")]
    assert resolve(ENTRY, nested).values["a.kind"] == "k3"
    shorter = [Setting("a.kind", "k3"), Setting("kind", "k1")]
    assert resolve(ENTRY, shorter).values["a.kind"] == "k1"


@pytest.mark.parametrize(
    ("given", "value"),
    [({"ref.path": "m"}, "given"), ({"ref.path": None}, None), ({"ref": None}, None), ({"ref": "m"}, "m"), ({}, None)],
)
def test_a_section_is_given_by_what_is_in_it(given, value):
    assert resolve(ENTRY, settings(given)).values["ref"] == value


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"a.kind": "k4"}, "k4 is no value that Mine 1 is known to take"),
        ({"a.coef": "much"}, "much is no finite number: 0.1 is assumed"),
        ({"a.coef": True}, "no finite number"),
        ({"a.coef": float("inf")}, "no finite number"),
        ({"a.coef": "${unknown}"}, "is not resolved here: 0.1 is assumed"),
        ({"a.use": True, "n": 1}, f"n = 1 makes no group: a group of {ASSUMED_GROUP} is assumed"),
        ({"a.use": True}, f"by default makes no group: a group of {ASSUMED_GROUP} is assumed"),
    ],
)
def test_what_cannot_be_taken_is_said_with_what_was_assumed(given, says):
    (problem,) = resolve(ENTRY, settings(given)).problems
    assert says in problem[1]


def test_flags_take_no_value_from_what_follows():
    flags = read("run --a.use script.py --no-a.kind", "f.sh").settings
    assert resolve(ENTRY, flags).values["a.use"] is True
    off = read("run --a.use --no_a.use", "f.sh").settings
    assert resolve(ENTRY, off).values["a.use"] is False


# ------------------------------------------------------------------------------------------------- guessing


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("algorithm.use_kl_in_reward=True", "verl"),
        ("--algo.kl.use_loss", "openrlhf"),
        ("--use-unbiased-kl", "slime"),
        ("loss_fn: {reference_policy_kl_penalty: 0.1}", "nemo-rl"),
        ("swift rlhf --rlhf_type grpo --beta 0.1", "ms-swift"),
        ("python open_instruct/grpo_fast.py --beta 0.1", "open-instruct"),
        ("method: {init_kl_coef: 0.1}", "trlx"),
    ],
)
def test_a_library_is_guessed_where_it_is_clear(text, name):
    document = read(text, "-")
    found = recognise(document)
    assert found.entry.name == name
    assert found.clues


@pytest.mark.parametrize(
    ("text", "says"), [("beta: 0.1", "equally well: say --library"), ("lr: 0.1", "no setting names a library")]
)
def test_a_library_is_not_guessed_where_it_is_not(text, says):
    with pytest.raises(ValueError, match=says):
        recognise(read(text, "f.yaml"))


def test_entries_stand_where_the_package_looks():
    assert {path.stem for path in FOLDER.glob("*.toml") if "@" not in path.stem} == {*NAMES, "stages"}
