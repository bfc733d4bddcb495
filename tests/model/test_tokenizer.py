"""Round trips, special tokens, and chat templates as transformers renders them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from course.model import LoadedModel
from course.model.tokenizer import ByteTokenizer, FileTokenizer

CHAT = [
    {"role": "user", "content": "hello, you"},
    {"role": "assistant", "content": "hi!"},
    {"role": "user", "content": "bye"},
]


@pytest.mark.parametrize("text", ["", "plain", "naïve – 日本語 👩‍🚀", "\x00\n\t", "<|257|>"])
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer(320)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < 256 for i in ids)


def test_broken_bytes_and_ids_without_meaning() -> None:
    tokenizer = ByteTokenizer(320)
    assert tokenizer.decode([72, 105, 0xC3]) == "Hi�"
    assert tokenizer.decode([72, 257, 319, 105]) == "Hi"
    assert tokenizer.decode([72, 257, 105], skip_special_tokens=False) == "H<|257|>i"
    for wrong in (320, -1):
        with pytest.raises(ValueError, match="ids"):
            tokenizer.decode([wrong])
    with pytest.raises(ValueError, match="vocab_size"):
        ByteTokenizer(257)


def test_bytes_chat(nano: LoadedModel) -> None:
    ids = nano.tokenizer.chat([{"role": "user", "content": "hi<|257|>"}])
    assert ids == [256, *b"user\nhi<|257|>", 257, 256, *b"assistant\n"]
    assert nano.tokenizer.chat(CHAT, add_generation_prompt=False)[-1] == 257
    assert nano.tokenizer.eos_ids == nano.config.eos_ids == (257,)


def test_text_in_a_file_tokenizer(tiny: Callable[[str], Path]) -> None:
    tokenizer = FileTokenizer(tiny("llama"), eos_ids=[2])
    ids = tokenizer.encode("hi, you")
    assert ids[0] == 1  # the BOS that the tokenizer itself puts in front
    assert len(ids) == 8
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<s>")
    assert "<s>" not in tokenizer.decode(ids)
    assert tokenizer.vocab_size == 34
    assert tokenizer.eos_ids == (2,)


def test_chat_template_puts_special_tokens_once(tiny: Callable[[str], Path]) -> None:
    tokenizer = FileTokenizer(tiny("llama"))
    text = tokenizer.render(CHAT)
    assert text == "<s>user: hello, you</s>assistant: hi!</s>user: bye</s>assistant: "
    ids = tokenizer.chat(CHAT)
    assert (ids.count(1), ids.count(2)) == (1, 3)
    assert tokenizer.chat(CHAT, add_generation_prompt=False) == ids[: -len("assistant: ")]


def with_template(folder: Path, target: Path, template: object, apart: bool = False) -> Path:
    shutil.copytree(folder, target)
    if apart:
        (target / "chat_template.jinja").write_text(str(template))
    else:
        (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return target


def test_template_in_its_own_file_or_by_name(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    own = with_template(tiny("llama"), tmp_path / "a", "own {{ messages | length }}", apart=True)
    assert FileTokenizer(own).render(CHAT) == "own 3"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert FileTokenizer(with_template(tiny("llama"), tmp_path / "b", named)).render(CHAT) == "yes"


def test_what_templates_may_use(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Loop controls, tojson, the date, and trimmed blocks, as transformers offers them."""
    template = (
        "{% for m in messages %}\n"
        "    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') | length }}"
    )
    tokenizer = FileTokenizer(with_template(tiny("llama"), tmp_path / "a", template))
    assert tokenizer.render(CHAT) == '{"role": "user", "content": "hello, you"}\n4'


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% if %}",
    ],
    ids=["its own refusal", "changes the messages", "reaches into Python", "no Jinja"],
)
def test_templates_that_fail(tiny: Callable[[str], Path], tmp_path: Path, template: str) -> None:
    tokenizer = FileTokenizer(with_template(tiny("llama"), tmp_path / "a", template))
    with pytest.raises(ValueError, match="chat template"):
        tokenizer.chat(CHAT)


def test_no_template_and_no_tokenizer(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = with_template(tiny("llama"), tmp_path / "a", None)
    with pytest.raises(ValueError, match="no chat template"):
        FileTokenizer(folder).chat(CHAT)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        FileTokenizer(folder)
