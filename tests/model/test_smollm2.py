"""The real model: what transformers computes, on three real prompts. Needs the fetched model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from course.model import Decoder, FullAttention, LoadedModel, causal_attention, load
from course.model.store import cached_folder
from course.model.tokenizer import FileTokenizer
from course.model.weights import read_weights

pytestmark = [pytest.mark.model, pytest.mark.slow]

CHAT = [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}]
CODE = '''def fibonacci(n: int) -> int:
    """The n-th Fibonacci number."""
'''
PROSE = "In 1492, Columbus sailed west; the voyage took 70 days. The first land that he saw"
PROMPTS = ["chat", "code", "prose"]
NEW_TOKENS = 24
LOGIT_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def folder() -> Path:
    found = cached_folder("smollm2-135m")
    if found is None:
        pytest.skip("not here: course model fetch smollm2-135m")
    return found


@pytest.fixture(scope="module")
def smollm2(folder: Path) -> LoadedModel:
    return load("smollm2-135m", device="cpu")


@pytest.fixture(scope="module")
def texts(folder: Path) -> dict[str, tuple[int, Tensor, Tensor]]:
    """prompt -> (its length, what transformers makes of it [1, T], its logits [T, V])."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    prompts = {"chat": chat, "code": tokenizer(CODE)["input_ids"]}
    prompts["prose"] = tokenizer(PROSE)["input_ids"]
    out = {}
    for name, ids in prompts.items():
        prompt = torch.tensor([ids])
        text = oracle.generate(
            prompt,
            # Without it every <|im_end|> of the chat is taken for padding, and not attended to.
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        with torch.no_grad():
            out[name] = (len(ids), text, oracle(text).logits[0])
    return out


def assert_parity(model: Decoder, length: int, text: Tensor, expected: Tensor) -> None:
    """Logits of the whole text in one pass, then greedy tokens one by one from a cache."""
    positions = torch.arange(text.shape[1]).unsqueeze(0)
    logits = model(text, positions, FullAttention())[0]
    assert (logits - expected).abs().max() < LOGIT_TOLERANCE, "logits differ"
    cache: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in cache:
            k, v = torch.cat((cache[layer][0], k), 1), torch.cat((cache[layer][1], v), 1)
        cache[layer] = (k, v)
        return causal_attention(q, k, v)

    step, tokens = slice(0, length), []
    while True:
        tokens.append(int(model(text[:, step], positions[:, step], attend, [-1]).argmax()))
        if len(tokens) == NEW_TOKENS:
            break
        step = slice(step.stop, step.stop + 1)
    assert tokens == text[0, length:].tolist(), "greedy tokens differ"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_equal_to_transformers(smollm2: LoadedModel, texts: Any, prompt: str) -> None:
    assert_parity(smollm2.model, *texts[prompt])


@pytest.mark.parametrize("fault", ["wrong rope theta", "gate and up swapped in one layer"])
def test_a_planted_fault_breaks_it(
    folder: Path, smollm2: LoadedModel, texts: Any, fault: str
) -> None:
    config = smollm2.config
    weights = read_weights(folder, config, device=torch.device("cpu"), dtype=torch.float32)
    if fault == "wrong rope theta":
        config = replace(config, rope_theta=10_000.0)
    else:
        name = "layers.15.gate_up.weight"
        weights[name] = torch.cat(weights[name].chunk(2)[::-1])
    with pytest.raises(AssertionError, match="differ"):
        assert_parity(Decoder(config, weights), *texts["prose"])


def test_the_tokenizer_is_the_one_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), FileTokenizer(folder)
    for text in (
        CODE,
        PROSE,
        "naïve – 日本語 👩‍🚀",
        "  two  spaces\n\n\tand 12 345",
        "<|im_start|>",
    ):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=False) == text
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    for messages in (CHAT, chat):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt)
            assert ours.chat(messages, add_generation_prompt=prompt) == expected["input_ids"]


def test_numbers_are_read_digit_by_digit(folder: Path) -> None:
    """As the model was trained; the GGUF file says so in a field that transformers ignores."""
    tokenizer = FileTokenizer(folder)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("12  345")] == [
        "1", "2", "  ", "3", "4", "5",
    ]  # fmt: skip


def test_it_knows_something(smollm2: LoadedModel) -> None:
    ids = smollm2.tokenizer.encode("The capital of France is")
    positions = torch.arange(len(ids)).unsqueeze(0)
    logits = smollm2.model(torch.tensor([ids]), positions, FullAttention(), [-1])
    assert smollm2.tokenizer.decode([int(logits.argmax())]) == " Paris"
    assert smollm2.tokenizer.eos_ids == (2,)
