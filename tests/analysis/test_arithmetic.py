"""What computes here: it follows what is switched off, and blocks of other vector units are kept apart."""

import os
import subprocess
import sys

import numpy as np
import pytest

from klgrad.analysis import arithmetic as module
from klgrad.analysis import cluster, montecarlo
from klgrad.analysis.arithmetic import apart, arithmetic, described
from klgrad.analysis.dynamics import runs
from klgrad.analysis.dynamics.recipes import Run
from klgrad.synth.configurations import parse
from klgrad.synth.objectives import family
from klgrad.synth.presets import preset
from klgrad.synth.rewards import task

TELL = "from klgrad.analysis.arithmetic import arithmetic; print(arithmetic(torch={torch}))"


def elsewhere(torch=False, **environment):
    command = [sys.executable, "-c", TELL.format(torch=torch)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return eval(done.stdout)


def test_it_is_what_is_in_use_and_not_what_the_cpu_has():
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", ())
    bare = elsewhere(NPY_DISABLE_CPU_FEATURES=" ".join(found))
    assert arithmetic() == elsewhere()
    assert not set(bare["numpy"].split()) & set(found)
    assert {key: bare[key] for key in ("blas", "libm")} == {key: arithmetic()[key] for key in ("blas", "libm")}


def test_openblas_tells_the_core_whose_kernels_it_runs():
    if "openblas" not in arithmetic()["blas"]:
        pytest.skip("numpy's BLAS here is another one")
    told = {core: elsewhere(OPENBLAS_CORETYPE=core)["blas"] for core in ("Prescott", "Haswell")}
    assert told["Prescott"] != told["Haswell"] == "scipy-openblas Haswell"


def test_torch_is_told_where_it_computed():
    assert "torch" not in arithmetic()
    assert elsewhere(torch=True, ATEN_CPU_CAPABILITY="default")["torch"] == "DEFAULT"


def test_what_is_apart_is_named():
    here = {"numpy": "X86_V2 X86_V4", "blas": "scipy-openblas SkylakeX", "libm": "glibc 2.36"}
    assert apart(here, here) is None
    assert apart(here | {"libm": "glibc 2.41"}, here) == ("another math library", "libm glibc 2.41", "libm glibc 2.36")
    kind, then, now = apart(here | {"numpy": "X86_V2"}, here)
    assert (kind, then, now) == ("another CPU's vector unit", "numpy X86_V2", "numpy X86_V2 X86_V4")


def test_blocks_of_another_vector_unit_are_not_taken_up(monkeypatch, tmp_path):
    pair = preset("near")
    trained = family(task(pair, "each(1)", 4, "none"))
    algorithm = Run("none", 0.1, 0.1).algorithm

    def stores():
        chosen = [Run("k1-in-reward", 0.1, 0.1, algorithm, 0)]
        return [
            montecarlo.store_of(tmp_path, pair, [parse("k1-in-loss")], 2, 2, 0),
            runs.store_of(tmp_path, trained, chosen, 3, trained.policy_parameters),
        ]

    here = stores()
    assert stores() == here
    monkeypatch.setattr(module, "_numpy", lambda: "X86_V1")
    assert not set(stores()) & set(here)


def test_a_worker_with_another_vector_unit_is_refused_by_name(monkeypatch):
    parcel = cluster.Parcel(b"", cluster.numerics())
    assert described(arithmetic()) in parcel.made_with
    monkeypatch.setattr(module, "_numpy", lambda: "X86_V1")
    with pytest.raises(ValueError, match=r"a worker has .*numpy X86_V1.*versions, platform and vector unit everywhere"):
        cluster.draw_parcel(parcel, montecarlo.Block(1, 0, 2))
