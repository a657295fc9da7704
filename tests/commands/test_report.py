"""`klgrad report`: one page, whole, that fetches nothing; opened in a real browser where there is one."""

import json
import re
import shutil
import subprocess

import pytest
from click.testing import CliRunner

from klgrad.cli import main

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
HEADINGS = ["What to use", "Bias and variance", "Growth", "What each gradient is", "Why", "Manifest"]


def run(folder, *words):
    return CliRunner().invoke(main, ["report", "--out", str(folder), *words])


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report on the preset near, with a little Monte Carlo."""
    folder = tmp_path_factory.mktemp("report")
    done = run(folder, "--preset", "near", "--lengths", "2,5,8", "--trials", "10", "--samples", "20")
    assert done.exit_code == 0, done.output
    assert [path.name for path in folder.iterdir()] == ["report.html"]
    return folder / "report.html"


def test_the_page_has_its_sections(page):
    text = page.read_text()
    assert re.findall(r"<h2>([^<]*)</h2>", text) == HEADINGS
    assert text.count("<svg") == 2
    assert text.count("<math") > 60
    assert "KL gradients on the pair near" in text
    for heading in HEADINGS:
        anchor = heading.lower().replace(" ", "-")
        assert f'href="#{anchor}"' in text
        assert f'id="{anchor}"' in text


def test_what_is_to_be_avoided_is_worth_no_sequences(page):
    heads = dict(re.findall(r"<h3>([^<]*)</h3>\n<div class=\"wide\"><table><thead>(.*?)</thead>", page.read_text()))
    assert len(heads) == 4
    assert [title for title, head in heads.items() if "sequences" not in head] == ["To be avoided"]


def test_points_with_bars_are_told_apart_where_there_are_any(page, tmp_path):
    assert "Everything but the points with bars is exact." in page.read_text()
    done = run(tmp_path, "--preset", "near", "--lengths", "2,3", "--exact-only")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "report.html").read_text()
    assert "Everything is exact." in text
    assert "points with bars" not in text


def test_ids_are_unique(page):
    ids = re.findall(r'\bid="([^"]+)"', page.read_text())
    assert len(ids) == len(set(ids))


def test_every_reference_within_the_page_is_met(page):
    text = page.read_text()
    ids = set(re.findall(r'\bid="([^"]+)"', text))
    assert set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
    assert {a or b for a, b in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text)} <= ids


def test_nothing_is_fetched_or_run(page):
    text = page.read_text()
    assert not re.search(r"<(?:script|link|img|iframe|object)\b", text)
    assert not re.search(r"@import|url\((?!#)", text)
    assert not re.search(r'(?:src|href)="(?!#)', text)


def test_the_manifest_makes_it_again(page):
    manifest = json.loads(re.search(r"<pre>(.*?)</pre>", page.read_text(), re.DOTALL)[1].replace("&quot;", '"'))
    assert manifest["command"] == "klgrad report"
    assert manifest["request"]["lengths"] == [2, 5, 8]
    assert (manifest["request"]["trials"], manifest["request"]["samples"]) == (10, 20)
    assert manifest["pairs"].keys() == {"near"}


@pytest.mark.slow
def test_the_same_request_gives_the_same_page(page, tmp_path):
    run(tmp_path, "--preset", "near", "--lengths", "2,5,8", "--trials", "10", "--samples", "20")
    assert (tmp_path / "report.html").read_bytes() == page.read_bytes()


@pytest.mark.parametrize(
    ("words", "heading", "absent"),
    [
        pytest.param(["--preset", "stale"], "Samples of an older policy", "k1 = -log r", marks=pytest.mark.slow),
        # contexts that end at a horizon have no curves beyond it
        pytest.param(["--preset", "counts"], "Why", ">Growth<", marks=pytest.mark.slow),
        pytest.param(
            ["--preset", "handbook", "--lengths", "1"], "What to use", "no derivation", marks=pytest.mark.slow
        ),
    ],
)
def test_other_pairs(words, heading, absent, tmp_path):
    done = run(tmp_path, *words, "--exact-only", *([] if "--lengths" in words else ["--lengths", "2,4"]))
    assert done.exit_code == 0, done.output
    text = (tmp_path / "report.html").read_text()
    assert heading in text
    assert absent not in text


@pytest.mark.slow
def test_a_pair_without_derivations_says_so(tmp_path):
    import numpy as np

    logits = {"policy_logits": [[0.0, -np.inf]], "reference_logits": [[0.0, 0.0]]}
    np.savez(tmp_path / "one.npz", next_context=[[0, 0]], start=0, end=-1, **logits)
    done = run(tmp_path, "--pair", str(tmp_path / "one.npz"), "--exact-only", "--lengths", "1,2")
    assert done.exit_code == 0, done.output
    assert "no derivation true-gradient: " in done.stderr
    assert "No derivations on this pair" in (tmp_path / "report.html").read_text()


def test_bad_use_writes_nothing(tmp_path):
    done = run(tmp_path / "out", "--preset", "nowhere")
    assert done.exit_code == 2
    assert "unknown preset 'nowhere'" in done.stderr
    assert not (tmp_path / "out" / "report.html").exists()


# ------------------------------------------------------------------------------------------------ in a browser

PROBE = """
<iframe id="frame" style="width: %dpx; height: 3000px; border: 0" src="page.html"></iframe>
<script>
frame.onload = () => {
  const page = frame.contentDocument, view = frame.contentWindow, box = e => e.getBoundingClientRect();
  const all = [...page.querySelectorAll("body *")], maths = all.filter(e => e instanceof view.MathMLElement);
  const scrolls = ".wide, .numbers, .figure, math, pre";
  document.title = JSON.stringify({
    maths: page.querySelectorAll("math").length,
    typeset: maths.filter(e => e.localName == "math" && box(e).height > 4).length,
    fractions: [...page.querySelectorAll("mfrac")].map(e => box(e.children[0]).bottom <= box(e.children[1]).top + 2),
    figures: [...page.querySelectorAll("svg")].map(e => box(e).width),
    wider: page.documentElement.scrollWidth - view.innerWidth,
    out: all.filter(e => box(e).right > view.innerWidth + 1 && !e.closest(scrolls)).length,
    fetched: view.performance.getEntriesByType("resource").map(e => e.name),
  });
};
</script>
"""


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    return found or pytest.skip("no Chromium on this machine")


def open_in(browser, folder, address, *options):
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=8000"]
    done = subprocess.run([*command, *options, address], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr  # what a page writes to the console stands there
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1200])
def test_in_chromium(page, browser, tmp_path, width):
    shutil.copy(page, tmp_path / "page.html")
    (tmp_path / "probe.html").write_text(PROBE % width)
    dom = open_in(browser, tmp_path, (tmp_path / "probe.html").as_uri(), "--dump-dom", "--window-size=1300,1000")
    seen = json.loads(re.search(r"<title>(.*)</title>", dom)[1])
    assert seen["maths"] > 60
    assert seen["typeset"] == seen["maths"]
    assert seen["fractions"]
    assert all(seen["fractions"])  # numerators above denominators: laid out, not run together
    assert len(seen["figures"]) == 2
    assert min(seen["figures"]) > 300
    assert seen["wider"] <= 0
    assert seen["out"] == 0
    assert seen["fetched"] == []


@pytest.mark.slow
def test_the_console_would_be_seen(browser, tmp_path):
    (tmp_path / "loud.html").write_text("<script>console.error('heard')</script>")
    with pytest.raises(AssertionError, match="heard"):
        open_in(browser, tmp_path, (tmp_path / "loud.html").as_uri(), "--dump-dom")


@pytest.mark.slow
def test_in_print(page, browser, tmp_path):
    open_in(browser, tmp_path, page.as_uri(), f"--print-to-pdf={tmp_path / 'page.pdf'}")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
