"""Tables of fields: every number by the function that it is said to come from."""

import numpy as np
import pytest
from strategies import assert_close

from klgrad.analysis.dynamics.flows import field_of, pull
from klgrad.analysis.dynamics.portraits import CURLS, ENDS, PHASES, curl_table, ends_table, phase_table
from klgrad.synth import objectives
from klgrad.synth.configurations import parse
from klgrad.synth.tasks import preset_task

NAMES = [parse(name) for name in ("k1-in-reward", "k3-in-loss", "k3-in-reward")]


def setting(name, length=None):
    family = objectives.family(preset_task(name, length))
    return family, family.parameters_of(family.task.pair.reference)


def test_ends_are_described_by_exact_measures_there():
    family, start = setting("phase")
    seen = []
    frame = ends_table(family, NAMES, [0.3, 1.0], start, longest=1e3, progress=lambda *at: seen.append(at))
    assert tuple(frame.columns) == ENDS
    assert seen[-1] == (6, 6)
    assert frame["kind"].tolist() == ["attracting", "attracting", "runaway"] * 2
    best = objectives.best(family.task, 0.3).objective
    assert_close(frame["objective"][:3] + frame["gap"][:3], [best] * 3)
    assert frame["objective"][0] > frame["objective"][1] > frame["objective"][2]
    assert (frame["eigenvalue"][:2] < 0).all()
    assert np.isnan(frame["eigenvalue"][2])
    assert frame["curl"][0] < 1e-8 < frame["curl"][1]
    assert frame["closed_form_distance"].isna().all()  # Markov contexts do not know their time
    step = np.random.default_rng(0).normal(size=2)
    near = pull(family, NAMES[2], step)
    assert_close([frame["pull_order"][2], frame["pull_towards"][2]], [near.order, near.towards])


def test_closed_forms_are_met_on_a_tree():
    family, start = setting("tree")
    frame = ends_table(family, NAMES[:2], [1.0], start)
    assert (frame["closed_form_distance"] < 1e-9).all()
    assert_close(frame["gap"][0], 0.0)


def test_curl_is_zero_at_one_token_and_for_gradients():
    families = [setting("pattern", length)[0] for length in (1, 3)]
    frame = curl_table(families, NAMES)
    assert tuple(frame.columns) == CURLS
    by = frame.set_index(["configuration", "length"])["curl"]
    assert (by["k1-in-reward"] < 1e-8).all()
    assert (by[:, 1] < 1e-8).all()
    assert by["k3-in-reward", 3] > by["k3-in-loss", 3] > 1e-3


def test_the_plane_holds_field_paths_and_ends():
    family, start = setting("phase")
    frame = phase_table(family, NAMES[1:], 0.3, points=5, duration=20.0)
    assert tuple(frame.columns) == PHASES
    assert set(frame["what"]) == {"field", "path", "reference", "end"}
    loss = frame[frame["configuration"] == "k3-in-loss"]
    grid = loss[loss["what"] == "field"]
    assert len(grid) == 25
    row = grid.iloc[7]
    theta = np.array([row["x"], row["y"]])  # two identifiable directions of two parameters are the parameters
    assert_close(field_of(family, NAMES[1], 0.3)(theta), [row["u"], row["v"]])
    assert_close(objectives.objective(family.task, family.pair(theta), 0.3), row["objective"])
    first = loss[(loss["what"] == "path") & (loss["path"] == 0)].iloc[0]
    assert_close([first["x"], first["y"]], start)
    assert not (frame[frame["configuration"] == "k3-in-reward"]["what"] == "end").any()


def test_a_plane_needs_two_directions():
    with pytest.raises(ValueError, match="has 7"):
        phase_table(setting("tree")[0], NAMES, 0.3)
