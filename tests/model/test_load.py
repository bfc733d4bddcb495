"""Models from folders: what is missing or too much is named, and hashes name the weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.conftest import save_tiny

from course.model import FullAttention, UnsupportedModel, catalogue, load
from course.model.layers import PackedLinear
from course.model.weights import HASH_FILE, hash_weights


@pytest.fixture
def folder(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("llama"), tmp_path / "model"))


def edit(folder: Path, **changes: object) -> None:
    """Change tensors of the only weight file; None removes one."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value  # type: ignore[assignment]
    save_file({k: v.clone() for k, v in tensors.items()}, folder / "model.safetensors")


def test_a_folder(folder: Path) -> None:
    loaded = load(folder, device="cpu")
    assert loaded.name == loaded.source == str(folder)
    assert (loaded.model.device, loaded.model.dtype) == (torch.device("cpu"), torch.float32)
    assert loaded.config.eos_ids == loaded.tokenizer.eos_ids == (2,)
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert load(str(folder), device="cpu").weights_hash == loaded.weights_hash


def test_another_dtype(folder: Path) -> None:
    half = load(folder, device="cpu", dtype=torch.bfloat16).model
    full = load(folder, device="cpu").model
    ids, positions = torch.tensor([[1, 5, 9]]), torch.tensor([[0, 1, 2]])
    logits = half(ids, positions, FullAttention())
    assert logits.dtype == half.dtype == torch.bfloat16
    assert half.cos.dtype == torch.float32
    assert not any(isinstance(layer, PackedLinear) for _, layer in half.linears())
    assert (logits - full(ids, positions, FullAttention())).abs().max() < 0.3


def test_several_files(folder: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    save_tiny("llama", shards, max_shard_size="50KB")
    assert len(list(shards.glob("*.safetensors"))) > 1
    one, many = load(folder, device="cpu"), load(shards, device="cpu")
    for (name, a), (_, b) in zip(one.model.linears(), many.model.linears(), strict=True):
        assert torch.equal(a.weight, b.weight), name
    sorted(shards.glob("*.safetensors"))[-1].unlink()
    with pytest.raises(FileNotFoundError, match=r"model-.*\.safetensors"):
        load(shards, device="cpu")


def test_generation_config_says_what_ends_a_text(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    loaded = load(folder, device="cpu")
    assert loaded.config.eos_ids == loaded.tokenizer.eos_ids == (5, 2)
    (folder / "generation_config.json").write_text("{}")
    assert load(folder, device="cpu").config.eos_ids == (2,)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        load(folder, device="cpu")


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit(folder, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder, device="cpu")


def test_a_misshapen_tensor_is_named(folder: Path) -> None:
    edit(folder, **{"model.layers.1.mlp.up_proj.weight": torch.zeros(80, 47)})
    with pytest.raises(ValueError, match=r"layers\.1\.gate_up\.weight"):
        load(folder, device="cpu")


def test_a_tensor_that_would_be_left_out_is_refused(folder: Path) -> None:
    edit(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)})
    with pytest.raises(UnsupportedModel, match=r"q_proj\.bias"):
        load(folder, device="cpu")


def test_tensors_that_follow_from_the_rest_are_ignored(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    tied = Path(shutil.copytree(tiny("smollm2"), tmp_path / "tied"))
    before = load(tied, device="cpu").model
    edit(
        tied,
        **{
            "lm_head.weight": torch.zeros(96, 48),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        },
    )
    assert torch.equal(load(tied, device="cpu").model.lm_head.weight, before.lm_head.weight)


def test_an_unsupported_folder_is_refused_by_name(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "model_type": "gemma3"}))
    with pytest.raises(UnsupportedModel, match="gemma3"):
        load(folder, device="cpu")


def test_the_hash_names_the_weights(folder: Path, tmp_path: Path) -> None:
    before = hash_weights(folder)
    assert len(before) == 16
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / HASH_FILE).unlink()
    assert hash_weights(copy) == before
    edit(folder, **{"model.norm.weight": torch.zeros(48)})
    assert hash_weights(folder) != before


def test_the_hash_is_remembered_and_its_memory_may_be_lost(folder: Path) -> None:
    true = hash_weights(folder)
    memory = json.loads((folder / HASH_FILE).read_text())
    (folder / HASH_FILE).write_text(json.dumps({**memory, "hash": "remembered"}))
    assert hash_weights(folder) == "remembered"
    for broken in ("", "[]", '{"files": 1}'):
        (folder / HASH_FILE).write_text(broken)
        assert hash_weights(folder) == true
    assert sorted(p.name for p in folder.glob(".weights*")) == [HASH_FILE]


@pytest.mark.parametrize("name", ["nope", "./nope", "/nope/nope", "a/b/c", "../x", ""])
def test_an_unknown_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"catalogue: nano, bench, .*smollm2-135m"):
        load(name, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="device 'cuda'"):
        load("nano", device="cuda")


def test_the_catalogue() -> None:
    entries = {entry.name: entry for entry in catalogue()}
    assert list(entries)[:5] == ["nano", "bench", "bench-1b", "bench-8b", "smollm2-135m"]
    assert entries["nano"].cached
    assert entries["nano"].size < 1_000_000
    assert entries["bench-8b"].size == 2 * 8_030_261_248
