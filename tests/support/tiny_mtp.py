"""Tiny checkpoints of `transformers` with an MTP head, and the head computed by modules of `transformers`.

The head's layer is the last of a model with one layer more, whose tensors get the names that checkpoints
have. `transformers` reads no such layer, so its modules are put together here.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compress.models.family import family_of
from tests.support.tiny_hf import CASES, build_config, saved

MTP_CASES = (
    "deepseek_v3",
    "glm4-moe",
    "glm4_moe_lite",
    "exaone_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_5",
    "qwen3_5_moe",
    "mimo_v2_flash",
    "deepseek_v32",
    "glm_moe_dsa",
    "axk1",
    "glm4v_moe",
    "kimi_k25",
    "solar_open",
    "minicpmv4_6",
    "minicpm_ocr",
    "hy_v3",
    "bailing_hybrid",
    "ernie4_5_moe",
    "exaone4_5",
    "glm_ocr",
    "mellum-types-yarn",
    "nemotron_h-experts",
    "nemotron_h-latents-biases",
    "nemotron_h_omni",
)
DENSE = ("exaone_moe", "mimo_v2_flash")
"""Families whose head has a dense FFN."""
IN_WINDOWS = ("mimo_v2_flash", "exaone4_5", "mellum")
"""Families whose head has attention in a window."""
LISTS = ("layer_types", "mlp_layer_types", "indexer_types", "is_moe_layer")
"""Fields of a config with an entry for each layer."""
HALVES = {"nemotron_h": ("full_attention", "moe"), "nemotron_h_omni": ("full_attention", "moe")}
"""Families of half-layers, and the types of those that are a head."""


OTHER_NAMES = {"mimo_v2_flash": {"post_attention_layernorm": "pre_mlp_layernorm"}}
"""Modules of a head's layer that other layers name otherwise."""


@dataclass(frozen=True)
class ReferenceHead:
    """A head as modules of `transformers`: `one_layer` is a model whose last norm is the head's."""

    target: nn.Module
    one_layer: nn.Module
    embed_norm: nn.Module
    hidden_norm: nn.Module
    fc: Tensor

    @torch.no_grad()
    def outputs(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return (g [B, S - 1, D] of each token but the last, logits of the token after the next)."""
        hidden_BSD = self.target(tokens_BS, output_hidden_states=True).hidden_states[-1]
        return self.after(hidden_BSD[:, :-1], tokens_BS[:, 1:])

    @torch.no_grad()
    def after(self, hidden_BSD: Tensor, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return (g [B, S, D], logits [B, S, V]) of hidden states and of the tokens that follow them."""
        embedded_BSD = self.target.get_input_embeddings()(tokens_BS)
        pair = torch.cat((self.embed_norm(embedded_BSD), self.hidden_norm(hidden_BSD)), dim=-1)
        out_BSD = self.one_layer(inputs_embeds=pair @ self.fc.T, use_cache=False).last_hidden_state
        return out_BSD, self.target.get_output_embeddings()(out_BSD)


def saved_with_mtp(directory: Path, case: str, **changes: Any) -> ReferenceHead:
    """Save a tiny model with a head, and return what computes the head."""
    family, own = CASES[case]
    own = {**own, **changes}
    config = build_config(family, own).get_text_config()
    num_layers = config.num_hidden_layers
    num_own = len(HALVES.get(family, ("whole",)))
    lists: dict[str, list[Any]] = {
        name: [*getattr(config, name), _last(family, name, getattr(config, name))]
        for name in LISTS
        if getattr(config, name, None) and len(getattr(config, name)) == num_layers
    }
    if family in HALVES:
        lists = {"layers_block_type": [*config.layers_block_type, *HALVES[family]]}
    if family == "ernie4_5_moe":
        own["moe_layer_end_index"] = num_layers - 1
    model = saved(directory, family, {**own, **lists, "num_hidden_layers": num_layers + num_own})
    model = model if hasattr(model, "model") else model.language_model
    file = directory / "model.safetensors"
    tensors = load_file(file)
    raw = json.loads((directory / "config.json").read_text())
    text = raw.get("text_config", raw)
    text |= {"num_hidden_layers": num_layers} | {
        name: each[:num_layers] for name, each in lists.items() if name in text
    }
    (directory / "config.json").write_text(json.dumps(raw))
    names = family_of(raw).mtp
    assert names is not None
    after, next_after = (f"{family_of(raw).layer_prefix}{num_layers + idx}" for idx in (0, 1))
    layer = after if names.layer_prefix is None else f"{names.layer_prefix}0"
    inside = {f"{after}.{own}.": f"{layer}.{other}." for own, other in OTHER_NAMES.get(family, {}).items()}
    second = {f"{next_after}.": f"{names.layer_prefix}1."} if family in HALVES else {}
    for old, new in {**inside, **second, f"{after}.": f"{layer}."}.items():
        tensors = {name.replace(old, new): each for name, each in tensors.items()}
    base = _text_model(model)
    last_norm = "norm_f" if family in HALVES else "norm"
    norm = getattr(base, last_norm)
    norms = {name: _noisy(copy.deepcopy(norm)) for name in ("embed_norm", "hidden_norm")}
    norms["norm"] = _noisy(copy.deepcopy(norm)) if "norm" in names.modules else norm
    size = config.hidden_size
    fc = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(11)) * (2 * size) ** -0.5
    parts = {f"{name}.weight": each.weight.detach() for name, each in norms.items()} | {"fc.weight": fc}
    for name, each in parts.items():
        module, _, leaf = name.rpartition(".")
        if module not in names.modules:
            continue
        tensors[f"{names.modules[module].format(layer=layer)}.{leaf}"] = each.clone()
    if names.layer_prefix is None:  # published copies of what the target has
        tensors[f"{layer}.embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        tensors[f"{layer}.shared_head.head.weight"] = model.get_output_embeddings().weight.detach().clone()
    save_file(tensors, file, metadata={"format": "pt"})
    one_layer = copy.deepcopy(base)
    one_layer.layers = one_layer.layers[num_layers:]
    for idx, each in enumerate(one_layer.layers):
        each.layer_idx = idx
    if family == "exaone_moe":  # with a rope, in a layer without a window
        one_layer.layers[0].self_attn.is_sliding = True
    setattr(one_layer, last_norm, norms["norm"])
    one_layer.config.num_hidden_layers = num_own
    for name in lists:
        setattr(one_layer.config, name, lists[name][num_layers:])
    base.layers = base.layers[:num_layers]
    base.config.num_hidden_layers = num_layers
    return ReferenceHead(model, one_layer, norms["embed_norm"], norms["hidden_norm"], fc)


def _last(family: str, name: str, values: list[Any]) -> Any:
    """Return what a list of a config has for the head's layer."""
    if name == "layer_types":
        return "sliding_attention" if family in IN_WINDOWS else "full_attention"
    return "dense" if family in DENSE and name == "mlp_layer_types" else values[-1]


def _text_model(model: Any) -> Any:
    """Return the decoder of a model without its head."""
    inner = model.model
    return getattr(inner, "language_model", inner)


def _noisy(norm: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(sum(map(ord, type(norm).__name__)))
    with torch.no_grad():
        norm.weight.add_(0.2 * torch.randn(norm.weight.shape, generator=generator))
    return norm
