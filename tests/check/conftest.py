"""Workers for solutions that a test writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from check.workers import Workshop


@pytest.fixture
def workshop(forked: None, tmp_path: Path) -> Iterator[Workshop]:
    shop = Workshop(tmp_path)
    yield shop
    shop.close()
