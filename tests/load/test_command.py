"""`course load`: what is shown, what is written, and what is refused."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.terminal import COURSE, Terminal
from course.load.fake_server import Answer, FakeServer
from course.load.plot import plot
from course.load.prompts import prompts_of
from course.load.report import as_dict, print_report, reasons, remarks
from course.load.run import Load, Measured
from course.parts import Binding, bind, load_part
from course.study.workspace import stub_source
from course.syllabus import Stage, load_syllabus
from course.types import Stamp, Timeline

pytest_plugins = ["cli.conftest"]

STEADY = Answer(0.03, (0.005,) * 9)
QUICK = ("--concurrency", "4", "--requests", "24", "--prompts", "code")


@pytest.fixture(autouse=True)
def _parts_as_they_were() -> Any:
    yield
    bind(Binding())
    for name in [n for n in sys.modules if n.startswith("course_parts.stage_06")]:
        del sys.modules[name]


def row(out: str, name: str) -> str:
    """The line of a figure."""
    return next(line for line in out.splitlines() if line.strip().startswith(name))


def test_a_closed_loop(course: Terminal, tmp_path: Path) -> None:
    files = tmp_path / "load.json", tmp_path / "load.png"
    with FakeServer(lambda _: STEADY) as server:
        ended = course("load", server.url, *QUICK, "--json", str(files[0]), "--plot", str(files[1]))
    assert ended.status == 0, ended
    for words in ("closed loop, 4 in flight · 24 requests", "fake", "errors none",
                  "by throughput x ITL", "output tokens per second"):  # fmt: skip
        assert words in ended.words, words
    assert "16 requests" in row(ended.out, "TTFT")
    assert "gaps" in row(ended.out, "ITL")
    document = json.loads(files[0].read_text())
    assert document["settings"]["concurrency"] == 4
    assert len(document["timelines"]) == len(server.records) == 24
    assert document["summary"]["requests"] == 16
    assert document["not_measured"] == {}
    assert 0.03 < document["summary"]["ttft"]["p50"] < 0.5
    # As the server saw it, by a clock that both read.
    first = document["timelines"][0]
    assert abs(first["chunks"][1][0] - server.records[0].sent[0][0]) < 0.1
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_an_open_loop(course: Terminal) -> None:
    with FakeServer(lambda _: STEADY) as server:
        ended = course(
            "load", server.url, "--rate", "40", "--requests", "40", "--arrivals", "constant",
            "--warmup", "12",
        )  # fmt: skip
    assert ended.status == 0
    assert "open loop, 40 per second (constant) · 40 requests" in ended.words
    assert "16 requests" in row(ended.out, "E2E")
    received = [record.received for record in server.records]
    assert received[-1] - received[0] > 0.8  # 39 gaps of 25 ms, and not all at once


def test_chunks_without_counts(course: Terminal) -> None:
    with FakeServer(lambda _: Answer(0.03, (0.005,) * 9, (3,) * 10)) as server:
        ended = course("load", server.url, *QUICK)
        again = course("load", server.url, *QUICK, "--chunk-usage")
    wanted = "ITL not measured: 10 chunks for 30 tokens, and nobody says how many each has"
    assert wanted in ended.words
    assert "not measured: it takes every request's" in row(ended.out, "occupancy")
    assert "16 requests" in row(ended.out, "TPOT")
    assert "gaps" in row(again.out, "ITL")


def test_an_answer_in_one_piece(course: Terminal) -> None:
    with FakeServer(lambda _: STEADY) as server:
        ended = course("load", server.url, *QUICK, "--no-stream")
    for name in ("TTFT", "ITL", "TPOT"):
        assert "not measured: answers did not come as a stream" in row(ended.out, name)
    assert "16 requests" in row(ended.out, "E2E")
    assert "output tokens per second" in row(ended.out, "throughput")


def test_no_counts_at_all(course: Terminal) -> None:
    with FakeServer(lambda _: Answer(0.03, (0.005,) * 9, usage=False)) as server:
        ended = course("load", server.url, *QUICK)
    assert "not measured: 10 chunks for an unknown number of tokens" in ended.words
    assert "not measured: the server does not say" in row(ended.out, "throughput")


def test_errors_are_counted_by_kind_and_shown(course: Terminal) -> None:
    plans = [STEADY, Answer(0.0, status=429), STEADY, Answer(0.03, (0.01,), cut_after=1)]
    with FakeServer(lambda i: plans[i % 4]) as server:
        ended = course("load", server.url, *QUICK)
    assert ended.status == 0
    assert "6 x HTTP 429: {" in ended.words
    assert "as it was planned" in ended.words
    assert "6 x closed early" in ended.words


def test_when_everything_fails(course: Terminal) -> None:
    with FakeServer(lambda _: Answer(0.0, status=500)) as server:
        ended = course("load", server.url, *QUICK)
    assert ended.status == 1
    assert "24 x HTTP 500" in ended.words
    assert "not measured: no request finished" in row(ended.out, "TTFT")


def test_what_is_refused(course: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://127.0.0.1:9"
    no_text = tmp_path / "prompts.bin"
    no_text.write_bytes(b"\xff\xfe\x00\xd8")
    for arguments, words in (
        (["--rate", "5", "--concurrency", "2"], "name one"),
        (["--rate", "0"], "--rate must be above 0"),
        (["--rate", "nan"], "--rate must be above 0"),
        (["--rate", "5", "--arrivals", "burst"], "--arrivals must be poisson or constant"),
        (["--requests", "10", "--concurrency", "5"], "--requests must be more than"),
        (["--requests", "4"], "8 + 8, got 4: ask for 17 or more, or leave out less with --warmup"),
        (["--requests", "1", "--warmup", "0"], "0 + 1, got 1: ask for 2 or more"),
        (["--prompts", "nowhere.txt"], "--prompts must be chat, code, revision or a file"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--api", "embeddings"], "api must be one of chat, completions"),
        (["--parts", "yours"], "--parts must be reference or mine"),
        (["--api-key", "NO_SUCH_KEY"], "NO_SUCH_KEY, which is not set"),
        (["--json", str(tmp_path / "no" / "x.json")], "--json: there is no folder"),
        (["--tokenizer", str(tmp_path)], ""),
        (["--json", str(tmp_path)], "--json must be a file"),
        (["--plot", str(tmp_path)], "--plot must be a file"),
        (["--plot", str(tmp_path / "x.nonsense")], "--plot must end in .png, .svg or .pdf"),
        (["--plot", str(tmp_path / "x.gif")], "--plot must end in .png, .svg or .pdf"),
        (["--plot", str(tmp_path / "x")], "--plot must end in .png, .svg or .pdf"),
        (["--prompts", str(no_text)], "--prompts: "),
        (["--prompts", str(no_text)], "is no text in UTF-8"),
        (["--requests", "1000000000000"], "--requests must be at most 1,000,000, got"),
        (["--rate", "1e9"], "--requests must be at most 1,000,000, got"),
        (["--concurrency", "10000000"], "--concurrency must be at most 1,000,000, got"),
        ([], "does not answer"),
    ):
        said = course.refused("load", url, *arguments)
        assert words in said, said
    for address in ("ftp://x", "http://127.0.0.1:99999", "http://[::1", "http://exa mple"):
        said = course.refused("load", address)
        assert said == f"course: url must be that of an HTTP server, got {address!r}"


def test_files_that_cannot_be_written_are_refused_before_the_load(
    course: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with FakeServer(lambda _: STEADY) as server:
        for option, name in (("--json", "x.json"), ("--plot", "x.png")):
            said = course.refused("load", server.url, *QUICK, option, str(tmp_path / name))
            assert said == f"course: {option}: {tmp_path / name} cannot be written"
    assert server.records == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_files_that_cannot_be_written_after_the_load_are_named(
    course: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "x.png"
    with FakeServer(lambda _: STEADY) as server:
        ended = course("load", server.url, *QUICK, "--json", "/dev/full", "--plot", str(picture))
        assert ended.status != 0
        assert "--json: /dev/full cannot be written: No space left on device" in ended.err
        assert "output tokens per second" in ended.out  # the table came, and the picture, too
        assert picture.read_bytes().startswith(b"\x89PNG")

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
        ended = course("load", server.url, *QUICK, "--plot", str(picture))
    assert f"--plot: {picture} cannot be written: No space left on device" in " ".join(
        ended.err.split()
    )


def test_prompts_are_taken_over_and_over(course: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\nthree\n")
    with FakeServer(lambda _: Answer(0.0)) as server:
        ended = course("load", server.url, "--concurrency", "1", "--requests", "7",
                       "--prompts", str(path))  # fmt: skip
    sent = [body["messages"][0]["content"] for body in server.bodies]
    assert sent == ["one", "two", "three", "one", "two", "three", "one"]
    assert "3 different prompts for 7 requests" in ended.words


def test_the_key_is_sent_and_never_written(
    course: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    path = tmp_path / "load.json"
    with FakeServer(lambda _: Answer(0.0)) as server:
        ended = course("load", server.url, *QUICK, "--api-key", "MY_KEY", "--json", str(path))
    assert server.headers[0]["authorization"] == "Bearer s3cret"
    assert "s3cret" not in ended.out + ended.err + path.read_text()


def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(
    course: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = "--api-key: the key in MY_KEY begins or ends with a space or a line break"
    holds = "--api-key: the key in MY_KEY holds a character that no header can carry"
    with FakeServer(lambda _: STEADY) as server:
        for key, words in (
            ("s3cret\n", ends), ("s3cret\r", ends), (" s3cret", ends), ("s3\ncret", holds),
            ("s3\x7fcret", holds), ("s3\xe9cret", holds), ("s3 cret", holds), ("s3\x01cret", holds),
        ):  # fmt: skip
            monkeypatch.setenv("MY_KEY", key)
            said = course.refused("load", server.url, *QUICK, "--api-key", "MY_KEY")
            assert words in said, key
            assert "s3" not in said
            assert "cret" not in said
        for key in ("sk-s3cret", "s3\ncret"):  # typed where the name of a variable belongs
            said = course.refused("load", server.url, *QUICK, "--api-key", key)
            assert "--api-key takes the name of an environment variable, not the key" in said
            assert "cret" not in said
    assert server.records == []


def test_the_defaults_are_in_the_help(course: Terminal) -> None:
    words = course("load", "--help").words
    assert "[default: 8 for each in flight, or 30 s of the rate; at least 20]" in words
    assert "[default: as many as are in flight, or a tenth of an open loop]" in words


def test_a_stub_is_said_to_be_one(
    course: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "load_harness.py"
    path.write_text(stub_source(load_syllabus().find(6)))
    monkeypatch.setattr(Stage, "file", path)
    with FakeServer(lambda _: Answer(0.0)) as server:
        said = course.refused("load", server.url, *QUICK, "--parts", "mine")
    assert "stage 06 is not written yet" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_load_that_is_ended_reports_what_was_measured(
    tmp_path: Path, number: signal.Signals
) -> None:
    path = tmp_path / "load.json"
    with FakeServer(lambda _: Answer(0.1, (0.01,) * 10)) as server:
        command = [*COURSE, "load", server.url, "--concurrency", "2", "--requests", "1000"]
        process = subprocess.Popen(
            [*command, "--json", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**os.environ, "COLUMNS": "90", "NO_COLOR": "1"},
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while len(server.records) < 12 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert err == ""
    assert "cut short after" in out
    assert "TTFT" in out
    document = json.loads(path.read_text())
    assert document["interrupted"]
    assert document["summary"]["requests"] >= 4
    assert any(timeline["ended"] is None for timeline in document["timelines"])


# -- the pieces -----------------------------------------------------------------------------------


def test_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  two \n")
    assert prompts_of(str(path)) == ["one", "two"]
    assert len(set(prompts_of("chat"))) > 4
    path.write_text("\n\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        prompts_of(str(path))


def planned(**options: Any) -> Load:
    known: dict[str, Any] = {
        "concurrency": None, "rate": None, "requests": None, "warmup": None, "process": "poisson",
        "seed": 0,
    }  # fmt: skip
    return Load.planned(**(known | options))


def test_a_load_has_sensible_numbers() -> None:
    load = planned()
    assert (load.concurrency, load.requests, load.warmup, load.cooldown) == (8, 64, 8, 8)
    load = planned(concurrency=1)
    assert (load.requests, load.warmup) == (20, 1)
    load = planned(rate=10.0)
    assert (load.requests, load.warmup, load.concurrency) == (300, 30, None)
    assert planned(warmup=0, requests=5).cooldown == 1
    with pytest.raises(ValueError, match="either a concurrency or a rate"):
        Load(10, 1)
    with pytest.raises(ValueError, match="--requests must be more than"):
        planned(requests=16)


def measured(timelines: list[Timeline], **options: Any) -> Measured:
    load = planned(concurrency=1, warmup=1, requests=20, **options)
    return Measured(load, load_part(load_syllabus().find(6)), timelines, model="m")


def steady(count: int, **fields: Any) -> list[Timeline]:
    return [
        Timeline(**({"intended": i, "sent": i, "chunks": [Stamp(i + 0.5, 1), Stamp(i + 0.75, 1)],
                     "output_tokens": 2, "ended": i + 0.8} | fields))
        for i in range(count)
    ]  # fmt: skip


def test_why_a_figure_is_absent() -> None:
    assert reasons(measured(steady(9))) == {}
    assert reasons(measured([])) == {}
    cases = {
        "answers did not come as a stream": {"chunks": [Stamp(5.0, 0)], "output_tokens": 9},
        "answers are empty": {"chunks": [Stamp(5.0, 0)], "output_tokens": 0},
        "an answer comes in a single chunk": {"chunks": [Stamp(5.0, 9)], "output_tokens": 9},
        "18 tokens by the chunks' counts, 9 by the server's": {
            "chunks": [Stamp(5.0, 9), Stamp(5.5, 9)], "output_tokens": 9,
        },
        "2 chunks for an unknown number of tokens, and nobody says how many each has": {
            "chunks": [Stamp(5.0, None), Stamp(5.5, None)], "output_tokens": None,
        },
    }  # fmt: skip
    for reason, fields in cases.items():
        found = reasons(measured(steady(9, **fields)))
        assert reason in (found.get("itl"), found.get("ttft")), found


def test_a_window_in_which_no_gap_closed() -> None:
    load = measured(steady(9))
    for index, timeline in enumerate(load.timelines):
        timeline.intended = timeline.sent = index * 1e-9  # all at once: the window is 7 ns long
    why = "no gap between two tokens ended in the window"
    found = reasons(load)
    assert (found.pop("itl"), found.pop("occupancy")) == (why, why)
    assert set(found) == {"request_rate", "throughput"}  # the window is too short for a rate


RATES = ("request_rate", "throughput", "occupancy")


def said(load: Measured) -> str:
    """The report, its lines put together."""
    console = Console(width=100, file=io.StringIO())
    print_report(console, load, "http://h/v1", 20)
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def told(load: Measured, reason: str) -> None:
    """The rates are absent everywhere, for this reason; the latencies are there."""
    assert reasons(load) == dict.fromkeys(RATES, reason)
    assert said(load).count(f"not measured: {reason}") == 3
    document = as_dict(load, "http://h/v1", {})
    assert document["not_measured"] == dict.fromkeys(RATES, reason)
    assert [document["summary"][name] for name in RATES] == [None] * 3
    assert document["summary"]["e2e"]["count"] == load.summary.e2e.count > 0


def test_no_rates_of_a_window_that_is_shorter_than_an_answer() -> None:
    load = measured(steady(20))
    for index, timeline in enumerate(load.timelines):  # three groups, each sent within 30 ms
        due = (index // 8) * 0.8 + index % 8 / 256
        timeline.intended = timeline.sent = due
        timeline.chunks = [Stamp(due + 0.5, 1), Stamp(due + 0.79, 1)]
        timeline.ended = due + 0.8
    load.load = planned(concurrency=8, requests=20)
    told(load, "the steady window is shorter than an answer, 15.6 ms and 800.0 ms (p50): "
         "take more --requests")  # fmt: skip


def test_no_rates_of_a_few_requests() -> None:
    told(measured(steady(6)), "4 of the requests that were due in the steady window finished, and "
         "it takes 5: take more --requests")  # fmt: skip
    assert reasons(measured(steady(7))) == {}


def open_loop(count: int, **options: Any) -> Measured:
    """16 requests a second, each answered after 1.5 s."""
    load = measured([
        Timeline(i / 16, i / 16, [Stamp(i / 16 + 0.5, 1), Stamp(i / 16 + 1, 1)], 2, i / 16 + 1.5)
        for i in range(count)
    ])  # fmt: skip
    load.load = planned(rate=16.0, requests=count, **options)
    return load


def test_an_open_loop_is_measured_when_it_has_filled_the_server() -> None:
    load = open_loop(80)
    assert load.load.warmup == 8
    assert load.window == (1.5, 4.5)  # and not from 0.5 s on
    assert reasons(load) == {}
    assert "the first 24 requests are left out, not 8: until 1.5 s" in said(load)
    assert as_dict(load, "", {})["summary"]["throughput"] == pytest.approx(32.0)
    longer = open_loop(80, warmup=32)
    assert longer.window[0] == 2.0
    assert "are left out" not in said(longer)


def test_no_rates_of_an_open_loop_that_ends_before_the_server_is_filled() -> None:
    why = ("the window opens 250.0 ms after the first request, and an answer takes 1.5 s (p90): "
           "the server was still filling. Take more --requests")  # fmt: skip
    load = open_loop(28, warmup=4)  # the cool-down begins at 1.5 s
    for timeline in load.timelines[2:24]:  # most are quick, so that the window is not too short
        timeline.ended = timeline.intended + 1.1
    told(load, why)


def test_a_short_open_loop_over_http(course: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    with FakeServer(lambda _: Answer(0.4, (0.02,) * 5)) as server:
        ended = course("load", server.url, "--rate", "40", "--requests", "20", "--json", str(path))
    assert ended.status == 0
    for name in ("requests", "throughput", "occupancy"):
        assert "not measured: the " in row(ended.out, name)
    summary = json.loads(path.read_text())["summary"]
    assert [summary[name] for name in RATES] == [None] * 3
    assert summary["ttft"]["p50"] >= 0.4


def test_a_window_whose_requests_all_failed() -> None:
    load = measured(steady(9, error="HTTP 500"))
    load.timelines[0].error = None  # of the warm-up
    found = reasons(load)
    assert {found[name] for name in ("ttft", "tpot", "e2e")} == {
        "no request that was due in the window finished"
    }
    assert found["throughput"] == "no request that was under way in the window finished"


def test_the_fake_server_as_a_command() -> None:
    command = [*COURSE, "fake-server", "--first", "0.01", "--gap", "0", "--tokens", "3"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stdout is not None
    url = process.stdout.readline().split()[0]
    done = subprocess.run(
        [*COURSE, "load", url, "--concurrency", "1", "--requests", "5"], capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (done.returncode, process.returncode, err) == (0, 0, ""), done
    assert "errors none" in " ".join(done.stdout.split())


def test_what_a_reader_should_know() -> None:
    assert remarks(measured(steady(9)), 20) == []
    few = measured(steady(2))
    assert "no steady state" in remarks(few, 20)[0]
    late = measured(steady(9))
    late.lateness = [0.2] * 100
    assert "this client was late itself, by 200.0 ms" in remarks(late, 20)[0]
    behind = measured(steady(9))
    for timeline in behind.timelines:
        timeline.sent += 0.3
    assert "sent up to 300.0 ms (p99) after they were due" in remarks(behind, 20)[0]
    assert "3 different prompts for 20 requests" in remarks(measured(steady(9)), 3)[0]
    cut = measured(steady(9))
    cut.interrupted = True
    assert remarks(cut, 20) == ["cut short after 9 of 20 requests"]


def test_plain_values_are_json() -> None:
    for timelines in ([], steady(9), steady(3, ended=None), steady(9, error="HTTP 500")):
        document = as_dict(measured(timelines), "http://h/v1", {"prompts": "chat"})
        assert json.loads(json.dumps(document, allow_nan=False)) == document or timelines
    assert as_dict(measured([]), "", {})["summary"] is None


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_of_anything(tmp_path: Path, suffix: str) -> None:
    for index, timelines in enumerate(
        ([], steady(9), steady(9, chunks=[]), steady(9, error="x"), steady(500))
    ):
        path = tmp_path / f"{index}.{suffix}"
        plot(measured(timelines), path, "a title")
        assert path.stat().st_size > 1000
    with pytest.raises(ValueError, match="nonsense"):
        plot(measured([]), tmp_path / "x.nonsense", "")


def test_nothing_heavy_is_imported_for_a_load() -> None:
    code = "import sys, course.load.command; print([m for m in ('torch', 'matplotlib', 'uvicorn')"
    code += " if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
