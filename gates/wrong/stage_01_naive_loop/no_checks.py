# WRONG_ERROR: bad input is taken as it comes, and fails deep inside
import torch

from course.model import FullAttention


def generate(model, prompt_ids, max_new_tokens, eos_ids=()):
    tokens = list(prompt_ids)
    for _ in range(min(max_new_tokens, model.config.max_context - len(tokens) + 1)):
        token_ids = torch.tensor([tokens], device=model.device)
        positions = torch.arange(len(tokens), device=model.device)[None]
        logits = model.forward(token_ids, positions, FullAttention(), logit_rows=[-1])
        token = int(logits[0].argmax())
        yield token
        if token in eos_ids:
            return
        tokens.append(token)
