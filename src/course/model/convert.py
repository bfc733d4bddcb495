"""SmolLM2 from a GGUF file into the layout that everything else reads: safetensors and JSON."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["gguf_to_folder"]


def gguf_to_folder(gguf: Path, folder: Path) -> None:
    """Write config.json, tokenizer files and model.safetensors (fp32) of a GGUF file to a folder.

    The 4-bit weights become the fp32 values that they stand for. Takes about half a minute and
    2 GB of memory: transformers reads the GGUF. Its `save_pretrained` refuses a model that came
    from one, hence the state dict here.
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # The GGUF says "smollm" here, which transformers does not know: one digit, one token.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)

    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # it is made for its owner alone

    config = model.config.to_diff_dict()
    for key in ("quantization_config", "_model_name_or_path", "_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")  # GGUF keeps it in 32 bits
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
