"""Growth: exponents of power laws, crossings, labels that keep apart."""

import numpy as np
import pandas as pd
import pytest

from klgrad.figures import growth
from klgrad.figures.growth import crossings, exponent, spread

LENGTHS = np.array([1, 2, 5, 10, 20, 50, 100, 200, 500, 1000])
POWERS = {"k1-in-reward": 3.0, "k1-in-loss": 1.0, "k3-in-reward": 2.5, "k3-in-loss": 1.0}


def power_laws(bias_of=lambda name, lengths: 0.1 * lengths.astype(float), lengths=LENGTHS):
    """Variance T^power, k3-in-loss on a higher level, so that k1-in-reward crosses it at sqrt(2600) = 50.99."""
    parts = []
    for name, power in POWERS.items():
        estimator, placement = name.split("-in-")
        level = 2600.0 if name == "k3-in-loss" else 1.0
        columns = {
            "preset": "far", "configuration": name, "estimator": estimator, "placement": placement,
            "length": lengths, "source": "exact", "gradient_norm": 1.0 * lengths, "bias": bias_of(name, lengths),
            "variance": level * lengths**power,
        }  # fmt: skip
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts)


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_exponent_of_a_power_law():
    assert exponent(LENGTHS, 7.0 * LENGTHS**2.98) == pytest.approx(2.98, rel=1e-12)
    assert exponent([10, 20], [4.0, 1.0]) == pytest.approx(-2.0)
    for values in ([1.0, 0.0], [np.nan, 1.0], [1.0, np.inf], [0.0, 0.0]):
        assert np.isnan(exponent([10, 20], values))
    assert np.isnan(exponent([10], [1.0]))


def test_every_line_carries_its_exponent():
    bias, variance = growth(power_laws()).axes
    assert texts(bias) == ["$T^{\\,1.00}$"] * 4
    assert sorted(texts(variance)) == sorted([
        "$T^{\\,3.00}$", "$T^{\\,1.00}$", "$T^{\\,2.50}$", "$T^{\\,1.00}$", "$T \\approx 51$",
    ])  # fmt: skip
    assert bias.get_xscale() == variance.get_xscale() == "log"


def test_lines_stand_at_the_values():
    frame = power_laws()
    axes = growth(frame).axes[1]
    for name in POWERS:
        (line,) = [found for found in axes.lines if found.get_label() == f"exact {name}"]
        np.testing.assert_array_equal(line.get_xdata(), LENGTHS)
        np.testing.assert_array_equal(line.get_ydata(), frame[frame.configuration == name].variance)


def test_zero_bias_is_labelled_zero_in_its_band():
    axes = growth(power_laws(lambda name, lengths: np.where(name == "k1-in-reward", 1e-13, 0.1) * lengths)).axes[0]
    assert axes.get_yscale() == "symlog"
    assert texts(axes).count("0") == 1


def test_curves_cross_where_power_laws_say():
    ((at, height, label),) = crossings(LENGTHS, LENGTHS**3.0, 2600.0 * LENGTHS)
    assert at == pytest.approx(np.sqrt(2600))
    assert height == pytest.approx(2600**1.5)
    assert label == "$T \\approx 51$"


def test_a_crossing_between_neighbours_is_exact():
    lengths = np.arange(45, 56)
    ((at, _, label),) = crossings(lengths, lengths**3.0, 2550.0 * lengths)
    assert at == pytest.approx(50.4975, abs=1e-4)
    assert label == "$T = 51$"


def test_no_crossing_is_made_up():
    assert not list(crossings(LENGTHS, LENGTHS**1.0, 2.0 * LENGTHS))
    assert not list(crossings([1, 2, 3], [1.0, 2.0, 4.0], [1.0, 1.0, 2.0]))  # they touch at the start only
    assert not list(crossings([1, 2], [1.0, np.nan], [2.0, 1.0]))


def test_the_crossing_is_ringed_where_the_curves_meet():
    (ring,) = [found for found in growth(power_laws()).axes[1].lines if found.get_label() == "_crossing"]
    assert ring.get_xdata()[0] == pytest.approx(np.sqrt(2600))
    alone = power_laws()
    figure = growth(alone[alone.configuration != "k3-in-loss"])
    assert not [found for found in figure.axes[1].lines if found.get_label() == "_crossing"]


@pytest.mark.parametrize("wanted", [[0.5] * 4, [0.0, 0.01, 0.9, 1.0], [0.2], [], [0.98, 0.99, 1.0], [0.1] * 30])
def test_spread_keeps_labels_apart_in_order_and_inside(wanted):
    places = np.array(spread(wanted, 0.08))
    gap = min(0.08, 1 / max(len(wanted) - 1, 1))
    assert (np.diff(places) > gap - 1e-9).all()
    assert ((places > -1e-9) & (places < 1 + 1e-9)).all()


def test_spread_moves_nothing_that_has_room():
    assert spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])


def test_no_labels_overlap():
    figure = growth(power_laws())
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts if "approx" not in text.get_text()]
        assert not any(box.overlaps(other) for i, box in enumerate(boxes) for other in boxes[i + 1 :]), axes.get_title()
        assert all(box.x1 <= figure.bbox.x1 for box in boxes)


def test_a_single_length_is_points_without_labels():
    figure = growth(power_laws(lengths=np.array([5])))
    figure.draw_without_rendering()
    assert [texts(axes) for axes in figure.axes] == [[], []]


def test_sampled_rows_are_passed_over_and_not_enough():
    frame = power_laws()
    both = pd.concat([frame, frame.assign(source="monte_carlo", variance=1.0)])
    assert len(growth(both).axes[1].lines) == len(growth(frame).axes[1].lines)
    with pytest.raises(ValueError, match="no exact rows"):
        growth(frame.assign(source="monte_carlo"))
    with pytest.raises(ValueError, match="no exact rows"):
        growth(frame[:0])


def test_gaps_of_infinite_values_draw():
    frame = power_laws().reset_index(drop=True)
    frame.loc[frame.length >= 500, ["variance", "bias"]] = np.inf
    figure = growth(frame)
    figure.draw_without_rendering()
    assert all(text.startswith("$T \\approx") for axes in figure.axes for text in texts(axes))
