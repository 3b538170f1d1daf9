"""EAGLE-3 heads before their training: one that begins as a part of its target, and random ones.

Shapes: W tokens of the head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.models.arch import Arch
from compress.models.eagle3 import (
    Eagle3Decoder,
    Eagle3Facts,
    Eagle3Head,
    eagle3_facts,
    last_attention,
    parameter_shapes,
)
from compress.models.initialise import INIT_STD
from compress.models.layer_shape import LayerShape
from compress.models.random_source import random_weight
from compress.models.weights import Weights, WeightSource, dense
from compress.quant.scheme import QuantizedWeight, Scheme


def fresh_eagle3(
    facts: Eagle3Facts, target: WeightSource, vocabulary_W: Tensor, *, generator: torch.Generator
) -> Eagle3Decoder:
    """Return a float32 head on the CPU for training.

    It begins as the target's last layer with attention and head, without a bias, on the deepest hidden state
    that it reads: fc passes that one on, and the columns that read the embedding are normal with std 0.02, as
    are the linears of its FFN that the layer does not have, its q and k where the values of that layer are
    narrower than its keys, and its q, k and v where it has latent attention.
    """
    decoder = Eagle3Decoder(facts)
    outer = target.outer()
    idx = last_attention(target.arch)
    kv_source = target.arch.layers[idx].kv_source
    of_source = {} if kv_source is None else target.layer(kv_source)
    last = {name: each for name, each in of_source.items() if name.startswith("attn.")} | target.layer(idx)
    size = facts.arch.hidden_size
    layer = "layers.0."
    others = _without_heads_of(target.arch.layers[idx])
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name == "fc.weight":
                parameter.zero_()[:, -size:].fill_diagonal_(1.0)
            elif name.startswith(layer) and name not in (
                f"{layer}embed_norm.weight",
                f"{layer}hidden_norm.weight",
            ):
                inner = name.removeprefix(layer)
                if inner == "ffn_norm.weight":
                    own = "ffn_norm" if "moe.shared_norm.weight" not in last else "moe.shared_norm"
                    parameter.copy_(_norm_weight(target.arch, last, own))
                    continue
                of_experts = inner not in last and inner.startswith("ffn.")
                if of_experts or inner.startswith(others):
                    parameter.normal_(0.0, INIT_STD, generator=generator)
                    continue
                if inner not in last:  # values that are keys
                    inner = inner.replace("attn.v", "attn.k")
                factor = target.arch.factor_of(inner.rpartition(".")[0])
                target_weight = dense(last[inner]).to(torch.float32) * factor
                if parameter.shape != target_weight.shape:  # q, k and v: the embedding's columns come first
                    parameter.normal_(0.0, INIT_STD, generator=generator)
                parameter[..., -target_weight.shape[-1] :] = target_weight
        decoder.get_parameter(f"{layer}hidden_norm.weight").copy_(
            _norm_weight(target.arch, last, "attn_norm")
        )
        decoder.norm.weight.copy_(_norm_weight(target.arch, outer, "norm") * target.arch.logit_scale)
        decoder.head.weight.copy_(
            dense(outer["embed.weight" if target.arch.tied_head else "head.weight"])[vocabulary_W]
        )
    return decoder


def _without_heads_of(shape: LayerShape) -> tuple[str, ...]:
    """Return the linears of a head that cannot begin as those of a layer, whose heads are other ones."""
    if shape.latent is not None:
        return ("attn.q", "attn.k", "attn.v")
    return ("attn.q", "attn.k") if shape.narrow_value_dim is not None else ()


def _norm_weight(target: Arch, weights: Weights, name: str) -> Tensor:
    """Return the factors of one of the target's norms, float32; ones where its layers do not have it, and
    those of the one norm of a layer whose halves run side by side."""
    found = (weights.get(each) for each in (f"{name}.weight", f"{name}.norm.weight", "attn_norm.weight"))
    stored = next((each for each in found if each is not None), None)
    if stored is None:
        return torch.ones(target.hidden_size)
    return dense(stored).to(torch.float32) + target.offset_of(name)


def random_eagle3(
    target: Arch,
    *,
    device: torch.device,
    dtype: torch.dtype,
    draft_vocab_size: int = 32000,
    layer_ids: Sequence[int] | None = None,
    scheme: Scheme | None = None,
    head_scheme: Scheme | None = None,
    seed: int = 0,
) -> Eagle3Head:
    """Return a head of random weights, for benchmarks: `scheme` for fc and the layer's linears,
    `head_scheme` for the head (None: dense)."""
    facts = eagle3_facts(target, draft_vocab_size=draft_vocab_size, layer_ids=layer_ids)
    generator = torch.Generator(device).manual_seed(seed)
    weights: dict[str, Tensor | QuantizedWeight] = {}
    for name, shape in parameter_shapes(facts).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=dtype, device=device)
        else:
            own = head_scheme if name == "head.weight" else scheme
            weights[name] = random_weight((shape[0], shape[1]), own, dtype=dtype, generator=generator)
    vocabulary_W = torch.arange(facts.draft_vocab_size) * target.vocab_size // facts.draft_vocab_size
    return Eagle3Head(facts, weights, vocabulary_W)
