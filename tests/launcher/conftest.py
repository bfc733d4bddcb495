"""Fixtures: a fake checkout, run by the shell that /bin/sh is and by others that are here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launcher.fake_checkout import Checkout

SHELLS = {
    "sh": [],
    "dash": ["dash"],
    "busybox": ["busybox", "sh"],
    "bash": ["bash", "--posix"],
}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture(params=list(SHELLS))
def checkout_in_each_shell(request: pytest.FixtureRequest, tmp_path: Path) -> Checkout:
    command = list(SHELLS[request.param])
    if command:
        found = shutil.which(command[0])
        if found is None:
            pytest.skip(f"{command[0]} is not on this machine")
        command[0] = found
    return Checkout(tmp_path, command)
