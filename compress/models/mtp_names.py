"""How checkpoints name the layer that predicts a further token (multi-token prediction, arXiv 2412.19437),
and the shape that it has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape

Feeds = Literal["normed", "stream", "target"]
"""The hidden state that a further step reads: that of the step before, normed as the matrix of logits reads
it, or the stream before that norm; or, where the next of several heads takes the step, that of the target,
which all of them read."""
FEEDS: tuple[Feeds, ...] = ("normed", "stream", "target")


def last_attention_layer(target: Arch) -> LayerShape:
    """Return the shape of the last layer of a model with attention, and with keys and values of its own.

    Raises:
        UsageError: there is none.
    """
    having = [
        layer for layer in target.layers if layer.attends and layer.kv_source is None and not layer.only_half
    ]
    if not having:
        raise UsageError(
            f"no layer of this {target.family} model has attention as an MTP head has; draft with a smaller "
            "model or by n-grams instead."
        )
    return having[-1]


def last_layer_of(target: Arch, *, windowed: bool, sparse: bool) -> LayerShape:
    """Return the shape of the last layer of a model with a window, or of the last without one; with `sparse`
    it has experts.

    Raises:
        UsageError: there is none.
    """
    having = [
        layer
        for layer in target.layers
        if layer.attends and (layer.window is not None) == windowed and (layer.experts or not sparse)
    ]
    if not having:
        raise UsageError(
            f"no layer of this {target.family} model has attention {'with' if windowed else 'without'} a "
            f"window{' and experts' if sparse else ''} as its MTP head has; draft with a smaller model or by "
            "n-grams instead."
        )
    return having[-1]


def with_dense_ffn(target: Arch, layer: LayerShape) -> LayerShape:
    """Return a layer with the FFN of the dense layers of a model in place of its experts."""
    dense = [each.intermediate_size for each in target.layers if each.experts is None and each.has_ffn]
    size = dense[0] if dense else int(target.config["intermediate_size"])
    return replace(layer, experts=None, intermediate_size=size)


@dataclass(frozen=True)
class MtpNames:
    """Modules of an MTP head (`mtp.py`) on disk. `{layer}` is the name of its layer, which has index 0 after
    `layer_prefix`; where that is None, it is the layer after the model's last. A head without a `norm` ends
    in that of the model, and one with a `head` has a matrix of logits of its own. `feeds` is the hidden state
    that a further step reads. `layer_modules` are those inside of the layer that have other names than in the
    model's layers; with `halves_apart` its second half has the next index. `shape` returns the shape of the
    layer. `parts` are the modules that hold all tensors of such heads, where that is not the parent of
    `layer_prefix`, and `in_vllm` are a module on disk and what vLLM calls it, where it looks up linears by
    another name; `{index}` is that of the layer after the model's last. `count_decides`: the number of such
    layers in a config decides what other parts of the model compute, so that it stays where none is
    written."""

    modules: Mapping[str, str]
    layer_prefix: str | None = None
    layer_modules: Mapping[str, str] = field(default_factory=dict)
    shape: Callable[[Arch], LayerShape] = last_attention_layer
    feeds: Feeds = "normed"
    halves_apart: bool = False
    parts: tuple[str, ...] = ()
    in_vllm: tuple[str, str] | None = None
    count_decides: bool = False


AFTER_LAST = MtpNames(
    {
        "embed_norm": "{layer}.enorm",
        "hidden_norm": "{layer}.hnorm",
        "fc": "{layer}.eh_proj",
        "norm": "{layer}.shared_head.norm",
    }
)
IN_MTP = MtpNames(
    {
        "embed_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden",
        "fc": "mtp.fc",
        "norm": "mtp.norm",
    },
    "mtp.layers.",
)
AFTER_LAST_WITH_FINAL_NORM = replace(
    AFTER_LAST, modules={**AFTER_LAST.modules, "norm": "{layer}.final_layernorm"}
)


def modules_of_target(names: MtpNames | None) -> tuple[str, ...]:
    """Return the modules of a head that are those of its model, which are neither trained nor written with
    it."""
    return ("target_norm",) if names is None or "norm" in names.modules else ("target_norm", "norm")
