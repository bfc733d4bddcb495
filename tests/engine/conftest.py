"""How long the soak soaks."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest tests/engine --seeds 20`; a few of them are part of the suite."""
    parser.addoption("--seeds", type=int, default=6, help="random lives of an engine to run")


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--seeds"))
