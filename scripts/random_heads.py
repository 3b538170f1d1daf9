"""Heads that draft for a target, with random weights, for benchmarks of their cost."""

import torch

from compress.models.arch import Arch
from compress.models.fresh_eagle3 import random_eagle3
from compress.models.random_mtp import random_mtp
from compress.runtime.speculative.eagle3 import Eagle3
from compress.runtime.speculative.mtp import Mtp
from compress.runtime.speculative.proposer import ProposerOptions
from scripts.bench_setup import schemes_of

EAGLE3_SCHEME = "W4A16_G128+FP8_DYNAMIC"
"""Of the layer of an EAGLE-3 head and of its own output head."""
EAGLE3_VOCAB = 32_000


def random_head(
    kind: str,
    target: Arch,
    scheme: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    vocab_size: int = EAGLE3_VOCAB,
) -> ProposerOptions:
    """Return the options of an EAGLE-3 head over `vocab_size` tokens, or of an MTP head, for a target."""
    body, outer = schemes_of(scheme)
    if kind == "mtp":
        return Mtp(random_mtp(target, device=device, dtype=dtype, scheme=body))
    draft_vocab = min(vocab_size, target.vocab_size)
    return Eagle3(
        random_eagle3(
            target,
            device=device,
            dtype=dtype,
            draft_vocab_size=draft_vocab,
            scheme=body,
            head_scheme=outer,
        )
    )
