"""Commands as processes: what they import, signals, terminals, pipes, and what they leave."""

from __future__ import annotations

import os
import pty
import select
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from cli.terminal import COURSE, environment
from toy_course import ToyCourse

LIGHT = {
    "--help": ["--help"], "check --help": ["check", "--help"], "explain": ["explain", "EXITED"],
    "next": ["next"], "hint": ["hint", "1"], "a mistake": ["hint", "nonsense"],
}  # fmt: skip


@pytest.mark.parametrize("arguments", LIGHT.values(), ids=LIGHT.keys())
def test_quick_commands_import_nothing_heavy(toy: ToyCourse, arguments: list[str]) -> None:
    code = (
        "import sys, course.cli\n"
        f"sys.argv = ['course', *{arguments!r}]\n"
        "try: course.cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'numpy', 'pytest', 'triton', 'psutil'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(toy.home)
    )
    assert "HEAVY []" in done.stdout, done.stdout + done.stderr


def start(toy: ToyCourse, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COURSE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(toy.home), start_new_session=True,
    )  # fmt: skip


def wait_for(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, id="kill", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_check_leaves_nothing(toy: ToyCourse, number: signal.Signals) -> None:
    """No process, not even a daemon of the solution's, and no half-written record."""
    flag = toy.home / "started"
    toy.mine.write_text(
        "import os, subprocess, time\n"
        "def work(): pass\n"
        "def seconds(): pass\n"
        "def double(number):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        f"        open({str(flag)!r} + '.part', 'w').write(str(child.pid))\n"
        f"        os.rename({str(flag)!r} + '.part', {str(flag)!r})\n"
        "        os._exit(0)\n"
        "    while True: time.sleep(1)\n"
    )
    check = start(toy, "check", "1", "--contract-only")
    wait_for(flag.exists)
    below = psutil.Process(check.pid).children(recursive=True)
    below.append(psutil.Process(int(flag.read_text())))
    assert len(below) >= 2
    check.send_signal(number)
    out, err = check.communicate(timeout=60)
    assert check.returncode == 130, out + err
    assert err.strip() == "course: interrupted; what was finished before is stored"
    assert "BROKEN_GATE" not in out
    _, alive = psutil.wait_procs(below, timeout=10)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    if toy.progress.exists():
        with sqlite3.connect(toy.progress) as db:
            assert db.execute("pragma integrity_check").fetchone() == ("ok",)
            assert db.execute("select count(*) from checks").fetchone() == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 1.0, 3.0, 6.0])  # in the judges' imports, and after
def test_an_interrupted_proof_says_so_and_leaves_nothing(toy: ToyCourse, seconds: float) -> None:
    """A terminal sends Ctrl-C to every process of a command."""
    endless = toy.home / "gates" / "wrong" / "stage_01_toy" / "endless.py"
    endless.write_text("# TIMEOUT: it never ends\ndef double(number):\n    while True: pass\n")
    prove = start(toy, "prove", "1")
    command = psutil.Process(prove.pid)

    def has_judges() -> bool:
        with suppress(psutil.NoSuchProcess):
            return any("multiprocessing" in " ".join(p.cmdline()) for p in command.children())
        return False

    wait_for(has_judges)  # not before: whoever imports torch may swallow an interruption
    time.sleep(seconds)
    below = command.children(recursive=True)
    os.killpg(prove.pid, signal.SIGINT)
    out, err = prove.communicate(timeout=10)
    assert prove.returncode == 130, out + err
    assert err.strip() == "course: interrupted; what was finished before is stored"
    _, alive = psutil.wait_procs(below, timeout=10)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--poll"], []], ids=["poll", "events"])
def test_watch(toy: ToyCourse, arguments: list[str]) -> None:
    """A check at once, one after each save, and an end with Ctrl-C."""
    watch = start(toy, "watch", "1", *arguments)
    assert watch.stdout is not None
    output = watch.stdout.fileno()
    seen = ""

    def said(words: str) -> bool:
        nonlocal seen
        if select.select([output], [], [], 0)[0]:
            seen += os.read(output, 65536).decode()
        return words in seen

    wait_for(lambda: said("NOT_IMPLEMENTED"))
    toy.solve()
    wait_for(lambda: said("now the number: course check 1"))
    assert "contract holds" in seen
    watch.send_signal(signal.SIGINT)
    watch.wait(timeout=60)
    assert watch.returncode == 0
    wait_for(lambda: said("stopped watching"))
    assert "Traceback" not in (watch.stderr.read() if watch.stderr else "")
    for stream in (watch.stdout, watch.stderr):
        if stream is not None:
            stream.close()


def in_a_terminal(toy: ToyCourse, output: Path | None, *arguments: str) -> tuple[int, str]:
    """Run a command with stderr, and unless `output` is given stdout, on a pseudo-terminal."""
    master, slave = pty.openpty()
    stdout = output.open("wb") if output else slave
    settings = environment(toy.home)
    del settings["NO_COLOR"]
    process = subprocess.Popen(
        [*COURSE, *arguments], stdin=slave, stdout=stdout, stderr=slave,
        env={**settings, "TERM": "xterm-256color"}, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    shown = b""
    while True:
        if select.select([master], [], [], 0.1)[0]:
            try:
                part = os.read(master, 65536)
            except OSError:
                break
            if not part:
                break
            shown += part
        elif process.poll() is not None:
            break
    os.close(master)
    return process.wait(timeout=60), shown.decode(errors="replace")


def test_a_terminal_shows_what_is_going_on(toy: ToyCourse, tmp_path: Path) -> None:
    """The spinner is seen on the terminal, while stdout goes into a file and is plain."""
    toy.solve()
    output = tmp_path / "out.txt"
    status, shown = in_a_terminal(toy, output, "check", "1", "--contract-only")
    assert status == 0
    assert "starting workers" in shown
    assert "bad input gets an error that names the argument" in shown  # the last that ran
    assert "contract holds" not in shown
    text = output.read_text()
    assert "contract holds" in text
    assert "\x1b" not in text


@pytest.mark.slow
def test_proofs_go_to_stdout_even_when_a_spinner_turns(toy: ToyCourse, tmp_path: Path) -> None:
    for name in ("slow", "triples", "leaves"):
        (toy.home / "gates" / "wrong" / "stage_01_toy" / f"{name}.py").unlink()
    output = tmp_path / "out.txt"
    status, shown = in_a_terminal(toy, output, "prove", "1", "--model", "nano")
    assert status == 0
    assert "claims hold" in output.read_text()
    assert "holds" in output.read_text()
    assert "holds" not in shown
    assert "2 of 3 claims tried" in shown
    assert "at the clock 01 reference toy" in shown


def test_output_that_nobody_reads(toy: ToyCourse) -> None:
    """`course explain | head -1`: no traceback."""
    explain = subprocess.Popen(
        [*COURSE, "explain"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(toy.home),
    )  # fmt: skip
    assert explain.stdout is not None
    assert explain.stderr is not None
    explain.stdout.close()
    err = explain.stderr.read().decode()
    explain.wait(timeout=60)
    explain.stderr.close()
    assert "Traceback" not in err
    assert "Exception" not in err


def test_a_terminal_without_these_characters(toy: ToyCourse) -> None:
    settings = {**environment(toy.home), "PYTHONIOENCODING": "ascii"}
    toy.write("stages/stage_01_toy/hints.md", "## Level 1\n\nüé 日本 ✓ ·\n")
    done = subprocess.run([*COURSE, "hint", "1"], capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout


@pytest.mark.parametrize(
    ("before", "after"), [("SIG_IGN", "SIG_IGN"), ("SIG_DFL", "default_int_handler")]
)
def test_nohup_is_respected(toy: ToyCourse, before: str, after: str) -> None:
    code = (
        "import signal, sys, course.cli\n"
        f"signal.signal(signal.SIGHUP, signal.{before})\n"
        "sys.argv = ['course', 'explain', 'EXITED']\n"
        "try: course.cli.main()\n"
        "except SystemExit: pass\n"
        f"assert signal.getsignal(signal.SIGHUP) == signal.{after}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(toy.home))


def test_the_console_script(toy: ToyCourse) -> None:
    script = Path(sys.executable).with_name("course")
    if not script.exists():
        pytest.skip("the course is not installed here")
    done = subprocess.run(
        [script, "explain", "EXITED"], capture_output=True, text=True, env=environment(toy.home)
    )
    assert done.returncode == 0
    assert done.stdout.startswith("EXITED\n")
    assert done.stderr == ""
