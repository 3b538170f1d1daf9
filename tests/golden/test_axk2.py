"""A.X K2: the choice among experts of groups, the one tensor of queries and gates, what its table refuses and
restates, and what may not be done to norms with gates."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter

from compress.distill.student import Shape, student_arch
from compress.errors import StorageError, UnsupportedArch, UsageError
from compress.export import FORMATS
from compress.kernels.operands.routing import COUNTED_ROWS, RouterWeights
from compress.kernels.router.reference import route as route_on_cpu
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.decoder import DecoderLayer
from compress.models.experts import Experts
from compress.models.family import family_of
from compress.models.hyper_connection import HyperConnections
from compress.models.latent import Latent
from compress.models.layer_shape import Rope
from compress.models.moe import route
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build_config, saved
from tests.support.tiny_source import tiny_shape, tiny_source

LATENT: dict[str, Any] = {
    "num_kv_heads": 4,
    "rope": Rope(10000.0, rotary_dim=6),
    "latent": Latent(q_rank=28, kv_rank=12, rope_dim=6, value_dim=12, interleaved=True, gated=True),
}


def config_of(case: str = "axk2", **changes: Any) -> dict[str, Any]:
    return dict(build_config(*CASES[case]).to_dict() | {"dtype": "float32"} | changes)


def arch_of(case: str = "axk2", **changes: Any) -> Arch:
    stated = config_of(case, **changes)
    return family_of(stated).read_config(stated)


def test_experts_of_other_groups_are_chosen_before_negative_scores() -> None:
    """Each group has one expert above 0, so that four are these of two groups and both of the third."""
    config = build_config(*CASES["axk2-groups"])
    router = AXK2TopkRouter(config)
    bias_E = torch.tensor([0.3, -1.5, -1.2, 0.1, 0.2, -1.1])
    x_TD = torch.randn(64, config.hidden_size, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        router.weight.copy_(torch.eye(6, config.hidden_size))
        router.e_score_correction_bias.copy_(bias_E)
        logits_TE, weights_TK, ids_TK = router(x_TD)
    order_TK = ids_TK.argsort(dim=1)
    experts = arch_of("axk2-groups").layers[0].experts
    assert experts is not None
    arrivals = torch.zeros(COUNTED_ROWS, dtype=torch.int32)
    routers = RouterWeights(router.weight.detach(), None, bias_E, None, arrivals)
    of_kernel = route_on_cpu(x_TD, routers, experts)
    of_decoder = route(experts, logits_TE, bias_E)
    for ids, weights in (of_kernel, (of_decoder.experts_TR, of_decoder.weights_TR)):
        order = ids.argsort(dim=1)
        assert torch.equal(ids.gather(1, order).long(), ids_TK.gather(1, order_TK))
        torch.testing.assert_close(weights.gather(1, order), weights_TK.gather(1, order_TK))
    within = route(replace(experts, zeroes_groups=False), logits_TE, bias_E).experts_TR
    assert not bool((within.sort(dim=1).values == ids_TK.sort(dim=1).values).all(dim=1).any())


def test_queries_and_gates_are_the_one_tensor_of_the_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["axk2"])
    source = Checkpoint(tmp_path)
    shape = source.arch.layers[0]
    assert shape.latent is not None
    assert shape.linear_shape("attn.q_up", 48) == (6 * (16 + 14), 2 * 28)
    assert "attn.gate" not in shape.linears
    names = source.layer(0).keys()
    assert {"attn_norm.norm.weight", "attn_norm.gate_in.weight", "attn_norm.gate_out.weight"} <= names
    assert "ffn_norm.weight" in names
    assert {"ffn_norm.norm.weight", "ffn_norm.gate_in.weight"} <= source.layer(1).keys()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"n_group": 3}, "topk_group"),
        ({"topk_group": 1}, "n_group"),
        ({"gated_norm": False}, "gated_norm"),
        ({"attention_output_gate": False}, "attention_output_gate"),
        ({"gated_norm_rank": 0}, "gated_norm_rank"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace"),
        ({"auto_map": {"AutoModel": "modeling.Other"}}, "auto_map"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedArch, match=named):
        arch_of(**changes)


def test_a_config_states_groups_and_dense_layers_as_its_source_does() -> None:
    plain = arch_of()
    written = family_of(plain.config).write_config(plain)
    assert (written["n_group"], written["topk_group"]) == (None, None)
    assert "first_k_dense_replace" not in written
    counted = arch_of(mlp_layer_types=None, first_k_dense_replace=2)
    assert [each.experts is None for each in counted.layers] == [True, True, False]
    later = family_of(plain.config).write_config(counted.replace(layers=counted.layers[1:]))
    assert later["first_k_dense_replace"] == 1
    assert [each.experts is None for each in family_of(later).read_config(later).layers] == [True, False]
    grouped = arch_of("axk2-groups")
    assert family_of(grouped.config).write_config(grouped)["n_group"] == 3


def test_a_manifest_has_gates_where_a_layer_has_them() -> None:
    arch = arch_of("axk2-groups")
    facts, layers = json.loads(json.dumps(arch.to_json()))
    assert Arch.from_json(facts, layers).layers == arch.layers
    assert (layers[0]["norm_gate_rank"], layers[0]["latent"]["gated"]) == (12, True)
    _, (plain, _) = tiny_source().arch.to_json()
    assert "norm_gate_rank" not in plain
    with pytest.raises(StorageError, match="norm_gate_rank"):
        Arch.from_json(facts, [{**layers[0], "norm_gate_rank": -1}, *layers[1:]])


@pytest.mark.parametrize(
    ("facts", "layer", "named"),
    [
        ({"block": "sandwich"}, {}, "'sandwich'"),
        ({"norm": "layer"}, {}, "no 'rms'"),
        ({"unit_norms": True}, {}, "with weights"),
        ({"hyper": HyperConnections(2, 1e-6)}, {}, "several streams"),
        ({}, {"experts": Experts(6, 2, 48, post_norm=True)}, "without gates"),
    ],
)
def test_gates_are_those_of_plain_norms(facts: dict[str, Any], layer: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedArch, match=f"its norms have gates, and .*{named}"):
        tiny_source(layers=(tiny_shape(norm_gate_rank=4, **layer),), **facts)


def test_gates_of_latents_are_the_only_gates_of_outputs() -> None:
    with pytest.raises(UnsupportedArch, match="two of an output gate"):
        tiny_source(layers=(tiny_shape(**LATENT, output_gate=True),))
    with pytest.raises(UnsupportedArch, match="two of an output gate"):
        tiny_source(layers=(tiny_shape(**LATENT, head_gate="sigmoid"),))
    without = replace(LATENT["latent"], q_rank=0)
    with pytest.raises(UnsupportedArch, match="no such latents"):
        tiny_source(layers=(tiny_shape(**{**LATENT, "latent": without}),))


def test_nothing_is_smoothed_into_what_gates_read() -> None:
    def producers(**facts: Any) -> set[str]:
        arch = tiny_source(layers=(tiny_shape(**facts),)).arch
        return {pair.producer for pair in DecoderLayer(arch, 0).smoothing_pairs()}

    plain = {**LATENT, "latent": replace(LATENT["latent"], gated=False)}
    assert {"attn_norm", "attn.q_latent_norm"} <= producers(**plain)
    assert not {"attn_norm", "attn.q_latent_norm"} & producers(**LATENT, norm_gate_rank=4)
    assert "ffn_norm" in producers(**LATENT, norm_gate_rank=4)  # of a dense FFN, which has no gates


def test_students_and_graphs_have_no_gates() -> None:
    arch = tiny_source(layers=(tiny_shape(norm_gate_rank=4), tiny_shape(norm_gate_rank=4))).arch
    with pytest.raises(UsageError, match="norms of the teacher have gates"):
        student_arch(arch, Shape(layers=1))
    assert "gated-norms" in {rule.name for rule in FORMATS.get("onnx").broken_facts(arch)}
