"""Makes these files gates: see `course.check.plugin`."""

from course.check.plugin import pytest_addoption, pytest_configure  # noqa: F401
