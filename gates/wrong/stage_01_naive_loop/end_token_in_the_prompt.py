# TOO_FEW_TOKENS: an end token anywhere in the text ends it, also one of the prompt's
import torch

from course.model import FullAttention
from course.types import check_generation


def generate(model, prompt_ids, max_new_tokens, eos_ids=()):
    limit = check_generation(model.config, prompt_ids, max_new_tokens, eos_ids)
    tokens = list(prompt_ids)
    for _ in range(limit):
        token_ids = torch.tensor([tokens], device=model.device)
        positions = torch.arange(len(tokens), device=model.device)[None]
        logits = model.forward(token_ids, positions, FullAttention(), logit_rows=[-1])
        token = int(logits[0].argmax())
        yield token
        tokens.append(token)
        if set(tokens) & set(eos_ids):
            return
