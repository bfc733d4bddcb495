"""Decode steps of a solution's pages against a baseline, in turn, in seconds per token."""

from __future__ import annotations

from typing import Any

from course.check import expect
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.check.host import Run
from course.model.describe import load_config

NEAR_TIE = 1e-3  # of the spread of the logits; on a GPU, in bfloat16, a tenth


class DecodeRace:
    """The same sequences, with the same random past, decoded by both workers.

    The sequences that both sides have must say the same, near-ties aside.
    """

    STEPS = 60  # of a run, before both sides begin anew
    BLOCK = 16

    def __init__(
        self, gate: GateRun, baseline: dict[str, Any], lengths: list[int],
        *, scenarios: tuple[str, str] = ("contiguous", "paged"),
    ) -> None:  # fmt: skip
        """
        Args:
            baseline: what its scenario is given: `lengths` of its sequences, and what it needs
                besides. None of these for one that takes the same pages as the candidate.
            lengths: of the past of each sequence of the candidate.
            scenarios: of the baseline, and of the candidate.
        """
        self.gate = gate
        self.model = gate.model
        needed = [-(-(n + self.STEPS + 1) // self.BLOCK) for n in lengths]
        self.num_blocks = sum(needed)
        ids = list(range(self.num_blocks))
        gate.rng.shuffle(ids)
        paged = {
            "tables": [[ids.pop() for _ in range(count)] for count in needed],
            "lengths": lengths, "num_blocks": self.num_blocks, "block_size": self.BLOCK,
        }  # fmt: skip
        shared = {"model": self.model, "steps": self.STEPS, "seed": gate.rng.randrange(1 << 20)}
        self.arguments = {
            "baseline": {**(baseline or paged), **shared}, "candidate": {**paged, **shared},
        }  # fmt: skip
        self.scenarios = dict(zip(("baseline", "candidate"), scenarios, strict=True))
        self.runs: dict[str, Run] = {}
        self.found: dict[str, list[Any]] = {"baseline": [], "candidate": []}
        self.parted: set[int] = set()

    def baseline(self) -> float:
        """One step of the baseline, in seconds per token."""
        return self._step("baseline")

    def candidate(self) -> float:
        """One step of the candidate, in seconds per token."""
        return self._step("candidate")

    def must_fit(self, name: str, budget: int) -> None:
        """The pool may hold no more than so many positions, and one block for nobody."""
        config = load_config(self.model, self.gate.device)
        width = 4 if self.gate.device == "cpu" else 2
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * width
        held = self.gate.candidate.call(
            "pool_bytes", model=self.model, num_blocks=self.num_blocks, block_size=self.BLOCK
        )
        self.gate.exact(
            name, held, at_most=(budget + self.BLOCK) * per_token + 256, unit="bytes",
            code=Code.TOO_MUCH_MEMORY,
            text=f"{held:,} bytes for {self.num_blocks} blocks of {self.BLOCK}; "
            f"contiguous slots hold {budget * per_token:,}",
            message="a pool holds the keys and values of its blocks, and of one more",
        )  # fmt: skip

    def _step(self, side: str) -> float:
        if side not in self.runs or len(self.found[side]) == self.STEPS:
            self._open(side)
        reply = expect.result_of(self.runs[side].step, f"a decode step on {self.model}")
        rows = len(self.arguments[side]["lengths"])
        self.found[side].append(self._rows(reply.value, rows))
        self._compare()
        return reply.seconds / rows

    def _open(self, side: str) -> None:
        worker = self.gate.baseline if side == "baseline" else self.gate.candidate
        self.runs[side] = worker.start(self.scenarios[side], **self.arguments[side])
        self.found[side] = []
        self.parted.clear()
        expect.result_of(self.runs[side].step, "a random past")

    def _rows(self, value: Any, count: int) -> list[Any]:
        if not isinstance(value, list) or len(value) != count:
            raise GateFailure(
                Code.WRONG_VALUE, f"logits of a decode step on {self.model}",
                f"a row for each of {count} sequences", repr(value)[:80],
            )  # fmt: skip
        return value

    def _compare(self) -> None:
        """The newest step that both sides have made: the same tokens, near-ties aside."""
        at = min(map(len, self.found.values())) - 1
        if at < 0:
            return
        limit = NEAR_TIE if self.gate.device == "cpu" else 0.1
        pairs = zip(self.found["baseline"][at], self.found["candidate"][at], strict=False)
        for row, ((wanted, lead), (got, _)) in enumerate(pairs):
            if got == wanted or row in self.parted:
                continue
            if lead > limit:
                raise GateFailure(
                    Code.WRONG_TOKEN, f"a timed token on {self.model} differs from the baseline's",
                    str(int(wanted)), str(int(got)), where=f"step {at}, row {row}",
                )  # fmt: skip
            self.parted.add(row)
