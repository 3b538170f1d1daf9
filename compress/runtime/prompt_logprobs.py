"""Log probabilities of the tokens of a prompt, in one pass over it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compress.runtime.engine import Engine
from compress.runtime.request import TopLogprobs

_ROWS = 128  # positions whose float32 log-softmax is held at once: 66 MB for 128,256 tokens


@dataclass(frozen=True)
class PromptLogprobs:
    """How well a model predicts a prompt. `logprobs[i]` is the natural logarithm of the probability of
    token i + 1 after the tokens before it, and `top[i]` the likeliest tokens of that position, where some
    were asked for: both are one shorter than the prompt.
    """

    logprobs: tuple[float, ...]
    top: tuple[TopLogprobs, ...]


@torch.inference_mode()
def score_prompt(engine: Engine, prompt: Sequence[int], *, num_top: int = 0) -> PromptLogprobs:
    """Return the log probabilities of a prompt's tokens after the first, and the `num_top` likeliest tokens
    of each position, all tokens of a smaller vocabulary. No step of the engine may run at the same time.

    Raises:
        UsageError: the prompt is longer than the engine's longest sequence.
    """
    if len(prompt) < 2:
        return PromptLogprobs((), ())
    tokens_S = torch.tensor(prompt, dtype=torch.int64, device=engine.device)
    logits_SV = engine.runner.score(tokens_S.unsqueeze(0))[0]
    logprobs: list[float] = []
    top: list[TopLogprobs] = []
    for rows_TV, next_T in zip(logits_SV[:-1].split(_ROWS), tokens_S[1:].split(_ROWS), strict=True):
        logprobs_TV = rows_TV.to(torch.float32).log_softmax(dim=-1)
        logprobs += logprobs_TV.gather(1, next_T.unsqueeze(1))[:, 0].tolist()
        if num_top:
            values_TK, ids_TK = logprobs_TV.topk(min(num_top, logprobs_TV.shape[1]), dim=-1)
            rows = zip(ids_TK.tolist(), values_TK.tolist(), strict=True)
            top += [tuple(zip(ids, values, strict=True)) for ids, values in rows]
    return PromptLogprobs(tuple(logprobs), tuple(top))
