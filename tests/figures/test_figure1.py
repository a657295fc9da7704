"""Figure 1: exact values on lines, Monte Carlo values as points with bars, floors and zeros in plain sight."""

import matplotlib
import numpy as np
import pandas as pd
import pytest

from klgrad.figures import figure1, figure1_caption
from klgrad.figures.style import looks
from klgrad.synth.configurations import parse
from klgrad.synth.exact import true_gradient
from klgrad.synth.moments import moments
from klgrad.synth.presets import preset

SIX = [f"{estimator}-in-{placement}" for estimator in ("k1", "k3") for placement in ("reward", "loss", "both")]
BIASED = ["k1-in-loss", "k3-in-reward", "k3-in-loss"]
UNBIASED = ["k1-in-reward", "k1-in-both", "k3-in-both"]
LENGTHS = (5, 6, 8)


def exact_rows(name="near", configurations=SIX, lengths=LENGTHS):
    """Rows of the exact engine, in the columns that figures read."""
    pair = preset(name, max(lengths))
    truth = true_gradient(pair, lengths)
    rows = []
    for m in moments(pair, [parse(text) for text in configurations], lengths):
        for i, length in enumerate(lengths):
            bias, size = np.linalg.norm(m.mean[i] - truth[i]), np.linalg.norm(truth[i])
            variance = m.covariance[i]
            rows.append({
                "preset": name, "configuration": str(m.configuration), "estimator": str(m.configuration.estimator),
                "placement": m.configuration.placement, "length": length, "source": "exact", "gradient_norm": size,
                "bias": bias, "bias_low": bias, "bias_high": bias, "bias_floor": 0.0, "relative_bias": bias / size,
                "variance": variance, "variance_low": variance, "variance_high": variance, "samples": 1000, "trials": 0,
            })  # fmt: skip
    return pd.DataFrame(rows)


def monte_carlo_rows(exact):
    """What a run of 200 x 1000 would measure, give or take: zero is not excluded where there is no bias."""
    floor = np.sqrt(exact["variance"] / 200_000)
    bias = np.hypot(exact["bias"], floor)
    low = np.where(exact["bias"] < 1e-9, 0.0, bias - 1.5 * floor)
    variance = exact["variance"] * 1.01
    return exact.assign(
        source="monte_carlo", bias=bias, bias_low=low, bias_high=bias + 2 * floor, bias_floor=floor,
        variance=variance, variance_low=0.97 * variance, variance_high=1.04 * variance, trials=200,
    )  # fmt: skip


@pytest.fixture(scope="module")
def frame():
    """near and far, exact and sampled; the row labels repeat, as after concatenation."""
    exact = pd.concat([exact_rows("near"), exact_rows("far")])
    return pd.concat([exact, monte_carlo_rows(exact)])


@pytest.fixture(scope="module")
def panels(frame):
    return figure1(frame).axes


def line(axes, label):
    return next(found for found in axes.lines if found.get_label() == label)


def bars(axes, name):
    return next(found for found in axes.collections if found.get_label() == f"interval {name}").get_segments()


def pick(frame, name, source="exact", pair="near"):
    return frame[(frame.configuration == name) & (frame.source == source) & (frame.preset == pair)]


def legend_texts(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_a_row_of_panels_per_preset(panels):
    titles = [axes.get_title() for axes in panels]
    assert titles == ["near: bias", "near: variance", "far: bias", "far: variance"]
    assert all(("nats" in axes.get_ylabel()) for axes in panels)


@pytest.mark.parametrize("name", SIX)
def test_lines_stand_at_exact_variances_and_points_at_measured_ones(panels, frame, name):
    for k, pair in ((1, "near"), (3, "far")):
        drawn = line(panels[k], f"exact {name}")
        np.testing.assert_array_equal(drawn.get_xdata(), LENGTHS)
        np.testing.assert_array_equal(drawn.get_ydata(), pick(frame, name, pair=pair).variance)
        points, rows = line(panels[k], f"monte carlo {name}"), pick(frame, name, "monte_carlo", pair)
        np.testing.assert_array_equal(points.get_ydata(), rows.variance)
        assert np.abs(points.get_xdata() - rows.length).max() < 0.5
        assert points.get_linestyle() == "None"
        ends = np.array([[bar[0, 1], bar[1, 1]] for bar in bars(panels[k], name)])
        np.testing.assert_array_equal(ends, rows[["variance_low", "variance_high"]])


@pytest.mark.parametrize("name", BIASED)
def test_exact_bias_is_drawn_as_it_is(panels, frame, name):
    np.testing.assert_array_equal(line(panels[0], f"exact {name}").get_ydata(), pick(frame, name).bias)


def test_zero_bias_has_a_band_of_its_own_below_every_other_value(panels, frame):
    axes = panels[0]
    heights = [line(axes, f"exact {name}").get_ydata() for name in UNBIASED]
    levels = {float(height) for (height,) in map(set, heights)}
    assert len(levels) == len(UNBIASED)  # flat, and told apart
    foot = 10 ** np.floor(np.log10(frame[(frame.preset == "near") & (frame.source != "exact")].bias_floor.min()))
    assert max(map(abs, levels)) < 0.62 * foot
    labels = [axes.yaxis.get_major_formatter()(tick, None) for tick in axes.yaxis.get_major_locator()()]
    assert labels[0] == "0"
    assert "0" not in labels[1:]
    breaks = [found for found in axes.lines if found.get_label() == "_break"]
    assert len(breaks) == 2
    gaps = np.diff(sorted(axes.transData.transform([(5, level) for level in levels])[:, 1]))
    assert (gaps > 2.5).all()  # pixels


def test_variance_has_no_zero_band_where_nothing_is_zero(panels):
    assert panels[1].get_yscale() == "log"


@pytest.mark.parametrize("name", UNBIASED)
def test_bars_run_to_the_bottom_where_zero_is_not_excluded(panels, frame, name):
    rows = pick(frame, name, "monte_carlo")
    for bar, high in zip(bars(panels[0], name), rows.bias_high, strict=True):
        assert bar[0, 1] == panels[0].get_ylim()[0]
        assert bar[1, 1] == high


@pytest.mark.parametrize("name", SIX)
def test_each_noise_floor_is_drawn_dotted(panels, frame, name):
    floor = line(panels[0], f"floor {name}")
    np.testing.assert_array_equal(floor.get_ydata(), pick(frame, name, "monte_carlo").bias_floor)
    assert floor.get_linestyle() == ":"


def test_one_legend_names_configurations_and_what_marks_mean(frame):
    texts = legend_texts(figure1(frame))
    assert texts[0] == "k1-in-reward"
    assert sorted(texts) == sorted([*SIX, "exact", "Monte Carlo, 95 % interval", "noise floor (not bias)"])
    assert sorted(legend_texts(figure1(frame[frame.source == "exact"]))) == sorted([*SIX, "exact"])


def test_no_text_overlaps_and_none_leaves_the_page(frame):
    figure = figure1(frame)
    figure.draw_without_rendering()
    texts = [text for axes in figure.axes for text in (axes.title, axes.xaxis.label, axes.yaxis.label)]
    boxes = [text.get_window_extent() for text in texts if text.get_text()] + [figure.legends[0].get_window_extent()]
    boxes += [axes.get_window_extent() for axes in figure.axes]
    for i, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0
        assert figure.bbox.y0 <= box.y0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])


def test_looks_differ_in_grey_too():
    names = [*SIX, "k1-in-reward+rtg", "k1-in-reward+loo", "k2-in-loss", "abs-in-loss", "full-in-both"]
    frame = pd.DataFrame([(n, str(parse(n).estimator), parse(n).placement) for n in names])
    found = looks(frame.set_axis(["configuration", "estimator", "placement"], axis=1))
    assert len({(look.marker, look.filled) for look in list(found.values())[:6]}) == 6
    assert len({(look.colour, str(look.linestyle), look.marker, look.filled) for look in found.values()}) == len(names)
    assert {look.linestyle for name, look in found.items() if name in ("k1-in-reward", "k3-in-reward")} == {"-"}


def test_many_configurations_fall_back_to_cycling(frame):
    one = pick(frame, "k1-in-reward")
    many = pd.concat([one.assign(configuration=f"k1-in-reward+b={b}") for b in range(20)])
    figure = figure1(many)
    figure.draw_without_rendering()
    assert len(legend_texts(figure)) == 21


def test_a_single_length_is_points():
    exact = exact_rows(configurations=["k1-in-reward", "full-in-loss"], lengths=(1,))
    figure = figure1(pd.concat([exact, monte_carlo_rows(exact)]))
    figure.draw_without_rendering()
    drawn = line(figure.axes[1], "exact k1-in-reward")
    assert len(drawn.get_xdata()) == 1
    assert drawn.get_marker() == "o"
    assert figure.axes[1].get_yscale() == "symlog"  # the exact KL of one token has a gradient without variance


def test_ticks_are_whole_lengths(panels):
    assert all(tick == round(tick) for axes in panels for tick in axes.get_xticks())


def test_values_that_are_not_finite_are_left_out_and_named(frame):
    broken = frame.reset_index(drop=True)
    missing = (broken.length == 6) & (broken.configuration == "k3-in-loss")
    infinite = (broken.length == 8) & (broken.configuration == "k1-in-loss")
    broken.loc[missing, ["bias", "variance"]] = np.nan
    broken.loc[infinite, ["bias", "bias_high", "variance"]] = np.inf
    figure = figure1(broken)
    figure.draw_without_rendering()
    drawn = line(figure.axes[0], "exact k3-in-loss").get_ydata()
    np.testing.assert_array_equal(np.isfinite(drawn), [True, False, True])
    assert len(bars(figure.axes[0], "k1-in-loss")) == 2
    assert np.isfinite(figure.axes[0].get_ylim()).all()
    assert "not drawn there: k1-in-loss, k3-in-loss." in figure1_caption(broken)


def test_a_variance_without_an_upper_end_has_a_bar_to_the_top_and_the_caption_says_why(frame):
    endless = frame.reset_index(drop=True)
    at = (endless.length == 8) & (endless.configuration == "k1-in-loss") & (endless.source == "monte_carlo")
    endless.loc[at, "variance_high"] = np.inf
    figure = figure1(endless)
    figure.draw_without_rendering()
    axes = figure.axes[1]
    low = endless.loc[at & (endless.preset == "near"), "variance_low"].item()
    np.testing.assert_array_equal(bars(axes, "k1-in-loss")[-1][:, 1], [low, axes.get_ylim()[1]])
    assert "A bar to the top has no upper end" in figure1_caption(endless)
    assert "A bar to the top has no upper end" not in figure1_caption(frame)


def test_a_frame_without_finite_values_says_so(frame):
    columns = [name for name in frame if name.startswith(("bias", "variance"))]
    figure = figure1(frame.assign(**dict.fromkeys(columns, np.nan)))
    figure.draw_without_rendering()
    assert [text.get_text() for text in figure.axes[0].texts] == ["no finite values"]


def test_a_frame_read_from_a_file_may_hold_none(frame):
    missing = frame.assign(bias=None, trials=None).astype({"variance": object})
    figure1(missing).draw_without_rendering()
    assert "as in the table" in figure1_caption(missing)


def test_an_empty_frame_or_one_that_lacks_a_column_is_refused(frame):
    with pytest.raises(ValueError, match="no rows"):
        figure1(frame[:0])
    with pytest.raises(ValueError, match="no rows"):
        figure1(pd.DataFrame())
    with pytest.raises(ValueError, match="lacks the columns bias_floor"):
        figure1(frame.drop(columns="bias_floor"))


def test_the_frame_and_matplotlibs_settings_are_left_as_they_were(frame):
    before, settings = frame.copy(), dict(matplotlib.rcParams)
    figure1(frame)
    pd.testing.assert_frame_equal(frame, before)
    assert dict(matplotlib.rcParams) == settings


def test_the_caption_says_whose_models_and_what_the_floor_is(frame):
    caption = figure1_caption(frame)
    for part in (
        "does not publish its models A and B", "(near, far) is not them", "T = 5 to 8", "200 trials of 1,000",
        "k1-in-reward", "sqrt(variance / (trials x samples))", "is not bias", "plus k3-in-loss is the true gradient",
    ):  # fmt: skip
        assert part in caption
    assert "All values are exact" in figure1_caption(frame[frame.source == "exact"])
    assert "(mine) is not them" in figure1_caption(frame.assign(preset="mine"))


def test_what_the_caption_claims_holds():
    rows = exact_rows("far", lengths=(7,)).set_index("configuration")
    assert (rows.loc[UNBIASED, "relative_bias"] < 1e-9).all()
    assert rows.loc["k1-in-loss", "bias"] == pytest.approx(rows.loc["k1-in-loss", "gradient_norm"], rel=1e-12)
