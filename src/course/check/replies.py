"""What a worker may answer, and how the judge makes sure that it is an answer.

A solution lives in the worker's process and can write to its channel. A reply therefore has to
carry the token of the message that it answers, and every field has to be of its type: anything else
is a `BadFrame`, which the host reports as CHANNEL_FORGED.
"""

from __future__ import annotations

from typing import Any

from course.check.channel import BadFrame, short

LONGEST = 4000  # characters of any text that a worker sends about an error

# Exactly one of these says what kind of reply it is.
KINDS = ("error", "missing", "loaded", "started", "value")


class SolutionError(Exception):
    """The solution raised. Bad-input checks expect this; elsewhere it becomes CRASHED."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['type']}: {error['message']}")
        self.type: str = error["type"]
        self.bases: list[str] = error["bases"]
        self.message: str = error["message"]
        self.where: str = error["where"]
        self.traceback: str = error["traceback"]


def checked(reply: Any, token: str, *kinds: str) -> dict[str, Any]:
    """The reply, if it answers the message of that token with one of `kinds`.

    Raises:
        BadFrame: somebody else wrote it.
    """
    if not isinstance(reply, dict):
        raise BadFrame("a message without its envelope")
    if reply.get("token") != token:
        raise BadFrame("a message that answers no question")
    found = [kind for kind in KINDS if kind in reply]
    if len(found) != 1 or found[0] not in (*kinds, "error"):
        raise BadFrame(f"a reply of kind {short(found)}, where {' or '.join(kinds)} was asked for")
    for name in ("violations", "patched", "missing"):
        if name in reply:
            reply[name] = _texts(reply[name])
    if "error" in reply:
        reply["error"] = _error(reply["error"])
    return reply


def _error(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadFrame("an error without its fields")
    fields: dict[str, Any] = {
        name: _text(value.get(name)) for name in ("type", "message", "where", "traceback")
    }
    return {**fields, "bases": _texts(value.get("bases"))}


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not value or len(value) > 100:
        raise BadFrame("a list of names was expected")
    return [_text(item) for item in value]


def _text(value: Any) -> str:
    if type(value) is not str:
        raise BadFrame("text was expected")
    return value[:LONGEST]
