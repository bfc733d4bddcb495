# FORBIDDEN_IMPORT: the judge's own oracle
from course.check.oracle import nano_oracle
from course.types import check_generation


def generate(model, prompt_ids, max_new_tokens, eos_ids=()):
    limit = check_generation(model.config, prompt_ids, max_new_tokens, eos_ids)
    tokens = list(prompt_ids)
    for _ in range(limit):
        token = int(nano_oracle().logits(tokens)[-1].argmax())
        yield token
        if token in eos_ids:
            return
        tokens.append(token)
