"""Server-sent events, as a stream of bytes brings them (WHATWG HTML, section 9.2)."""

from __future__ import annotations

from collections.abc import Iterator

MOST = 8 << 20  # bytes of one event: an answer's chunk takes some hundred


class EventTooLong(ValueError):
    """An event does not end: whoever sends it is no OpenAI server."""


class EventStream:
    """Cuts bytes into events. Bytes may be handed in in any pieces.

    Only `data` matters to the OpenAI API: other fields and comments are left out. Lines are cut at
    line feeds alone. Text cut at everything that Unicode calls a line break, as `str.splitlines`
    does, would break JSON that holds such a character.
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # the line that has not ended yet, in pieces
        self._data: list[bytes] = []  # the event that has not ended yet
        self._bytes = [0, 0]  # of the two

    def feed(self, piece: bytes) -> Iterator[str]:
        """The data of each event that ends in `piece`.

        Raises:
            UnicodeDecodeError: an event is not UTF-8.
            EventTooLong: an event is longer than MOST.
        """
        first, *others = piece.split(b"\n")
        self._rest.append(first)
        self._bytes[0] += len(first)
        for begun in others:  # each of these follows the end of a line
            line = b"".join(self._rest).removesuffix(b"\r")
            self._rest = [begun]
            self._bytes[0] = len(begun)
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._bytes[1] += len(line)
            elif not line and self._data:
                event = b"\n".join(self._data)
                self._data = []
                self._bytes[1] = 0
                yield event.decode()
        if sum(self._bytes) > MOST:
            raise EventTooLong(f"an event of more than {MOST} bytes")
