# CRASHED: memory for max_new_tokens, however far that lies beyond the context
import torch

from course.model import FullAttention
from course.types import check_generation


def generate(model, prompt_ids, max_new_tokens, eos_ids=()):
    limit = check_generation(model.config, prompt_ids, max_new_tokens, eos_ids)
    tokens = list(prompt_ids)
    torch.empty(len(tokens) + max_new_tokens, dtype=torch.int64)
    for _ in range(limit):
        token_ids = torch.tensor([tokens], device=model.device)
        positions = torch.arange(len(tokens), device=model.device)[None]
        logits = model.forward(token_ids, positions, FullAttention(), logit_rows=[-1])
        token = int(logits[0].argmax())
        yield token
        if token in eos_ids:
            return
        tokens.append(token)
