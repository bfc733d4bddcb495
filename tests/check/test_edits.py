"""Edits of the reference: where they belong, what they leave, and those that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from course.check.edits import SUFFIX, BadEdit, apply_edits, edited, edited_solution
from course.syllabus import load_syllabus
from toy_course import ToyCourse

SOURCE = """\
import math


def area(r):
    square = r * r

    return math.pi * square


def ring(r, s):
    square = r * r
    return area(r) - area(s)
"""


def test_a_line_is_replaced_where_it_stands() -> None:
    diff = "# WRONG_VALUE: no circle\n@@\n-    return math.pi * square\n+    return 3 * square\n"
    assert apply_edits(SOURCE, diff) == SOURCE.replace("math.pi * square", "3 * square")


def test_several_hunks_and_remarks() -> None:
    diff = """\
# WRONG_VALUE: no circle, and no ring
# It takes two mistakes.
@@ -1,3 +1,2 @@ what stands behind the signs is for the reader
-import math
-
-
+PI = 3
@@
-    return math.pi * square
+    return PI * square
@@
-    square = r * r
-    return area(r) - area(s)
+    return area(r)
"""
    wanted = """\
PI = 3
def area(r):
    square = r * r

    return PI * square


def ring(r, s):
    return area(r)
"""
    assert apply_edits(SOURCE, diff) == wanted


def test_context_shows_the_place_of_what_is_only_added() -> None:
    diff = "@@\n+\n+\n+# the end\n def ring(r, s):\n+    s = abs(s)\n     square = r * r\n"
    assert apply_edits(SOURCE, diff) == SOURCE.replace(
        "def ring(r, s):\n", "\n\n# the end\ndef ring(r, s):\n    s = abs(s)\n"
    )


@pytest.mark.parametrize("blank", [" ", ""], ids=["kept", "stripped"])
def test_a_blank_line_of_context_may_have_lost_its_space(blank: str) -> None:
    diff = f"@@\n     square = r * r\n{blank}\n-    return math.pi * square\n+    return square\n"
    assert apply_edits(SOURCE, diff) == SOURCE.replace("math.pi * square", "square")


def test_what_follows_the_last_line_can_be_added() -> None:
    diff = "@@\n     return area(r) - area(s)\n+\n+\n+ring = area\n"
    assert apply_edits(SOURCE, diff) == SOURCE + "\n\nring = area\n"


def test_hunks_are_found_in_the_reference_not_in_each_other() -> None:
    diff = "@@\n def area(r):\n+    return area(r) - area(s)\n\n"
    diff += "@@\n-    return area(r) - area(s)\n+    return 0\n"
    wanted = SOURCE.replace("    return area(r) - area(s)\n", "    return 0\n")
    wanted = wanted.replace("def area(r):\n", "def area(r):\n    return area(r) - area(s)\n")
    assert apply_edits(SOURCE, diff) == wanted


BAD = {
    "a line that is not there": ("@@\n-    return 4 * square\n+    return 5\n",
                                 "hunk 1 must stand .* exactly once, and is 0 times"),
    "another indentation": ("@@\n-return math.pi * square\n+return 5\n", "hunk 1 .* 0 times"),
    "half a line": ("@@\n-    return math.pi\n+    return 5\n", "hunk 1 .* 0 times"),
    "lines with others between": ("@@\n-def area(r):\n     return math.pi * square\n",
                                  "hunk 1 .* 0 times"),
    "two places": ("@@\n-    square = r * r\n+    square = 2 * r\n", "hunk 1 .* is 2 times"),
    "the second": ("@@\n-import math\n@@\n-import cmath\n", "hunk 2 .* 0 times"),
    "only what is added": ("@@\n+x = 1\n", "hunk 1 says nowhere where it belongs"),
    "an empty hunk": ("@@\n@@\n-import math\n", "hunk 1 says nowhere where it belongs"),
    "two in one place": ("@@\n-import math\n+import cmath\n@@\n import math\n+\n+x = 1\n",
                         "two hunks overlap at 'import math'"),
    "only context": ("@@\n import math\n", "hunk 1 changes nothing"),
    "the same again": ("@@\n-import math\n+import math\n", "hunk 1 changes nothing"),
    "a whole solution": ("# WRONG_VALUE: no circle\ndef area(r):\n    return 3\n",
                         "line 2 stands before the first @@"),
    "a blank line at the top": ("\n@@\n-import math\n", "line 1 stands before the first @@"),
    "a line without its sign": ("# X: y\n@@\n-import math\nimport cmath\n",
                                "line 4 must begin with .* got 'import cmath'"),
    "a remark in a hunk": ("@@\n-import math\n# why\n", "line 3 must begin with"),
    "remarks alone": ("# WRONG_VALUE: no circle\n", "no hunk"),
    "nothing": ("", "no hunk"),
}  # fmt: skip


@pytest.mark.parametrize(("diff", "problem"), BAD.values(), ids=BAD.keys())
def test_bad_edits(diff: str, problem: str) -> None:
    with pytest.raises(BadEdit, match=problem):
        apply_edits(SOURCE, diff)


def test_the_solution_is_written(toy: ToyCourse, tmp_path: Path) -> None:
    """What is edited is the reference without its markers: a hunk may reach across them."""
    diff = tmp_path / "triples.diff"
    diff.write_text(
        "# NO_ERROR_RAISED: three times, and of anything\n"
        "@@\n"
        "-    if type(number) is not int:\n"
        '-        raise TypeError("number must be an int")\n'
        "-    return 2 * number\n"
        "+    return 3 * number\n"
    )
    path = edited_solution(toy.reference, diff, tmp_path / "a" / "folder")
    assert path == tmp_path / "a" / "folder" / "triples.py"
    text = path.read_text()
    assert text == edited(toy.reference, diff)
    assert "solution:" not in text
    space: dict[str, object] = {}
    exec(compile(text, str(path), "exec"), space)
    assert space["double"]("x") == "xxx"  # type: ignore[operator]
    assert toy.reference.read_text().count("return 2 * number") == 1


def test_one_that_does_not_fit_is_named_and_leaves_no_file(toy: ToyCourse, tmp_path: Path) -> None:
    diff = tmp_path / "lost.diff"
    diff.write_text("# WRONG_VALUE: lost\n@@\n-    return 5 * number\n")
    with pytest.raises(BadEdit, match=r"^lost\.diff: hunk 1 "):
        edited_solution(toy.reference, diff, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_every_edit_in_the_repository_fits_its_reference() -> None:
    for stage in load_syllabus().stages:
        for path in stage.wrong:
            if path.suffix == SUFFIX:
                edited(stage.reference, path)  # or BadEdit, which names it
