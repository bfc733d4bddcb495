"""The words of the course, from glossary.toml."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from functools import cache
from typing import Any

from course.paths import course_home


@dataclass(frozen=True)
class Term:
    """A word, the stage that needs it first, and what it means."""

    name: str
    stage: int
    text: str
    aliases: tuple[str, ...] = ()


@cache
def glossary() -> tuple[Term, ...]:
    """All terms, each after those that its definition uses."""
    path = course_home() / "glossary.toml"
    try:
        return _terms(tomllib.loads(path.read_text("utf-8")))
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _terms(document: dict[str, Any]) -> tuple[Term, ...]:
    return tuple(
        Term(t["name"], t["stage"], t["text"], tuple(t.get("aliases", ())))
        for t in document["term"]
    )


def look_up(word: str) -> Term:
    """The term of that name or alias.

    Raises:
        ValueError: there is none; the message lists near ones.
    """
    wanted = word.strip().lower()
    names = {name.lower(): term for term in glossary() for name in (term.name, *term.aliases)}
    if wanted in names:
        return names[wanted]
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    near += [name for name in names if wanted in name and name not in near][:3]
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    raise ValueError(f"the glossary has no term {word!r}.{hint}")
