# WRONG_TOKEN: logits of the last but one position
import torch

from course.model import FullAttention
from course.types import check_generation


def generate(model, prompt_ids, max_new_tokens, eos_ids=()):
    limit = check_generation(model.config, prompt_ids, max_new_tokens, eos_ids)
    tokens = list(prompt_ids)
    for _ in range(limit):
        token_ids = torch.tensor([tokens], device=model.device)
        positions = torch.arange(len(tokens), device=model.device)[None]
        logits = model.forward(token_ids, positions, FullAttention())
        token = int(logits[0, max(0, len(tokens) - 2)].argmax())
        yield token
        if token in eos_ids:
            return
        tokens.append(token)
