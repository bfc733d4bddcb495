# TOO_SLOW: right, with the same counts, but attention takes one query at a time, in float64
import torch

from course.types import check_generation


def loop_attention(layer, q, k, v):
    out = torch.empty_like(q)
    group = q.shape[2] // k.shape[2]
    for t in range(q.shape[1]):
        keys = k[0, : t + 1].double().repeat_interleave(group, dim=1)
        values = v[0, : t + 1].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,shd->hs", q[0, t].double(), keys) / q.shape[-1] ** 0.5
        out[0, t] = torch.einsum("hs,shd->hd", scores.softmax(-1), values).float()
    return out


def generate(model, prompt_ids, max_new_tokens, eos_ids=()):
    limit = check_generation(model.config, prompt_ids, max_new_tokens, eos_ids)
    tokens = list(prompt_ids)
    for _ in range(limit):
        token_ids = torch.tensor([tokens], device=model.device)
        positions = torch.arange(len(tokens), device=model.device)[None]
        logits = model.forward(token_ids, positions, loop_attention, logit_rows=[-1])
        token = int(logits[0].argmax())
        yield token
        if token in eos_ids:
            return
        tokens.append(token)
