"""Bytes that a kernel loads, and what its machine code says, for kernels small enough to know."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import course
from course.measure.kernel_builds import LOAD, SPILL, Build, read_build

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton does not exist here"
)


@cache
def found(what: str, interpret: str) -> dict[str, Any]:
    """What `kernel_process.py` prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("kernel_process.py"), what],
        env={
            **os.environ, "TRITON_INTERPRET": interpret,
            "PYTHONPATH": str(Path(course.__file__).parents[1]),
        },
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


class TestLoads:
    """In the interpreter: ten of sixteen lanes of float32, twice; and sixteen of float16."""

    def test_masked_lanes_are_not_counted_and_lanes_loaded_twice_are(self) -> None:
        of_x, untouched, elsewhere, instructions = found("loads", "1")["first"]
        assert of_x == 2 * 10 * 4
        assert untouched == 0
        assert elsewhere == 16 * 2
        assert instructions == 3

    def test_every_program_instance_counts(self) -> None:
        of_x, elsewhere, total = found("loads", "1")["nothing of x"]
        assert of_x == 80  # from before: nothing has come to it
        assert elsewhere == 32 + 3 * 32
        assert total == of_x + elsewhere

    def test_only_what_happens_inside_counts_and_nothing_is_changed(self) -> None:
        result = found("loads", "1")
        assert result["after it was left"] == 80 + 4 * 32
        assert result["out"] == [lane + lane // 2 + 1 for lane in range(10)] + [1.0] * 6

    def test_views_are_told_apart_within_their_storage(self) -> None:
        assert found("loads", "1")["views"] == [16, 16, 8]  # of int64

    def test_tensors_elsewhere_or_on_top_of_each_other_are_refused(self) -> None:
        assert found("loads", "1")["refused"] == [
            "tensors['far'] must lie on a CPU, not on meta",
            "tensors['some'] shares memory with tensors['all']",
            "tensors['right'] shares memory with tensors['left']",
        ]

    def test_the_interpreter_builds_nothing(self) -> None:
        with pytest.raises(AssertionError, match="TRITON_INTERPRET must not be set"):
            found("builds", "1")


class TestFarEnd:
    """What the interpreter hides, seen in it."""

    def test_only_the_last_program_runs_and_it_knows_the_whole_grid(self) -> None:
        result = found("far", "1")
        assert result["last"] == [[0] * 4, [0] * 4, [0, 0, 0, 234]]
        assert result["last of fewer"] == [[0] * 4, [0, 0, 0, 134], [0] * 4]

    def test_afterwards_all_run_again(self) -> None:
        assert found("far", "1")["afterwards"] == 12

    def test_float32_is_multiplied_in_tf32_unless_told_otherwise(self) -> None:
        result = found("far", "1")
        assert result["left open"] == ["tf32"]
        assert result["ieee"] == ["ieee"]
        assert result["half"] == []
        assert result["outside"] == []


class TestBuilds:
    """Compiled for GPUs that are not here."""

    def test_launches_are_noted_and_not_run(self) -> None:
        result = found("builds", "0")
        assert result["kernels"] == ["copy_rows"] * 4 + ["keep_all"] * 2 + ["copy_rows"]
        assert result["default"] == 0
        assert result["reads"] == [True, False]
        assert result["untouched"] == 0

    @pytest.mark.parametrize("capability", [80, 90])
    def test_neighbours_are_loaded_128_bits_at_a_time(self, capability: int) -> None:
        for name, size in (("wide", 4), ("wide_half", 2)):
            build = found("builds", "0")[f"{name} {capability}"]
            per_thread = 32 * 64 * size * 8 // 128  # bits
            assert build["loads"] == {"128": per_thread // 128}
            assert build["wide"] == 1
            assert build["spills"] == build["stack"] == 0

    @pytest.mark.parametrize("capability", [80, 90])
    @pytest.mark.parametrize("name", ["narrow", "misaligned"])
    def test_others_in_pieces(self, capability: int, name: str) -> None:
        build = found("builds", "0")[f"{name} {capability}"]
        assert build["loads"] == {"32": 32 * 64 // 128}
        assert build["wide"] == 0

    @pytest.mark.parametrize("capability", [80, 90])
    def test_what_does_not_fit_in_registers_is_spilled(self, capability: int) -> None:
        build = found("builds", "0")[f"spilling {capability}"]
        assert build["registers"] <= 255
        assert build["stack"] > 0
        assert build["spills"] > 0
        small = found("builds", "0")[f"small {capability}"]
        assert small["registers"] < 64
        assert small["stack"] == small["spills"] == 0
        assert small["shared"] > 0  # a sum over several warps

    def test_an_argument_without_a_type_is_refused(self) -> None:
        assert "str cannot be built" in found("builds", "0")["refused"]

    def test_junk_is_no_cubin(self) -> None:
        with pytest.raises(RuntimeError, match=r"cuobjdump (cannot|says nothing)"):
            read_build(b"no machine code at all")


@pytest.mark.parametrize(
    ("line", "suffixes"),
    [
        ("        /*0100*/  LDG.E.128 R4, [R2.64] ;", [".E.128"]),
        ("        @P0 LDG.E.U16.CONSTANT R4, [R2.64] ;", [".E.U16.CONSTANT"]),
        ("        LDGSTS.E.BYPASS.128 [R5], [R2.64] ;", [".E.BYPASS.128"]),
        ("        LDGDEPBAR ;", []),
        ("        STG.E.128 [R2.64], R4 ;", []),
    ],
)
def test_load_instructions_are_told_from_others(line: str, suffixes: list[str]) -> None:
    assert LOAD.findall(line) == suffixes
    assert not SPILL.findall(line)


def test_spills_are_told_from_others() -> None:
    assert len(SPILL.findall("STL [R1+0x4], R5 ;\nLDL.LU R5, [R1+0x4] ;\nLDLOCK ;")) == 2


def test_the_share_of_wide_loads_is_one_of_bytes() -> None:
    assert Build(1, 0, 0, Counter({128: 3, 32: 4})).wide_share == 3 * 128 / (3 * 128 + 4 * 32)
    assert Build(1, 0, 0).wide_share == 0
