"""Texts that come and go, as the judge knows them: their steps, and the logits that are due."""

from __future__ import annotations

from typing import Any

import torch

from course.check.gate import GateRun
from course.check.oracle import nano_oracle

Rows = list[tuple[int, int]]  # (text, position) of each row of logits


class Texts:
    """Texts of random tokens in a pool of blocks. Blocks of a text that left go to the next."""

    def __init__(self, gate: GateRun, num_blocks: int, block_size: int, width: int) -> None:
        """
        Args:
            width: columns of the tables, unless a text has more blocks.
        """
        self.rng = gate.rng
        self.num_blocks, self.block_size, self.width = num_blocks, block_size, width
        self.free = list(range(num_blocks))
        self.rng.shuffle(self.free)
        self.tokens: list[list[int]] = []  # of every text that ever was, as far as they were fed
        self.tables: list[list[int]] = []
        self.running: list[int] = []
        self._logits: dict[int, torch.Tensor] = {}

    def join(self, reserve: int = 0) -> int:
        """A new text without tokens; its number.

        reserve: blocks that its table has from the start, whether they are needed or not.
        """
        self.tokens.append([])
        self.tables.append([self.free.pop() for _ in range(reserve)])
        self.running.append(len(self.tokens) - 1)
        return self.running[-1]

    def leave(self, text: int) -> None:
        """A text ends. Its blocks are the first that are given away again."""
        self.running.remove(text)
        self.free += self.tables[text]
        self.tables[text] = []

    def step(
        self, counts: dict[int, int], *, exact: bool = False, token: int | None = None
    ) -> tuple[dict[str, Any], Rows]:
        """A step that feeds counts[text] new tokens to each text, in that order.

        exact: the tables are as wide as the longest of them, as `step_batch` makes them.
        token: what all texts are fed; random tokens by default.

        Returns the fields of its StepBatch, and the rows that its logits are of.
        """
        rows: Rows = []
        fields: dict[str, list[Any]] = {
            name: []
            for name in ("token_ids", "positions", "context_lens", "slot_mapping", "logit_rows")
        }
        starts, tables = [0], []
        for text, count in counts.items():
            table, tokens = self.tables[text], self.tokens[text]
            for _ in range(count):
                position = len(tokens)
                if position == len(table) * self.block_size:
                    table.append(self.free.pop())
                block = table[position // self.block_size]
                tokens.append(self.rng.randrange(256) if token is None else token)
                fields["token_ids"].append(tokens[-1])
                fields["positions"].append(position)
                fields["slot_mapping"].append(block * self.block_size + position % self.block_size)
            starts.append(starts[-1] + count)
            fields["context_lens"].append(len(tokens))
            fields["logit_rows"].append(starts[-1] - 1)
            rows.append((text, len(tokens) - 1))
            tables.append(table)
        width = max(map(len, tables))
        if not exact:
            width = max(width, self.width)
        fields["query_start_loc"] = starts
        fields["block_tables"] = [table + [-1] * (width - len(table)) for table in tables]
        return fields, rows

    def shuffled(self, some: int) -> list[int]:
        """So many of the running texts, in random order."""
        return self.rng.sample(self.running, some)

    def due(self, rows: Rows) -> torch.Tensor:
        """The logits [rows, V] of those rows, in float64: each text alone, without a cache.

        To be asked for when the texts have had all their tokens: each is computed once.
        """
        found = []
        for text, position in rows:
            if text not in self._logits:
                self._logits[text] = nano_oracle().logits(self.tokens[text])
            found.append(self._logits[text][position])
        return torch.stack(found)
