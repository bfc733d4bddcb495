"""How a result reads on a terminal, or in plain text."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from course.check.result import Exit, Number, StageResult
from course.measure.ratio import Verdict

COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.INCONCLUSIVE: "yellow"}


def print_result(console: Console, result: StageResult, *, published: str, stage: str) -> None:
    """One stage's result: contract, every number (green or red), and the failure."""
    where = f"{result.model} · {result.device}"
    head = Text(f"{result.stage.replace('-', ' ')}  {result.title}", style="bold")
    head.append(f"   {where}", style="dim")
    console.print(head)
    console.print(contract_line(result))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(style="dim")
    table.add_column(no_wrap=True)
    for number in result.numbers:
        table.add_row(*number_row(number))
        for note in number.notes:
            table.add_row("", Text(note, style="dim"), "", "")
    console.print(table)
    if published:
        console.print(Text(f"  {published}", style="dim"))
    for remark in result.remarks:
        console.print(Text(f"  note: {remark}", style="yellow"))
    print_failure(console, result, stage)
    console.print(closing_line(result))


def contract_line(result: StageResult) -> Text:
    """How many contract checks passed."""
    contract = [c for c in result.checks if c.layer == "contract"]
    passed = sum(c.outcome == "passed" for c in contract)
    failed = len(contract) - passed
    line = Text(f"  {'contract':<16}  {passed} passed")
    if failed:
        line.append(f", {failed} failed: {contract[-1].title}", style="red")
    return line


def number_row(number: Number) -> tuple[Text, Text, Text, Text]:
    """name, what was found, what is needed, verdict."""
    name = Text(f"  {number.name.replace('_', ' '):<16}")
    text = Text(number.text)
    if number.interval is not None and number.interval[0] > 0:
        low, high = number.interval
        text.append(f"  [{low:.2f}, {high:.2f}] over {number.slices} slices", style="dim")
    needs = Text(f"needs {number.needs}" if number.needs else "")
    if number.verdict is None:
        return name, text, needs, Text("reported", style="dim")
    verdict = Text(number.verdict.value, style=COLOURS[number.verdict])
    if number.exact:
        verdict.append("  exact", style="dim")
    return name, text, needs, verdict


def print_failure(console: Console, result: StageResult, stage: str) -> None:
    """The failure, if there is one: what, expected, got, where, and what next."""
    if result.missing:
        names = ", ".join(result.missing)
        console.print(
            Text(f"  not measured: {names}. A check that is absent is not a pass.", "red")
        )
    failure = result.failure
    if failure is None:
        return
    console.print()
    console.print(Text(f"  {failure.code.value}", style="bold red"))
    rows = [("", failure.message)]
    rows += [(n, getattr(failure, n)) for n in ("expected", "got", "where") if getattr(failure, n)]
    rows += [("", note) for note in failure.notes]
    rows += [("said", line) for line in failure.detail.strip().splitlines()]
    rows.append(("likely", failure.code.page.causes[0]))
    if failure.code.value == "NOT_IMPLEMENTED":
        rows.append(("next", f"course read {stage}; then edit the file it names"))
    else:
        level = f" --level {failure.hint}" if failure.hint else ""
        rows.append(("next", f"course explain {failure.code.value}; course hint {stage}{level}"))
    console.print(pairs(rows))


def pairs(rows: list[tuple[str, str]]) -> Table:
    """Two columns, the second wrapped under itself."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(f"  {name}", style="dim"), Text(text))
    return table


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
        Exit.NOT_HERE: ("not measurable on this machine", "yellow"),
        Exit.USAGE: ("not run", "red"),
    }
    text, style = words[result.status]
    return Text(f"  {text}  ({result.seconds:.0f} s)", style=style)
