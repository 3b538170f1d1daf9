"""Checks of the facts of a mixture of experts: that they fit one another."""

from collections.abc import Mapping
from typing import Any

from compress.untrusted.fields import Fields

SCORES = ("softmax", "sigmoid", "softmax_topk", "sparsemixer", "sqrt_softplus")
OF_TOKENS = ("sigmoid", "sqrt_softplus")
"""The scores that weigh experts which a table chooses."""
MIXED = 2
"""Experts that a token is routed to by SparseMixer."""


def check_experts(facts: Mapping[str, Any], stated: Fields, *, max_size: int) -> None:
    """Check that facts of experts fit one another; `stated` raises its error where they do not. A shared
    expert is at most `max_size` wide."""
    if facts.get("score", "softmax") not in SCORES:
        raise stated.wrong("score", facts["score"], f"one of {', '.join(SCORES)}")
    num_experts = facts["num_experts"]
    groups = facts.get("num_groups", 1)
    top_k = facts["top_k"]
    if top_k > num_experts:
        raise stated.wrong("top_k", top_k, f"at most the number of experts, {num_experts}")
    if facts.get("shared_size", 0) > max_size:
        raise stated.wrong("shared_size", facts["shared_size"], f"at most {max_size}")
    if facts.get("branch_norms") and not facts.get("shared_size"):
        raise stated.wrong("shared_size", 0, "at least 1 where branches are normed apart")
    plain = facts.get("shared_size") and not (facts.get("shared_gate") or facts.get("branch_norms"))
    if facts.get("shared_scale", 1.0) != 1 and not plain:
        raise stated.wrong("shared_scale", facts["shared_scale"], "1 but for a shared expert without a gate")
    weighs = facts.get("weighs_input")
    if weighs and top_k != 1:
        raise stated.wrong("top_k", top_k, "1 where a router weighs the inputs of experts")
    if weighs and (facts["score"] != "sigmoid" or facts.get("renormalize")):
        raise stated.wrong("score", facts["score"], "sigmoid where a router weighs the inputs of experts")
    changes = weighs or facts.get("branch_norms")
    if facts.get("latent_size") and changes:
        raise stated.wrong("latent_size", facts["latent_size"], "0 where inputs are normed apart or weighed")
    if (facts.get("latent_bias") or facts.get("latent_norms")) and not facts.get("latent_size"):
        raise stated.wrong("latent_size", 0, "at least 1 where linears of latents have biases, or norms")
    is_biased = facts.get("selection_bias") and facts.get("score") == "sigmoid"
    if facts.get("biased_logits") and not (is_biased and facts.get("num_groups", 1) == 1):
        wanted = "sigmoid, with a bias and no groups, where logits have it"
        raise stated.wrong("score", facts.get("score"), wanted)
    if facts.get("zeroes_groups") and not is_biased:
        raise stated.wrong("score", facts.get("score"), "sigmoid, with a bias, where other groups score 0")
    of_router = facts.get("selection_bias") or facts.get("num_groups", 1) > 1
    fits_table = facts.get("score") in OF_TOKENS and not of_router and not changes
    if facts.get("table_size") and not fits_table:
        raise stated.wrong(
            "score", facts.get("score"), f"one of {', '.join(OF_TOKENS)}, alone, where a table chooses"
        )
    is_mixed = facts.get("score") == "sparsemixer"
    if is_mixed and top_k != MIXED:
        raise stated.wrong("top_k", top_k, f"{MIXED} where one expert is chosen after the other")
    if is_mixed and (facts.get("renormalize") or of_router):
        raise stated.wrong("score", "sparsemixer", "another one with groups, a bias or divided weights")
    if facts.get("jitter", 0.0) and not is_mixed:
        raise stated.wrong("jitter", facts["jitter"], "0 where the score is not sparsemixer")
    if always := facts.get("always", 0):
        if always >= top_k:
            raise stated.wrong("always", always, f"less than the experts of a token, {top_k}")
        if not is_biased or facts.get("num_groups", 1) > 1 or facts.get("biased_logits"):
            wanted = "sigmoid, with a bias of scores and no groups, where all tokens choose some experts"
            raise stated.wrong("score", facts.get("score"), wanted)
    is_whole = plain and facts.get("shared_scale", 1.0) == 1 and not facts.get("post_norm")
    if facts.get("delayed") and not is_whole:
        raise stated.wrong("delayed", True, "false without a shared expert that is added as it is")
    apart = (
        *("always", "table_size", "latent_size", "weighs_input", "branch_norms", "post_norm"),
        *("output_scale", "one_output_scale"),
    )
    is_plain = facts.get("score", "softmax") in ("softmax", "sigmoid") and groups == 1
    if facts.get("zero_experts") and (not is_plain or any(facts.get(each) for each in apart)):
        wanted = (
            "0 with groups, a table, latents, scales of outputs, or other scores than softmax and sigmoid"
        )
        raise stated.wrong("zero_experts", facts["zero_experts"], wanted)
    if facts.get("one_output_scale") and facts.get("output_scale"):
        raise stated.wrong("output_scale", True, "one number of each expert, or one of all")
    top_groups = facts.get("top_groups", 1)
    if num_experts % groups or top_groups > groups:
        raise stated.wrong("num_groups", groups, f"a divisor of {num_experts} experts, at least {top_groups}")
    if groups > 1 and (num_experts // groups < 2 or top_k > top_groups * (num_experts // groups)):
        raise stated.wrong("num_groups", groups, f"so few that {top_k} experts can be chosen")
