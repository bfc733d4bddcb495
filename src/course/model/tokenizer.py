"""Text to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

__all__ = ["ByteTokenizer", "FileTokenizer", "Message", "Tokenizer"]

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": ...}


class Tokenizer(Protocol):
    """What the course asks of a tokenizer."""

    eos_ids: tuple[int, ...]  # any of these ends a reply

    @property
    def vocab_size(self) -> int:
        """Ids lie in 0 .. vocab_size - 1."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with what the model expects in front (a BOS, for some)."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids. Bytes that are no UTF-8 become U+FFFD."""
        ...

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """The ids of a conversation; with add_generation_prompt, up to where a reply begins."""
        ...


class ByteTokenizer:
    """Ids 0 to 255 are bytes of UTF-8; 256 begins a message and 257 ends it (EOS).

    Every id above that means nothing and decodes to nothing. For models with random weights.
    """

    START, END = 256, 257

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 258:
            raise ValueError(f"vocab_size must be at least 258, got {vocab_size}")
        self.vocab_size = vocab_size
        self.eos_ids: tuple[int, ...] = (self.END,)

    def encode(self, text: str) -> list[int]:
        """One id per byte; nothing in front. No text means 256 or above."""
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text; with skip_special_tokens=False, ids above 255 show as ``<|id|>``."""
        out = bytearray()
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"ids must lie in 0 .. {self.vocab_size - 1}, got {i}")
            if i < 256:
                out.append(i)
            elif not skip_special_tokens:
                out += f"<|{i}|>".encode()
        return out.decode(errors="replace")

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """ChatML, with the two special ids in the place of its two special strings."""
        ids: list[int] = []
        for message in messages:
            ids += [self.START, *self.encode(f"{message['role']}\n{message['content']}"), self.END]
        return ids + [self.START, *self.encode("assistant\n")] * add_generation_prompt


class FileTokenizer:
    """A tokenizer.json, run by the `tokenizers` library, with the chat template beside it.

    Raises:
        FileNotFoundError: the folder has no tokenizer.json.
    """

    def __init__(self, folder: Path, eos_ids: Sequence[int] = ()) -> None:
        from tokenizers import Tokenizer as Backend

        if not (folder / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json")
        self.backend = Backend.from_file(str(folder / "tokenizer.json"))
        self.backend.no_padding()
        self.backend.no_truncation()
        self.settings = _settings(folder)
        self.eos_ids = tuple(eos_ids)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows; a model's own vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer itself puts around it."""
        return self.backend.encode(text).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; spaces are left as they are."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """The ids of a conversation, by the model's own chat template.

        Raises:
            ValueError: the model has no chat template, or its template refuses the messages.
        """
        text = self.render(messages, add_generation_prompt)
        return self.backend.encode(text, add_special_tokens=False).ids

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, as `chat` encodes it."""
        template = self.settings.get("chat_template")
        if template is None:
            raise ValueError("this model has no chat template: it was not trained to chat")
        from jinja2 import TemplateError

        special = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in self.settings.items()
            if key.endswith("_token")
        }
        try:
            return (
                _environment()
                .from_string(template)
                .render(
                    messages=list(messages), add_generation_prompt=add_generation_prompt, **special
                )
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with the chat template from wherever the folder keeps it."""
    path = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    if (apart := folder / "chat_template.jinja").is_file():
        settings["chat_template"] = apart.read_text("utf-8")
    if isinstance(template := settings.get("chat_template"), list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        settings["chat_template"] = named.get("default")
    return settings


def _environment() -> Any:
    """Jinja as transformers sets it up for chat templates: no access to Python's insides."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    return environment
