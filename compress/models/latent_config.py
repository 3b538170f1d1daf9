"""Multi-head latent attention (arXiv 2405.04434) in `config.json`, in the fields of DeepSeek-V2."""

from collections.abc import Callable

from compress.models.latent import MAX_RANK, Latent
from compress.models.limits import MAX_SIZE
from compress.untrusted.fields import Fields

LATENT_FIELDS = frozenset(
    {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim"}
)
"""The fields that state latents; `qk_head_dim`, which `transformers` writes, is the sum of the two before
it."""
LATENT_MODULES = {
    "attn.q_down": "self_attn.q_a_proj",
    "attn.q_latent_norm": "self_attn.q_a_layernorm",
    "attn.q_up": "self_attn.q_b_proj",
    "attn.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_latent_norm": "self_attn.kv_a_layernorm",
    "attn.kv_up": "self_attn.kv_b_proj",
}


def latent_of(interleaved: bool | str) -> Callable[[Fields], Latent]:
    """Return the reader of the latents of a config. `interleaved` (`Latent`) is a fact of the family, or the
    field that states it."""

    def read(config: Fields) -> Latent:
        rope_dim = config.integer("qk_rope_head_dim", 2, MAX_SIZE)
        head_dim = head_dim_of_latents(config)
        if config.integer("qk_head_dim", 1, MAX_SIZE, default=head_dim) != head_dim:
            wanted = f"{head_dim}, the sum of qk_nope_head_dim and qk_rope_head_dim"
            raise config.wrong("qk_head_dim", config.integer("qk_head_dim", 1, MAX_SIZE), wanted)
        if config.integer("head_dim", 1, MAX_SIZE, default=rope_dim) != rope_dim:
            wanted = f"{rope_dim}, as qk_rope_head_dim, or absent: it is what transformers rotates"
            raise config.wrong("head_dim", config.integer("head_dim", 1, MAX_SIZE), wanted)
        return Latent(
            q_rank=config.integer("q_lora_rank", 1, MAX_RANK) if config.has("q_lora_rank") else 0,
            kv_rank=config.integer("kv_lora_rank", 1, MAX_RANK),
            rope_dim=rope_dim,
            value_dim=config.integer("v_head_dim", 1, MAX_SIZE),
            interleaved=(
                config.flag(interleaved, default=False) if isinstance(interleaved, str) else interleaved
            ),
        )

    return read


def head_dim_of_latents(config: Fields) -> int:
    """Return the dimensions of a query and of a key, of which none may rotate."""
    still = config.integer("qk_nope_head_dim", 2, MAX_SIZE)
    return still + config.integer("qk_rope_head_dim", 0, MAX_SIZE)
