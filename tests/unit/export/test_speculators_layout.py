"""The speculators layout of an EAGLE-3 head: what is written is what was there, and the head means the same
numbers to others.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from compress.errors import UnsupportedFormat
from compress.export.speculators import LINEARS, is_eagle3, open_eagle3, write_speculators
from compress.models.attention import FullAttention
from compress.models.eagle3 import Eagle3Head, save_eagle3
from compress.models.fresh_eagle3 import random_eagle3
from compress.models.layer_shape import Rope
from compress.models.weights import dense
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight
from tests.support.tiny_decoder import LLAMA, tiny_arch

CPU = torch.device("cpu")
LLAMA3 = Rope(500000.0, "llama3", 8.0, 8192, 1.0, 4.0)
YARN = Rope(10000.0, "yarn", 4.0, 32, attention_factor=1.2)


def make_head(rope: Rope = LLAMA3, **options: Any) -> Eagle3Head:
    arch = tiny_arch(LLAMA, hidden_size=64, intermediate_size=96, mlp_bias=False)
    arch = arch.replace(layers=tuple(replace(each, rope=rope) for each in arch.layers))
    head = random_eagle3(arch, device=CPU, dtype=torch.float32, draft_vocab_size=40, **options)
    generator = torch.Generator().manual_seed(0)
    norms = {
        name: 1 + 0.3 * torch.randn(weight.shape, generator=generator)
        for name, weight in head.weights.items()
        if "norm" in name
    }
    return replace(head, weights={**head.weights, **norms})


def written(head: Eagle3Head, path: Path) -> Path:
    write_speculators(path, head, verifier="some/model", architectures=["LlamaForCausalLM"], k=4)
    return path


def same(a: Any, b: Any) -> bool:
    if isinstance(a, QuantizedWeight):
        return (
            isinstance(b, QuantizedWeight)
            and a.scheme == b.scheme
            and torch.equal(a.dequantize(), b.dequantize())
        )
    return torch.equal(a, b)


@pytest.mark.parametrize("rope", [Rope(10000.0), Rope(10000.0, "linear", 2.0), LLAMA3, YARN])
@pytest.mark.parametrize(
    "codes", [{}, {"scheme": "W4A16_G32"}, {"scheme": "W4A16_G32", "head_scheme": "FP8_DYNAMIC"}]
)
def test_what_is_written_is_read_back(tmp_path: Path, rope: Rope, codes: dict[str, str]) -> None:
    head = make_head(rope, **{name: SCHEMES[scheme] for name, scheme in codes.items()})
    head = replace(head, facts=replace(head.facts, norm_before_residual=True))
    found = open_eagle3(written(head, tmp_path / "draft"))
    assert is_eagle3(tmp_path / "draft")
    assert found.facts == head.facts
    assert torch.equal(found.vocabulary_W, head.vocabulary_W)
    assert found.weights.keys() == head.weights.keys()
    assert all(same(found.weights[name], weight) for name, weight in head.weights.items())
    assert found.embed_VD is None


def test_tensors_have_the_names_and_shapes_that_others_read(tmp_path: Path) -> None:
    tensors = load_file(written(make_head(), tmp_path) / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (64, 192),
        "layers.0.input_layernorm.weight": (64,),
        "layers.0.hidden_norm.weight": (64,),
        "layers.0.self_attn.q_proj.weight": (32, 128),
        "layers.0.self_attn.k_proj.weight": (16, 128),
        "layers.0.self_attn.v_proj.weight": (16, 128),
        "layers.0.self_attn.o_proj.weight": (64, 32),
        "layers.0.post_attention_layernorm.weight": (64,),
        "layers.0.mlp.gate_proj.weight": (96, 64),
        "layers.0.mlp.up_proj.weight": (96, 64),
        "layers.0.mlp.down_proj.weight": (64, 96),
        "norm.weight": (64,),
        "lm_head.weight": (40, 64),
        "d2t": (40,),
        "t2d": (61,),
    }
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    words = torch.arange(40) + tensors["d2t"]
    assert words.tolist() == tensors["t2d"].nonzero().flatten().tolist()


def peer_step(
    tensors: dict[str, Tensor], config: dict[str, Any], embedded_BSD: Tensor, hidden_BSD: Tensor, before: bool
) -> Tensor:
    """One step as other programs compute it: a Llama layer of `transformers` whose q, k and v read the two
    halves side by side.
    """
    layer_config = LlamaConfig(**config, attn_implementation="eager")
    layer = LlamaDecoderLayer(layer_config, 0)
    norm = LlamaRMSNorm(64, eps=layer_config.rms_norm_eps)
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(layer.self_attn, name)
        setattr(layer.self_attn, name, torch.nn.Linear(128, old.out_features, bias=False))
    own = {
        name.removeprefix("layers.0."): tensor
        for name, tensor in tensors.items()
        if name.startswith("layers.0.")
    }
    norm.load_state_dict({"weight": own.pop("hidden_norm.weight")})
    layer.load_state_dict(own, strict=True)
    seq_len = hidden_BSD.shape[1]
    rotary = LlamaRotaryEmbedding(layer_config)(hidden_BSD, torch.arange(seq_len).unsqueeze(0))
    mask = torch.full((seq_len, seq_len), float("-inf")).triu(1)[None, None]
    normed = norm(hidden_BSD)
    attended, _ = layer.self_attn(
        torch.cat((layer.input_layernorm(embedded_BSD), normed), dim=-1),
        position_embeddings=rotary,
        attention_mask=mask,
    )
    x = (normed if before else hidden_BSD) + attended
    return x + layer.mlp(layer.post_attention_layernorm(x))


@pytest.mark.parametrize("before", [False, True])
@torch.no_grad()
def test_the_head_computes_what_others_compute_from_the_files(tmp_path: Path, before: bool) -> None:
    head = make_head()
    head = replace(head, facts=replace(head.facts, norm_before_residual=before))
    written(head, tmp_path)
    generator = torch.Generator().manual_seed(1)
    embedded, hidden = (torch.randn(2, 9, 64, generator=generator) for _ in range(2))
    config = json.loads((tmp_path / "config.json").read_text())
    theirs = peer_step(
        load_file(tmp_path / "model.safetensors"),
        config["transformer_layer_config"],
        embedded,
        hidden,
        before,
    )
    ours = head.decoder(dtype=torch.float32, device=CPU)(embedded, hidden, torch.arange(9), FullAttention())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_head_with_an_embedding_of_its_own_keeps_it(tmp_path: Path) -> None:
    own = torch.randn(61, 64)
    found = open_eagle3(written(replace(make_head(), embed_VD=own), tmp_path))
    assert found.embed_VD is not None
    assert torch.equal(found.embed_VD, own)


@pytest.mark.parametrize(
    ("changes", "layer", "sentence"),
    [
        ({"norm_before_residual": None}, {}, "does not say norm_before_residual"),
        ({"eagle_aux_hidden_state_layer_ids": None}, {}, "eagle_aux_hidden_state_layer_ids"),
        ({"norm_before_fc": True}, {}, "this one has 1 layer\\(s\\) of llama, norm_before_fc"),
        ({}, {"num_hidden_layers": 2}, "this one has 2 layer"),
        ({}, {"model_type": "qwen3"}, "of qwen3"),
        ({"draft_vocab_size": 39}, {}, "expected \\(39,"),
    ],
)
def test_a_head_that_computes_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], layer: dict[str, Any], sentence: str
) -> None:
    config = json.loads((written(make_head(), tmp_path) / "config.json").read_text())
    config = {
        **config,
        **changes,
        "transformer_layer_config": {**config["transformer_layer_config"], **layer},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFormat, match=sentence):
        open_eagle3(tmp_path)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    written(make_head(scheme=SCHEMES["W4A16_G32"]), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["fc.weight_scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedFormat, match=r"lacks fc.weight_scale"):
        open_eagle3(tmp_path)


def test_other_directories_are_none(tmp_path: Path) -> None:
    assert not is_eagle3(tmp_path)
    save_eagle3(tmp_path, make_head())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not is_eagle3(tmp_path)


def test_linears_of_one_input_have_one_global_scale(tmp_path: Path) -> None:
    head = make_head()
    scheme = SCHEMES["NVFP4"]
    names = [f"layers.0.attn.{each}.weight" for each in "qkv"]
    sizes = dict(zip(names, (4.0, 0.02, 0.02), strict=True))
    codes = {
        f"{name}.weight": nearest_weight(
            sizes.get(f"{name}.weight", 1.0) * dense(head.weights[f"{name}.weight"]), scheme, torch.float32
        )
        for name in LINEARS
        if f"{name}.weight" in head.weights
    }
    write_speculators(
        tmp_path, replace(head, weights={**head.weights, **codes}), verifier="v", architectures=["V"], k=2
    )
    tensors = load_file(tmp_path / "model.safetensors")
    shared = {float(tensors[f"layers.0.self_attn.{each}_proj.weight_global_scale"]) for each in "qkv"}
    assert len(shared) == 1
