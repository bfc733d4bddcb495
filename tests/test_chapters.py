"""The teaching text, linted: chapters, hints, notes and glossary, against the code.

A chapter is prose, but it is held to facts: its signatures are those of the solution, its bars
those of `course.toml`, its codes those of the closed list, and its figures are worked out again.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from course.check.codes import Code
from course.model.config import ModelConfig
from course.model.published import PUBLISHED
from course.model.seeded import BENCH_1B
from course.paths import course_home
from course.syllabus import Stage, load_syllabus
from course.types import Stamp, Timeline

ROOT = course_home()
STAGES = load_syllabus().published
GIB = 1 << 30

CHAPTER = (
    "Predict", "Because", "On paper", "What you are given", "What you build", "The contract",
    "Traps", "The gate", "Incident", "Challenges", "Sources",
)  # fmt: skip
NOTES = (
    "Invariant", "Hypothesis", "Where it wins", "Where it loses", "Control",
    "How the benchmark could mislead", "Why the bars stand where they stand",
)  # fmt: skip
LEVELS = ("Level 1", "Level 2", "Level 3")

each_stage = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.id)


# -- reading Markdown ----------------------------------------------------------------------------


def sections(text: str) -> dict[str, str]:
    """The text under each `##` heading, in order. A heading inside a code block is none."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if line.startswith("## ") and not fenced:
            name = line.removeprefix("## ").strip()
            assert name not in found, f"two sections are called {name!r}"
            lines = found[name] = []
        else:
            lines.append(line)
    assert not fenced, "a code fence is left open"
    return {name: "\n".join(body).strip() for name, body in found.items()}


def fences(text: str, language: str) -> list[str]:
    """Code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def prose(text: str) -> str:
    """The text without code blocks, inline code, links' targets and HTML tags."""
    text = re.sub(r"```.*?```", " ", text, flags=re.S)
    text = re.sub(r"`[^`]*`", " ", text)
    text = re.sub(r"<https?://[^>]*>|</?\w+>", " ", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"[*_]", "", re.sub(r"\s+", " ", text))


def flat(text: str) -> str:
    """White space and quote marks do not matter."""
    return re.sub(r"[\s>]+", " ", text).strip()


def links(text: str) -> list[str]:
    """Targets of Markdown links and images."""
    return re.findall(r"\]\(([^)\s]+)[^)]*\)", re.sub(r"```.*?```", " ", text, flags=re.S))


def file_names(text: str) -> list[str]:
    """Paths of this repository that stand in backticks."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", " ", text, flags=re.S))
    kinds = r"[\w./-]+/[\w.-]+\.(?:py|md|toml|ipynb)"
    return [span for span in spans if re.fullmatch(kinds, span)]


def named_codes(text: str) -> list[str]:
    """What looks like a failure code: capitals in backticks."""
    return re.findall(r"`([A-Z][A-Z_]{4,})`", text)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def notes_of(stage: Stage) -> Path:
    return stage.reference.parent / "NOTES.md"


def texts_of(stage: Stage) -> list[Path]:
    return [stage.chapter, stage.hints, notes_of(stage)]


# -- form ----------------------------------------------------------------------------------------


def test_a_lint_that_reads_nothing_is_no_lint() -> None:
    assert len(STAGES) >= 3
    assert list(sections("# T\n\n## A\nx\n```\n## not one\n```\n## B\ny")) == ["A", "B"]
    assert prose("a `b` *c*\n```\nd\n```\n[e](f)") == "a c [e]"
    assert named_codes("`TOO_SLOW`, `EXITED`, `A`, TOO_GOOD, `limit`") == ["TOO_SLOW", "EXITED"]
    assert file_names("`a/b.py` and `b.py` and `a/b`") == ["a/b.py"]
    assert list(uses(("token",), "Tokens, a tokenizer.")) == ["Tokens"]


@each_stage
def test_chapter_has_its_sections(stage: Stage) -> None:
    text = read(stage.chapter)
    assert text.startswith(f"# Stage {stage.number:02d}: {stage.title}\n")
    found = sections(text)
    assert tuple(found) == CHAPTER
    assert all(found.values()), [name for name, body in found.items() if not body]


@each_stage
def test_chapter_can_be_read_in_one_sitting(stage: Stage) -> None:
    words = len(re.findall(r"[A-Za-z][\w'-]*", prose(read(stage.chapter))))
    assert 900 <= words <= 1800, words


@each_stage
def test_a_wrapped_line_is_no_list(stage: Stage) -> None:
    """A formula or a number that begins a line would be shown as the item of a list."""
    for path in texts_of(stage):
        text = re.sub(r"```.*?```", "", read(path), flags=re.S)
        # Only a list that starts with 1 can cut into a paragraph.
        items = re.findall(r"^ *[*+] .*|(?<=[^\n]\n) *1[.)] .*", text, flags=re.M)
        assert not items, f"{path.name}: {items}"


@each_stage
def test_code_fits_a_terminal_of_80_columns(stage: Stage) -> None:
    """`course read` and `course hint` would break a longer line, and with it a table or a formula.

    Of 80 columns, code is shown in 78, and in 75 inside the item of a list.
    """
    for path in (stage.chapter, stage.hints):
        blocks = re.findall(r"^( *)```\w*\n(.*?)^ *```", read(path), flags=re.M | re.S)
        assert blocks
        for indent, block in blocks:
            most = 75 if indent else 78
            wide = [line for line in block.splitlines() if len(line.removeprefix(indent)) > most]
            assert not wide, f"{path.name}: {wide}"


@each_stage
def test_hints_have_three_levels(stage: Stage) -> None:
    found = sections(read(stage.hints))
    assert tuple(found) == LEVELS
    assert min(len(body) for body in found.values()) >= 200
    assert found["Level 3"].count("```") == 2, "level 3 shows the shape of the code"
    assert not fences(read(stage.hints), "python"), "pseudo code, not the solution"


@each_stage
def test_hints_are_not_the_solution(stage: Stage) -> None:
    hints = {flat(line) for line in read(stage.hints).splitlines()}
    given_away = [
        line
        for line in map(flat, solution_lines(stage))
        if len(line) > 24 and not line.startswith(("#", '"""')) and line in hints
    ]
    assert not given_away


def solution_lines(stage: Stage) -> Iterator[str]:
    inside = False
    for line in read(stage.reference).splitlines():
        if line.strip() == "# solution: begin":
            inside = True
        elif line.strip() == "# solution: end":
            inside = False
        elif inside:
            yield line


@each_stage
def test_notes_answer_their_questions(stage: Stage) -> None:
    found = sections(read(notes_of(stage)))
    assert tuple(found)[: len(NOTES)] == NOTES
    assert all(len(found[name]) >= 80 for name in NOTES), {n: len(found[n]) for n in NOTES}
    for number in (*stage.numbers, *stage.gpu_numbers):
        bars = {**stage.bars.get("cpu", {}), **stage.bars.get("cuda", {})}
        if number in bars:
            assert number.replace("_", " ") in found["Why the bars stand where they stand"]


@each_stage
def test_incident_hides_its_answer(stage: Stage) -> None:
    incident = sections(read(stage.chapter))["Incident"]
    assert incident.count("<details>") == incident.count("</details>") == 1
    before, answer = incident.split("<details>")
    assert "?" in before, "the reader is asked something"
    assert len(answer) > 300


@each_stage
def test_challenges_are_graded(stage: Stage) -> None:
    items = re.findall(r"^\d+\. \*(Easy|Medium|Hard)\.\*", section(stage, "Challenges"), flags=re.M)
    assert len(items) >= 3
    assert items == sorted(items, key=("Easy", "Medium", "Hard").index)


@each_stage
def test_sources_say_when_and_where(stage: Stage) -> None:
    items = re.split(r"^- ", section(stage, "Sources"), flags=re.M)[1:]
    assert len(items) >= 3
    for item in items:
        assert re.search(r"\b(19|20)\d\d\b|https://|data sheets", item), item


def section(stage: Stage, name: str) -> str:
    return sections(read(stage.chapter))[name]


# -- one source ----------------------------------------------------------------------------------


@each_stage
def test_chapter_opens_with_the_prediction(stage: Stage) -> None:
    predict = section(stage, "Predict")
    assert predict.startswith("> ")
    assert flat(stage.predict) in flat(predict)
    assert f"./course predict {stage.number}" in predict


@each_stage
def test_no_result_comes_before_the_prediction(stage: Stage) -> None:
    """Nothing that was measured or worked out stands beside the question."""
    around = flat(section(stage, "Predict")).replace(flat(stage.predict), "")
    assert not re.search(r"\d(?:\.\d+)?\s?(?:x|ms|us|GB/s|times)\b", around)
    if stage.number == 1:
        answer = sum(64 + generated for generated in range(128))
        assert f"{answer:,}" not in read(stage.chapter)
        assert str(answer) not in read(stage.chapter)


@each_stage
def test_because_is_that_of_the_syllabus(stage: Stage) -> None:
    assert flat(section(stage, "Because")).startswith(flat(stage.because))


@each_stage
def test_signatures_are_those_of_the_solution(stage: Stage) -> None:
    shown: dict[str, str] = {}
    for block in fences(section(stage, "What you build"), "python"):
        shown |= signatures(ast.parse(block))
    real = signatures(ast.parse(read(stage.reference)))
    assert {name.split(".")[0] for name in shown} == set(stage.builds)
    assert shown == {name: real[name] for name in shown}


def signatures(module: ast.Module) -> dict[str, str]:
    """`name` or `Class.name` -> arguments and result, as text."""
    found: dict[str, str] = {}
    for node in module.body:
        owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for function in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                result = ast.unparse(function.returns) if function.returns else ""
                found[owner + function.name] = f"({ast.unparse(function.args)}) -> {result}"
    return found


@each_stage
def test_gate_names_every_number_and_bar(stage: Stage) -> None:
    text = section(stage, "The gate")
    rows = " ".join(line for line in text.splitlines() if line.startswith("|"))
    for number in (*stage.numbers, *stage.gpu_numbers):
        words = number.split("_")
        assert " ".join(words) in rows or all(word in rows for word in words), number
    for tier in stage.bars:
        for name, bar in stage.bars[tier].items():
            values = bar.values() if isinstance(bar, dict) else bar
            for value in values if isinstance(values, Iterable) else [values]:
                assert re.search(rf"(?<![\d.]){value:,g}(?![\d])", text), (tier, name, value)
    assert f"./course check {stage.number}" in text
    gpu = (
        "not measured on this machine"
        if stage.model != "none"
        else "nothing of this stage runs on a GPU"
    )
    assert gpu in text


@each_stage
def test_codes_are_in_the_closed_list(stage: Stage) -> None:
    known = {code.value for code in Code}
    for path in texts_of(stage):
        unknown = set(named_codes(read(path))) - known
        assert not unknown, f"{path.name}: {unknown}"
    assert len(set(named_codes(section(stage, "Traps")))) >= 3


@each_stage
def test_every_mistake_in_the_traps_has_a_wrong_solution(stage: Stage) -> None:
    """A code that the traps threaten with is one that some wrong solution does end with."""
    proved = {read(path).split(maxsplit=2)[1].rstrip(":") for path in stage.wrong}
    assert set(named_codes(section(stage, "Traps"))) <= proved


@each_stage
def test_links_and_files_exist(stage: Stage) -> None:
    for path in texts_of(stage):
        for target in links(read(path)):
            if not target.startswith(("https://", "#")):
                assert (path.parent / target.partition("#")[0]).exists(), f"{path.name}: {target}"
        for name in file_names(read(path)):
            assert (ROOT / name).exists(), f"{path.name}: {name}"


# -- glossary ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    name: str
    aliases: tuple[str, ...]
    stage: int
    text: str

    @property
    def words(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@cache
def glossary() -> tuple[Term, ...]:
    document = tomllib.loads(read(ROOT / "glossary.toml"))
    return tuple(
        Term(**{**entry, "aliases": tuple(entry["aliases"])}) for entry in document["term"]
    )


def uses(words: Iterable[str], text: str) -> Iterator[str]:
    """Occurrences of any of these words, in the singular or the plural."""
    for word in words:
        pattern = rf"(?<![\w-]){re.escape(word)}s?(?![\w-])"
        yield from re.findall(pattern, text, flags=0 if word.isupper() else re.IGNORECASE)


def test_glossary_entries_are_whole() -> None:
    seen: set[str] = set()
    for term in glossary():
        for word in term.words:
            assert word.lower() not in seen, f"{word!r} is defined twice"
            seen.add(word.lower())
        assert term.text.endswith(".")
        assert 1 <= len(re.findall(r"\.(?:\s|$)", term.text)) <= 2, (
            f"{term.name}: one or two sentences"
        )
    assert [t.stage for t in glossary()] == sorted(t.stage for t in glossary())


def test_glossary_defines_before_use() -> None:
    for index, term in enumerate(glossary()):
        for later in glossary()[index + 1 :]:
            # "end-of-sequence token" holds the word "token": only what a *later* entry says counts.
            found = list(uses(later.words, prose(term.text)))
            assert not found, f"{term.name!r} is explained by {later.name!r}, which comes after it"


@each_stage
def test_terms_of_the_syllabus_are_defined_and_used(stage: Stage) -> None:
    defined = {term.name: term for term in glossary()}
    chapter = prose(read(stage.chapter))
    for name in stage.terms:
        assert name in defined, f"glossary.toml does not define {name!r}"
        assert defined[name].stage == stage.number
        assert any(uses(defined[name].words, chapter)), f"the chapter never uses {name!r}"
    assert set(stage.terms) == {t.name for t in glossary() if t.stage == stage.number}


@each_stage
def test_chapters_use_no_term_of_a_later_stage(stage: Stage) -> None:
    for path in (stage.chapter, stage.hints):
        text = read(path)
        if path == stage.chapter:  # the titles of papers are what they are
            text = text.replace(section(stage, "Sources"), "")
        for term in glossary():
            if term.stage > stage.number:
                found = list(uses(term.words, prose(text)))
                assert not found, f"{path.name} of {stage.id} uses {found[0]!r}: stage {term.stage}"


# -- figures -------------------------------------------------------------------------------------


@cache
def reference(number: int) -> ModuleType:
    path = load_syllabus().find(number).reference
    spec = importlib.util.spec_from_file_location(f"reference_for_chapters_{number}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


TOY = ModelConfig(
    architecture="llama", vocab_size=10, hidden_size=4, intermediate_size=8, num_layers=1,
    num_heads=2, num_kv_heads=1, head_dim=2, max_context=16,
)  # fmt: skip
LLAMA3, SMOL = PUBLISHED["llama-3-8b"], PUBLISHED["smollm2-135m"]
A100, H100 = 2.039e12, 3.35e12  # bytes per second
A100_FLOPS = 312e12

Figure = tuple[str, Callable[[], Any]]  # a piece of the chapter with {}, and what belongs there


def one_pass(rows: int) -> float:
    """Milliseconds of a pass in stage 02's example: h = 10, r = 40, b = 3."""
    return 10 + max(40, 3 * rows)


def naive(prompt: int, new: int) -> int:
    return sum(prompt + i for i in range(new))


def weights(config: ModelConfig) -> int:
    return int(reference(3).decode_weights(config))


def kv(config: ModelConfig, width: float) -> float:
    return float(reference(3).kv_bytes_per_token(config, width))


FIGURES: dict[int, list[Figure]] = {
    1: [
        ("For n = 3 and m = 2 that is 6 + 1 = {}.", lambda: naive(3, 2)),
        ("makes {:.1f} million weights in the layers",
         lambda: (SMOL.num_weights - SMOL.vocab_size * SMOL.hidden_size) / 1e6),
        ("× 30 = {:.1f} million for attention", lambda: 2 * 9 * 64 * 160 * 30 / 1e6),
        ("49,152 x 576 = {:.1f} million weights", lambda: SMOL.vocab_size * SMOL.hidden_size / 1e6),
        ("{:.0%} of the model's", lambda: SMOL.vocab_size * SMOL.hidden_size / SMOL.num_weights),
        ("28.3 / 106.2 = {:.0%} more expensive", lambda: 28.3 / 106.2),
        ("160 x 49,152 four-byte numbers, {:.0f} MB", lambda: 160 * 49_152 * 4 / 1e6),
        ("tokens: 8 - 6 + 1 = {}.", lambda: 8 - 6 + 1),
        ("`b` = 77 / 511 = {:.2f} ms per position", lambda: (118 - 41) / (212 + 511 - 212)),
        ("has a mean of {:.1f}", lambda: (41 + 118) / 2),
        ("total {:.1f} s", lambda: 512 * 79.5 / 1e3),
    ],
    2: [
        ("you counted {:,} positions", lambda: naive(64, 128)),
        ("that is {} instead of 16,320", lambda: 64 + 128 - 1),
        ("{:.0f} times fewer", lambda: naive(64, 128) / 191),
        ("One row takes {:.0f} ms", lambda: one_pass(1)),
        ("So do {:.0f} rows", lambda: max(t for t in range(99) if one_pass(t) == one_pass(1))),
        ("10 + 558 = {:.0f} ms", lambda: one_pass(186)),
        ("a gain of {:.0f}, not of 186", lambda: one_pass(186) / one_pass(1)),
        ("at 186 tokens and {:.0f} at 2,000", lambda: one_pass(2000) / one_pass(1)),
        ("× 4 = {:,.0f} bytes for each token", lambda: kv(SMOL, 4)),
        ("46,080 bytes = {:.0f} MB", lambda: 2000 * kv(SMOL, 4) / 1e6),
        ("the {:.0f} MB of its weights", lambda: 4 * SMOL.num_weights / 1e6),
        ("48 × 768 = {:,}", lambda: 48 * 2 * 3 * 2 * 16 * 4),
    ],
    3: [
        ("{} weights", lambda: weights(TOY)),
        ("The toy: {} FLOP", lambda: 2 * weights(TOY)),
        ("FLOP, {} bytes", lambda: 2 * weights(TOY)),
        ("decode does {:.0f} FLOP per byte", lambda: intensity(LLAMA3, 1, 0, 2)),
        ("at 32 bits {:.1f}", lambda: intensity(LLAMA3, 1, 0, 4)),
        ("1/153 = {:.2%} of an A100", lambda: A100 / A100_FLOPS),
        ("14 GB take {:.0f} ms", lambda: 14e9 / A100 * 1e3),
        ("14 GFLOP take {:.0f} us", lambda: 14e9 / A100_FLOPS * 1e6),
        ("about {:.0f}:1", lambda: 7e-3 / 45e-6),
        ("need {:.0f} us of arithmetic", lambda: 5 * 45),
        ("2 TB/s: {:.0f} ms, at most 125", lambda: 16e9 / 2e12 * 1e3),
        ("at most {:.0f} tokens/s", lambda: 2e12 / 16e9),
        ("At 4 bits: {:.0f} ms", lambda: 4e9 / 2e12 * 1e3),
        ("2 ms, {:.0f} tokens/s", lambda: 2e12 / 4e9),
        ("128 × 2 = {:,.0f} bytes per token", lambda: kv(LLAMA3, 2)),
        ("{:.0f} MiB per 1,000 tokens", lambda: 1000 * kv(LLAMA3, 2) / 2**20),
        ("{:.0f} GiB per 8,192", lambda: 8192 * kv(LLAMA3, 2) / GIB),
        ("of weights, {:.1f} GiB are left", lambda: 80 - 14.9),
        ("{} sequences of 8,192 tokens",
         lambda: reference(3).max_batch(LLAMA3, 80 * GIB, 14.9 * GIB, 8192, 2)),
        ("the group size, {:.0f} for Llama-3-8B", lambda: LLAMA3.num_heads / LLAMA3.num_kv_heads),
        ("read {:.1f} GB of weights", lambda: 2 * weights(LLAMA3) / 1e9),
        ("and {:.1f} GB of cache", lambda: 65 * 8192 * kv(LLAMA3, 2) / 1e9),
        ("intensity is {:.1f}, not 65", lambda: intensity(LLAMA3, 65, 8192, 2)),
        ("its {:.2f} billion weights", lambda: LLAMA3.num_weights / 1e9),
        ("need {:.2f} GB", lambda: 2 * LLAMA3.num_weights / 1e9),
        ("3.35 TB/s = {:.2f} ms", lambda: 2 * LLAMA3.num_weights / H100 * 1e3),
        ("ms: {:.0%}, and that is a well configured server", lambda: 4.79 / 6.09),
        ("the floor is {:.2f} ms", lambda: 2 * weights(LLAMA3) / H100 * 1e3),
        ("the utilisation {:.0%}", lambda: 2 * weights(LLAMA3) / H100 * 1e3 / 6.09),
        ("tokens\" for 131,072 bytes per token: it is {:.0f} MiB",
         lambda: 1000 * kv(LLAMA3, 2) / 2**20),
        ("A ridge of {:.0f} for the A100", lambda: 312e12 / 2e12),
        ("A is right: {:,} weights", lambda: weights(SMOL)),
        ("4 bytes = {:.0f} MB)", lambda: 4 * SMOL.vocab_size * SMOL.hidden_size / 1e6),
    ],
    4: [
        ("all but {:.2%} of an A100's arithmetic", lambda: A100 / A100_FLOPS),
        ("eight rows take {:.0f} ms", lambda: one_pass(8)),
        ("as long as one, and the gain is {:.0f}.", lambda: 8 * one_pass(1) / one_pass(8)),
        ("Sixteen take {:.0f} ms", lambda: one_pass(16)),
        ("58 ms: {:.1f}", lambda: 16 * one_pass(1) / one_pass(16)),
        ("stays below (10 + 40) / 3 = {:.1f}", lambda: (10 + 40) / 3),
        ("{:.0f} on an A100", lambda: A100_FLOPS / A100),
        ("{:.0f} on an H100", lambda: 989e12 / H100),
        ("reads {:.1f} GB of weights", lambda: 2 * weights(LLAMA3) / 1e9),
        ("and {:.2f} GB of cache per text of 8,192 tokens", lambda: long_cache() / 1e9),
        ("One text: {:.1f} GB", lambda: (2 * weights(LLAMA3) + long_cache()) / 1e9),
        ("Eight: {:.1f} GB", lambda: (2 * weights(LLAMA3) + 8 * long_cache()) / 1e9),
        ("23.6 = {:.1f}", lambda: long_gain(8)),
        ("stays below 16.1 / 1.07 = {:.0f}", lambda: long_gain(10**9)),
        ("2 × (3 + 4 - 1) = {} computed", lambda: 2 * (3 + 4 - 1)),
        ("12 computed, {} + 4 useful", lambda: 3 + 2 - 1),
        ("4 + {} useful", lambda: 1 + 4 - 1),
        ("about {:.1f} +", lambda: 4 + 44 * 8 / 9),
        ("43.1 + {:.1f} - 1", lambda: 4 + 28 * 8 / 9),
        ("28.9 - 1 = {:.0f} columns", lambda: 8 + 72 * 8 / 9 - 1),
        ("26 + 18 - 1 = {}.", lambda: 26 + 18 - 1),
        ("Some {:.0%} of the work", lambda: 1 - 43 / (8 + 72 * 8 / 9 - 1)),
        ("one of 60 puts {} there", lambda: 60 - 9),
    ],
    5: [
        ("some {:.0%} of the positions", lambda: 1 - 43 / (8 + 72 * 8 / 9 - 1)),
        ("(128 - 8) / ln 16 = {:.1f}", lambda: (128 - 8) / math.log(16)),
        ("The four longest are {}, {}, {} and {}.", lambda: outputs()[-4:]),
        ("94 + 102 + 111 + 122 = {} steps", lambda: sum(outputs()[-4:]) - 4),
        ("together need only {:,} rows", lambda: decodes()),
        ("1,353 / (8 × 429) = {:.0%}", lambda: decodes() / (8 * 429)),
        ("1,353 / 8 steps: {}.", lambda: math.ceil(decodes() / 8)),
        ("(1,353 - 122) / 8 + 122 = {:.1f}", lambda: (decodes() - 122) / 8 + 122),
        ("429 / 275 = {:.2f}", lambda: 429 / 275),
        ("429 / 170 = {:.2f}", lambda: 429 / 170),
        ("holds {:.0f} tokens on average", lambda: held()),
        ("reserves 256. That is {:.0%}", lambda: held() / 256),
        ("at 16 bits with 8,192 positions each reserve {:.0f} GiB", lambda: 8 * long_cache() / GIB),
    ],
    6: [
        ("2.25 - 1.0 = {} s", lambda: reference(6).ttft(EXAMPLE)),
        ("each token but the first: {} s",
         lambda: "{:g}, {:g} and {:g}".format(*reference(6).itl(EXAMPLE))),
        ("0.75 s over 3 gaps = {} s", lambda: reference(6).tpot(EXAMPLE)),
        ("3.125 - 1.0 = {} s", lambda: reference(6).e2e(EXAMPLE)),
        ("*one* slow request: p99 = {:.0f} ms", lambda: 1e3 * stall(99, on_schedule=False)),
        ("The first of them waits {:.0f} ms", lambda: 1e3 * stalled(on_schedule=True)[301]),
        ("the next {:.0f}, and", lambda: 1e3 * stalled(on_schedule=True)[302]),
        ("and {} in all pay",
         lambda: sum(late > 0.0101 for late in stalled(on_schedule=True)) - 1),
        ("p95 is {:.2f} s", lambda: stall(95, on_schedule=True)),
        ("p99 is {:.2f} s", lambda: stall(99, on_schedule=True)),
        ("At 128 tokens an answer that is {:.1%}", lambda: 1 / 128),
        ("at 8 it is {:.1%}", lambda: 1 / 8),
        ("- 5.4) × 0.020 = {:.1f}", lambda: (697 - 16 / 2.94) * 0.020),
        ("× 2.54 / {:.2f} is the same", lambda: 0.4 + 127 * 0.020),
        ("(0.75 × 400 + 0.25 × 3 = {:.0f})", lambda: 0.75 * 400 + 0.25 * 3),
    ],
    7: [
        ("at 16 bits: {:,.0f} bytes for each token", lambda: kv(LLAMA3, 2)),
        ("8,192 tokens is {:.0f} GiB", lambda: 8192 * kv(LLAMA3, 2) / GIB),
        ("500 has used {:.1%} of it", lambda: 500 / 8192),
        ("120 / ln 16 = {:.1f}", lambda: 120 / math.log(128 / 8)),
        ("has stored {:.1f} positions", lambda: STORED),
        ("{:.0%} of a slot of 256", lambda: STORED / 256),
        ("(16 - 1) / 2 = {:.1f} on average", lambda: (16 - 1) / 2),
        ("takes up {:.1f},", lambda: STORED + 7.5),
        ("256 / 73.8 = {:.2f} texts", lambda: 256 / (STORED + 7.5)),
        ("alone 4 × 4 blocks = {}", lambda: 4 * blocks(40 + 20)),
        ("shared 2 full ones + 4 × 2 = {} blocks", lambda: 2 + 4 * (blocks(40 + 20) - 2)),
        ("{:.0f} kB for 100,000 free blocks", lambda: 8 * 100_000 / 1e3),
    ],
    8: [
        ("rectangle of 8 × 30, {} positions", lambda: 8 * 30),
        ("of which {} are useful", lambda: 30 + 7),
        ("4 slots of 1,024 are {:,} positions", lambda: 4 * 1024),
        ("a past of {:.1f} on average", lambda: sum(range(32, 160)) / 128),
        ("they take up {:.1f} +", lambda: sum(range(32, 160)) / 128 + 61),
        ("156.5 + {:.1f} =", lambda: (16 - 1) / 2),
        ("7.5 = {:.0f}, and", lambda: 156.5 + 7.5),
        ("4,096 / 164 = {:.1f}: some 25", lambda: 4096 / 164),
        ("the passes take {:.0f} and", lambda: one_pass(4)),
        ("50 and {:.0f} ms, so", lambda: one_pass(25)),
        ("so the gain is {:.1f}, not", lambda: 25 / 4 * one_pass(4) / one_pass(25)),
        ("not {:.2f}: 25 rows", lambda: 25 / 4),
        ("stand {} slots of 8,192", lambda: beside_llama(8192)),
        ("in blocks for 1,008, it is {}.", lambda: beside_llama(-(-1000 // 16) * 16)),
        ("that is 3 × {:.1f} GB", lambda: 65 * 8192 * kv(LLAMA3, 2) / 1e9),
        ("beside {:.1f} GB of weights", lambda: 2 * weights(LLAMA3) / 1e9),
    ],
    9: [
        ("read {:.1f} GB of cache", lambda: 65 * 8192 * kv(LLAMA3, 2) / 1e9),
        ("that takes {:.1f} ms", lambda: 65 * 8192 * kv(LLAMA3, 2) / H100 * 1e3),
        ("three times it is {:.1f} ms", lambda: 3 * 65 * 8192 * kv(LLAMA3, 2) / H100 * 1e3),
        ("weights that take {:.1f}.", lambda: 2 * weights(LLAMA3) / H100 * 1e3),
        ("ridge of an H100 is {:.0f}", lambda: 989e12 / H100),
        ("eight texts have {:,} positions", lambda: sum(TEXTS)),
        ("rectangle 8 × 431 = {:,}:", lambda: 8 * max(TEXTS)),
        ("3,448: {:.2f} times as many", lambda: 8 * max(TEXTS) / sum(TEXTS)),
        ("2.50 × 3 = {:.2f}", lambda: 3 * 8 * max(TEXTS) / sum(TEXTS)),
        ("group of 4: {} rows, padded to 32", lambda: 5 * 4),
        ("l = 0.135 + 1 = {:.3f}", lambda: math.exp(1 - 3) + 1),
        ("1.135 × {:.3f} +", lambda: math.exp(3 - 4)),
        ("1 + 0.135 = {:.3f}. All", lambda: (math.exp(-2) + 1) * math.exp(-1) + 1 + math.exp(-2)),
        ("0.368 + 1 + 0.135 = {:.3f}", lambda: sum(math.exp(x - 4) for x in (1, 3, 4, 2))),
        ("so {:.0%} of them sleep", lambda: 1 - 8 / 132),
        ("there are {} instances", lambda: 64 * 8),
        ("one layer are {:.2f} billion elements", lambda: elements_of_a_layer(141e9) / 1e9),
        ("2^31 is {:.3f} billion", lambda: 2**31 / 1e9),
        ("at 16 bits: {} with 16 queries", lambda: 16 * 4),
        ("queries make {} rows", lambda: 128 * 4),
        ("take {} KiB, all", lambda: 512 * 128 * 4 // 1024),
        ("is {:,} numbers", lambda: 128 * 128),
        ("that is {} registers each", lambda: 128 * 128 // 256),
        ("ceil(5 / 4) = {} tiles each", lambda: math.ceil(math.ceil(300 / 64) / 4)),
        ("The {:,} tiles of the test", lambda: 131_072 // 64),
        ("are {} for each of 32", lambda: 2048 // 32),
    ],
    10: [
        ("108, 132, 156 and 180 tokens, {} in all", lambda: sum(turn_prompts())),
        ("for eight users {:,} prompt tokens", lambda: 8 * sum(turn_prompts())),
        ("question, the last one of the answer, which was never fed, and those in a block that was "
         "not full, {:.1f} on average", lambda: (16 - 1) / 2),
        ("That is {:.1f} for each of 24 turns", lambda: 12 + 1 + 7.5),
        ("432 + 48 + 24 × 20.5 = {:.0f}", lambda: 4 * 108 + 4 * 12 + 24 * 20.5),
        ("4,608 / 972 = {:.2f}", lambda: 4608 / 972),
        ("272 tokens take {:.0f} ms", lambda: one_pass(272)),
        ("when 256 are found take {:.0f}:", lambda: one_pass(272 - 256)),
        ("58: {:.0f} times sooner", lambda: one_pass(272) / one_pass(16)),
        ("One token would take {:.0f}.", lambda: one_pass(1)),
        ("512 × 513 / 2 × 16 = {:.1f} million tokens", lambda: 512 * 513 / 2 * 16 / 1e6),
        ("64 bits give about 1 in 10^{:.0f}", lambda: -math.log10(20_000**2 / 2**65)),
    ],
    11: [
        ("32 × (24 + 8 + 3.5) / 8 = {:.0f} blocks", lambda: 32 * 35.5 / 8),
        ("With a mean output of {:.1f}, and a mean of its square of {:,.0f}",
         lambda: [MEAN, SQUARE]),
        ("2,943 / 2 = {:,.0f} places times steps", lambda: round(24 * MEAN + SQUARE / 2, -1)),
        ("{:.0f} blocks times steps with the halves", lambda: GROWING),
        ("96 × 333 / 443 = {:.0f} blocks on average", lambda: 96 * GROWING / 443),
        ("half of the peak: {:.0f}", lambda: 32 * 35.5 / 8 / 2),
        ("96 × 333 / 71 = {:.0f} steps: {:.2f} of the throughput",
         lambda: [96 * GROWING / 71, 443 / (96 * GROWING / 71)]),
        ("96 × {:.0f} / 71 = {:.0f} steps", lambda: [RESERVED, 96 * RESERVED / 71]),
        ("96 × 43.3 / 3 = {:,.0f}", lambda: 96 * 43.3 / (71 // 20)),
        ("moves {:,.0f} bytes out and in again", lambda: kv(LLAMA3, 2)),
        ("{:.1f} us over the 31.5 GB/s", lambda: 2 * kv(LLAMA3, 2) / 31.5e9 * 1e6),
        ("2 × {:.2f} billion FLOP, {:.0f} us on an A100",
         lambda: [LLAMA3.num_weights / 1e9, 2 * LLAMA3.num_weights / A100_FLOPS * 1e6]),
        ("the keys of 16 tokens are {:.0f} KiB",
         lambda: 16 * kv(LLAMA3, 2) / LLAMA3.num_layers / 2 / 1024),
        ("is {:,} such pieces, each way", lambda: blocks(500) * LLAMA3.num_layers * 2),
        ("that is {:.0f} ms; computing takes {:.0f}",
         lambda: [2 * 2048 * 10e-6 * 1e3, 500 * 2 * LLAMA3.num_weights / A100_FLOPS * 1e3]),
    ],
    14: [
        ("read at 2 TB/s, take {:.0f} ms", lambda: 16e9 / 2e12 * 1e3),
        ("at most {:.0f} tokens/s. At 4 bits", lambda: 2e12 / 16e9),
        ("At 4 bits it is {:.0f} ms", lambda: 4e9 / 2e12 * 1e3),
        ("2 ms, {:.0f} tokens/s", lambda: 2e12 / 4e9),
        ("step / √12 = {:.3f} steps", lambda: 1 / math.sqrt(12)),
        ("3.5 / 127 = {:.4f} σ", lambda: 3.5 / 127),
        ("the error {:.4f} σ: a product", lambda: 3.5 / 127 / math.sqrt(12)),
        ("a step is 7 / 15 = {:.3f} σ", lambda: 7 / 15),
        ("and the error {:.3f} σ", lambda: 7 / 15 / math.sqrt(12)),
        ("4.1 σ apart: {:.3f} σ", lambda: 4.1 / 15),
        ("0.273 σ and {:.3f} σ", lambda: 4.1 / 15 / math.sqrt(12)),
        ("bits a weight: {:.0f} in groups of 32", lambda: 4 + 32 / 32),
        ("{:.1f} in groups of 64", lambda: 4 + 32 / 64),
        ("127 / 512 = {:.2f} steps more", lambda: 127 / 512),
        ("3,065 / 127 = {:.0f}, whatever is below 12", lambda: 3065 / 127),
        ("SmolLM2's {:.1f} million weights", lambda: quantized_bytes(None) / 4e6),
        ("are {:.1f} MB in 32 bits", lambda: quantized_bytes(None) / 1e6),
        ("{:.1f} MB in 8", lambda: quantized_bytes(8) / 1e6),
        ("in 8 ({:.2f}x)", lambda: quantized_bytes(None) / quantized_bytes(8)),
        ("and {:.1f} MB in 4", lambda: quantized_bytes(4) / 1e6),
        ("a head of 8 ({:.2f}x)", lambda: quantized_bytes(None) / quantized_bytes(4)),
        ("(0.2 + 0.8 / 4) = {:.1f}x", lambda: 1 / (0.2 + 0.8 / 4)),
        ("/ 127: {:.2f} beside 30", lambda: 30 / 127),
        ("an error of 0.24 / √12 = {:.3f}", lambda: 30 / 127 / math.sqrt(12)),
        ("Beside 3,000 the step is {:.0f}", lambda: 3000 / 127),
    ],
}  # fmt: skip


def quantized_bytes(bits: int | None) -> int:
    """Bytes of SmolLM2's layers: in 32 bits, in 8, or in 4 with groups of 32 and a head of 8."""
    total = 0
    for name, shape in SMOL.weight_shapes().items():
        if len(shape) == 2:
            rows, columns = shape
            if bits is None:
                total += 4 * rows * columns
                continue
            eight = bits == 8 or name == "embed.weight"  # the head is tied to it
            scales = 2 * rows if eight else 4 * rows * columns // 32
            total += rows * columns * (8 if eight else 4) // 8 + scales
    return total


TEXTS = load_syllabus().find(9).bars["cpu"]["texts"]

# Stage 11: outputs are log-uniform from 8 to 128; prompts have 24 tokens on average, blocks 8.
MEAN, SQUARE = 120 / math.log(16), (128**2 - 8**2) / (2 * math.log(16))
GROWING = (24 * MEAN + SQUARE / 2 + 3.5 * MEAN) / 8  # blocks times steps of a text that grows
RESERVED = (24 * MEAN + SQUARE + 3.5 * MEAN) / 8  # and of one whose final length is held back

# Stage 06: the request that its chapter works out by hand.
EXAMPLE = Timeline(
    1.0, 1.5, [Stamp(2.0, 0), Stamp(2.25, 1), Stamp(2.5, 2), Stamp(3.0, 1), Stamp(3.0, 0)], None,
    3.125,
)  # fmt: skip


def stalled(*, on_schedule: bool) -> list[float]:
    """Latencies of 1,000 requests, due every 20 ms, of 10 ms each and one of 1 s; one at a time."""
    free, latencies = 0.0, []
    for index in range(1000):
        due = 0.020 * index if on_schedule else max(0.020 * index, free)
        free = max(free, due) + (1.0 if index == 300 else 0.010)
        latencies.append(free - due)
    return latencies


def stall(q: float, *, on_schedule: bool) -> float:
    return float(reference(6).percentile(stalled(on_schedule=on_schedule), q))


def beside_llama(positions: int) -> int:
    """How many caches of so many positions fit beside Llama-3-8B on 80 GiB, at 16 bits."""
    return int(reference(3).max_batch(LLAMA3, 80 * GIB, 14.9 * GIB, positions, 2))


def elements_of_a_layer(memory: float) -> float:
    """Keys of one layer in a pool that fills a GPU beside Llama-3.2-1B, at 16 bits."""
    return (memory - 2 * BENCH_1B.num_weights) / (2 * 2 * BENCH_1B.num_layers)


STORED = 24 + 120 / math.log(16) - 1  # stage 07: a mean prompt and a mean output, the last not fed


def turn_prompts() -> list[int]:
    """Stage 10: a system prompt of 96, and after every answer of 12 a question of 12."""
    return [96 + 12 + 24 * turn for turn in range(4)]


def blocks(tokens: int) -> int:
    return int(reference(7).BlockAllocator(1, 16).blocks_for(tokens))


def long_cache() -> float:
    """Bytes of a cache of 8,192 tokens of Llama-3-8B at 16 bits."""
    return 8192 * kv(LLAMA3, 2)


def long_gain(batch: int) -> float:
    """Tokens per second of a batch over one by one, where reading sets the pace."""
    floor = reference(3).decode_floor
    one, many = (floor(LLAMA3, size, 8192, 2, A100, 1e30) for size in (1, batch))
    return float(batch * one / many)


def outputs() -> list[int]:
    """The output lengths of stage 05's trace, shortest first."""
    return [round(8 * math.exp(math.log(16) * (i + 0.5) / 32)) for i in range(32)]


def decodes() -> int:
    """The tokens of that trace that come from decode steps."""
    return sum(outputs()) - len(outputs())


def held() -> float:
    """Positions that a running text of that trace holds on average, with a prompt of 24."""
    return sum(24 + fed for new in outputs() for fed in range(1, new)) / decodes()


def intensity(config: ModelConfig, batch: int, context: int, width: float) -> float:
    return float(reference(3).arithmetic_intensity(config, batch, context, width))


@pytest.mark.parametrize(
    ("number", "words", "compute"),
    [(number, *figure) for number, figures in FIGURES.items() for figure in figures],
)
def test_figures_are_what_they_should_be(
    number: int, words: str, compute: Callable[[], Any]
) -> None:
    """The chapter says, character for character, what comes out when it is worked out again."""
    found = compute()
    values = found if isinstance(found, list) else [found]
    assert words.format(*values) in flat(read(load_syllabus().find(number).chapter))


def test_published_sizes_are_their_publishers() -> None:
    """The figures above rest on these."""
    assert LLAMA3.num_weights == 8_030_261_248
    assert SMOL.num_weights == 134_515_008


def test_ridges_follow_from_their_own_rows() -> None:
    rows = tables(section(load_syllabus().find(3), "On paper"))
    ridges = {}
    for device, bandwidth, flops, ridge in rows["device"]:
        assert f"{float(flops) / float(bandwidth):.0f}" == ridge, device
        ridges[device.split()[0]] = int(ridge)
    assert ridges == {"A100": 153, "H100": 295, "H200": 206}


def test_the_reports_of_the_incident_follow_from_their_own_rows() -> None:
    rows = tables(section(load_syllabus().find(3), "Incident"))["report"]
    assert len(rows) == 5
    counted = {"538": weights(SMOL), "651": weights(SMOL) + SMOL.vocab_size * SMOL.hidden_size}
    for report, moved, bandwidth, floor, share in rows:
        megabytes = moved.removesuffix(" MB")
        assert f"{4 * counted[megabytes] / 1e6:.0f}" == megabytes
        milliseconds = 4 * counted[megabytes] / float(bandwidth.removesuffix(" GB/s")) / 1e6
        assert f"{milliseconds:.1f} ms" == floor, report
        assert f"{milliseconds / 30.0:.0%}" == share, report


def test_published_occupancies_say_how_many_wait() -> None:
    rows = tables(section(load_syllabus().find(6), "On paper"))["in flight"]
    users = [1, 4, 16, 64, 128, 256]
    products = [0.98, 3.91, 15.2, 60.1, 114.6, 220.9]
    assert [float(cell) for cell in rows[0][1:]] == products
    shares = [f"{1 - busy / many:.0%}" for busy, many in zip(products, users, strict=True)]
    assert rows[1][1:] == shares


def test_the_loads_of_the_incident_follow_from_their_own_rows() -> None:
    rows = tables(section(load_syllabus().find(6), "Incident"))["report"]
    wait, gap, users, tokens = 0.4, 0.020, 16, 128
    rate = users * tokens / (wait + (tokens - 1) * gap)
    first = users / (wait + (tokens - 1) * gap)
    gaps = {"B": (wait + (tokens - 1) * gap) / tokens, "C": (tokens - 1) * gap / (tokens // 2 - 1)}
    for report, _, shown, throughput, product in rows:
        mean = gaps.get(report, gap)
        counted = rate if report == "B" else rate - first  # B takes first tokens for gaps, too
        assert f"{1e3 * mean:.1f} ms" == shown, report
        assert f"{rate:.0f}" == throughput
        assert f"{counted * mean:.1f}" == product, report


def test_the_toy_weights_add_up() -> None:
    block = fences(section(load_syllabus().find(3), "On paper"), "")[0]
    counts = [int(number) for number in re.findall(r"(\d+)(?: weights)?$", block, flags=re.M)]
    assert sum(counts[:-1]) == counts[-1] == weights(TOY)


def test_hand_counts_of_the_loops() -> None:
    """The tables that stages 01 and 02 work out by hand: a prompt of 3, and 2 new tokens."""
    naive_rows = tables(section(load_syllabus().find(1), "On paper"))["step"]
    assert [row[2] for row in naive_rows] == ["3", "4", str(naive(3, 2))]
    assert [len(row[1].split()) for row in naive_rows[:2]] == [3, 4]
    cached = tables(section(load_syllabus().find(2), "On paper"))["pass"]
    assert sum(len(row[1].split()) for row in cached) == 3 + 2 - 1
    assert [row[2] for row in cached] == ["0", "3"]


def test_block_sizes_follow_from_their_own_rows() -> None:
    rows = tables(section(load_syllabus().find(7), "On paper"))["tokens in a block"]
    assert [int(row[0]) for row in rows] == [1, 4, 16, 64]
    for size, wasted, texts, entries in rows:
        mean = (int(size) - 1) / 2
        assert f"{mean:g}" == wasted
        assert f"{256 / (STORED + mean):.2f}" == texts
        assert f"{8192 // int(size):,}" == entries


def test_the_log_of_the_double_free_can_be_replayed() -> None:
    """Stage 07's incident: the calls as they stand there, and what is free after each."""
    stage = load_syllabus().find(7)
    incident = section(stage, "Incident")
    allocator = reference(7).BlockAllocator(8, 4)
    names: dict[str, Any] = {}
    calls = {name: getattr(allocator, name) for name in ("allocate", "fork", "free")}
    steps = re.findall(r"^ +\d +(?:(\w) = )?(\w+\(.+?\)) +(\d)? ", incident, flags=re.M)
    assert len(steps) == 8
    for name, call, free in steps[:-1]:
        names[name] = eval(call, {**calls, **names})
        assert allocator.num_free == int(free), call
        if call == "free([0, 1])":
            with pytest.raises(RuntimeError, match="block 0 has a count of 0; tables: 1"):
                allocator.check([names["a"]])
        if name == "d":
            assert names["d"] == [6, 7, 1, 0]
    with pytest.raises(ValueError, match="table holds block 1, which is free"):
        eval(steps[-1][1], {**calls, **names})


def tables(text: str) -> dict[str, list[list[str]]]:
    """The rows of each table, by the first word of its head."""
    found: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    before = ""
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not before.startswith("|"):
                rows = found[cells[0]] = []
            elif not set(line) <= set("|-: "):
                rows.append(cells)
        before = line
    return found


def test_the_rectangle_of_stage_04() -> None:
    """Its positions are those of `pad_left`, and go on by one a column."""
    block = fences(section(load_syllabus().find(4), "On paper"), "")[1]
    shown = [list(map(int, re.findall(r"\d+", line)[-6:])) for line in block.splitlines()[1:]]
    _, positions, starts = reference(4).pad_left([[1, 2, 3], [4]])
    for row, (wide, start) in enumerate(zip(positions.tolist(), starts.tolist(), strict=True)):
        assert shown[row] == wide + [column - start for column in (3, 4, 5)]
