"""What chapter 14 shows: the row worked by hand, and a neighbour that ruins a request."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from course.check.edits import edited_solution
from course.syllabus import load_syllabus
from loading import module_at
from test_chapters import fences, section

STAGE = load_syllabus().find(14)


def test_the_row_of_the_chapter() -> None:
    """Its scale, its values and what they stand for, by the reference."""
    block = next(b for b in fences(section(STAGE, "On paper"), "") if "max |w|" in b)
    weights, values, levels = (
        [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", line[30:])][:3]
        for line in block.splitlines()
    )
    scale = float(block.splitlines()[0].split()[-1])
    found, scales = module_at(STAGE.reference).quantize_int8(torch.tensor([weights]))
    assert found[0].tolist() == values
    assert abs(float(scales[0]) - scale) < scale / 512
    assert torch.allclose(torch.tensor(values) * scale, torch.tensor(levels))


def test_the_log_of_the_incident(tmp_path: Path) -> None:
    """A row beside ever larger neighbours, through a layer that rounds activations."""
    diff = next(path for path in STAGE.wrong if path.stem == "dynamic_int8")
    solution = module_at(edited_solution(STAGE.reference, diff, tmp_path))
    generator = torch.Generator().manual_seed(14)
    weight = torch.randn(256, 1024, generator=generator)
    rows = torch.randn(4, 1024, generator=generator).clamp(-2.9, 2.9)
    layer = solution.QuantLinear(weight)
    wanted = rows[0].double() @ weight.double().T
    shown = [line.split() for line in fences(section(STAGE, "Incident"), "")[0].splitlines()[1:]]
    for largest, off in shown:
        rows[2, 5] = float(largest)
        error = float((layer(rows)[0].double() - wanted).norm() / wanted.norm())
        assert f"{error:.0%}" == off
    alone = float((layer(rows[:1])[0].double() - wanted).norm() / wanted.norm())
    assert f"{alone:.0%}" == "1%"
