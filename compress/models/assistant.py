"""An assistant, the draft model published for Gemma 4: decoder layers without keys and values of their own,
which continue a sequence from the target's last hidden state and read the target's cache.

    x   = pre([embed(y_t); f_t-1])             the target's embedding of the last token y_t, and its hidden
                                               state of the token before, normed as its head reads it
    x   = layer(x) for each                    queries at position t; keys and values of the tokens before t
    g   = norm(x)
    p(y_t+1) = softmax(head(g)),               f_t = post(g)

A layer with a window reads the keys and values of the target's last layer with a window, every other layer
those of its last layer without one; layers of the target that read those of another have none. In a step of
drafting, the position and the keys and values stay the same, and only y and f change. A layer with a window
w sees the last w + 1 positions, as in `transformers` 5.23 (`SinglePositionMultiTokenCandidateGenerator` and
`Gemma4AssistantForCausalLM`).

With ordered embeddings the vocabulary is cut into clusters of equal size. A matrix of centroids gives each
cluster a score, and logits are computed of the tokens in the clusters with the highest scores alone; all
others are minus infinity.

Shapes: R rows, D hidden size of the assistant, V vocabulary, C clusters, N tokens of a cluster, J chosen
clusters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape
from compress.models.weights import Weights, parameter_names

KIND = "assistant"
"""The name of this kind of draft."""
PRE = "pre"
"""The linear that joins the embedding and the hidden state that are read."""
POST = "post"
"""The linear that computes the hidden state that the next pass reads."""
NORM = "norm"
HEAD = "head"
CENTROIDS = "centroids"


@dataclass(frozen=True)
class OrderedEmbeddings:
    """A vocabulary in `num_centroids` clusters, of which the `top_k` with the highest scores have logits."""

    num_centroids: int
    top_k: int


@dataclass(frozen=True)
class AssistantFacts:
    """The facts of an assistant for targets of hidden size `target_size`.

    The first `num_read` layers of `arch` are the shapes of the target's layers whose keys and values are
    read, one for each type of layer; they have no weights. The layers of the assistant follow, each with the
    one that it reads as its `kv_source`.
    """

    arch: Arch
    num_read: int
    target_size: int
    ordered: OrderedEmbeddings | None = None

    @property
    def read_layers(self) -> tuple[LayerShape, ...]:
        """The shapes of the target's layers whose keys and values are read."""
        return self.arch.layers[: self.num_read]

    @property
    def own_layers(self) -> range:
        """The indices of the layers of the assistant in `arch`."""
        return range(self.num_read, self.arch.num_layers)

    @property
    def num_params(self) -> int:
        """The number of parameters."""
        return sum(torch.Size(shape).numel() for shape in parameter_shapes(self).values())


@dataclass(frozen=True)
class Assistant:
    """An assistant as it is stored: its parameters by the names of `parameter_shapes`, and with ordered
    embeddings the tokens of each cluster, int64 [C, N]."""

    facts: AssistantFacts
    weights: Weights
    tokens_CN: Tensor | None = None

    @property
    def arch(self) -> Arch:
        """The facts of its layers."""
        return self.facts.arch

    def layer(self, layer_idx: int) -> Weights:
        """Return the parameters of a layer of `arch` that is its own, names relative to it."""
        assert layer_idx in self.facts.own_layers, "other layers are the target's"
        prefix = f"layers.{layer_idx}."
        return {
            name.removeprefix(prefix): each for name, each in self.weights.items() if name.startswith(prefix)
        }


def arch_of_assistant(arch: Arch) -> tuple[Arch, int]:
    """Return the facts of an assistant from those of a model whose layers have keys of their own: with the
    layers that are read, one for each type, before its own; and the number of those."""
    seen = {layer.window is not None: layer for layer in arch.layers}
    read = {
        windowed: replace(
            layer, keys_are_values=False, window=None if layer.window is None else layer.window + 1
        )
        for windowed, layer in sorted(seen.items())
    }
    sources = {windowed: idx for idx, windowed in enumerate(read)}
    own = tuple(
        replace(
            layer,
            keys_are_values=False,
            window=read[layer.window is not None].window,
            kv_source=sources[layer.window is not None],
        )
        for layer in arch.layers
    )
    return arch.replace(layers=(*read.values(), *own), config={}), len(read)


def parameter_shapes(facts: AssistantFacts) -> dict[str, tuple[int, ...]]:
    """Return the parameters of an assistant by name, with their shapes."""
    size = facts.arch.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        f"{PRE}.weight": (size, 2 * facts.target_size),
        f"{POST}.weight": (facts.target_size, size),
        f"{NORM}.weight": (size,),
        f"{HEAD}.weight": (facts.arch.vocab_size, size),
    }
    if facts.ordered is not None:
        shapes[f"{CENTROIDS}.weight"] = (facts.ordered.num_centroids, size)
    layers = parameter_names(facts.arch)[1]
    for idx in facts.own_layers:
        shapes |= {f"layers.{idx}.{name}": shape for name, shape in layers[idx].items()}
    return shapes


def target_layers(facts: AssistantFacts, target: Arch) -> tuple[int, ...]:
    """Return the indices of the target's layers whose keys and values an assistant reads.

    Raises:
        UsageError: the target has another vocabulary or hidden size, several streams or a scaled residual, no
            layer of a type, or heads or a rope that the assistant was not made for.
    """
    found = (target.vocab_size, target.hidden_size)
    if found != (facts.arch.vocab_size, facts.target_size):
        raise UsageError(
            f"the assistant was made for a model of {facts.arch.vocab_size} tokens and hidden size "
            f"{facts.target_size}; this one has {found[0]} tokens and hidden size {found[1]}."
        )
    plain = {"hyper": None, "altup_streams": 0, "residual_scale": 1, "logit_scale": 1}
    if any(getattr(target, name) != value for name, value in plain.items()) or not target.norms_stream:
        raise UsageError(
            f"an assistant reads one hidden state of each token, and the residual of this {target.family} "
            "model is several streams, or scaled; draft with a smaller model or by n-grams instead."
        )
    return tuple(_layer_like(shape, target) for shape in facts.read_layers)


def _layer_like(shape: LayerShape, target: Arch) -> int:
    """Return the index of the target's last layer of a type, given by its shape, that has keys and values."""
    windowed = shape.window is not None
    having = [
        idx
        for idx, layer in enumerate(target.layers)
        if (layer.window is not None) is windowed and has_plain_keys(layer)
    ]
    kind = "a window" if windowed else "full attention"
    if not having:
        raise UsageError(
            f"the assistant reads keys and values of a layer with {kind}, and no layer of this "
            f"{target.family} model has such keys and values; take the assistant of this model."
        )
    layer = target.layers[having[-1]]
    facts = {
        "KV heads": (shape.num_kv_heads, layer.num_kv_heads),
        "dimensions of a head": (shape.head_dim, layer.head_dim),
        "rope": (shape.rope, layer.rope),
    }
    for name, (wanted, found) in facts.items():
        if wanted != found:
            raise UsageError(
                f"the assistant was made for {name} {wanted} in layers with {kind}; layer {having[-1]} of "
                f"this model has {found}. Take the assistant of this model."
            )
    return having[-1]


def has_plain_keys(layer: LayerShape) -> bool:
    """Return whether a cache holds keys and values of the heads of a layer, and nothing else of it."""
    others = (layer.kv_source, layer.latent, layer.recurrence, layer.compressed, layer.block_indexer)
    return (
        layer.attends
        and layer.chunk is None
        and layer.residual_convs is None
        and layer.narrow_value_dim is None
        and all(each is None for each in others)
    )


def check_clusters(ordered: OrderedEmbeddings, vocab_size: int) -> None:
    """Check that the vocabulary is clusters of equal size, and that there are as many as are chosen.

    Raises:
        UsageError: it is not, or there are fewer.
    """
    if vocab_size % ordered.num_centroids or ordered.top_k > ordered.num_centroids:
        raise UsageError(
            f"an assistant with {ordered.num_centroids} centroids of {vocab_size} tokens, of which "
            f"{ordered.top_k} are chosen: the vocabulary must be that many clusters of equal size, and no "
            "more can be chosen than there are."
        )


def clusters(tokens: Sequence[int] | Tensor, ordered: OrderedEmbeddings) -> Tensor:
    """Return the tokens of each cluster int64 [C, N], from the tokens of all clusters in their order.

    Raises:
        UsageError: they are not every token of the vocabulary once.
    """
    tokens_V = torch.as_tensor(tokens).flatten().to(torch.int64)
    check_clusters(ordered, len(tokens_V))
    if not torch.equal(tokens_V.sort().values, torch.arange(len(tokens_V))):
        raise UsageError(
            f"the order of an assistant's {len(tokens_V)} tokens must have each of them once; another one "
            "would leave tokens without a logit, or give a token two."
        )
    return tokens_V.view(ordered.num_centroids, -1)
