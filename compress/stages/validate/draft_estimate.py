"""Memory of speculation with a candidate, from shapes alone.

engines     the candidate and an engine with the same weights that speculates, after the source is freed
weights     those of the draft in the dtype of the computation, also where it is to be quantized
logits      matrices of logits of MTP heads, on a GPU in FP8 (`runtime/speculative/mtp.py`): each its own
            where it has one, or all of them one copy of the target's
pages       keys and values of the requests; rings of hidden states are left out, a few rows of each block
"""

from collections.abc import Iterator

from compress.export.mtp import checkpoint_with_mtp, exported_mtp
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import slot_bytes
from compress.stages import PlanFacts
from compress.stages.draft.inits import ServedDraft
from compress.stages.draft.inits.mtp import Mtp
from compress.stages.draft.spec import Draft


def exports_mtp(facts: PlanFacts) -> bool:
    """Return whether the candidate has an MTP head to draft with, as far as that can be foreseen."""
    source = checkpoint_with_mtp(facts.source) if "export" in facts.specs else None
    found = None if source is None else exported_mtp(source, facts.arch)
    return found is not None and bool(found.names)


def draft_bytes(
    facts: PlanFacts, config: EngineConfig, k: int, *, assistant: ServedDraft | None = None
) -> int:
    """Return the bytes of the largest draft of those that are measured, each of which proposes `k` tokens;
    zero for prompt lookup."""
    drafts = [*_drafts(facts), *([] if assistant is None else [assistant])]
    return max((bytes_of(each, facts.device, config, k) for each in drafts), default=0)


def bytes_of(draft: ServedDraft, device: str, config: EngineConfig, k: int) -> int:
    """Return the bytes of a draft: of its weights, its matrices of logits, and its pages."""
    assert config.max_model_len is not None
    on_cpu = device == "cpu"
    width = 4 if on_cpu else 2
    logits = width * draft.own_logits if on_cpu else draft.own_logits + draft.copied_logits
    of_request = config.max_model_len * draft.arch.cached_numbers * width
    of_request += slot_bytes(draft.arch, k + 2)
    return width * draft.num_params + logits + draft.num_heads * config.max_batch_size * of_request


def _drafts(facts: PlanFacts) -> Iterator[ServedDraft]:
    spec = facts.specs.get("draft")
    if isinstance(spec, Draft):
        yield spec.kind.served(facts)
    if exports_mtp(facts):
        yield Mtp().served(facts)
