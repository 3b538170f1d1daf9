"""nanochat (Karpathy, 2025): norms without weights of the embedding, of the stream and of heads of q and k,
FFNs without gates whose activation is the squared relu, and a cap of the logits. q and k rotate by the
negative angle."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.limits import SCALES
from compress.models.module_names import LAYER_MODULES, OUTER_MODULES
from compress.untrusted.fields import Fields

_ROPES = ("default", "linear", "llama3")
"""The ropes that only turn heads: its norms of q and k follow the rotation, and would undo a factor of it."""


def _facts(config: Fields) -> dict[str, Any]:
    facts: dict[str, Any] = {"unit_norms": True, "unit_qk_norm": True, "embed_norm": True}
    if config.has("final_logit_softcapping"):
        facts["logit_softcap"] = config.number("final_logit_softcapping", 1e-3, SCALES[1])
    return facts


def _implied(config: Fields) -> dict[str, Any]:
    """Imply nothing, and refuse a rope with a factor of what it turns."""
    rope = config.mapping("rope_parameters", default={}) or config.mapping("rope_scaling", default={})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPES:
        raise config.wrong("rope_type", kind, f"one of {', '.join(_ROPES)}")
    return {}


FAMILIES.add(
    "nanochat",
    Family(
        model_type="nanochat",
        architecture="NanoChatForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        gated=False,
        reversed_rotary=True,
        facts=_facts,
        implied=_implied,
        outer_modules={name: disk for name, disk in OUTER_MODULES.items() if name != "norm"},
        layer_modules={
            **{
                name: disk
                for name, disk in LAYER_MODULES.items()
                if name not in ("attn_norm", "ffn_norm", "ffn.gate")
            },
            "ffn.up": "mlp.fc1",
            "ffn.down": "mlp.fc2",
        },
        known_fields=frozenset({"attention_bias", "final_logit_softcapping"}),
        defaults={
            "hidden_act": "relu2",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
            "final_logit_softcapping": 15.0,
        },
    ),
)
