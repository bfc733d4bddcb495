"""The commands: parse, call, render. Heavy imports happen inside the commands that need them."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from course.check.prove import Proof
    from course.syllabus import Stage

app = typer.Typer(
    name="course",
    help="Build an LLM inference engine in twenty measured stages.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="The models that the course runs on.", no_args_is_help=True)
dev_app = typer.Typer(help="For whoever changes the course itself.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(dev_app, name="dev")

StageName = Annotated[str, typer.Argument(metavar="STAGE", help="7, stage-07 or block-allocator.")]
StageNames = Annotated[
    list[str] | None, typer.Argument(metavar="[STAGE...]", help="7, stage-07 or block-allocator.")
]


INTERRUPTED = 130  # as shells count: 128 and the number of the signal


def main() -> None:
    """The console script. What we can foresee ends in one line and status 2, not in a traceback."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # whoever started us closed it
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character it cannot show is no reason to fail
            stream.reconfigure(errors="replace")
    for name in ("SIGTERM", "SIGHUP"):  # whoever stops a check wants its workers gone, too
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, signal.default_int_handler)
    try:
        status = app(prog_name="course", standalone_mode=False) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except typer.Abort:
        _error("aborted")
        sys.exit(1)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # typer's, of wrong usage
            error.show()
            sys.exit(error.exit_code)
        if not _foreseen(error):
            raise
        _error(str(error))
        sys.exit(2)
    if status == INTERRUPTED:
        _error("interrupted; what was finished before is stored")
    sys.exit(status)


def _foreseen(error: Exception) -> bool:
    """Errors whose message is for the person at the keyboard, by the names of their classes."""
    named = {
        "UnknownStage", "NoSuchSolution", "ModelUnavailable", "UnsupportedModel",
        "ProgressUnreadable", "BadWrongSolution", "BadRegions",
    }  # fmt: skip
    return isinstance(error, (ValueError, OSError)) or type(error).__name__ in named


def _error(text: str) -> None:
    print(f"course: {text}", file=sys.stderr)


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    # Nothing that is shown is markup: names, messages and paths may hold brackets and colons. The
    # stream is fixed now: a gate redirects sys.stderr while it runs.
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, markup=False, emoji=False)


def _stage(name: str, *, published: bool = True) -> Stage:
    from course.syllabus import load_syllabus

    stage = load_syllabus().find(name)
    if published and not stage.published:
        raise ValueError(f"{stage.id} ({stage.title}) is not yet published. {stage.because}")
    return stage


# -- checking ------------------------------------------------------------------------------------


@app.command()
def check(
    stages: StageNames = None,
    all_stages: Annotated[bool, typer.Option("--all", help="Every published stage.")] = False,
    solution: Annotated[str, typer.Option(help="mine, reference, or a path.")] = "mine",
    tier: Annotated[str, typer.Option(help="cpu, cuda, or best: what is here.")] = "best",
    model: Annotated[
        str | None, typer.Option(help="The model that numbers are measured on.")
    ] = None,
    contract_only: Annotated[
        bool, typer.Option("--contract-only", help="Only whether it is right, in seconds.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Repeats the secret inputs of an earlier check.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Results as JSON.")] = False,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML to this file.")] = None,
) -> None:
    """Run the gate of a stage: is it right, and did the number move?

    Without a stage, the first published one that you have neither passed nor given up.
    Status: 0 pass, 1 fail, 2 usage or set-up, 3 inconclusive, 4 not measurable on this machine,
    5 the course itself is broken, 130 interrupted.
    """
    if tier not in ("cpu", "cuda", "best"):
        raise ValueError(f"--tier must be cpu, cuda or best, got {tier!r}")
    from course.check.junit import write_junit
    from course.check.report import print_result
    from course.check.result import Exit
    from course.check.session import Session, Wish, prediction_line

    session = Session()
    chosen = _chosen(stages, all_stages, session)
    wish = Wish(solution, tier, model, contract_only, seed)
    console, results = _console(), []
    for stage in chosen:
        with _status(quiet=as_json) as say:
            result = session.check(stage, wish, say)
        results.append(result)
        if not as_json:
            gpu = _gpu_line(stage, result.tier)
            print_result(console, result, published=gpu, stage=str(stage.number))
            if line := prediction_line(stage, result, session.progress):
                console.print(f"  {line}")
            console.print()
    if as_json:
        document = {"machine": session.machine.as_dict(), "results": [r.as_dict() for r in results]}
        print(json.dumps(document, indent=2))
    if junit is not None:
        write_junit(junit, results)
    order = (Exit.BROKEN, Exit.FAIL, Exit.NOT_HERE, Exit.INCONCLUSIVE, Exit.PASS)
    found = {result.status for result in results}
    raise typer.Exit(int(next(status for status in order if status in found)))


def _chosen(names: list[str] | None, all_stages: bool, session: object) -> list[Stage]:
    from course.syllabus import load_syllabus

    syllabus = load_syllabus()
    if all_stages:
        if names:
            raise ValueError("name stages or say --all, not both")
        return list(syllabus.published)
    if names:
        return [_stage(name) for name in names]
    stage = _next_stage()
    if stage is None:
        raise ValueError("every published stage is passed; name one, or say --all")
    return [stage]


def _gpu_line(stage: Stage, tier: str) -> str:
    if stage.model == "none":
        return "none: nothing of this stage runs on a GPU"
    return "" if tier == "cuda" else "not measured on this machine"


class _status:
    """A spinner with the name of the check that runs, on stderr; nothing where no one looks."""

    def __init__(self, quiet: bool) -> None:
        from rich.live import Live
        from rich.spinner import Spinner

        console = _console(stderr=True)
        self.quiet = quiet or not console.is_terminal
        self.spinner = Spinner("dots", "starting workers")
        # Without the redirections, which would send what is printed to stdout to stderr.
        self.live = Live(
            self.spinner, console=console, transient=True, refresh_per_second=12.5,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip

    def __enter__(self) -> Callable[[str], None] | None:
        if self.quiet:
            return None
        self.live.start()
        return lambda text: self.spinner.update(text=text)

    def __exit__(self, *_: object) -> None:
        if not self.quiet:
            self.live.stop()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Out of the way, while something is printed."""
        if self.quiet:
            yield
            return
        self.live.stop()
        yield
        self.live.start()


@app.command()
def watch(
    stage: StageName,
    poll: Annotated[bool, typer.Option("--poll", help="Do not rely on file events.")] = False,
) -> None:
    """Check the contract of a stage each time you save its file. Ctrl-C ends it."""
    from course.check.report import PROGRAM, print_result
    from course.check.session import Session, Wish
    from course.study.watching import changes

    found, session, console = _stage(stage), Session(), _console()
    console.print(f"watching {found.file.name}; Ctrl-C ends it")
    try:
        for _ in changes(found.file, poll=True if poll else None):
            with _status(quiet=False) as say:
                result = session.check(found, Wish(contract_only=True), say)
            if console.is_terminal:
                console.clear()
            print_result(console, result, published="", stage=str(found.number))
            if result.failure is None:
                console.print(f"  now the number: {PROGRAM} check {found.number}")
            console.print(f"  watching {found.file.name}; Ctrl-C ends it", style="dim")
    except KeyboardInterrupt:
        console.print("stopped watching")


@app.command()
def prove(
    stages: StageNames = None,
    model: Annotated[str | None, typer.Option(help="The model of the numbers.")] = None,
) -> None:
    """Prove that gates are gates: reference passes, stub and every wrong solution fail as named.

    A control is a solution that is right and gains nothing, such as that of the stage before. It
    must keep the contract and fail the number alone.

    The proof of all stages takes about a quarter of an hour on two cores.
    """
    import tempfile
    from collections import Counter

    from course.check.gate import GateOptions
    from course.check.prove import judges, trials
    from course.check.prove import prove as prove_all
    from course.check.session import Session, Wish
    from course.plain import plain
    from course.study.workspace import stub_source
    from course.syllabus import load_syllabus

    session, console, status = Session(), _console(), _status(quiet=False)
    tier = session.tier("best")
    chosen = [_stage(name) for name in stages] if stages else list(load_syllabus().published)
    wish = Wish(model=model)
    models = {stage.id: session.model_for(stage, wish, tier) for stage in chosen}

    def options(stage: Stage, path: Path) -> GateOptions:
        threads = max(1, session.machine.cores - 1)
        return GateOptions(path, tier, models[stage.id], threads=threads)

    held: Counter[str] = Counter()
    broken: list[Proof] = []
    with tempfile.TemporaryDirectory() as scratch:
        todo = []
        for stage in chosen:
            folder = Path(scratch, stage.folder)
            folder.mkdir()
            todo += trials(stage, options, stub_source(stage), folder)
        total = Counter(trial.claim.stage.id for trial in todo)
        with judges(session.machine.cores, tier) as found, status as say:
            for proof in prove_all(todo, found, say):
                if proof.holds:
                    held[proof.claim.stage.id] += 1
                else:
                    broken.append(proof)
                with status.hidden():
                    _print_proof(console, proof)
    for stage in chosen:
        count = f"{held[stage.id]} of {total[stage.id]}"
        console.print(f"{stage.id}  {stage.title:<32} {count:>10}  ({models[stage.id]}, {tier})")
    console.print(f"{held.total()} of {len(todo)} claims hold")
    for proof in broken:  # said again: among a hundred lines one is overlooked
        claim = proof.claim
        console.print(f"{claim.stage.id} {claim.path.stem}: {plain(proof.problem)}")
    raise typer.Exit(1 if broken else 0)


def _print_proof(console: Console, proof: Proof) -> None:
    from rich.text import Text

    from course.plain import plain

    mark = Text("holds   ", "green") if proof.holds else Text("BROKEN  ", "red")
    code = proof.claim.code.value if proof.claim.code else "passes"
    console.print(
        mark + f"{proof.claim.stage.number:02d} {proof.claim.kind:<9} {proof.claim.path.stem:<28}"
        f" {code:<18} {proof.result.seconds:4.0f} s"
    )
    if not proof.holds:
        console.print(f"          {plain(proof.problem)}")


# -- where one stands ----------------------------------------------------------------------------


def _next_stage() -> Stage | None:
    from course.check.progress import Progress
    from course.syllabus import load_syllabus

    progress = Progress()
    left = [s for s in load_syllabus().published if not progress.has_passed(s.id)]
    # A stage that was given up for blocks nothing; it comes when there is no other.
    fresh = [s for s in left if not progress.events(s.id, "give-up")]
    return next(iter(fresh or left), None)


@app.command()
def status() -> None:
    """Which stages you have passed, and with which numbers."""
    from rich.table import Table

    from course.check.progress import Progress
    from course.measure.machine import fingerprint
    from course.syllabus import load_syllabus

    progress, machine, console = Progress(), fingerprint().key, _console()
    table = Table(box=None, pad_edge=False)
    for column in ("stage", "title", "state", "last check"):
        table.add_column(column, no_wrap=column == "stage")
    for stage in load_syllabus().stages:
        rows = [row for row in progress.checks(stage.id) if row.mine]
        if not stage.published:
            state = "not yet published"
        elif progress.has_passed(stage.id, machine):
            state = "passed"
        elif progress.has_passed(stage.id):
            state = "passed on another machine"
        else:
            state = "tried" if rows else "open"
            if progress.events(stage.id, "give-up"):
                state += ", solution seen"
        table.add_row(f"{stage.number:02d}", stage.title, state, _last(stage, rows))
    console.print(table)


def _last(stage: Stage, rows: list) -> str:  # type: ignore[type-arg]
    """What the last check found: its failure, or else the number that the stage predicts."""
    if not rows:
        return ""
    last = rows[-1].document
    if failure := last.get("failure"):
        return str(failure.get("code", ""))
    texts = {n.get("name"): str(n.get("text", "")) for n in last.get("numbers", ())}
    return texts.get(stage.predicts, "contract holds")


@app.command(name="next")
def next_stage() -> None:
    """What to do now."""
    from course.check.report import PROGRAM, pairs

    console, stage = _console(), _next_stage()
    if stage is None:
        console.print("You have passed every published stage.")
        return
    console.print(f"{stage.id}  {stage.title}", style="bold")
    rows = [
        ("because", stage.because),
        ("predict", f"{PROGRAM} predict {stage.number}"),
        ("read", f"{PROGRAM} read {stage.number}"),
        ("write", str(stage.file.relative_to(stage.file.parents[2]))),
        ("check", f"{PROGRAM} check {stage.number}"),
    ]
    console.print(pairs(rows))


# -- learning ------------------------------------------------------------------------------------


@app.command()
def read(
    stage: StageName,
    notebook: Annotated[
        bool, typer.Option("--notebook", help="The executed notebook instead of the chapter.")
    ] = False,
    jupyter: Annotated[
        bool, typer.Option("--jupyter", help="Open the notebook in Jupyter.")
    ] = False,
) -> None:
    """Read a stage's chapter here, or its notebook."""
    found = _stage(stage)
    if jupyter:
        import subprocess

        command = [sys.executable, "-m", "jupyter", "lab", str(found.notebook)]
        raise typer.Exit(subprocess.call(command))
    from rich.markdown import Markdown

    from course.study.reading import chapter_text, notebook_text

    console = _console()
    text = notebook_text(found) if notebook else chapter_text(found)
    os.environ.setdefault("LESS", "-R")  # colours as colours, not as escape codes
    with console.pager(styles=True) if console.is_terminal else _no_pager():
        console.print(Markdown(text))


class _no_pager:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@app.command()
def hint(
    stage: StageName,
    level: Annotated[
        int | None, typer.Option(min=1, max=3, help="1 points, 3 nearly tells.")
    ] = None,
) -> None:
    """The next hint that you have not seen, or the one of --level."""
    from rich.markdown import Markdown

    from course.check.progress import Progress
    from course.study.hints import LEVELS
    from course.study.hints import hint as hint_text

    found, progress = _stage(stage), Progress()
    seen = {int(detail) for detail in progress.events(found.id, "hint")}
    level = level or next((n for n in LEVELS if n not in seen), LEVELS[-1])
    console = _console()
    console.print(f"{found.id}  hint {level} of {LEVELS[-1]}", style="bold")
    console.print(Markdown(hint_text(found, level)))
    _record(lambda: progress.note(found.id, "hint", str(level)))


@app.command()
def explain(
    code: Annotated[str | None, typer.Argument(help="TOO_SLOW, for example.")] = None,
) -> None:
    """What a code means, what causes it, and what to do."""
    import difflib

    from course.check.codes import Code
    from course.check.report import pairs

    console = _console()
    if code is None:
        console.print(pairs([(entry.value, entry.page.means) for entry in Code]))
        return
    name = code.strip().upper().replace("-", "_")
    if name not in Code.__members__:
        near = difflib.get_close_matches(name, Code.__members__, n=3, cutoff=0.4)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ValueError(f"there is no code {code!r}.{hint} `course explain` lists them.")
    page = Code[name].page
    console.print(name, style="bold")
    rows = [("means", page.means), *(("likely", cause) for cause in page.causes), ("do", page.do)]
    console.print(pairs(rows))


@app.command()
def predict(
    stage: StageName,
    value: Annotated[float | None, typer.Argument(help="Your prediction, if not typed in.")] = None,
) -> None:
    """Write down the number you expect, before you measure it."""
    import math

    from course.check.progress import Progress

    found, progress, console = _stage(stage), Progress(), _console()
    console.print(found.predict)
    if value is None:
        if not sys.stdin.isatty():
            raise ValueError(f"type a number: course predict {found.number} NUMBER")
        value = typer.prompt("your prediction", type=float)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"a prediction must be a number above 0, got {value}")
    progress.predict(found.id, value)
    console.print(f"noted: {value:,.6g}. `course check {found.number}` will hold it against the "
                  "measurement.")  # fmt: skip


@app.command()
def glossary(term: Annotated[str | None, typer.Argument(help="A word.")] = None) -> None:
    """The words of the course."""
    from rich.padding import Padding
    from rich.text import Text

    from course.study.glossary import glossary as all_terms
    from course.study.glossary import look_up

    console = _console()
    for entry in [look_up(term)] if term else all_terms():
        console.print(Text(entry.name, "bold") + f"  (stage {entry.stage:02d})")
        console.print(Padding(entry.text, (0, 0, 0, 2)))


@app.command()
def diff(
    stage: StageName,
    stub: Annotated[bool, typer.Option("--stub", help="What you changed in the stub.")] = False,
    give_up: Annotated[bool, typer.Option("--give-up", help="See it before you passed.")] = False,
) -> None:
    """From your file to the reference, once passed; --stub: what you changed."""
    from rich.syntax import Syntax

    from course.study.workspace import diff_lines

    found = _stage(stage)
    if not stub:
        _earned(found, give_up, "diff")
    lines = diff_lines(found, against="stub" if stub else "reference")
    console = _console()
    if not lines:
        console.print("no difference")
    elif console.is_terminal:
        console.print(Syntax("\n".join(lines), "diff", background_color="default", word_wrap=True))
    else:
        print("\n".join(lines))


@app.command()
def solution(
    stage: StageName,
    give_up: Annotated[bool, typer.Option("--give-up", help="See it before you passed.")] = False,
) -> None:
    """The reference, once you have passed."""
    from rich.syntax import Syntax

    from course.study.workspace import solution_source

    found = _stage(stage)
    _earned(found, give_up, "solution")
    console, text = _console(), solution_source(found)
    if console.is_terminal:
        console.print(Syntax(text, "python", background_color="default", word_wrap=True))
    else:
        print(text, end="")


def _earned(stage: Stage, give_up: bool, what: str) -> None:
    """Passed, or given up for: which is recorded."""
    from course.check.progress import Progress

    progress = Progress()
    if progress.has_passed(stage.id):
        return
    if not give_up:
        raise ValueError(
            f"{stage.id} is not passed yet. `course hint {stage.number}` helps; `course {what} "
            f"{stage.number} --give-up` shows it all the same, and that is recorded"
        )
    _record(lambda: progress.note(stage.id, "give-up", what))


@app.command()
def reset(
    stage: StageName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Put the stub back; what was there is kept beside it."""
    from course.study.workspace import reset as put_back

    found = _stage(stage)
    if not yes and sys.stdin.isatty() and found.file.exists():
        typer.confirm(f"put the stub back in {found.file.name}? (a backup is kept)", abort=True)
    backup = put_back(found)
    print(f"the stub is back in {found.file}")
    if backup is not None:
        print(f"what was there is in {backup}")


# -- the machine ---------------------------------------------------------------------------------


@app.command()
def doctor() -> None:
    """What this machine can measure, and why not the rest."""
    from rich.table import Table
    from rich.text import Text

    from course.study.doctor import examine

    console = _console()
    styles = {"ok": "green", "limit": "yellow", "mend": "red"}
    table = Table.grid(padding=(0, 2))
    worst = 0
    for finding in examine():
        table.add_row(Text(finding.state, styles[finding.state]), finding.subject, finding.found)
        if finding.advice:
            table.add_row("", "", Text(finding.advice, "dim"))
        worst = max(worst, finding.state == "mend")
    console.print(table)
    raise typer.Exit(int(worst))


@app.command()
def machine(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """The measured roofline of this machine."""
    import torch

    from course.measure.machine import fingerprint
    from course.measure.roofline import probe

    found = fingerprint()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    roofline = probe(device, refresh=refresh)
    if as_json:
        print(json.dumps({"machine": found.as_dict(), "roofline": roofline.as_dict()}, indent=2))
        return
    console = _console()
    console.print(found.name(device), style="bold")
    console.print(f"  last-level cache  {roofline.cache_bytes / 2**20:,.0f} MiB")
    console.print(f"  reads             {roofline.read_bandwidth / 1e9:,.1f} GB/s")
    console.print(f"  copies            {roofline.copy_bandwidth / 1e9:,.1f} GB/s read and written")
    if roofline.busy:
        console.print(
            "  other programs ran meanwhile, so all this may be too low: --refresh measures again",
            style="yellow",
        )
    for dtype, flops in sorted(roofline.flops.items(), reverse=True):
        ridge = roofline.ridge(dtype)
        console.print(
            f"  {dtype:<17} {flops / 1e9:,.1f} GFLOP/s, ridge at {ridge:,.1f} FLOP per byte"
        )


@model_app.command("list")
def model_list() -> None:
    """The models that the course knows, and which are here."""
    from rich.table import Table

    from course.model import catalogue

    table = Table(box=None, pad_edge=False)
    for column in ("model", "", "size", "here"):
        table.add_column(column)
    for entry in catalogue():
        size = f"{entry.size / 2**20:,.0f} MiB"
        table.add_row(entry.name, entry.description, size, "yes" if entry.cached else "no")
    _console().print(table)


@model_app.command("fetch")
def model_fetch(name: Annotated[str, typer.Argument(help="smollm2-135m, or a hub id.")]) -> None:
    """Bring a model to this machine, once."""
    from course.model import fetch
    from course.model.store import cached_folder

    if cached_folder(name) is not None:
        print(f"{name} is here already")
        return
    with _status(quiet=False) as say:
        fetch(name, progress=say)
    print(f"{name} is here")


# -- measuring a server --------------------------------------------------------------------------


@app.command()
def load(
    url: Annotated[str, typer.Argument(metavar="URL", help="Such as http://localhost:8000.")],
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: requests in flight.  [default: 8]")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests per second, on average.")
    ] = None,
    arrivals: Annotated[
        str, typer.Option(help="Of an open loop: poisson or constant.")
    ] = "poisson",
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many in all.  [default: 8 for each in flight, or 30 s of the rate; at least "
            "20]",
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Left out at the start, and as many at the end.  [default: as many as are in "
            "flight, or a tenth of an open loop]",
        ),
    ] = None,
    prompts: Annotated[
        str, typer.Option(help="chat, code, revision, or a file: one in each line.")
    ] = "chat",
    max_tokens: Annotated[int, typer.Option(min=1, help="The most that an answer has.")] = 128,
    model: Annotated[str, typer.Option(help="The server's first, if not said.")] = "",
    api: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Answers in pieces, or in one.")
    ] = True,
    chunk_usage: Annotated[
        bool, typer.Option("--chunk-usage", help="Ask for token counts in every chunk (vLLM).")
    ] = False,
    tokenizer: Annotated[
        str, typer.Option(help="Counts tokens where the server does not: a model's name.")
    ] = "",
    api_key: Annotated[
        str, typer.Option(metavar="VARIABLE", help="Environment variable that holds the key.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(help="Longest silence, in seconds; an answer may take longer.")
    ] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Of Poisson arrivals.")] = 0,
    parts: Annotated[str, typer.Option(help="Whose stage 06: reference or mine.")] = "reference",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Put a load on an OpenAI-compatible server, and measure it with stage 06's harness.

    Ctrl-C, or SIGTERM, ends the load, and what was measured so far is reported.
    Status: 0 measured, 1 no request finished.
    """
    from course.load.command import Wish, measure

    wish = Wish(
        url, concurrency, rate, arrivals, requests, warmup, prompts, max_tokens, model, api,
        stream, chunk_usage, tokenizer, api_key, timeout, seed, parts, json_file, plot_file,
    )  # fmt: skip
    raise typer.Exit(measure(wish, _console(), _console(stderr=True)))


@app.command("fake-server")
def fake_server(
    first: Annotated[float, typer.Option(min=0, help="Seconds until the first token.")] = 0.2,
    gap: Annotated[float, typer.Option(min=0, help="Seconds between two chunks.")] = 0.02,
    tokens: Annotated[
        int, typer.Option(min=1, help="Of an answer, if no fewer are asked for.")
    ] = 64,
    per_chunk: Annotated[int, typer.Option(min=1, help="Tokens in a chunk.")] = 1,
) -> None:
    """A server that computes nothing and whose delays are known, to try `course load` on."""
    import contextlib
    import time

    from course.load.fake_server import Answer, FakeServer

    sizes = [min(per_chunk, tokens - done) for done in range(0, tokens, per_chunk)]
    answer = Answer(first, (gap,) * (len(sizes) - 1), tuple(sizes))
    with contextlib.suppress(KeyboardInterrupt), FakeServer(lambda _: answer) as server:
        print(f"{server.url}  (Ctrl-C ends it)", flush=True)
        while True:
            time.sleep(3600)


# -- changing the course -------------------------------------------------------------------------


@dev_app.command("stubs")
def dev_stubs(
    check_only: Annotated[bool, typer.Option("--check", help="Only say what is stale.")] = False,
) -> None:
    """Make the stubs in stages/ from the references. Never overwrites work of a student."""
    from course.dev.stubs import refresh

    stale = refresh(write=not check_only)
    for line in stale:
        print(line)
    raise typer.Exit(1 if stale and check_only else 0)


@dev_app.command("notebooks")
def dev_notebooks(
    stages: StageNames = None,
    check_only: Annotated[bool, typer.Option("--check", help="Re-execute, and compare.")] = False,
) -> None:
    """Make and execute the notebooks from their sources."""
    from course.dev.notebooks import build, verify
    from course.measure.machine import fingerprint

    numbers = [_stage(name).number for name in stages] if stages else None
    if not check_only:
        build(numbers, tell=print)
        return
    problems = verify(numbers, tell=print, side_by_side=fingerprint().cores)
    for problem in problems:
        print(problem)
    raise typer.Exit(1 if problems else 0)


@dev_app.command("readme")
def dev_readme(
    check_only: Annotated[bool, typer.Option("--check", help="Only say what is stale.")] = False,
) -> None:
    """Run the README's commands and put what they print in its transcripts; make its tables."""
    from course.dev.readme import refresh

    stale = refresh(write=not check_only)
    for line in stale:
        print(line)
    raise typer.Exit(1 if stale and check_only else 0)


@dev_app.command("test")
def dev_test(
    fast: Annotated[
        bool, typer.Option("--fast", help="Lint, types and unit tests; nothing that measures.")
    ] = False,
) -> None:
    """Everything that must hold before a change lands."""
    from course.dev.suite import run_suite

    raise typer.Exit(run_suite(fast=fast))


def _record(write) -> None:  # type: ignore[no-untyped-def]
    """Store something small; a read-only home is no reason to withhold it."""
    try:
        write()
    except OSError as error:
        _error(f"this was not recorded ({error})")


if __name__ == "__main__":
    main()
