"""A checkout whose Python is a shell script, to try the launcher without Python, pip or a network.

The stand-in for Python answers exactly what the launcher asks of one: which version it is, `venv`,
`pip install`, and running the `course` script. What pip does is a shell snippet that a test sets.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

LAUNCHER = Path(__file__).resolve().parents[2] / "course"

# The tools that the launcher may call; anything else is missing from its PATH in these tests.
TOOLS = [
    "cat",
    "cksum",
    "cp",
    "cut",
    "date",
    "dirname",
    "env",
    "grep",
    "ls",
    "mkdir",
    "mkfifo",
    "mv",
    "ps",
    "readlink",
    "rm",
    "rmdir",
    "sed",
    "sh",
    "sleep",
    "tail",
    "tr",
]

FAKE_PYTHON = r"""#!/bin/sh
fake=__FAKE__
while :; do case ${1-} in -I | -S | -u) shift ;; *) break ;; esac; done
if [ "${1-}" != -c ]; then exec sh "$@"; fi
code=$2
shift 2
case $code in
    *cache_tag*) cat "$fake/cache_tag" ;;
    *ensurepip*) echo "__VERSION__"; exit __CODE__ ;;
    *pip._internal*) [ ! -e "$fake/pip-is-broken" ] ;;
    *runpy*)
        echo "$*" >>"$fake/calls"
        module=$1
        shift
        case $module in
            venv)
                for folder; do :; done
                . "$fake/venv"
                if [ "$1" = --clear ]; then rm -rf "$folder"; fi
                mkdir -p "$folder/bin"
                cp "$0" "$folder/bin/python"
                echo "version = __VERSION__" >"$folder/pyvenv.cfg"
                ;;
            pip)
                venv=${0%/bin/python}
                case $* in
                    *" -e "*) . "$fake/pip-packages" ;;
                    *) . "$fake/pip-installer" ;;
                esac
                ;;
        esac
        ;;
    *torch*) . "$fake/torch" ;;
esac
"""

# What the fake console script prints: its process id and its arguments.
CONSOLE_SCRIPT = """
cat >"$venv/bin/course" <<'END'
echo "pid $$"
for argument; do echo "argument $argument"; done
exit ${FAKE_STATUS:-0}
END
"""


class Checkout:
    """A folder with the real launcher and fake everything else. `fake` holds what the fakes do."""

    def __init__(self, folder: Path, shell: Sequence[str] = ()) -> None:
        self.root = folder / "check out"  # a space, since people have them
        self.fake = folder / "fake"
        self.bin = folder / "bin"
        self.shell = list(shell)
        for path in (self.root, self.fake, self.bin):
            path.mkdir()
        shutil.copy(LAUNCHER, self.root / "course")
        (self.root / "pyproject.toml").write_text("[project]\n")
        (self.root / "constraints.txt").write_text("torch==2.13.0\n")
        for tool in TOOLS:
            found = shutil.which(tool)
            if found is not None:
                (self.bin / tool).symlink_to(found)
        (self.fake / "cache_tag").write_text("cpython-311\n")
        (self.fake / "calls").touch()
        (self.fake / "pip-installer").touch()
        (self.fake / "torch").touch()
        (self.fake / "venv").touch()
        self.pip_works()
        self.add_python("python3", "3.11.7")

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def lock(self) -> Path:
        return self.root / ".venv.lock"

    def add_python(self, name: str, version: str, code: int = 0) -> None:
        """Puts a Python on PATH. `code` is what the probe ends with: 3 too old, 4 no ensurepip."""
        text = FAKE_PYTHON.replace("__FAKE__", shlex.quote(str(self.fake)))
        text = text.replace("__VERSION__", version).replace("__CODE__", str(code))
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def pip_works(self) -> None:
        (self.fake / "pip-packages").write_text(CONSOLE_SCRIPT)

    def pip_says(self, output: str, status: int) -> None:
        """The next installations print `output` and end with `status`."""
        (self.fake / "pip-packages").write_text(
            f"printf '%s\\n' {shlex.quote(output)}\nexit {status}\n"
        )

    def pip_waits(self) -> None:
        """Installations work, but only end once `let_pip_go` is called."""
        (self.fake / "pip-packages").write_text(
            ': >"$fake/pip-is-at-work"\n'
            # Bounded: a test that was cut short must not leave a loop behind.
            "tries=0\n"
            'while [ ! -e "$fake/go" ] && [ "$tries" -lt 2400 ]; do\n'
            "    sleep 0.05\n"
            "    tries=$((tries + 1))\n"
            "done\n" + CONSOLE_SCRIPT
        )

    def venv_is_slow(self) -> None:
        """`venv` starts a helper process, as the real one does, and waits for it."""
        # A process group takes a real Python: it runs the launcher's own line, and as the module a
        # standard one that runs what it is given.
        statement = (
            "import pathlib, subprocess;"
            "helper = subprocess.Popen(['sleep', '60']);"
            f"new = pathlib.Path({str(self.fake)!r}, 'new');"
            "new.write_text(str(helper.pid));"
            "new.rename(new.with_name('helper'));"
            "helper.wait()"
        )
        python, statement = shlex.quote(sys.executable), shlex.quote(statement)
        (self.fake / "venv").write_text(
            f'exec {python} -I -c "$code" timeit -n 1 -r 1 {statement}\n'
        )

    def let_pip_go(self) -> None:
        (self.fake / "go").touch()

    def wait_for_pip(self) -> int:
        """Waits until pip is at work and the lock says so; returns its process id."""
        wait_until((self.fake / "pip-is-at-work").exists)
        found = self.lock / "worker"
        wait_until(
            lambda: found.exists() and found.read_text() and is_running(int(found.read_text()))
        )
        return int(found.read_text())

    @property
    def calls(self) -> list[str]:
        """What was asked of `venv` and `pip` so far: the module and its first arguments."""
        return (self.fake / "calls").read_text().splitlines()

    def count(self, module: str) -> int:
        return sum(call.split()[0] == module for call in self.calls)

    def environment(self, **extra: str) -> dict[str, str]:
        return {"PATH": str(self.bin), "HOME": str(self.fake), "TERM": "xterm", **extra}

    def start(
        self, *arguments: str, program: Path | None = None, cwd: Path | None = None, **extra: str
    ) -> subprocess.Popen[str]:
        command = [*self.shell, str(program or self.root / "course"), *arguments]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(**extra),
            cwd=cwd or self.root,
            start_new_session=True,
            # a runner in the background may ignore Ctrl-C, and a shell keeps that for good
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(
        self, *arguments: str, program: Path | None = None, cwd: Path | None = None, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, program=program, cwd=cwd, **extra)
        return finish(process)


def finish(process: subprocess.Popen[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Waits for the end of a launcher; kills everything that it started when it does not come."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_until(condition: Callable[[], object], seconds: float = 15) -> None:
    """Waits until `condition()` is true; AssertionError when it stays false."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def too_long(text: str) -> list[str]:
    """Lines that do not fit 80 columns, other than quoted output and those with a path."""
    without_codes = re.sub("\033\\[[0-9]*[mK]", "", text)
    lines = without_codes.replace("\r\n", "\n").replace("\r", "\n").splitlines()
    return [line for line in lines if len(line) > 80 and "  | " not in line and " (/" not in line]


def is_running(pid: int) -> bool:
    """False also for a process that has ended and that nobody has asked about yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
