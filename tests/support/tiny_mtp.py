"""Tiny checkpoints of `transformers` with MTP heads, and the head computed by modules of `transformers`.

The head's layer is the last of a model with one layer more, whose tensors get the names that checkpoints
have. `transformers` reads no such layer, so its modules are put together here.
"""

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compress.models.family import family_of
from compress.models.mtp_names import MtpNames
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build_config, saved

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
    "step3p7",
    "step3p7-as-published",
)
DENSE = ("exaone_moe", "mimo_v2_flash", "step3p7")
"""Families whose head has a dense FFN."""
IN_WINDOWS = ("mimo_v2_flash", "exaone4_5", "mellum", "step3p7")
"""Families whose head has attention in a window."""
LISTS = ("layer_types", "mlp_layer_types", "indexer_types", "is_moe_layer")
"""Fields of a config with an entry for each layer."""
CAPS = ("swiglu_limits", "swiglu_limits_shared")
"""Fields of a config with a cap for each layer, and for those that predict further tokens."""
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
    own_head_VD: Tensor | None = None
    further: tuple["ReferenceHead", ...] = ()

    @torch.no_grad()
    def outputs(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return (g [B, S - 1, D] of each token but the last, logits of the token after the next)."""
        hidden_BSD = self.target(tokens_BS, output_hidden_states=True).hidden_states[-1]
        return self.after(hidden_BSD[:, :-1], tokens_BS[:, 1:])

    @torch.no_grad()
    def after(self, hidden_BSD: Tensor, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return (g [B, S, D], logits [B, S, V]) of hidden states and of the tokens that follow them."""
        out_BSD, _ = self.outputs_of(hidden_BSD, tokens_BS)
        if self.own_head_VD is not None:
            return out_BSD, out_BSD @ self.own_head_VD.T
        return out_BSD, self.target.get_output_embeddings()(out_BSD)

    @torch.no_grad()
    def outputs_of(self, hidden_BSD: Tensor, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return (g [B, S, D], the stream before its norm [B, S, D]) of hidden states and of the tokens that
        follow them."""
        embedded_BSD = self.target.get_input_embeddings()(tokens_BS)
        pair = torch.cat((self.embed_norm(embedded_BSD), self.hidden_norm(hidden_BSD)), dim=-1)
        streams: list[Tensor] = []
        norm = next(
            getattr(self.one_layer, name) for name in ("norm", "norm_f") if hasattr(self.one_layer, name)
        )
        hook = norm.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
        out_BSD = self.one_layer(inputs_embeds=pair @ self.fc.T, use_cache=False).last_hidden_state
        hook.remove()
        return out_BSD, streams[-1]


def saved_with_mtp(directory: Path, case: str, *, num_heads: int = 1, **changes: Any) -> ReferenceHead:
    """Save a tiny model with one head or more, and return what computes the first of them, with the others
    as `further`."""
    family, own = CASES[case]
    own = {**own, **changes}
    config = build_config(family, own).get_text_config()
    num_layers = config.num_hidden_layers
    num_own = len(HALVES.get(family, ("whole",)))
    lists: dict[str, list[Any]] = {
        name: [*getattr(config, name), *[_last(family, name, getattr(config, name))] * num_heads]
        for name in LISTS
        if getattr(config, name, None) and len(getattr(config, name)) == num_layers
    }
    if family in HALVES:
        lists = {"layers_block_type": [*config.layers_block_type, *HALVES[family]]}
    if family == "ernie4_5_moe":
        own["moe_layer_end_index"] = num_layers - 1
    own |= {name: [*own[name], *[0.6] * num_heads] for name in CAPS if name in own}
    model = saved(directory, family, {**own, **lists, "num_hidden_layers": num_layers + num_own * num_heads})
    model = model if hasattr(model, "model") else model.language_model
    file = directory / "model.safetensors"
    tensors = load_file(file)
    raw = json.loads((directory / "config.json").read_text())
    text = raw.get("text_config", raw)
    text |= {"num_hidden_layers": num_layers} | {
        name: each[:num_layers] for name, each in lists.items() if name in text
    }
    if case == "step3p7":
        text |= {f"mtp_{name}": each[num_layers:] for name, each in lists.items()}
    if case == "step3p7-as-published":
        text |= {"layer_types": lists["layer_types"]}
    (directory / "config.json").write_text(json.dumps(raw))
    table = family_of(raw)
    names = table.mtp
    assert names is not None
    base = _text_model(model)
    heads = []
    for idx in range(num_heads):
        first = num_layers + num_own * idx
        prefix = table.layer_prefix if names.layer_prefix is None else names.layer_prefix
        layer = f"{prefix}{first if names.layer_prefix is None else idx}"
        parts, head = _head(base, model, family, names, first, idx)
        tensors = _renamed(tensors, family, table.layer_prefix, first, layer)
        for name, each in parts.items():
            module, _, leaf = name.rpartition(".")
            tensors[f"{names.modules[module].format(layer=layer)}.{leaf}"] = each.clone()
        if names.layer_prefix is None:  # published copies of what the target has
            copies = {
                "embed_tokens": model.get_input_embeddings(),
                "shared_head.head": model.get_output_embeddings(),
            }
            tensors |= {
                f"{layer}.{name}.weight": each.weight.detach().clone() for name, each in copies.items()
            }
        for name in lists:
            setattr(head.one_layer.config, name, lists[name][first : first + num_own])
        heads.append(head)
    save_file(tensors, file, metadata={"format": "pt"})
    base.layers = base.layers[:num_layers]
    base.config.num_hidden_layers = num_layers
    return replace(heads[0], further=tuple(heads[1:]))


def _head(
    base: Any, model: Any, family: str, names: MtpNames, first: int, idx: int
) -> tuple[dict[str, Tensor], ReferenceHead]:
    """Return the tensors of a head outside of its layer by the names of its modules, and what computes it;
    its layer is that with index `first` of the model's."""
    last_norm = "norm_f" if family in HALVES else "norm"
    norm = getattr(base, last_norm)
    norms = {
        name: _noisy(copy.deepcopy(norm), seed=3 * idx + place)
        for place, name in enumerate(("embed_norm", "hidden_norm", "norm"))
    }
    if "norm" not in names.modules:
        norms["norm"] = norm
    size = base.config.hidden_size
    fc, own_VD = (
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed + 2 * idx)) * columns**-0.5
        for seed, rows, columns in ((11, size, 2 * size), (12, base.config.vocab_size, size))
    )
    one_layer = copy.deepcopy(base)
    one_layer.layers = one_layer.layers[first : first + len(HALVES.get(family, ("whole",)))]
    for place, each in enumerate(one_layer.layers):
        each.layer_idx = place
    if family == "exaone_moe":  # with a rope, in a layer without a window
        one_layer.layers[0].self_attn.is_sliding = True
    setattr(one_layer, last_norm, norms["norm"])
    one_layer.config.num_hidden_layers = len(one_layer.layers)
    tensors = {f"{name}.weight": each.weight.detach() for name, each in norms.items()}
    tensors |= {"fc.weight": fc, "head.weight": own_VD}
    stored = {name: each for name, each in tensors.items() if name.removesuffix(".weight") in names.modules}
    own = own_VD if "head" in names.modules else None
    return stored, ReferenceHead(model, one_layer, norms["embed_norm"], norms["hidden_norm"], fc, own)


def _renamed(
    tensors: dict[str, Tensor], family: str, prefix: str, first: int, layer: str
) -> dict[str, Tensor]:
    """Return the tensors with those of a head's layer, which has the index `first`, under its name."""
    after = f"{prefix}{first}"
    inside = {f"{after}.{own}.": f"{layer}.{other}." for own, other in OTHER_NAMES.get(family, {}).items()}
    second = {f"{prefix}{first + 1}.": f"{layer[:-1]}1."} if family in HALVES else {}
    for old, new in {**inside, **second, f"{after}.": f"{layer}."}.items():
        tensors = {name.replace(old, new): each for name, each in tensors.items()}
    return tensors


def _last(family: str, name: str, values: list[Any]) -> Any:
    """Return what a list of a config has for the head's layer."""
    if name == "layer_types":
        return "sliding_attention" if family in IN_WINDOWS else "full_attention"
    return "dense" if family in DENSE and name == "mlp_layer_types" else values[-1]


def _text_model(model: Any) -> Any:
    """Return the decoder of a model without its head."""
    inner = model.model
    return getattr(inner, "language_model", inner)


def _noisy(norm: nn.Module, *, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        norm.weight.add_(0.2 * torch.randn(norm.weight.shape, generator=generator))
    return norm
