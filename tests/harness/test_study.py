"""The grid: cells, recipes of cells, an interrupted study that goes on, tables and the figure."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from klgrad.figures import study as draw  # noqa: E402
from klgrad.harness import study as s  # noqa: E402
from klgrad.harness.recipe import Recipe  # noqa: E402


def test_the_paper_s_grid():
    cells = s.grid(s.KLS, (0.3, 1.0), 3, (0, 10))
    assert len(cells) == len(set(cells)) == 3 * 2 * (1 + 6 * 2)
    assert len({cell.name for cell in cells}) == len(cells)
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)


def test_recipes_of_cells():
    base = Recipe(group=5)
    assert s.recipe_of(s.Cell(s.NO_KL, 0.0, 1, 0), base).kl == ""
    assert s.recipe_of(s.Cell("k1-in-reward", 0.3, 0, 0), base).kl == "k1-in-reward+loo=5"
    assert s.recipe_of(s.Cell("k3-in-both", 0.3, 0, 10), base).kl == "k3-in-both+token-ratio+loo=5"
    assert s.recipe_of(s.Cell("k3-in-loss", 0.3, 0, 10), base).kl == "k3-in-loss"


def test_a_study_goes_on_and_ends_in_a_figure(micro, tmp_path):
    base = Recipe(
        model=str(micro), tasks=("sort",), in_domain=("sort",), out_of_domain=("countdown",),
        steps=2, batch=2, group=2, length=6, evaluate_problems=4,
    )  # fmt: skip
    cells = s.grid((s.NO_KL, "k3-in-loss"), (1.0,), 2, (0, 1))
    s.run(cells[:3], base, tmp_path, processes=1)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    assert len(stamps) == 3
    seen = []
    s.run(cells, base, tmp_path, processes=1, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 8) for done in range(3, 9)]
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())  # not run again
    final = s.final(cells, base, tmp_path)
    means = s.summary(final)
    assert len(final) == 8
    assert (means["seeds"] == 2).all()
    one = final[(final.configuration == "k3-in-loss") & (final.staleness == 1)]
    row = means[(means.configuration == "k3-in-loss") & (means.staleness == 1)].iloc[0]
    assert row["kl"] == pytest.approx(one["kl"].mean())
    assert row["kl_error"] == pytest.approx(one["kl"].std() / np.sqrt(2))
    curves = s.curves(cells, tmp_path)
    assert set(curves["staleness"]) == {0, 1}
    figure = draw(curves[curves.staleness == 0], means[means.staleness == 0])
    assert [axes.get_title() for axes in figure.axes][3].startswith("frontier")


def test_a_run_elsewhere_gives_the_files_of_one_here(micro, tmp_path, monkeypatch):
    """What a cluster's worker is sent and sends back, without the cluster: the same bytes, put in the same place."""
    cloudpickle = pytest.importorskip("cloudpickle")
    base = Recipe(model=str(micro), tasks=("sort",), steps=2, batch=2, group=2, length=6, evaluate_problems=2)
    cells = s.grid(("k1-in-reward",), (1.0,), 1, (0, 1))

    def cluster(address, task, keep, todo, packages):
        assert address == "tcp://somewhere:8786"
        assert {"numpy", "torch", "transformers"} <= set(packages)
        draw = cloudpickle.loads(cloudpickle.dumps(task)).drawer()
        for index, cell in reversed(todo):
            keep(cell, found := draw(cell))
            yield index, found

    monkeypatch.setattr("klgrad.analysis.cluster.draw_on_cluster", cluster)
    monkeypatch.chdir(micro.parent)
    seen = []
    s.run(cells, base, tmp_path / "here", processes=1)
    s.run(
        cells, replace(base, model=micro.name), tmp_path / "there", scheduler="tcp://somewhere:8786",
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(0, 2), (1, 2), (2, 2)]
    here, there = (s.curves(cells, tmp_path / place).drop(columns="seconds") for place in ("here", "there"))
    assert here.equals(there)
    assert s.final(cells, base, tmp_path / "here").equals(s.final(cells, base, tmp_path / "there"))
    assert all(s.finished(tmp_path / "there" / cell.name, base.steps) for cell in cells)


def test_a_cluster_is_not_given_a_task_s_file_that_its_workers_would_not_find(micro, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("from klgrad.harness.tasks import Sort\n")
    monkeypatch.chdir(tmp_path)
    base = Recipe(model=str(micro), tasks=("mine.py:Sort",), in_domain=("sort",), out_of_domain=(), steps=1, length=6)
    cells = s.grid((s.NO_KL,), (1.0,), 1, (0,))
    with pytest.raises(ValueError, match=f"mine.py:Sort: .* name its file {tmp_path / 'mine.py'}"):
        s.run(cells, base, tmp_path / "out", scheduler="tcp://somewhere:8786")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((("k9-in-loss",), (1.0,), 1, (0,)), "unknown estimator"),
        ((s.KLS, (0.0,), 1, (0,)), "betas must be positive"),
        ((s.KLS, (1.0,), 0, (0,)), "the grid is empty"),
    ],
)
def test_bad_grids(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        s.grid(*given)
