"""Ling 3.0 as it is published: with other names than `transformers` saves, and with latents of queries, which
its class has not."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.config_file import read_config
from compress.models.family import family_of
from compress.models.weights import build_decoder
from tests.golden.test_families import SEQ_LEN, assert_same_tensors, tensors_of, tolerance
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved, tokens

CPU = torch.device("cpu")
Q_RANK = 20


def saved_as_published(directory: Path, case: str, *, q_rank: int = 0) -> Any:
    """Save the model of a case by its published names, and return it. In delta nets the last linear has
    another name than in attention; with a `q_rank` there are latents of queries."""
    model = saved(directory, *CASES[case])
    tensors = tensors_of(directory)
    recurrent = {name.removesuffix("o_norm.weight") for name in tensors if name.endswith("o_norm.weight")}
    for prefix in recurrent:
        tensors[f"{prefix}o_proj.weight"] = tensors.pop(f"{prefix}dense.weight")
    if q_rank:
        torch.manual_seed(1)
        for idx, layer in enumerate(model.model.layers):
            if layer.block_type == "full_attention":
                tensors |= with_latent_of_queries_(layer.self_attn, idx, q_rank)
                del tensors[f"model.layers.{idx}.attention.q_proj.weight"]
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    if q_rank:
        config = directory / "config.json"
        config.write_text(config.read_text().replace("{", f'{{"q_lora_rank": {q_rank}, ', 1))
    return model


def with_latent_of_queries_(attention: Any, idx: int, q_rank: int) -> dict[str, torch.Tensor]:
    """Put a latent before the queries of attention, and return its tensors by their published names."""
    rows, columns = attention.q_proj.weight.shape
    down, up = nn.Linear(columns, q_rank, bias=False), nn.Linear(q_rank, rows, bias=False)
    norm = type(attention.kv_a_layernorm)(q_rank)
    nn.init.normal_(norm.weight, 1.0, 0.1)
    attention.q_proj = nn.Sequential(down, norm, up).requires_grad_(False)
    named = {"q_a_proj": down, "q_a_layernorm": norm, "q_b_proj": up}
    return {f"model.layers.{idx}.attention.{name}.weight": each.weight.data for name, each in named.items()}


@pytest.mark.parametrize("q_rank", [0, Q_RANK])
@pytest.mark.parametrize("case", ["bailing_hybrid", "bailing_hybrid-loose-bound"])
def test_a_model_by_its_published_names_computes_the_same_and_keeps_them(
    case: str, q_rank: int, tmp_path: Path
) -> None:
    model = saved_as_published(tmp_path, case, q_rank=q_rank)
    source = Checkpoint(tmp_path)
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    with torch.no_grad():
        expected = model(tokens(2, SEQ_LEN)).logits
        found = decoder(tokens(2, SEQ_LEN))
    assert (found - expected).abs().max() <= tolerance(expected)
    assert {layer.latent.q_rank for layer in source.arch.layers if layer.latent is not None} == {q_rank}
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", source)
    assert_same_tensors(tmp_path / "written", tmp_path)
    assert "model.layers.0.attention.o_proj.weight" in tensors_of(tmp_path / "written")


def with_caps_(model: Any, experts: list[float], shared: list[float]) -> None:
    """Give the experts of a model of `transformers` the caps of layers, which its class has not."""
    for layer, of_experts, of_shared in zip(model.model.layers, experts, shared, strict=True):
        if not hasattr(layer.mlp, "experts"):
            continue
        if of_shared:
            both = layer.mlp.shared_experts
            both.act_fn = nn.Sequential(nn.SiLU(), nn.Hardtanh(-1.0, of_shared))  # silu is above -0.3
            both.up_proj = nn.Sequential(both.up_proj, nn.Hardtanh(-of_shared, of_shared))
        if of_experts:
            layer.mlp.experts._apply_gate = partial(capped, cap=of_experts)


def capped(gate_up: torch.Tensor, *, cap: float) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate).clamp(max=cap) * up.clamp(-cap, cap)


def test_caps_of_layers_are_computed_where_a_config_lists_them(tmp_path: Path) -> None:
    """As in vLLM and SGLang, and in layers with experts alone, of which the second and the third are two."""
    caps = {"expert_swiglu_limit_list": [4, 0, 0.02], "share_expert_swiglu_limit_list": [5, 0.03, 0.01]}
    family, changes = CASES["bailing_hybrid"]
    model = saved(tmp_path, family, {**changes, **caps})
    model.set_experts_implementation("batched_mm")
    source = Checkpoint(tmp_path)
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    with torch.no_grad():
        plain = model(tokens(2, SEQ_LEN)).logits
        with_caps_(model, *caps.values())
        expected = model(tokens(2, SEQ_LEN)).logits
        found = decoder(tokens(2, SEQ_LEN))
    assert (found - expected).abs().max() <= tolerance(expected)
    assert (found - plain).abs().max() > 10 * tolerance(expected)
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", source)
    assert {name: read_config(tmp_path / "written")[name] for name in caps} == caps


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    saved_as_published(tmp_path, "bailing_hybrid")
    plain = Checkpoint(tmp_path).layer(1)
    extra = {f"model.layers.3.{name}.weight": torch.ones(4, 4) for name in ("eh_proj", "attention.q_proj")}
    save_file({**tensors_of(tmp_path), **extra}, tmp_path / "model.safetensors")
    again = Checkpoint(tmp_path).layer(1)
    assert all(torch.equal(torch.as_tensor(plain[name]), torch.as_tensor(again[name])) for name in plain)


def test_the_published_class_is_stated_again(tmp_path: Path) -> None:
    saved_as_published(tmp_path, "bailing_hybrid")
    config = read_config(tmp_path) | {"architectures": ["BailingMoeV3ForCausalLM"]}
    family = family_of(config)
    assert family.write_config(family.read_config(config))["architectures"] == ["BailingMoeV3ForCausalLM"]
