"""How a result reads on a terminal, or in plain text."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from course.check.codes import Kind
from course.check.libraries import where
from course.check.result import Exit, Number, StageResult
from course.measure.ratio import Verdict
from course.plain import one_line, plain

# What to type to run a command: `./course` where the launcher was used.
PROGRAM = os.environ.get("COURSE_NAME", "course")
COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.INCONCLUSIVE: "yellow"}
INDENT = 2
NAME_WIDTH = 16  # of the first column
GAP = 2  # between columns


def print_result(console: Console, result: StageResult, *, published: str, stage: str) -> None:
    """One stage's result: contract, every number (green or red), and the failure.

    Args:
        published: a line on the number of another tier, if there is something to say.
        stage: what the stage is called in the commands that are proposed.
    """
    where = one_line(f"{result.model} · {result.device}")
    head = Text(f"{result.stage.replace('-', ' ')}  {result.title}", style="bold")
    room = console.width - head.cell_len - len(where)
    head.append(" " * (room if room >= 3 else 3) + where, style="dim")
    console.print(head)
    console.print(pairs([("contract", contract_line(result))]))
    print_numbers(console, result.numbers)
    if published:
        console.print(pairs([("GPU number", Text(published, style="dim"))]))
    for remark in result.remarks:
        console.print(pairs([("note", Text(plain(remark), style="yellow"))]))
    print_failure(console, result, stage)
    console.print(closing_line(result))


def contract_line(result: StageResult) -> Text:
    """How many contract checks passed."""
    contract = [c for c in result.checks if c.layer == "contract"]
    passed = sum(c.outcome == "passed" for c in contract)
    failed = [c for c in contract if c.outcome != "passed"]
    if not contract and result.failure is not None:
        return Text("not run", style="red")
    line = Text(f"{passed} passed")
    if failed:
        line.append(f", {len(failed)} failed: {one_line(failed[-1].title)}", style="red")
    return line


def print_numbers(console: Console, numbers: Sequence[Number]) -> None:
    """One row for each number, in columns that all of them share; notes below, across them."""
    rows = [number_row(number) for number in numbers]
    widths = [max((row[i].cell_len for row in rows), default=0) for i in range(4)]
    widths[0] = min(max(widths[0], NAME_WIDTH), 24)
    widths[2] = min(widths[2], 20)
    widths[1] = max(16, console.width - INDENT - widths[0] - widths[2] - widths[3] - 3 * GAP)
    for number, row in zip(numbers, rows, strict=True):
        table = Table.grid(padding=(0, GAP), pad_edge=False)
        for width in widths:
            table.add_column(width=width, overflow="fold")
        table.add_row(*row)
        console.print(Padding(table, (0, 0, 0, INDENT), expand=False))
        notes = [*interval_note(number), *number.notes]
        if notes:
            shown = [("", Text(plain(note), style="dim")) for note in notes]
            console.print(pairs(shown, widths[0]))


def number_row(number: Number) -> tuple[Text, Text, Text, Text]:
    """name, what was found, what is needed, verdict."""
    name = Text(one_line(number.name.replace("_", " ")))
    text = Text(plain(number.text))
    needs = Text(f"needs {number.needs}" if number.needs else "", style="dim")
    if number.verdict is None:
        return name, text, needs, Text("reported", style="dim")
    verdict = Text(number.verdict.value, style=COLOURS[number.verdict])
    if number.exact:
        verdict.append("  exact", style="dim")
    return name, text, needs, verdict


def interval_note(number: Number) -> list[str]:
    """The interval of a timed number, for the line below it."""
    if number.interval is None:
        return []
    if not number.interval[0] > 0:
        return [f"no interval yet: {number.slices} slices are too few, or hang together too much"]
    low, high = number.interval
    return [f"[{low:.2f}, {high:.2f}] over {number.slices} slices"]


def print_failure(console: Console, result: StageResult, stage: str) -> None:
    """The failure, if there is one: what, expected, got, where, and what next."""
    if result.missing:
        missing = f"{', '.join(result.missing)}. A check that is absent is not a pass."
        console.print(pairs([("not measured", Text(missing, style="red"))]))
    for library, titles in result.left_out.items():
        console.print(
            pairs([(f"no {library}", f"not checked: {'; '.join(titles)}. {where(library)}")])
        )
    failure = result.failure
    if failure is None:
        return
    console.print()
    console.print(Text(f"  {failure.code.value}", style="bold red"))
    rows = [("", failure.message)]
    rows += [(n, getattr(failure, n)) for n in ("expected", "got", "where") if getattr(failure, n)]
    rows += [("", note) for note in failure.notes]
    if failure.detail.strip():
        rows.append(("said", failure.detail.strip()))
    if result.printed:
        rows.append(("printed", result.printed))
    if likely := failure.likely or failure.code.page.likely:
        rows.append(("likely", likely))
    if failure.code.value == "NOT_IMPLEMENTED":
        rows.append(("next", f"{PROGRAM} read {stage}; then edit the file it names"))
    elif failure.code.page.kind is Kind.COURSE:
        rows.append(("next", f"{PROGRAM} explain {failure.code.value}; {PROGRAM} doctor"))
    else:
        level = f" --level {failure.hint}" if failure.hint else ""
        rows.append(
            ("next", f"{PROGRAM} explain {failure.code.value}; {PROGRAM} hint {stage}{level}")
        )
    console.print(pairs(rows))


def pairs(rows: Sequence[tuple[str, str | Text]], width: int = NAME_WIDTH) -> Padding:
    """Two columns, the second wrapped under itself. Nothing in a text is taken for markup."""
    table = Table.grid(padding=(0, GAP), pad_edge=False)
    table.add_column(min_width=width, no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        shown = text if isinstance(text, Text) else Text(plain(text))
        table.add_row(Text(name, style="dim"), shown)
    return Padding(table, (0, 0, 0, INDENT), expand=False)


def closing_line(result: StageResult) -> Text:
    """One line for the whole stage."""
    words = {
        Exit.PASS: ("contract holds; the number was not measured", "green")
        if result.contract_only
        else ("passed: the gate is open", "bold green"),
        Exit.FAIL: ("not yet", "bold red"),
        Exit.INCONCLUSIVE: (
            "inconclusive: too noisy for a verdict. Close other programs and run it again; "
            "measurements add up while your file stays the same",
            "yellow",
        ),
        Exit.NOT_HERE: (
            "what could be checked holds; the rest is not measurable on this machine: no pass"
            if result.left_out
            else "not measurable on this machine",
            "yellow",
        ),
        Exit.BROKEN: ("the course is broken: this says nothing about your file", "bold red"),
        Exit.USAGE: ("not run", "red"),
    }
    text, style = words[result.status]
    return Text(f"  {text}  ({result.seconds:.0f} s)", style=style)
