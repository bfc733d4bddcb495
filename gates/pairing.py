"""The timing that stages with tokens share: two workers, the same prompts, step by step in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from course.check import expect
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.check.host import Run
from course.check.oracle import near_tie
from course.check.prompts import real_prompt


class PairedRuns:
    """The same prompts continued by both workers, one step of each at a time.

    Every timed token is checked: both sides must say the same, near-ties in float32 aside. A step
    may serve several rows. Runs follow each other: when one has had its steps, both sides go on
    with the next, on fresh prompts.
    """

    candidate_scenario = "counted_stream"
    baseline_scenario = "stream"

    def __init__(self, gate: GateRun, model: str, *, new: int, untimed: int = 0) -> None:
        """
        Args:
            model: what the prompts are continued with.
            new: timed steps of each run.
            untimed: steps before those (1 leaves the prefill out).
        """
        self.gate = gate
        self.model = model
        self.new = new
        self.untimed = untimed
        self.prompts: list[list[list[int]]] = []  # [run][row]
        self.steps: dict[str, list[list[list[Any]]]] = {"candidate": [], "baseline": []}
        self.runs: dict[str, Run] = {}
        self.seconds: dict[str, list[tuple[int, float]]] = {"candidate": [], "baseline": []}

    def draw(self, index: int) -> list[list[int]]:
        """The prompts of run `index`, one a row."""
        raise NotImplementedError

    def arguments(self, prompts: list[list[int]]) -> dict[str, Any]:
        """What both scenarios are started with, besides `model` and `max_new_tokens`."""
        raise NotImplementedError

    def sides(self) -> tuple[Callable[[], float], Callable[[], float]]:
        """The two steps that `GateRun.ratio` takes."""
        return partial(self.step, "baseline"), partial(self.step, "candidate")

    def step(self, side: str) -> float:
        """One timed step of one side; seconds by the judge's clock."""
        steps = self.steps[side]
        if not steps or len(steps[-1]) == self.untimed + self.new:
            self._open(side)
        seconds = self._advance(side)
        longest = max(map(len, self.prompts[len(steps) - 1]))
        self.seconds[side].append((longest + len(steps[-1]) - 1, seconds))
        return seconds

    def stop(self) -> None:
        """End both runs where they are."""
        for run in self.runs.values():
            run.stop()

    def _open(self, side: str) -> None:
        """Begin the next run of this side; the side that comes first draws the prompts."""
        index = len(self.steps[side])
        if index == len(self.prompts):
            self.prompts.append(self.draw(index))
        if side in self.runs:
            self.runs[side].stop()
        if side == "candidate":
            worker, scenario = self.gate.candidate, self.candidate_scenario
        else:
            worker, scenario = self.gate.baseline, self.baseline_scenario
        self.runs[side] = worker.start(
            scenario, model=self.model, max_new_tokens=self.untimed + self.new,
            **self.arguments(self.prompts[index]),
        )  # fmt: skip
        self.steps[side].append([])
        for _ in range(self.untimed):
            self._advance(side)

    def _advance(self, side: str) -> float:
        steps = self.steps[side][-1]
        rows = len(self.prompts[len(self.steps[side]) - 1])
        reply = expect.result_of(self.runs[side].step, f"generation on {self.model}")
        if reply.done:
            raise GateFailure(
                Code.TOO_FEW_TOKENS, f"the text on {self.model} stopped too early",
                f"{self.untimed + self.new} tokens", str(len(steps)),
            )  # fmt: skip
        tokens = reply.value
        if side == "candidate":
            tokens = self._counted(reply.value, len(steps) + 1, rows)
        steps.append(tokens if isinstance(tokens, list) else [tokens])
        for row in range(rows):
            self._compare(len(self.steps[side]) - 1, len(steps) - 1, row)
        return reply.seconds

    def _counted(self, value: Any, passes: int, rows: int) -> Any:
        """The tokens of a candidate's step, of which every one needed a pass of its own step."""
        tokens = value["tokens"]
        if rows == 1 and not isinstance(tokens, list):
            expect.is_int(tokens, "a token")
        elif not isinstance(tokens, list) or len(tokens) != rows:
            raise GateFailure(
                Code.WRONG_TYPE, "what one step yields", f"a list of {rows} tokens", repr(tokens)
            )
        else:
            for row, token in enumerate(tokens):
                expect.is_int(token, f"the token of row {row}")
        # A text computed in the step that is not timed would cost nothing in those that are.
        if value["passes"] != passes:
            raise GateFailure(
                Code.NOT_STREAMING, "a timed token was computed before its turn",
                f"{passes} passes at token {passes - 1}", str(value["passes"]),
            )  # fmt: skip
        return tokens

    def _compare(self, index: int, at: int, row: int) -> None:
        """The newest token of one side with that of the other, if it is there already."""
        texts = [
            [step[row] for step in runs[index]] if index < len(runs) else []
            for runs in self.steps.values()
        ]
        if any(len(text) <= at for text in texts) or texts[0][:at] != texts[1][:at]:
            return  # not there yet, or parted before, at a near-tie
        candidate, baseline = texts[0][at], texts[1][at]
        if candidate == baseline:
            return
        prompt = self.prompts[index][row]
        if not near_tie(self.model, self.gate.device, prompt + texts[0][:at], candidate, baseline):
            where = f"token {at} after {len(prompt)}"
            if len(self.prompts[index]) > 1:
                where += f", row {row}"
            raise GateFailure(
                Code.WRONG_TOKEN, f"a timed token on {self.model} differs from the baseline's",
                str(baseline), str(candidate), where=where,
            )  # fmt: skip


class PairedText(PairedRuns):
    """Real texts, one at a time, on the model that `--model` names."""

    def __init__(
        self, gate: GateRun, lengths: Sequence[int], *, new: int, untimed: int = 0
    ) -> None:
        """
        Args:
            lengths: tokens of the prompts, taken in turn.
            new, untimed: as for `PairedRuns`.
        """
        super().__init__(gate, gate.model, new=new, untimed=untimed)
        self.lengths = lengths

    def draw(self, index: int) -> list[list[int]]:
        """One prompt of real text."""
        length = self.lengths[index % len(self.lengths)]
        return [real_prompt(self.model, self.gate.rng, length)]

    def arguments(self, prompts: list[list[int]]) -> dict[str, Any]:
        """As `generate` is called."""
        return {"prompt_ids": prompts[0]}
