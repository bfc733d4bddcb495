"""The decoder computes what transformers computes; and a decoder that does not is noticed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from course.model import Decoder, FullAttention, causal_attention, load

LOGIT_TOLERANCE = 1e-3
PROMPT = [1, 17, 5, 80, 33, 33, 9, 61, 2, 40, 12, 77, 3, 25]
NEW_TOKENS = 40  # past the 32 positions from which llama3's scaling counts

ALL = ["llama", "llama3-rope", "linear-rope", "smollm2", "qwen2", "qwen3", "mistral"]


class Cache:
    """The plainest KV cache there is."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.kv:
            k, v = torch.cat((self.kv[layer][0], k), 1), torch.cat((self.kv[layer][1], v), 1)
        self.kv[layer] = (k, v)
        return causal_attention(q, k, v)


def greedy(model: Decoder, prompt: list[int], new: int) -> tuple[list[int], Tensor]:
    """(new tokens, the logits [new, V] that chose them), with a cache."""
    ids, chosen, cache = list(prompt), [], Cache()
    fed = 0
    while len(ids) < len(prompt) + new:
        step = torch.tensor([ids[fed:]])
        positions = torch.arange(fed, len(ids)).unsqueeze(0)
        chosen.append(model(step, positions, cache, [-1])[0])
        fed = len(ids)
        ids.append(int(chosen[-1].argmax()))
    return ids[len(prompt) :], torch.stack(chosen)


@torch.no_grad()
def assert_parity(folder: Path, oracle_folder: Path | None = None) -> None:
    """Equal greedy tokens, and logits within the tolerance, cached and uncached."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(oracle_folder or folder, dtype=torch.float32)
    prompt = torch.tensor([PROMPT])
    text = oracle.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    expected = oracle(text).logits[0]  # [T, V]

    model = load(folder, device="cpu").model
    full = model(text, torch.arange(text.shape[1]).unsqueeze(0), FullAttention())[0]
    tokens, logits = greedy(model, PROMPT, NEW_TOKENS)
    assert (full - expected).abs().max() < LOGIT_TOLERANCE, "logits differ"
    assert tokens == text[0, len(PROMPT) :].tolist(), "greedy tokens differ"
    assert (logits - expected[len(PROMPT) - 1 : -1]).abs().max() < LOGIT_TOLERANCE, "cache differs"
    assert len(set(tokens)) > 5, "a text this monotonous would prove little"


@pytest.mark.parametrize("architecture", ALL)
def test_equal_to_transformers(tiny: Callable[[str], Path], architecture: str) -> None:
    assert_parity(tiny(architecture))


def change_config(key: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        raw = json.loads(path.read_text())
        if key in raw["rope_parameters"]:
            raw["rope_parameters"][key] = value
        else:
            raw[key] = value
        path.write_text(json.dumps(raw))

    return change


def change_weights(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file({k: v.clone() for k, v in tensors.items()}, path)

    return rewrite


def swap(a: str, b: str) -> Callable[[Path], None]:
    def exchange(tensors: dict[str, Tensor]) -> None:
        a_, b_ = f"model.layers.1.{a}.weight", f"model.layers.1.{b}.weight"
        tensors[a_], tensors[b_] = tensors[b_], tensors[a_]

    return change_weights(exchange)


def zero(name: str) -> Callable[[Path], None]:
    def clear(tensors: dict[str, Tensor]) -> None:
        tensors[f"model.layers.0.{name}"].zero_()

    return change_weights(clear)


FAULTS = {
    "wrong rope theta": ("llama", change_config("rope_theta", 20_000.0)),
    "rope scaling ignored": ("llama3-rope", change_config("rope_type", "default")),
    "rope scaling by another factor": ("llama3-rope", change_config("factor", 4.0)),
    "wrong norm epsilon": ("llama", change_config("rms_norm_eps", 1e-2)),
    "gate and up swapped": ("llama", swap("mlp.gate_proj", "mlp.up_proj")),
    "k and v swapped": ("mistral", swap("self_attn.k_proj", "self_attn.v_proj")),
    "the two norms swapped": ("smollm2", swap("input_layernorm", "post_attention_layernorm")),
    "q and k norms swapped": ("qwen3", swap("self_attn.q_norm", "self_attn.k_norm")),
    "a bias dropped": ("qwen2", zero("self_attn.q_proj.bias")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_breaks_it(tiny: Callable[[str], Path], tmp_path: Path, fault: str) -> None:
    """The proof is able to fail: one thing wrong in the weights or the config is enough."""
    architecture, plant = FAULTS[fault]
    folder = tmp_path / "faulty"
    shutil.copytree(tiny(architecture), folder)
    assert_parity(folder, tiny(architecture))  # the copy itself is right
    plant(folder)
    with pytest.raises(AssertionError, match="differ"):
        assert_parity(folder, tiny(architecture))
