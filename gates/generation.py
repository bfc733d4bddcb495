"""The contract and the timing that every stage with a `generate` shares."""

from __future__ import annotations

from typing import Any

import pytest

from course.check import expect
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.check.oracle import nano_oracle


def steps_of(
    gate: GateRun,
    prompt: Any,
    new: Any,
    eos_ids: list[int],
    *,
    limit: int,
    what: str = "generate",
    eos_kind: str = "list",
) -> tuple[list[Any], dict[str, Any] | None]:
    """What `generate` yields on nano, at most `limit` steps, and the counts if it ended.

    Each step is {"token", "passes"}.
    """

    def collect() -> tuple[list[Any], dict[str, Any] | None]:
        run = gate.candidate.start(
            "generate", model="nano", prompt_ids=prompt, max_new_tokens=new,
            eos_ids=eos_ids, eos_kind=eos_kind,
        )  # fmt: skip
        opened = run.step().value
        if not opened["iterator"]:
            printed = gate.candidate.output()
            raise GateFailure(
                Code.NOT_AN_ITERATOR,
                "generate must yield its tokens one by one",
                "a generator",
                opened["type"].removeprefix("builtins."),
                detail=f"it printed: {printed[-300:]}" if printed else "",
                hint=1,
            )
        found = []
        for step in run:
            found.append(step.value)
            if len(found) >= limit:
                run.stop()
                return found, None
        assert run.finished is not None
        return found, run.finished.value

    return expect.result_of(collect, what)


def tokens_of(
    gate: GateRun,
    prompt: Any,
    expected: list[int],
    new: int,
    eos_ids: list[int],
    what: str,
    eos_kind: str = "list",
) -> dict[str, Any]:
    """Check what `generate` yields against `expected`, and return the counts at the end."""
    found, counts = steps_of(
        gate, prompt, new, eos_ids, limit=len(expected) + 2, what=what, eos_kind=eos_kind
    )
    ended = bool(expected) and expected[-1] in eos_ids
    expect.tokens([step["token"] for step in found], expected, what, ended_by_eos=ended)
    assert counts is not None  # it ended by itself: there were not more tokens than expected
    if ended and counts["passes"] > len(expected):
        raise GateFailure(
            Code.WRONG_COUNT, f"{what}: a pass was made after the end token",
            f"{len(expected)} passes", str(counts["passes"]),
        )  # fmt: skip
    return counts


@pytest.mark.contract
class GenerationContract:
    """Greedy text from `generate(model, prompt_ids, max_new_tokens, eos_ids)`, on nano."""

    @pytest.mark.parametrize("length", [5, 1, 23])
    def test_tokens_are_those_of_an_independent_model(self, gate: GateRun, length: int) -> None:
        """greedy tokens equal those of a float64 model"""
        prompt, expected = nano_oracle().prompt(gate.rng, length, 12)
        tokens_of(gate, prompt, expected, 12, [], f"a prompt of {length} tokens")

    def test_each_token_comes_when_it_is_known(self, gate: GateRun) -> None:
        """tokens stream: one forward pass for each"""
        prompt, _ = nano_oracle().prompt(gate.rng, 6, 4)
        what = "four of eight tokens, and then walking away"
        found, _ = steps_of(gate, prompt, 8, [], limit=4, what=what)
        passes = [step["passes"] for step in found]
        if passes and passes[0] > 1 and passes == [passes[0] + i for i in range(4)]:
            raise GateFailure(
                Code.WRONG_COUNT, "the whole prompt goes through the model in one pass",
                "1 pass before the first token", str(passes[0]),
            )  # fmt: skip
        if passes != [1, 2, 3, 4]:
            raise GateFailure(
                Code.NOT_STREAMING,
                "token k must be yielded after pass k, before the next one is computed",
                "passes 1, 2, 3, 4",
                "passes " + ", ".join(map(str, passes)),
            )

    @pytest.mark.parametrize("eos_kind", ["list", "tuple", "frozenset"])
    def test_the_end_token_is_the_last(self, gate: GateRun, eos_kind: str) -> None:
        """the end token is yielded, and nothing after it"""
        prompt, expected = prompt_with_new_token(gate)
        others = [token for token in range(320) if token not in expected][:2]
        # The one that comes is neither the first nor the last of them, where that means anything.
        ends = [others[0], expected[-1], others[1]]
        tokens_of(gate, prompt, expected, 20, ends, f"end tokens in a {eos_kind}", eos_kind)

    def test_end_tokens_in_the_prompt_end_nothing(self, gate: GateRun) -> None:
        """an end token inside the prompt does not end the text"""
        prompt, expected = nano_oracle().prompt(gate.rng, 8, 5)
        inside = [token for token in prompt[:-1] if token not in expected]
        if not inside:
            raise RuntimeError("every token of the prompt comes again")
        tokens_of(gate, prompt, expected, 5, inside[:1], "a prompt that holds an end token")

    def test_a_limit_far_beyond_the_context(self, gate: GateRun) -> None:
        """a huge max_new_tokens costs nothing by itself"""
        prompt, expected = prompt_with_new_token(gate)
        what = "max_new_tokens = 10**12, and an end token soon"
        tokens_of(gate, prompt, expected, 10**12, expected[-1:], what)

    def test_an_end_token_in_the_first_step(self, gate: GateRun) -> None:
        """an end token in the first step ends it there"""
        prompt, expected = nano_oracle().prompt(gate.rng, 9, 1)
        tokens_of(gate, prompt, expected, 8, [expected[0]], "a text that ends at once")

    def test_one_new_token(self, gate: GateRun) -> None:
        """max_new_tokens = 1 is one forward pass"""
        prompt, expected = nano_oracle().prompt(gate.rng, 7, 1)
        counts = tokens_of(gate, prompt, expected, 1, [], "max_new_tokens = 1")
        if counts["passes"] != 1:
            raise GateFailure(
                Code.WRONG_COUNT, "one token needs one pass", "1", str(counts["passes"])
            )

    def test_no_new_tokens_compute_nothing(self, gate: GateRun) -> None:
        """max_new_tokens = 0 yields and computes nothing"""
        counts = tokens_of(gate, [65, 66], [], 0, [], "max_new_tokens = 0")
        if counts["passes"]:
            raise GateFailure(
                Code.WRONG_COUNT, "max_new_tokens = 0 must compute nothing", "0 forward passes",
                str(counts["passes"]),
            )  # fmt: skip

    @pytest.mark.parametrize("room", [0, 2])
    def test_the_context_is_the_end(self, gate: GateRun, room: int) -> None:
        """a prompt as long as the context yields one token"""
        oracle = nano_oracle()
        length = oracle.config.max_context - room
        prompt, expected = oracle.prompt(gate.rng, length, room + 1)
        what = f"a prompt with room for {room} more tokens"
        tokens_of(gate, prompt, expected, 10, [], what)

    @pytest.mark.parametrize(
        ("argument", "prompt", "new", "eos_ids", "kinds", "what"),
        [
            ("prompt_ids", [], 4, [], ["ValueError"], "an empty prompt"),
            ("prompt_ids", [320], 4, [], ["ValueError"], "a token past the vocabulary"),
            ("prompt_ids", [-1], 4, [], ["ValueError"], "a negative token"),
            ("prompt_ids", [1] * 257, 4, [], ["ValueError"], "a prompt longer than the context"),
            ("prompt_ids", [1.5], 4, [], ["TypeError", "ValueError"], "a token that is no int"),
            ("max_new_tokens", [1], -1, [], ["ValueError"], "a negative limit"),
            ("max_new_tokens", [1], 2.5, [], ["TypeError", "ValueError"], "a limit of 2.5"),
            ("eos_ids", [1], 4, [999], ["ValueError"], "an end token past the vocabulary"),
        ],
        ids=lambda value: value if isinstance(value, str) and " " in value else "",
    )  # fmt: skip
    def test_bad_input_is_refused(
        self,
        gate: GateRun,
        argument: str,
        prompt: Any,
        new: Any,
        eos_ids: Any,
        kinds: Any,
        what: str,
    ) -> None:
        """bad input gets an error that names the argument"""

        def attempt() -> None:
            run = gate.candidate.start(
                "generate", model="nano", prompt_ids=prompt, max_new_tokens=new, eos_ids=eos_ids
            )
            run.step()
            run.step()
            run.stop()

        expect.rejects(attempt, argument, what, kinds=kinds)

    def test_arguments_are_left_alone(self, gate: GateRun) -> None:
        """the caller's lists are not changed"""
        prompt, expected = nano_oracle().prompt(gate.rng, 4, 3)
        other = next(token for token in range(320) if token not in expected)
        counts = tokens_of(gate, prompt, expected, 3, [other], "a second look at the prompt")
        expect.unchanged(prompt, counts["prompt_ids"], "prompt_ids")
        expect.unchanged([other], counts["eos_ids"], "eos_ids")

    @pytest.mark.parametrize("lengths", [(3, 8), (6, 6)])
    def test_two_texts_at_once(self, gate: GateRun, lengths: tuple[int, int]) -> None:
        """two generations in turn do not disturb each other"""
        pairs = [nano_oracle().prompt(gate.rng, length, 6) for length in lengths]
        found: list[list[Any]] = [[], []]

        def interleave() -> None:
            runs = [
                gate.candidate.start("stream", model="nano", prompt_ids=prompt, max_new_tokens=6)
                for prompt, _ in pairs
            ]
            for _ in range(6):
                for run, tokens in zip(runs, found, strict=True):
                    tokens.append(run.step().value)
            for run in runs:
                run.stop()

        expect.result_of(interleave, "two generations in turn")
        for tokens, (_, expected) in zip(found, pairs, strict=True):
            if tokens != expected:
                raise GateFailure(
                    Code.STALE_STATE, "two generations in turn disturb each other",
                    str(expected), str(tokens),
                )  # fmt: skip


def prompt_with_new_token(gate: GateRun) -> tuple[list[int], list[int]]:
    """A prompt, and its continuation up to the third token that had not come before."""
    for _ in range(50):
        prompt, expected = nano_oracle().prompt(gate.rng, 9, 12)
        fresh = [i for i, token in enumerate(expected) if token not in expected[:i]]
        if len(fresh) >= 3:
            return prompt, expected[: fresh[2] + 1]
    raise RuntimeError("nano repeats itself on every prompt")
