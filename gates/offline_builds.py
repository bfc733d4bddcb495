"""Kernels built for GPUs that are not here: load widths, spills and registers, for the stages that
write one.
"""

from __future__ import annotations

from typing import Any

from course.check import expect
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.measure.kernel_builds import read_build

CAPABILITIES = [80, 90]


def judge_builds(
    gate: GateRun, shapes: list[dict[str, Any]], *, reads: str, what: str, handed: str
) -> None:
    """Build the solution's kernels for every shape and GPU, and record what the builds show.

    Args:
        shapes: for the scenario "builds", which gives the launches of each build.
        reads: the entry of a launch that says whether it was handed what must be read.
        what: that is read, for messages; `handed`: the argument that holds it.
    """

    def run() -> list[Any]:
        scenario = gate.candidate_in("cpu", TRITON_INTERPRET="0").start(
            "builds", shapes=shapes, capabilities=CAPABILITIES
        )
        found = []
        for step in scenario:
            gate.tell(f"builds: {len(found) + 1} of {len(shapes) * len(CAPABILITIES)}")
            found.append(step.value)
        return found

    spills, registers, shared, wide = 0, 0, 0, 1.0
    for launches in expect.result_of(run, "building the kernels for GPUs"):
        built = [(launch, read_build(launch["cubin"])) for launch in launches]
        if not any(launch[reads] for launch, _ in built):
            raise GateFailure(
                Code.WRONG_COUNT, f"a kernel itself must read {what}",
                f"a launch that is handed {handed}", f"{len(built)} launches, none of them",
            )  # fmt: skip
        for launch, build in built:
            spills = max(spills, build.spills)
            registers = max(registers, build.registers)
            shared = max(shared, launch["shared"])
            if launch[reads]:
                wide = min(wide, build.wide_share)
    where = " and ".join(f"sm_{capability}" for capability in CAPABILITIES)
    # Before the spills: narrow loads take registers too, and are the cause that can be mended.
    gate.exact(
        "wide_loads", round(100 * wide, 1), at_least=gate.bar("wide_loads"), unit="%",
        code=Code.NARROW_LOADS,
        text=f"{100 * wide:.0f}% of the bytes are loaded 128 bits at a time, at the least",
        message=f"{what}: loaded in narrow pieces",
    )  # fmt: skip
    gate.exact(
        "spills", spills, at_most=gate.bar("spills"), code=Code.SPILLED_REGISTERS,
        text=f"{spills} instructions of a kernel spill registers, in the worst of {len(shapes)} "
        f"builds each for {where}",
        message="a kernel needs more registers than a thread has",
    )  # fmt: skip
    gate.report(
        "registers", registers,
        f"at most {registers} of a thread's 255, and {shared:,} bytes of shared memory",
    )  # fmt: skip
