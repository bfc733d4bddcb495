# WRONG_TOKEN: fast, because only the last 16 tokens are looked at
import torch

from course.model import FullAttention
from course.types import check_generation


def generate(model, prompt_ids, max_new_tokens, eos_ids=()):
    limit = check_generation(model.config, prompt_ids, max_new_tokens, eos_ids)
    tokens = list(prompt_ids)
    for _ in range(limit):
        recent = tokens[-16:]
        token_ids = torch.tensor([recent], device=model.device)
        positions = torch.arange(len(recent), device=model.device)[None]
        logits = model.forward(token_ids, positions, FullAttention(), logit_rows=[-1])
        token = int(logits[0].argmax())
        yield token
        if token in eos_ids:
            return
        tokens.append(token)
