"""An MTP head: the layer with which many models are trained to predict one token more, from their own last
hidden state and the token that follows (multi-token prediction, arXiv 2412.19437).

    f_t = target_norm(h_t)          the hidden state of token t after the target's last layer, normed as its
                                    head reads it
    x   = fc([embed_norm(embed(y_t+1)); hidden_norm(f_t)])     y_t+1 is the token that follows t
    g_t = norm(layer(x)),           position t
    p(y_t+2) = softmax(head(g_t)),  the head is the target's, or one of its own

One token further on, where the target has computed nothing yet, g_t takes the place of f_t+1, or layer(x)
does (`Feeds`). Where a checkpoint has several heads, the i-th takes the i-th step: its row t reads y_t+i and
what the head before made of row t, or f_t, and predicts y_t+i+1. Each has keys and values of all rows. The
layer is a decoder layer of the target's kind, with latents or experts where the target
has them.

A head is read from the target's checkpoint (`mtp_reader.py`), or from `mtp.safetensors` of a draft, which has
the names of `MtpDecoder`; its facts are in the manifest then.

Shapes: B batch, S sequence, D hidden.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.artifact.manifest import Artifact
from compress.artifact.tensors import save_tensors
from compress.errors import StorageError, UnsupportedFormat, UsageError
from compress.models.arch import Arch
from compress.models.attention import AttentionFn
from compress.models.canonical import encoded, load_weights
from compress.models.decoder import DecoderLayer
from compress.models.layer_shape import LayerShape
from compress.models.linear import Linear
from compress.models.mtp_names import FEEDS, Feeds, MtpNames
from compress.models.norms import norm_of
from compress.models.tap import Tap, no_tap
from compress.models.weights import Weights, fill_
from compress.quant.model_scheme import ModelScheme
from compress.untrusted.fields import Fields

MTP_NAME = "mtp.safetensors"
KIND = "mtp"
"""The name of this kind of draft in facts."""
LAYER = "layers.0."


def arch_of_head(target: Arch, shape: LayerShape) -> Arch:
    """Return the facts of a head over a model: those of the model, with one layer of this shape.

    Raises:
        UsageError: embeddings, the residual or logits of the model are more than one plain vector each.
    """
    plain = {
        **dict.fromkeys(("embed_scale", "residual_scale", "logit_scale"), 1),
        **dict.fromkeys(("layer_embed_size", "altup_streams", "laurel_rank"), 0),
        **dict.fromkeys(("hyper", "logit_softcap", "position_offset"), None),
        **dict.fromkeys(("embed_norm", "head_bias", "layer_scalar", "sinusoidal_positions"), False),
    }
    if any(getattr(target, name) != value for name, value in plain.items()):
        raise UsageError(
            f"the layer that predicts a further token is not read of this {target.family} model; draft with "
            "a smaller model, an EAGLE-3 head or by n-grams instead."
        )
    return target.replace(layers=(shape,), tied_head=False, config={})


@dataclass(frozen=True)
class MtpFacts:
    """The facts of a head: those of its layer, whether it has a matrix of logits of its own, and the hidden
    state that a further step reads."""

    arch: Arch
    own_head: bool = False
    feeds: Feeds = "normed"


def mtp_facts(target: Arch, names: MtpNames) -> MtpFacts:
    """Return the facts of a head over a model, by the names that its family has for it.

    Raises:
        UsageError: no layer of the model has the shape of such a head, or the model is not read with one.
    """
    arch = arch_of_head(target, names.shape(target))
    return MtpFacts(arch, own_head="head" in names.modules, feeds=names.feeds)


class MtpDecoder(nn.Module):
    """A head without embedding: `fuse` hidden states of the target, `forward` a step."""

    def __init__(self, facts: MtpFacts) -> None:
        super().__init__()
        arch = facts.arch
        self.arch = arch
        self.facts = facts
        size = arch.hidden_size
        self.target_norm = norm_of(arch, size, "norm")
        self.embed_norm = norm_of(arch, size, "norm")
        self.hidden_norm = norm_of(arch, size, "norm")
        self.fc = Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(arch, 0)])
        self.norm = norm_of(arch, size, "norm")
        if facts.own_head:
            self.head = Linear(size, arch.vocab_size, bias=False)

    def fuse(self, features_BSD: Tensor) -> Tensor:
        """Return f [B, S, D] of the target's hidden states after its last layer."""
        fused: Tensor = self.target_norm(features_BSD)
        return fused

    def normed(self, out_BSD: Tensor) -> Tensor:
        """Return g of what `forward` returns."""
        normed: Tensor = self.norm(out_BSD) if self.facts.feeds == "stream" else out_BSD
        return normed

    def own_head(self) -> Tensor | None:
        """Return the matrix of logits [V, D], None where the target's computes them."""
        return self.head.weight if self.facts.own_head else None

    def forward(
        self,
        embedded_BSD: Tensor,
        hidden_BSD: Tensor,
        positions: Tensor,
        attention: AttentionFn,
        tap: Tap = no_tap,
    ) -> Tensor:
        """Return what a further step reads [B, S, D], of embedded next tokens, and of f or of what this
        returned where there is no f yet."""
        pair = torch.cat((self.embed_norm(embedded_BSD), self.hidden_norm(hidden_BSD)), dim=-1)
        out: Tensor = self.layers[0](self.fc(pair), positions, attention, tap)
        return out if self.facts.feeds == "stream" else self.norm(out)


def _nothing() -> None:
    """Return no matrix."""


@dataclass(frozen=True)
class MtpHead:
    """A head as it is stored: its facts, and the parameters of `MtpDecoder` by name, perhaps quantized.
    `target_head` reads the target's matrix of logits [V, D], of which a runtime may draft with a copy in
    fewer bits; None where it is in codes, or not at hand."""

    facts: MtpFacts
    weights: Weights
    target_head: Callable[[], Tensor | None] = _nothing

    @property
    def arch(self) -> Arch:
        """The facts of its layer."""
        return self.facts.arch

    def layer(self, layer_idx: int) -> Weights:
        """Return the parameters of its layer, names relative to it."""
        assert layer_idx == 0, "a head has one layer"
        return {
            name.removeprefix(LAYER): each for name, each in self.weights.items() if name.startswith(LAYER)
        }

    def decoder(self, *, dtype: torch.dtype, device: torch.device) -> MtpDecoder:
        """Build the module of the head, ready to run."""
        with torch.device("meta"):
            decoder = MtpDecoder(self.facts)
        fill_(decoder, self.weights, dtype=dtype, device=device)
        return decoder.requires_grad_(False)


def parameter_shapes(facts: MtpFacts) -> dict[str, tuple[int, ...]]:
    """Return the parameters of a head by name, with their shapes."""
    with torch.device("meta"):
        return {name: tuple(each.shape) for name, each in MtpDecoder(facts).named_parameters()}


def checked_head(facts: MtpFacts, weights: Weights, *, where: str) -> MtpHead:
    """Return a head.

    Raises:
        UnsupportedFormat: parameters are missing, misshapen, or more than a head has.
    """
    expected = parameter_shapes(facts)
    found = {name: tuple(value.shape) for name, value in weights.items()}
    if found != expected:
        name = min(name for name in {*expected, *found} if expected.get(name) != found.get(name))
        raise UnsupportedFormat(
            f"{where} is not the MTP head that its facts describe: {name} is {found.get(name, 'absent')}, "
            f"expected {expected.get(name, 'nothing')}; make the draft again."
        )
    return MtpHead(facts, weights)


def save_mtp(directory: Path, head: MtpHead) -> None:
    """Write `mtp.safetensors`."""
    save_tensors(directory / MTP_NAME, encoded(head.weights))


def facts_of(head: MtpHead) -> dict[str, Any]:
    """Return the facts of a head for a manifest."""
    arch, layers = head.arch.to_json()
    own = {"own_head": True} if head.facts.own_head else {}
    feeds = {} if head.facts.feeds == "normed" else {"feeds": head.facts.feeds}
    return {"arch": arch, "layers": layers, **own, **feeds}


def mtp_of_draft(artifact: Artifact) -> MtpHead:
    """Read the head of an artifact whose draft is one: facts["draft"]["kind"] is "mtp".

    Raises:
        StorageError: a fact is missing, of another type or out of range.
        UnsupportedFormat: the tensors are not those of the facts.
    """
    scheme = artifact.manifest.scheme
    stated: Mapping[str, Any] = artifact.manifest.facts
    draft = Fields(stated, f"the facts of {artifact.path}", StorageError).fields("draft")
    stored = draft.fields("head")
    feeds = stored.text("feeds", default="normed")
    if feeds not in FEEDS:
        raise stored.wrong("feeds", feeds, f"one of {', '.join(FEEDS)}")
    facts = MtpFacts(
        Arch.from_json(stored.mapping("arch"), stored.items("layers")),
        own_head=stored.flag("own_head", default=False),
        feeds=next(each for each in FEEDS if each == feeds),
    )
    path = artifact.path / MTP_NAME
    weights = load_weights(path, None if scheme is None else ModelScheme.from_json(scheme))
    return checked_head(facts, weights, where=str(path))
