"""Shared test settings: hypothesis profiles and the torch fixture.

Profiles are derandomised, so a run repeats: ``dev`` (the default) is quick, ``ci`` searches further; ``fuzz`` alone
takes its seed from ``--hypothesis-seed`` (``make fuzz``); ``mutation`` only has to fail (``make mutate``).
Choose with ``HYPOTHESIS_PROFILE=ci``.
"""

import os

import pytest
from hypothesis import HealthCheck, Phase, settings

_COMMON = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("dev", max_examples=25, **_COMMON)
settings.register_profile("ci", max_examples=100, **_COMMON)
settings.register_profile("fuzz", max_examples=300, print_blob=True, **(_COMMON | {"derandomize": False}))
settings.register_profile("mutation", max_examples=10, phases=[Phase.explicit, Phase.generate], **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture
def torch():
    """torch, or a skip where it is not installed."""
    return pytest.importorskip("torch")


def pytest_terminal_summary(terminalreporter):
    """How the corpora of right and wrong functions came out, where they were run."""
    ran = {"passed": {"right": 0, "wrong": 0}, "failed": {"right": 0, "wrong": 0}}
    for outcome, count in ran.items():
        for report in terminalreporter.getreports(outcome):
            side = report.nodeid.partition("corpus/test_corpus.py::test_")[2].partition("_")[0]
            if side in count and report.when == "call":
                count[side] += 1
    good, bad = ran.values()
    if any((*good.values(), *bad.values())):
        not_so = f"; {bad['right']} right and {bad['wrong']} wrong do not" if any(bad.values()) else ""
        line = f"corpus: {good['right']} right pass, {good['wrong']} wrong fail by name{not_so}"
        terminalreporter.write_line(line)
