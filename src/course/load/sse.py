"""Server-sent events, as a stream of bytes brings them (WHATWG HTML, section 9.2)."""

from __future__ import annotations

from collections.abc import Iterator


class EventStream:
    """Cuts bytes into events. Bytes may be handed in in any pieces.

    Only `data` matters to the OpenAI API: other fields and comments are left out. Lines are cut at
    line feeds alone. Text cut at everything that Unicode calls a line break, as `str.splitlines`
    does, would break JSON that holds such a character.
    """

    def __init__(self) -> None:
        self._rest = b""  # the line that has not ended yet
        self._data: list[bytes] = []  # the event that has not ended yet

    def feed(self, piece: bytes) -> Iterator[str]:
        """The data of each event that ends in `piece`.

        Raises:
            UnicodeDecodeError: an event is not UTF-8.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                event = b"\n".join(self._data)
                self._data = []
                yield event.decode()
