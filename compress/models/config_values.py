"""Values that `config.json` states in more than one way, the same for all families."""

from compress.models.eos import NO_TOKEN
from compress.models.limits import MAX_SIZE
from compress.untrusted.fields import Fields

SAME_ACTIVATIONS = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
}
"""Other names of the decoder's activations, as `transformers.activations` defines them."""


def activation_of(config: Fields) -> str:
    """Return the activation of the FFNs by the decoder's name, or the config's own where it has none."""
    stated = config.text("hidden_act")
    return SAME_ACTIVATIONS.get(stated, stated)


def eos_token_ids(config: Fields) -> list[int]:
    """Return the end-of-sequence ids of a config, which states none (`null` or `NO_TOKEN`), one or a
    list."""
    name = "eos_token_id"
    if not config.has(name):
        return []
    if config.is_list(name):
        return config.integers(name, 0, MAX_SIZE)
    stated = config.integer(name, NO_TOKEN, MAX_SIZE)
    return [] if stated == NO_TOKEN else [stated]


def ffn_sizes_of(config: Fields, name: str, num_layers: int, *, by_layer: bool) -> list[int]:
    """Return the width of the dense FFN of each layer: the one of all that a config states, or, where it may
    be stated `by_layer`, those in a list."""
    if not by_layer or not config.is_list(name):
        return [config.integer(name, 1, MAX_SIZE)] * num_layers
    sizes = config.integers(name, 1, MAX_SIZE)
    if len(sizes) != num_layers:
        raise config.wrong(name, sizes, f"one width, or a list of {num_layers}")
    return list(sizes)


def head_dim_of(config: Fields, hidden_size: int, num_heads: int) -> int:
    """Return the size of a head: as stated, or the hidden size shared by the heads. It is even, because
    rotation takes pairs."""
    if config.has("head_dim"):
        head_dim = config.integer("head_dim", 2, MAX_SIZE)
        name = "head_dim"
    elif hidden_size % num_heads:
        raise config.wrong("num_attention_heads", num_heads, f"a divisor of hidden_size {hidden_size}")
    else:
        head_dim = hidden_size // num_heads
        name = "hidden_size / num_attention_heads"
    if head_dim % 2:
        raise config.wrong(name, head_dim, "even")
    return head_dim
