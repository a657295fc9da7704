"""Scripts as data: what they would start, followed and never executed; bash itself is the oracle where it is there."""

import shutil
import subprocess

import pytest

from klgrad.analysis.shell import follow


def started(text, beside=lambda name: None):
    return [" ".join(word.text for word in command.words) for command in follow(text, beside).commands]


SAME = [
    "run a=1 'b c'=2 \"d=$HOME_\"",
    "K=k1; run x=$K y=${K} z=\"$K\" w='$K'",
    'KL="a=1 b=2 c=3"\nrun $KL',
    'KL="a=1 b=2"\nrun "$KL"',
    'ARGS=(a=1 "b c")\nARGS+=(d=2)\nrun "${ARGS[@]}" last',
    "ARGS=(a=1 b=2)\nrun ${ARGS[*]}",
    "for k in k1 k2; do run x=$k; done",
    'A=1\nif [ "$A" = 1 ]; then run yes; else run no; fi',
    'A=2\nif [[ "$A" == 1 ]]; then run one; elif [ "$A" == 2 ]; then run two; else run no; fi',
    'A=\nif [ -z "$A" ]; then run empty; fi\nif [ -n "$A" ]; then run full; fi',
    "A=b\ncase $A in a) run first ;; b|c) run second ;; *) run rest ;; esac",
    "f() { run x=$1 y=$2; }\nf 3 4\nf 5 6",
    'f() { run "$@" last; }\nf a=1 "b c"',
    'run x=${A:-3} y=${B-4} z="${C:=5}" w=$C',
    "A=7\nrun x=${A:-3} y=${A:+set} z=${B:+set}end",
    "A=MiXed\nrun ${A,,} ${A^^} ${A/i/o}",
    "P=a/b/c.x\nrun ${P##*/}",
    'run $(echo a=1 b=2) "$(echo c d)"',
    "export A=1 B=2\nrun $A $B",
    'A=1; A+=2; run "$A"',
    "run one && run two || run three",
    "run a \\\n  b \\\n  c # a comment\n# run d",
    'eval "run a=1 b=2"',
    'run \'it is\' "a \\"quoted\\" word" esc\\ aped',
    "(run inside)\n{ run grouped; }",
    "A='x y'\nB=$A\nrun \"$B\" z",
    "for k in 1 2; do for j in a b; do run $k$j; done; done",
]


@pytest.mark.parametrize("text", SAME)
def test_what_a_script_starts_is_what_bash_starts(text):
    """``run`` prints its arguments, one line a call; bash's own words against ours."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    script = "run() { printf '%s\\037' \"$@\"; echo; }\n" + text
    out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=30).stdout
    theirs = [line.split("\037")[:-1] for line in out.splitlines()]
    if "||" in text:  # which of them fails is not known
        return
    ours = [
        [w.text.replace("$HOME_", "") for w in c.words[1:]] for c in follow(text).commands if c.words[0].text == "run"
    ]
    assert ours == theirs


def test_undecided_branches_are_all_followed_and_named():
    found = follow('if [ "$GPUS" = 8 ]; then K=k1; else K=k2; fi\nrun x=$K').commands
    assert [c.words[1].text for c in found] == ["x=k1", "x=k2"]
    assert found[0].choices == ('if [ "$GPUS" = 8 ]',)
    assert started("case $1 in a) run a ;; b) run b ;; esac") == ["run a", "run b"]


def test_the_arguments_of_a_script_are_not_guessed():
    text = 'K=k1\nwhile [ $# -gt 0 ]; do case "$1" in --kind) K="$2"; shift 2 ;; esac; done\nJ=$K\nrun x=$J y=1'
    (command,) = follow(text).commands
    assert [word.text for word in command.words] == ["run", "x=k1", "y=1"]
    assert command.arguments == ("J",)
    (plain,) = follow("while true; do run x=1; done").commands
    assert plain.arguments == ()
    assert follow("run x=$1").commands[0].arguments == ("1",)


def test_here_documents_are_files_that_later_commands_see():
    text = "K=k1\ncat > a.yaml <<EOF\nkl: $K\nEOF\ncat <<'EOF' > b.yaml\nkl: $K\nEOF\ntee c.yaml <<EOF\nx: 1\nEOF\nrun"
    (command,) = (c for c in follow(text).commands if c.words[0].text == "run")
    assert dict(command.written) == {"a.yaml": "kl: k1\n", "b.yaml": "kl: $K\n", "c.yaml": "x: 1\n"}
    each = follow("for k in 1 2; do cat > a <<EOF\n$k\nEOF\nrun\ndone").commands
    assert [dict(c.written) for c in each] == [{"a": "1\n"}, {"a": "2\n"}]


def test_sourced_files_are_read_or_named():
    files = {"common.sh": "K=k2\nf() { run x=$K; }"}
    assert started("source common.sh\nf", files.get) == ["run x=k2"]
    script = follow("source gone.sh\nrun x=$K")
    assert script.missing == ("gone.sh",)
    assert [w.text for w in script.commands[0].words] == ["run", "x=$K"]


def test_lines_are_those_of_the_words():
    (command,) = follow("ARGS=(\n a=1\n b=2\n)\nrun \\\n  c=3 ${ARGS[@]}").commands
    assert [(w.text, w.line) for w in command.words] == [("run", 5), ("c=3", 6), ("a=1", 2), ("b=2", 3)]


def test_what_calls_itself_or_branches_without_end_stops():
    assert started("f() { f; run x; }\nf").count("run x") <= 8
    many = "".join(f'if [ "$A{i}" = 1 ]; then V{i}=1; fi\n' for i in range(20)) + "run x"
    assert started(many) == ["run x"]


def test_nothing_is_executed(tmp_path):
    target = tmp_path / "made"
    assert started(f"touch {target}\nX=$(touch {target})\nrun x=$X `touch {target}`")
    assert not target.exists()
