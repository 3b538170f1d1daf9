"""The planned memory of drafts is that of the weights that engines load, with the copies that a GPU makes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.export import codecs, open_checkpoint
from compress.models.arch import Arch
from compress.models.mtp_reader import num_heads, read_mtps
from compress.models.weights import dense
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES
from compress.stages import PlanFacts
from compress.stages.draft.spec import Draft
from compress.stages.export import Export
from compress.stages.quantize.spec import Quantize
from compress.stages.validate.draft_estimate import bytes_of, draft_bytes
from compress.stages.validate.estimate import estimate
from compress.stages.validate.spec import Validate
from tests.support.tiny_decoder import tiny_arch
from tests.support.tiny_mtp import saved_with_mtp

SPEC = Validate(seq_len=32)
CONFIG = SPEC.engine_config(speculates=True)
K = 3


def draft(init: dict[str, Any]) -> Draft:
    return Draft.model_validate({"init": init})


def pages_of(arch: Arch, width: int) -> int:
    assert CONFIG.max_model_len is not None
    return CONFIG.max_batch_size * CONFIG.max_model_len * arch.cached_numbers * width


@pytest.mark.parametrize("case", ["glm4-moe", "step3p7", "exaone_moe"])
def test_heads_of_a_checkpoint_are_counted_as_they_are_loaded(case: str, tmp_path: Path) -> None:
    saved_with_mtp(tmp_path, case)
    source = open_checkpoint(tmp_path)
    heads = read_mtps(source, codecs())
    arch = source.arch
    logits = arch.vocab_size * arch.hidden_size
    own = heads[0].facts.own_head
    weights = sum(
        dense(each).numel() for head in heads for name, each in head.weights.items() if name != "head.weight"
    )
    facts = PlanFacts(arch, "cuda", {"draft": draft({"kind": "mtp"})}, source=tmp_path)
    pages = num_heads(source) * pages_of(heads[0].arch, 2)
    copied = len(heads) * logits if own else logits
    codes_OI = nearest_weight(
        torch.zeros(arch.vocab_size, 8), SCHEMES["FP8_DYNAMIC"], torch.bfloat16
    ).codes_OI
    assert codes_OI.itemsize == 1
    assert draft_bytes(facts, CONFIG, K) == 2 * weights + copied + pages
    of_cpu = 4 * weights + (4 * copied if own else 0) + 2 * pages
    assert draft_bytes(replace(facts, device="cpu"), CONFIG, K) == of_cpu


def test_no_copy_is_counted_of_a_head_in_codes(tmp_path: Path) -> None:
    saved_with_mtp(tmp_path, "glm4-moe")
    arch = open_checkpoint(tmp_path).arch
    facts = PlanFacts(arch, "cuda", {"draft": draft({"kind": "mtp"})}, source=tmp_path)
    in_codes = replace(
        facts, specs={**facts.specs, "quantize": Quantize(scheme="FP8_DYNAMIC", head="FP8_DYNAMIC")}
    )
    copied = draft_bytes(facts, CONFIG, K) - draft_bytes(in_codes, CONFIG, K)
    assert copied == arch.vocab_size * arch.hidden_size


def test_a_checkpoint_that_keeps_its_head_is_counted_without_a_draft_stage(tmp_path: Path) -> None:
    saved_with_mtp(tmp_path, "glm4-moe")
    arch = open_checkpoint(tmp_path).arch
    trained, kept = (
        PlanFacts(arch, "cuda", specs, source=tmp_path)
        for specs in ({"draft": draft({"kind": "mtp"})}, {"export": Export()})
    )
    assert draft_bytes(trained, CONFIG, K) == draft_bytes(kept, CONFIG, K) > 0


@pytest.mark.parametrize("init", [{"keep_layers": 2}, {"kind": "eagle3"}], ids=["pruned", "eagle3"])
@pytest.mark.parametrize("apart", [None, {}], ids=["together", "apart"])
def test_a_plan_has_room_for_two_engines_of_the_candidate_and_the_draft(
    init: dict[str, Any], apart: dict[str, Any] | None
) -> None:
    arch = tiny_arch(num_hidden_layers=4, max_position_embeddings=1024)
    spec = Validate(seq_len=32, apart=apart)
    specs = {"draft": draft(init)}
    facts = PlanFacts(arch, "cpu", specs)
    own = draft_bytes(facts, CONFIG, K)
    served = specs["draft"].kind.served(facts)
    assert own == 4 * served.num_params + pages_of(served.arch, 4) == bytes_of(served, "cpu", CONFIG, K)
    assert served.num_params > arch.vocab_size
    planned = estimate(spec, facts)
    assert planned.peak_bytes >= 2 * (4 * arch.num_params + pages_of(arch, 4)) + own
    assert f"with a draft of {own / 1e9:.3f} GB" in " ".join(planned.notes)
