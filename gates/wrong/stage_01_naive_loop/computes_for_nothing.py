# WRONG_COUNT: a pass is made even when no token is wanted
import torch

from course.model import FullAttention
from course.types import check_generation


def generate(model, prompt_ids, max_new_tokens, eos_ids=()):
    limit = check_generation(model.config, prompt_ids, max_new_tokens, eos_ids)
    tokens = list(prompt_ids)
    while True:
        token_ids = torch.tensor([tokens], device=model.device)
        positions = torch.arange(len(tokens), device=model.device)[None]
        logits = model.forward(token_ids, positions, FullAttention(), logit_rows=[-1])
        if len(tokens) - len(prompt_ids) >= limit:
            return
        token = int(logits[0].argmax())
        yield token
        tokens.append(token)
        if token in eos_ids or len(tokens) - len(prompt_ids) >= limit:
            return
