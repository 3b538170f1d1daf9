"""An EAGLE-3 head: one decoder layer that continues a sequence from the hidden states of its target model
(arXiv 2503.01840).

    f_t = fc([h_a; h_b; h_c])                  hidden states of the target at token t after layers a, b, c
    x   = [embed_norm(embed(y_t+1)); hidden_norm(f_t)]      y_t+1 is the token that follows t
    r   = f_t + o(attention(q x, k x, v x)),   position t;  with `norm_before_residual` hidden_norm(f_t) + ...
    g_t = r + ffn(ffn_norm(r))
    p(y_t+2) = softmax(head(norm(g_t)))        over a part of the target's tokens

The hidden states are taken before any norm. One token further on, where the target has computed nothing
yet, g_t takes the place of f_t+1. The embedding is the target's unless the head has its own. `vocabulary`
lists the head's tokens: token d of the head is token d + d2t[d] of the target.

`layer_ids` count layers: id i is the hidden state after i layers, which is the input of layer i, as in
vLLM and speculators, where they are `eagle_aux_hidden_state_layer_ids`.

A head is stored in `eagle3.safetensors` under the names of `Eagle3Decoder`, with `d2t` int64 [W] and
`t2d` bool [V] as other programs have them; its facts are in the manifest.

Shapes: B batch, S sequence, D hidden, E = D for each layer id, V vocabulary of the target, W of the head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.artifact.manifest import Artifact
from compress.artifact.tensors import save_tensors
from compress.errors import StorageError, UnsupportedFormat, UsageError
from compress.models.arch import PLAIN_FACTS, Arch
from compress.models.attention import AttentionFn
from compress.models.canonical import encoded, load_weights
from compress.models.ffn import Ffn
from compress.models.layer_shape import LayerShape, Rope
from compress.models.limits import MAX_LAYERS, MAX_SIZE
from compress.models.linear import Linear
from compress.models.norms import Norm
from compress.models.self_attention import Attention
from compress.models.tap import Tap, no_tap
from compress.models.weights import Weights, dense, fill_
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import Schemes
from compress.untrusted.fields import Fields

EAGLE3_NAME = "eagle3.safetensors"
_VOCABULARY = ("d2t", "t2d")
_OWN_EMBEDDING = "embed.weight"


@dataclass(frozen=True)
class Eagle3Facts:
    """`arch` has the layer's shape, and the target's vocabulary, hidden size and positions.

    Raises:
        UsageError: more words than the target has.
    """

    arch: Arch
    layer_ids: tuple[int, ...]
    draft_vocab_size: int
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.draft_vocab_size <= self.arch.vocab_size:
            raise UsageError(
                f"eagle3: a draft vocabulary of {self.draft_vocab_size} tokens; the model has "
                f"{self.arch.vocab_size}."
            )

    def to_json(self) -> dict[str, Any]:
        arch, layers = self.arch.to_json()
        return {
            "arch": arch,
            "layers": layers,
            "layer_ids": list(self.layer_ids),
            "draft_vocab_size": self.draft_vocab_size,
            "norm_before_residual": self.norm_before_residual,
        }

    @staticmethod
    def from_json(stated: Mapping[str, Any]) -> "Eagle3Facts":
        """Inverse of `to_json`; other keys are somebody else's.

        Raises:
            StorageError: a value is missing, of another type or out of range.
        """
        facts = Fields(stated, "the draft's head in a manifest", StorageError)
        return Eagle3Facts(
            Arch.from_json(facts.mapping("arch"), facts.items("layers")),
            tuple(facts.integers("layer_ids", 0, MAX_LAYERS)),
            facts.integer("draft_vocab_size", 1, MAX_SIZE),
            facts.flag("norm_before_residual"),
        )


def check_one_stream(target: Arch) -> None:
    """Check that a head can read the hidden states of a model.

    Raises:
        UsageError: the residual is several streams.
    """
    if target.num_streams > 1:
        raise UsageError(
            f"eagle3: the residual of this {target.family} model is {target.num_streams} streams, and "
            "a head reads hidden states of one; draft with a smaller model or by n-grams instead."
        )


def eagle3_facts(
    target: Arch, *, draft_vocab_size: int, layer_ids: Sequence[int] | None = None
) -> Eagle3Facts:
    """Return the facts of a head for this model: a layer like its last one, without biases, windows
    and norms of heads, with a rope that a Llama can have, and with one FFN of the width that a token computes
    in a mixture of experts, that reads `layer_ids` or the default.

    Raises:
        UsageError: layer ids that the model does not have, or that do not rise; no layer has attention; the
            residual is several streams.
    """
    check_one_stream(target)
    ids = default_layer_ids(target.num_layers) if layer_ids is None else tuple(layer_ids)
    if not ids or list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] <= target.num_layers:
        raise UsageError(
            f"eagle3: layers {list(ids)} of a model that has {target.num_layers}; give numbers from 0 (the "
            "embedding) to that, rising."
        )
    last = target.layers[last_attention(target)]
    rope = last.rope
    if rope is None or rope.kind in ("longrope", "proportional") or rope.rotary_dim or rope.exponents:
        rope = Rope(theta=10000.0 if rope is None else rope.theta)
    having = [each for each in (*target.layers, last) if each.has_ffn]
    if not having:
        raise UsageError("eagle3: no layer has an FFN, and a head has one as wide as the model's.")
    of_ffn = having[-1]
    ffn_size = of_ffn.intermediate_size if of_ffn.experts is None else of_ffn.experts.active_size
    arch = target.replace(
        family="llama",
        layers=(
            LayerShape(
                num_heads=last.num_heads,
                num_kv_heads=last.num_kv_heads,
                head_dim=last.value_dim,
                intermediate_size=ffn_size,
                rope=rope,
            ),
        ),
        activation="silu",
        tied_head=False,
        qkv_bias=False,
        o_bias=False,
        ffn_bias=False,
        qk_norm=False,
        config={},
        **PLAIN_FACTS,
    )
    return Eagle3Facts(arch, ids, min(draft_vocab_size, target.vocab_size))


def last_attention(target: Arch) -> int:
    """Return the index of the last layer that has attention.

    Raises:
        UsageError: no layer has.
    """
    having = [idx for idx, layer in enumerate(target.layers) if layer.attends]
    if not having:
        raise UsageError("eagle3: no layer has attention, and a head has the attention of a layer.")
    return having[-1]


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Return the layer ids after 2 layers, half of them and all but 3, as other tools do; where a model has
    too few layers for that, one layer less of each end."""
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    return (
        (1, num_layers // 2, num_layers - 1)
        if num_layers >= 4
        else tuple(range(max(num_layers - 2, 0), num_layers + 1))
    )


class Eagle3Layer(nn.Module):
    """The one layer; its attention reads two vectors side by side."""

    def __init__(self, facts: Eagle3Facts) -> None:
        super().__init__()
        arch = facts.arch
        shape = facts.arch.layers[0]
        self.norm_before_residual = facts.norm_before_residual
        self.embed_norm = Norm(arch.hidden_size, arch.norm_eps)
        self.hidden_norm = Norm(arch.hidden_size, arch.norm_eps)
        self.attn = Attention(arch, shape)
        for name in ("q", "k", "v"):
            rows, columns = shape.linear_shape(f"attn.{name}", arch.hidden_size)
            self.attn.add_module(name, Linear(2 * columns, rows, bias=False))
        self.ffn_norm = Norm(arch.hidden_size, arch.norm_eps)
        self.ffn = Ffn(arch, shape)

    def forward(
        self,
        embedded_BSD: Tensor,
        hidden_BSD: Tensor,
        positions: Tensor,
        attention: AttentionFn,
        tap: Tap = no_tap,
    ) -> Tensor:
        normed_BSD = self.hidden_norm(hidden_BSD)
        pair = torch.cat((self.embed_norm(embedded_BSD), normed_BSD), dim=-1)
        residual_BSD = normed_BSD if self.norm_before_residual else hidden_BSD
        x_BSD = residual_BSD + self.attn(pair, positions, attention, 0, tap)
        return x_BSD + self.ffn(self.ffn_norm(x_BSD), tap)


class Eagle3Decoder(nn.Module):
    """The head without an embedding: `fuse` features, `forward` a step, `head(norm(...))` for logits [B, S,
    W]."""

    def __init__(self, facts: Eagle3Facts) -> None:
        super().__init__()
        self.facts = facts
        size = facts.arch.hidden_size
        self.fc = Linear(len(facts.layer_ids) * size, size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(facts)])
        self.norm = Norm(size, facts.arch.norm_eps)
        self.head = nn.Linear(size, facts.draft_vocab_size, bias=False)

    def fuse(self, features_BSE: Tensor) -> Tensor:
        """f [B, S, D]."""
        fused: Tensor = self.fc(features_BSE)
        return fused

    def normed(self, out_BSD: Tensor) -> Tensor:
        """Return g as the head reads it."""
        normed: Tensor = self.norm(out_BSD)
        return normed

    def own_head(self) -> Tensor:
        """Return the matrix of logits [W, D]."""
        return self.head.weight

    def forward(
        self,
        embedded_BSD: Tensor,
        hidden_BSD: Tensor,
        positions: Tensor,
        attention: AttentionFn,
        tap: Tap = no_tap,
    ) -> Tensor:
        """g [B, S, D] of embedded next tokens, and of f or of g where there is none yet."""
        out: Tensor = self.layers[0](embedded_BSD, hidden_BSD, positions, attention, tap)
        return out


@dataclass(frozen=True)
class Eagle3Head:
    """A head as it is stored: parameters of `Eagle3Decoder` by name, perhaps quantized; the target's tokens
    int64 [W] that it can draft, rising; its own embedding [V, D] where it has one."""

    facts: Eagle3Facts
    weights: Weights
    vocabulary_W: Tensor
    embed_VD: Tensor | None = None

    def decoder(self, *, dtype: torch.dtype, device: torch.device) -> Eagle3Decoder:
        with torch.device("meta"):
            decoder = Eagle3Decoder(self.facts)
        fill_(decoder, self.weights, dtype=dtype, device=device)
        return decoder.requires_grad_(False)


def head_of(decoder: Eagle3Decoder, vocabulary_W: Tensor, *, dtype: torch.dtype) -> Eagle3Head:
    """Return a trained module as it is stored."""
    weights = {name: parameter.detach().to("cpu", dtype) for name, parameter in decoder.named_parameters()}
    return Eagle3Head(decoder.facts, weights, vocabulary_W.cpu())


def vocabulary_tensors(vocabulary_W: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return `d2t` int64 [W], the difference from a token of the head to the target's, and `t2d` bool [V],
    which tokens of the target the head has."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[vocabulary_W] = True
    return {"d2t": vocabulary_W - torch.arange(len(vocabulary_W)), "t2d": t2d}


def vocabulary_of(d2t: Tensor) -> Tensor:
    """Inverse of `vocabulary_tensors`."""
    return d2t.to(torch.int64) + torch.arange(len(d2t))


def save_eagle3(directory: Path, head: Eagle3Head) -> None:
    """Write `eagle3.safetensors`."""
    own = {} if head.embed_VD is None else {_OWN_EMBEDDING: head.embed_VD}
    tensors = encoded(head.weights) | vocabulary_tensors(head.vocabulary_W, head.facts.arch.vocab_size) | own
    save_tensors(directory / EAGLE3_NAME, tensors)


def load_eagle3(directory: Path, facts: Eagle3Facts, schemes: Schemes | None = None) -> Eagle3Head:
    """Inverse of `save_eagle3`. Raises UnsupportedFormat where tensors are missing or others are there."""
    weights = load_weights(directory / EAGLE3_NAME, schemes)
    return checked_head(facts, weights, where=str(directory / EAGLE3_NAME))


def draft_head(artifact: Artifact) -> Eagle3Head:
    """Read the head of an artifact whose draft is one: facts["draft"]["kind"] is "eagle3"."""
    scheme = artifact.manifest.scheme
    stated = Fields(artifact.manifest.facts, f"the facts of {artifact.path}", StorageError)
    facts = Eagle3Facts.from_json(stated.fields("draft").mapping("head"))
    return load_eagle3(artifact.path, facts, None if scheme is None else ModelScheme.from_json(scheme))


def checked_head(facts: Eagle3Facts, tensors: Weights, *, where: str) -> Eagle3Head:
    """Raise UnsupportedFormat where tensors are missing, misshapen, or more than a head has."""
    expected = parameter_shapes(facts) | {"d2t": (facts.draft_vocab_size,)}
    found = {
        name: tuple(value.shape) for name, value in tensors.items() if name not in ("t2d", _OWN_EMBEDDING)
    }
    if found != expected:
        names = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
        raise UnsupportedFormat(
            f"{where} is not the EAGLE-3 head that its facts describe: "
            + "; ".join(
                f"{name} is {found.get(name, 'absent')}, expected {expected.get(name, 'nothing')}"
                for name in names[:4]
            )
        )
    own = tensors.get(_OWN_EMBEDDING)
    weights = {name: value for name, value in tensors.items() if name not in (*_VOCABULARY, _OWN_EMBEDDING)}
    return Eagle3Head(
        facts, weights, vocabulary_of(dense(tensors["d2t"])), None if own is None else dense(own)
    )


def parameter_shapes(facts: Eagle3Facts) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Eagle3Decoder(facts).named_parameters()}
