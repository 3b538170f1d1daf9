"""A student of its own config: its shape, and weights taken from evenly chosen layers, heads and channels of
a larger model, or random.

Evenly chosen means that the i-th of n kept among N is i (N - 1) / (n - 1), rounded: first and last are
kept. All matrices that share a dimension take the same choice, so the kept parts stay connected. With
fewer query heads or KV heads, whole KV groups are chosen, then query heads inside each group.

Shapes: D hidden, F ffn, H heads, K kv heads, C head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.arch_params import is_compressed
from compress.models.decoder import Decoder
from compress.models.expert_pruning import with_experts
from compress.models.family import family_of_arch
from compress.models.pruning import (
    OF_HEADS,
    Widths,
    resized,
    why_channels_stay,
    why_heads_stay,
    why_layers_stay,
    with_layers,
)
from compress.models.weights import WeightSource, dense, split_outer
from compress.models.xielu import PARAMETERS
from compress.quant.kv import KV_SCALES


@dataclass(frozen=True)
class Shape:
    """Widths of a student; what is None stays the teacher's."""

    layers: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    heads: int | None = None
    kv_heads: int | None = None


def evenly(num_kept: int, num_all: int) -> list[int]:
    """Return `num_kept` of 0..num_all-1, first and last among them."""
    if num_kept == 1:
        return [0]
    return [round(idx * (num_all - 1) / (num_kept - 1)) for idx in range(num_kept)]


def student_arch(teacher: Arch, shape: Shape) -> Arch:
    """Return the shape of a student.

    Raises:
        UsageError: a student larger than its teacher, a count below one, or heads that cannot share KV heads
            evenly.
    """
    if not teacher.is_uniform:
        raise UsageError(
            "student: the layers of the teacher differ in width, so no even choice of heads and channels "
            "fits all of them."
        )
    if (reason := _why_uncut(teacher)) is not None:
        raise UsageError(f"student: {reason}; {_instead_of_student(teacher)}")
    if (reason := why_layers_stay(teacher)) is not None:
        raise UsageError(f"student: {reason} No student is cut from it; name a smaller checkpoint.")
    first = teacher.layers[0]
    wanted = {
        "layers": (shape.layers, teacher.num_layers),
        "hidden": (shape.hidden, teacher.hidden_size),
        "ffn": (shape.ffn, first.intermediate_size),
        "heads": (shape.heads, first.num_heads),
        "kv_heads": (shape.kv_heads, first.num_kv_heads),
    }
    for name, (value, most) in wanted.items():
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"student: {name} {value} is not between 1 and the teacher's {most}.")
    num_heads = shape.heads or first.num_heads
    num_kv_heads = shape.kv_heads or first.num_kv_heads
    if num_heads % num_kv_heads or num_heads // num_kv_heads > first.num_heads // first.num_kv_heads:
        raise UsageError(
            f"student: {num_heads} query heads on {num_kv_heads} KV heads; each KV head serves the same "
            "number, at most the teacher's "
            f"{first.num_heads // first.num_kv_heads}. Give heads and kv_heads that fit."
        )
    family = family_of_arch(teacher)
    if family.untouched and shape.hidden not in (None, teacher.hidden_size):
        raise UsageError(
            f"student: {', '.join(family.untouched)} of this {teacher.family} model write into its hidden "
            "states, so their size stays."
        )
    kept = evenly(shape.layers or teacher.num_layers, teacher.num_layers)
    widths = Widths(num_heads, num_kv_heads, shape.ffn or first.intermediate_size, len(kept))
    student = resized(with_layers(teacher, kept), widths).replace(
        hidden_size=shape.hidden or teacher.hidden_size
    )
    again = family.read_config(family.write_config(student))
    return student.replace(embed_scale=again.embed_scale)  # some follow from the hidden size


def _why_uncut(teacher: Arch) -> str | None:
    """Return the reason why no student is cut from a teacher, None where one can be."""
    if teacher.has_experts:
        return "the teacher is a mixture of experts, from which no student is cut"
    if teacher.has_latents:
        return "the teacher has latent attention, from which no student is cut"
    if is_compressed(teacher):
        return "the teacher has compressed attention, from which no student is cut"
    if teacher.num_streams > 1 or teacher.hyper is not None or teacher.laurel_rank:
        return (
            "the residual of the teacher is several streams, or has gates or LAuReL, or its sums are normed, "
            "from which no student is cut"
        )
    if teacher.has_recurrences:
        return "the teacher has recurrences, from which no student is cut"
    if any(layer.only_half is not None for layer in teacher.layers):
        return "layers of the teacher have attention or an FFN, and even choices of layers would part them"
    if any(layer.norm_gate_rank for layer in teacher.layers):
        return "norms of the teacher have gates, from which no student is cut"
    return None


def _instead_of_student(teacher: Arch) -> str:
    """Return the advice for a model from which no student is cut: what of it `prune` removes, or another
    model where that is nothing."""
    is_removed = {
        "experts": _loses_experts(teacher),
        "heads": why_heads_stay(teacher) is None,
        "layers": why_layers_stay(teacher) is None,
        "channels of the FFN": not teacher.has_experts and why_channels_stay(teacher) is None,
    }
    names = [name for name, removed in is_removed.items() if removed]
    if not names:
        return "nothing of it is removed by `prune` either, so name a smaller checkpoint."
    *others, last = names
    joined = f"{', '.join(others)} or {last}" if others else last
    return f"remove {joined} by `prune` instead."


def _loses_experts(arch: Arch) -> bool:
    """Return whether `prune` can remove experts of a model."""
    mixture = next((layer.experts for layer in arch.layers if layer.experts is not None), None)
    if mixture is None:
        return False
    try:
        with_experts(arch, mixture.num_experts - 1)
    except UsageError:
        return False
    return True


def sliced_decoder(source: WeightSource, arch: Arch) -> Decoder:
    """Return a float32 student on the CPU with weights of the source, from whose shape `arch` was cut; the
    source is read a layer at a time."""
    decoder = Decoder(arch)
    hidden = torch.tensor(evenly(arch.hidden_size, source.arch.hidden_size))
    state = {
        name: _cut(name, dense(value, torch.float32), hidden, {})
        for name, value in split_outer(source.outer())[0].items()
    }
    for idx, source_idx in enumerate(evenly(arch.num_layers, source.arch.num_layers)):
        channels = _channels(source.arch, source_idx, arch, idx)
        for name, value in source.layer(source_idx).items():
            if name not in KV_SCALES.values():
                state[f"layers.{idx}.{name}"] = _cut(
                    name,
                    dense(value, torch.float32),
                    hidden,
                    channels,
                    is_whole=arch.whole_qk_norm or arch.own_qk_norm,
                )
    if arch.tied_head:
        state["head.weight"] = state["embed.weight"]
    decoder.load_state_dict(state, strict=True)
    return decoder


def _channels(teacher: Arch, teacher_idx: int, student: Arch, student_idx: int) -> dict[str, Tensor]:
    """Return the query heads, the channels of query, key and value, the FFN dimensions, the channels of an
    indexer of blocks and the numbers of relative logits that a layer keeps."""
    old = teacher.layers[teacher_idx]
    new = student.layers[student_idx]
    groups = evenly(new.num_kv_heads, old.num_kv_heads)
    old_repeat = old.num_heads // old.num_kv_heads
    heads = [
        group * old_repeat + idx
        for group in groups
        for idx in evenly(new.num_heads // new.num_kv_heads, old_repeat)
    ]

    index_dim = 0 if old.block_indexer is None else old.block_indexer.head_dim
    rank = 0 if old.relative is None else old.relative.rank

    def spread(chosen: list[int], width: int = old.head_dim) -> Tensor:
        return torch.tensor([head * width + channel for head in chosen for channel in range(width)])

    return {
        "heads": torch.tensor(heads),
        "q": spread(heads),
        "k": spread(groups),
        "v": spread(groups, old.value_dim),
        "o": spread(heads, old.value_dim),
        "ffn": torch.tensor(evenly(new.intermediate_size, old.intermediate_size)),
        "indexer_q": spread(groups, index_dim),
        "indexer_k": torch.arange(index_dim),
        "relative": spread(heads, rank),
    }


_ROWS = {
    "attn.q": "q",
    "attn.k": "k",
    "attn.v": "v",
    "attn.gate": "q",
    "attn.indexer.q": "indexer_q",
    "attn.indexer.k": "indexer_k",
    "attn.relative": "relative",
    "attn.k_conv": "k",
    "attn.v_conv": "v",
    "ffn.gate": "ffn",
    "ffn.up": "ffn",
    "attn.sub_norm": "o",
    "ffn.sub_norm": "ffn",
}
_COLUMNS = {"attn.o": "o", "ffn.down": "ffn"}
_WHOLE = (
    "head.bias",
    "layer_scalar",
    "attn.profiles",
    "ffn.factor",
    "attn.indexer.q_norm.weight",
    "attn.indexer.k_norm.weight",
    *(f"ffn.{name}" for name in PARAMETERS),
)
"""Parameters that do not depend on widths."""


def _cut(
    name: str, tensor: Tensor, hidden: Tensor, channels: dict[str, Tensor], *, is_whole: bool = False
) -> Tensor:
    """Return the kept part of a parameter; `is_whole`: norms of q and k span all heads."""
    module, _, leaf = name.rpartition(".")
    if name in OF_HEADS:
        of_heads = tensor[channels["heads"]]
        return of_heads if of_heads.dim() == 1 else of_heads[:, hidden]
    if module in ("attn.q_norm", "attn.k_norm"):
        own = channels["q" if module == "attn.q_norm" else "k"]
        return tensor[own] if is_whole else tensor
    if name in _WHOLE:
        return tensor
    rows = channels[_ROWS[module]] if module in _ROWS else hidden
    if tensor.dim() != 2:
        return tensor[rows]
    if module in ("embed", "positions", "head"):
        return tensor[:, hidden]
    assert leaf == "weight"
    return tensor[rows][:, channels[_COLUMNS[module]] if module in _COLUMNS else hidden]
