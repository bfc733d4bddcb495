"""Text from outside, of a solution or a server, made fit to be shown: terminal, log, XML."""

from __future__ import annotations

import re
import unicodedata

# Colours, cursor movements, window titles: what a terminal would obey instead of showing.
_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[PX^_][^\x1b]*\x1b\\|.)?", re.DOTALL
)
_TURNS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # writing direction


def plain(text: str) -> str:
    """The text without control characters (new lines and tabs stay) and without half characters.

    What is left is valid in XML 1.0 and in UTF-8, and does nothing to a terminal.
    """
    text = _SEQUENCE.sub("", text.replace("\r\n", "\n"))
    return "".join(map(_shown, text))


def one_line(text: str) -> str:
    """`plain`, with every run of white space made one space."""
    return " ".join(plain(text).split())


def _shown(character: str) -> str:
    if character in "\n\t":
        return character
    if character == "\r":
        return "\n"
    kind = unicodedata.category(character)
    if kind == "Cc" or character in _TURNS:
        return ""
    if kind == "Cs" or ord(character) & 0xFFFE == 0xFFFE:  # surrogates, and no characters at all
        return "\N{REPLACEMENT CHARACTER}"
    return character
