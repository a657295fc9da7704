"""Figures of training: what is drawn is what the frame says, and nothing else."""

import numpy as np
import pandas as pd
import pytest

from klgrad.figures import curl_by_length, fixed_points, phase_portrait, staleness, training_curves

NAMES = {"k1-in-reward": ("k1", "reward"), "k3-in-loss": ("k3", "loss"), "none": ("none", "none")}


def named(name):
    estimator, placement = NAMES[name]
    return {"task": "pattern", "configuration": name, "estimator": estimator, "placement": placement}


def curves_frame(betas=(0.1, 0.2), collapsed=-1):
    rows = []
    for beta in betas:
        for k, name in enumerate(NAMES):
            for seed in (0, 1, 2):
                for step in range(0, 11, 2):
                    gone = name == "none" and seed == 2 and 0 <= collapsed < step
                    value = np.nan if gone else 0.2 + 0.05 * step / (k + 1) + 0.01 * seed
                    rows.append({
                        **named(name), "beta": beta, "staleness": 0, "learning_rate": 0.5, "seed": seed, "step": step,
                        "objective": value, "reward": value, "kl": 3 * value, "out_of_domain": 0.5,
                        "collapsed": collapsed if name == "none" and seed == 2 else -1,
                    })  # fmt: skip
    return pd.DataFrame(rows)


def line(axes, label):
    (found,) = [artist for artist in axes.get_lines() if artist.get_label() == label]
    return np.column_stack(found.get_data())


def test_curves_are_means_over_seeds_and_bands_their_range():
    frame = curves_frame()
    figure = training_curves(frame)
    axes = figure.get_axes()
    assert len(axes) == 8  # four measures, two betas
    mine = frame[(frame["beta"] == 0.1) & (frame["configuration"] == "k3-in-loss")]
    expected = mine.groupby("step")["objective"].mean()
    np.testing.assert_allclose(line(axes[0], "k3-in-loss")[:, 1], expected)
    band = axes[0].collections[1].get_paths()[0].vertices
    assert np.isclose(band[:, 1].max(), mine["objective"].max())
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(NAMES)
    assert "0.1" in axes[0].get_title()
    assert axes[-1].get_xlabel() == "step"


def test_a_single_setting_is_one_column_and_an_idle_reward_no_row():
    frame = curves_frame(betas=(0.1,)).assign(out_of_domain=0.0)
    assert len(training_curves(frame).get_axes()) == 3


def test_a_collapse_is_marked_where_it_happened():
    figure = training_curves(curves_frame(betas=(0.1,), collapsed=6))
    marks = [artist for artist in figure.get_axes()[0].get_lines() if artist.get_label() == "_collapse"]
    assert len(marks) == 1
    assert marks[0].get_xdata().tolist() == [6]


def test_a_run_away_does_not_flatten_the_others():
    frame = curves_frame(betas=(0.1,))
    frame.loc[(frame["configuration"] == "none") & (frame["step"] > 4), ["objective", "kl"]] = [-1e3, 1e4]
    axes = training_curves(frame).get_axes()
    assert axes[0].get_ylim()[0] > -5
    assert axes[2].get_ylim()[1] < 50


def ends_frame():
    rows = [
        {**named(name), "beta": beta, "kind": kind, "objective": value - beta / 10, "gap": 0.1 + beta / 10, "kl": 1.0}
        for name, kind, value in (("k1-in-reward", "attracting", 0.9), ("k3-in-loss", "spiral", 0.8))
        for beta in (0.1, 1.0)
    ]
    rows.append({**named("none"), "beta": 0.1, "kind": "runaway", "objective": -9.0, "gap": 9.9, "kl": 40.0})
    rows.append({**named("none"), "beta": 1.0, "kind": "moving", "objective": 0.3, "gap": 0.6, "kl": 2.0})
    return pd.DataFrame(rows)


def test_ends_against_beta():
    left, right = fixed_points(ends_frame()).get_axes()
    np.testing.assert_allclose(line(left, "k1-in-reward"), [[0.1, 0.89], [1.0, 0.8]])
    np.testing.assert_allclose(line(left, "_optimum")[:, 1], [1.0, 1.0])
    np.testing.assert_allclose(line(left, "none"), [[1.0, 0.3]])  # a run away is a cross, on no line
    assert left.get_ylim()[0] > -1
    assert right.get_title() == "cross: runs away; bar: still moves"
    settled = ends_frame().query("kind == 'attracting'")
    assert fixed_points(settled).get_axes()[1].get_title() == ""


def test_curl_by_length_shows_zero_and_leaves_out_what_has_none():
    rows = [{**named("k1-in-reward"), "length": n, "curl": 1e-12} for n in (1, 2, 4)]
    rows += [{**named("k3-in-loss"), "length": n, "curl": c} for n, c in ((1, 0.0), (2, 0.4), (4, 0.1))]
    rows += [{**named("none"), "length": n, "curl": None} for n in (1, 2, 4)]
    figure = curl_by_length(pd.DataFrame(rows))
    (axes,) = figure.get_axes()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["k1-in-reward", "k3-in-loss"]
    np.testing.assert_allclose(line(axes, "k3-in-loss")[1:], [[2, 0.4], [4, 0.1]])
    assert np.abs(line(axes, "k1-in-reward")[:, 1]).max() < 0.1  # in the band of zero


def plane_frame(names):
    rows = []
    for name in names:
        same = {**named(name), "beta": 0.3}
        for x in (-1.0, 0.0, 1.0):
            for y in (0.0, 1.0, 2.0):
                rows.append({**same, "what": "field", "x": x, "y": y, "u": -x, "v": 1 - y, "objective": -x * x - y})
        rows += [{**same, "what": "path", "path": 0, "x": k / 4, "y": k / 4, "objective": 0.0} for k in range(4)]
        rows.append({**same, "what": "reference", "x": 0.0, "y": 0.0, "objective": 0.0})
    rows.append({**named("k1-in-reward"), "beta": 0.3, "what": "end", "x": 0.75, "y": 0.75, "objective": 0.0})
    return pd.DataFrame(rows, columns=[*rows[0], "path"])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_plane_for_each_configuration(count):
    names = list(NAMES)[:count]
    figure = phase_portrait(plane_frame(names))
    shown = [axes for axes in figure.get_axes() if axes.axison]
    assert [axes.get_title() for axes in shown] == names
    assert shown[0].get_xlim() == (-1.0, 1.0)
    paths = [np.column_stack(artist.get_data()) for artist in shown[0].get_lines()]
    assert any(len(path) == 4 and np.allclose(path[-1], 0.75) for path in paths)


def staleness_frame():
    return pd.DataFrame([
        {
            **named(name), "ratio": ratio, "staleness": s, "objective": 0.5 - 0.01 * s, "objective_low": 0.4 - 0.01 * s,
            "objective_high": 0.6, "collapses": int(s == 10),
        }
        for name in NAMES for ratio in ("none", "token") for s in (0, 10)
    ])  # fmt: skip


def test_staleness_has_a_panel_for_each_ratio():
    axes = staleness(staleness_frame()).get_axes()
    assert [a.get_title() for a in axes] == [f"pattern: importance ratio of the reward: {r}" for r in ("none", "token")]
    np.testing.assert_allclose(line(axes[0], "k3-in-loss")[:, 1], [0.5, 0.4])
    crosses = [artist for artist in axes[0].get_lines() if artist.get_label() == "_x"]
    assert [len(artist.get_xdata()) for artist in crosses] == [1, 1, 1]


@pytest.mark.parametrize("draw", [training_curves, fixed_points, curl_by_length, phase_portrait, staleness])
def test_what_cannot_be_drawn_is_said(draw):
    with pytest.raises(ValueError, match="no rows"):
        draw(pd.DataFrame())
    with pytest.raises(ValueError, match="lacks the columns"):
        draw(pd.DataFrame({"task": ["x"], "configuration": ["k1-in-reward"]}))
