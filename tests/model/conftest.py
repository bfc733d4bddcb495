"""Tiny random models of every architecture, saved by transformers, and the oracle they make."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import course
from course.model import LoadedModel, load

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# name -> (transformers' config class, what differs from SHAPE)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "smollm2": (
        "LlamaConfig",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
    ),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 8}),
}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # two threads on tensors this small only wait for each other


@pytest.fixture(scope="session")
def nano() -> LoadedModel:
    return load("nano", device="cpu")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """architecture -> a folder with a tiny random model of it; made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            save_tiny(name, made[name])
        return made[name]

    return make


@pytest.fixture
def child() -> Callable[..., str]:
    """Runs code in a fresh Python that finds the course; gives what it printed."""
    source = str(Path(course.__file__).parents[1])

    def run(code: str, check: bool = True, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": source, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def save_tiny(name: str, folder: Path, **save_options: Any) -> None:
    import transformers

    kind, changes = ARCHITECTURES[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, kind)(**{**SHAPE, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms are all ones and biases all zeros until trained
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder, **save_options)
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    """One token per letter, with a BOS in front, and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    letters = "abcdefghijklmnopqrstuvwxyz .,!?"
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
