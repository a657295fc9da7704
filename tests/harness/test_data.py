"""Tasks from packages and data sets, run for real: right, wrong, equivalent, malformed, hostile answers; bad files."""

import json
from itertools import islice

import pytest

from klgrad.harness import data, tasks

MATH_500 = {
    "problem": "What is $1 + 1$?", "solution": "It is \\boxed{2}.", "answer": "2", "subject": "Prealgebra", "level": 1,
    "unique_id": "test/prealgebra/1.json",
}  # fmt: skip
MATH = {"problem": "Half?", "level": "Level 1", "solution": "So \\boxed{\\frac{1}{2}}.", "type": "Prealgebra"}
MMLU = {"question": "Units of force?", "subject": "college_physics", "choices": ["J", "N", "W", "Pa"], "answer": 1}


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def no_worker(monkeypatch):
    """Where only the data matters, nothing is started."""
    monkeypatch.setattr(data, "_worker", lambda *args, **options: None)


# --------------------------------------------------------------------------------------------------- reasoning-gym


@pytest.fixture(scope="module")
def gym():
    pytest.importorskip("reasoning_gym")
    return lambda name: tasks.task(f"reasoning-gym:{name}")


@pytest.mark.parametrize("name", ["countdown", "codeio", "gcd"])
def test_reasoning_gym_poses_and_judges(gym, name):
    task = gym(name)
    problems, others = (list(islice(task.problems(split, 0), 12)) for split in ("train", "test"))
    for problem in problems:
        assert task.reward(problem, f"I think <answer>7 7</answer>, no: <answer>{problem.answer}</answer>") == 1
        assert task.reward(problem, problem.answer) == 1
        assert task.reward(problem, "") < 0.1  # countdown gives 0.01 to anything
        assert problem.prompt.endswith("</answer>.")
    assert len({problem.prompt for problem in problems + others}) == 24
    task.worker.close()
    if name == "codeio":  # the same in another worker, where what was judged is made anew
        assert [p.prompt for p in islice(task.problems("train", 0), 12)] == [p.prompt for p in problems]
        assert task.reward(problems[0], problems[0].answer) == 1
        task.worker.close()


def test_train_and_test_never_share_a_seed(monkeypatch):
    seen = {"train": set(), "test": set()}

    class Recorder:
        def call(self, method, first, index):
            return (first + index,) * 2

    monkeypatch.setattr(data, "_worker", lambda *args, **options: Recorder())
    monkeypatch.setattr(data.ReasoningGym, "ASK", 0)
    task = data.ReasoningGym("any")
    for seed in (0, 1, 2, 1_000_003):
        for split, found in seen.items():
            found |= {problem.prompt for problem in islice(task.problems(split, seed), 3000)}
    assert len(seen["train"]) == len(seen["test"]) == 4 * 3000  # nor one seed of training with another
    assert not seen["train"] & seen["test"]
    assert 0 <= min(seen["train"]) <= max(seen["train"]) < 2**30 <= min(seen["test"]) <= max(seen["test"]) < 2**31


def test_an_answer_that_breaks_the_judge_scores_0(gym):
    task = gym("prime_factorization")
    problem, before = next(task.problems("train", 0)), task.failed
    assert task.reward(problem, "zzz") == 0  # the package raises ValueError
    assert task.failed == before + 1
    assert task.reward(problem, problem.answer) == 1
    task.worker.close()


def test_a_name_that_reasoning_gym_lacks(gym):
    with pytest.raises(ValueError, match="unknown reasoning-gym task 'contdown': did you mean 'countdown'"):
        gym("contdown")


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="needs reasoning-gym: pip install 'klgrad"):
        data.Gym("gcd")


# ----------------------------------------------------------------------------------------------------- mathematics


@pytest.fixture(scope="module")
def mathematics(tmp_path_factory):
    pytest.importorskip("math_verify")
    task = tasks.task("math:" + write(tmp_path_factory.mktemp("data") / "math.jsonl", MATH_500))
    return lambda truth, response: task.reward(tasks.Problem("", truth), response), task


@pytest.mark.parametrize(
    ("truth", "given", "reward"),
    [
        ("2", "2", 1), ("2", "3", 0), ("2", "2.0", 1), ("\\frac{1}{2}", "0.5", 1), ("\\frac12", "\\dfrac{2}{4}", 1),
        ("(x+1)^2", "x^2+2x+1", 1), ("\\sqrt{8}", "2\\sqrt{2}", 1), ("3", "x=3", 1), ("\\{1,2\\}", "\\{2,1\\}", 1),
        ("(1,2)", "(2,1)", 0), ("10", "10\\text{ cm}", 1), ("1000", "1,000", 1), ("2", "2 or 3", 0), ("2", "", 0),
        ("2", "\\left(", 0), ("2", "\\frac{1}{", 0), ("2", "{{{{2}}}}", 1), ("2", "\\text{two}", 0),
        ("\\text{even}", "even", 1), ("2", "__import__('os').getpid()", 0), ("2", "\x00", 0), ("2", "1/0", 0),
    ],
)  # fmt: skip
def test_answers_are_compared_as_mathematics(mathematics, truth, given, reward):
    judge, _ = mathematics
    assert judge(truth, f"I say \\boxed{{7}}, no, \\boxed{{{given}}}") == reward


def test_without_a_box_nothing_counts(mathematics):
    judge, _ = mathematics
    for response in ("2", "", "\\boxed{2", "\\boxed 2", "boxed{2}"):
        assert judge("2", response) == 0


def test_hostile_answers_cost_themselves_alone(mathematics):
    judge, task = mathematics
    before = task.failed
    assert judge("2", "\\boxed{9^{9^{9^9}}}") == 0  # no end of digits
    assert task.failed == before + 1
    for given in ("{" * 10**6 + "2" + "}" * 10**6, "1" * 10**6, "9^" * 600 + "9"):  # too long to be read
        assert judge("2", f"\\boxed{{{given}}}") == 0
    assert judge("2", "\\boxed{" * 10**5) == 0
    assert task.failed == before + 1
    assert judge("2", "\\boxed{2.0}") == 1


def test_rows_of_math_and_of_math_500(tmp_path, no_worker):
    path = write(tmp_path / "math.jsonl", MATH_500, "", MATH, {"problem": "Three?", "answer": 3})
    task = tasks.task(f"math:{path}")
    found = list(task.problems("test", 0))
    assert [problem.answer for problem in found] == ["2", "\\frac{1}{2}", "3"]
    assert found[0].prompt.startswith("What is $1 + 1$?\nPlease")
    two_rounds = list(islice(task.problems("train", 0), 6))
    assert sorted(p.answer for p in two_rounds[:3]) == sorted(p.answer for p in two_rounds[3:])
    assert two_rounds == list(islice(task.problems("train", 0), 6))


# ------------------------------------------------------------------------------------------------- multiple choice


def test_choices_are_judged_by_letter(tmp_path):
    path = write(tmp_path / "mmlu.jsonl", MMLU, {**MMLU, "answer": "D"})
    task = tasks.task(f"choices:{path}")
    force, pascal = task.problems("test", 0)
    assert "Units of force?\nA. J\nB. N\nC. W\nD. Pa\n" in force.prompt
    assert pascal.answer == "D"
    for right in ("B", "(B)", "B.", "\\text{B}", "\\textbf{(B)}", " B ", "B. N", "{B}"):
        assert task.reward(force, f"so \\boxed{{{right}}}") == 1, right
    for wrong in ("A", "b", "N", "AB", "BC", "Both", "", "1", "A. N B"):
        assert task.reward(force, f"so \\boxed{{{wrong}}}") == 0, wrong
    assert task.reward(force, "B") == 0


# -------------------------------------------------------------------------------------------------------- bad data


@pytest.mark.parametrize(
    ("kind", "content", "sentence"),
    [
        ("math", "", "holds no problem: the data is empty"),
        ("math", "\n \n", "holds no problem: the data is empty"),
        ("math", "\n\nnonsense", r"line 3 is not JSON \(Expecting value"),
        ("math", "[1]", 'line 1 is no JSON object: write one {"problem"'),
        ("math", "[" * 100_000, "line 1 is not JSON"),
        ("math", '{"answer": "2"}', "line 1 has no 'problem', which must be text"),
        ("math", '{"problem": "p"}', "line 1 has neither 'answer' nor a 'solution'"),
        ("math", '{"problem": "p", "solution": "no box"}', "line 1 has neither 'answer' nor a 'solution'"),
        ("math", '{"problem": 3, "answer": "2"}', "line 1 has int as 'problem'"),
        ("math", '{"problem": "p", "answer": ["2"]}', "line 1 has list as 'answer'"),
        ("math", '{"problem": "p", "answer": true}', "line 1 has bool as 'answer'"),
        ("math", '{"problem": "' + "x" * (1 << 20) + '", "answer": "2"}', "line 1 is longer than 1,048,576 bytes"),
        ("choices", '{"question": "q", "answer": 0}', "line 1 has no 'choices' of 2 to 26 texts"),
        ("choices", '{"question": "q", "choices": ["1"], "answer": 0}', "line 1 has no 'choices' of 2 to 26"),
        ("choices", '{"question": "q", "choices": ["1", "2"], "answer": 2}', "line 1 has 2 as 'answer'"),
        ("choices", '{"question": "q", "choices": ["1", "2"], "answer": "C"}', "line 1 has 'C' as 'answer'"),
        ("choices", '{"question": "q", "choices": ["1", "2"]}', "line 1 has None as 'answer'"),
    ],
)
def test_bad_files_are_one_sentence_with_file_and_line(tmp_path, no_worker, kind, content, sentence):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(ValueError, match=sentence) as caught:
        tasks.task(f"{kind}:{tmp_path / 'bad.jsonl'}")
    assert "bad.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text(tmp_path, no_worker):
    (tmp_path / "bad.jsonl").write_bytes(b'{"problem": "\xff"}')
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        tasks.task(f"math:{tmp_path / 'bad.jsonl'}")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        tasks.task(f"math:{tmp_path / 'folder.jsonl'}")


# --------------------------------------------------------------------------------------------------------- the hub


def test_hub_names_have_subset_and_split(monkeypatch, no_worker):
    asked = []

    class Fake:
        @staticmethod
        def load_dataset(name, subset, split):
            asked.append((name, subset, split))
            return [MMLU] if "mmlu" in name else [MATH_500]

    monkeypatch.setitem(__import__("sys").modules, "datasets", Fake)
    monkeypatch.setattr(data, "_offline_if_unreachable", __import__("contextlib").nullcontext)
    for name, split in (
        ("math:HuggingFaceH4/MATH-500", "test"), ("choices:cais/mmlu/college_physics", "test"),
        ("math:owner/name@main", "test"), ("math:owner/name", "train"),
    ):  # fmt: skip
        assert next(tasks.task(name).problems(split, 0)).prompt
    assert asked == [
        ("HuggingFaceH4/MATH-500", None, "test"), ("cais/mmlu", "college_physics", "test"),
        ("owner/name", None, "main"), ("owner/name", None, "train"),
    ]  # fmt: skip


def test_without_datasets_the_hub_is_one_sentence(monkeypatch, no_worker):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match="cais/mmlu is no file here, and the hub needs datasets: pip install datasets"):
        next(tasks.task("choices:cais/mmlu").problems("test", 0))


@pytest.mark.slow
def test_the_real_datasets_package(tmp_path, monkeypatch, no_worker):
    pytest.importorskip("datasets")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    write(tmp_path / "owner" / "name" / "test.jsonl", MATH_500)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert next(tasks.task("math:owner/name").problems("test", 0)).answer == "2"
    with pytest.raises(ValueError, match=r"nobody/nothing \(test\) is neither a file nor a hub data set at hand"):
        next(tasks.task("math:nobody/nothing").problems("test", 0))
