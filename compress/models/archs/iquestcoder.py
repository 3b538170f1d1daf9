"""IQuest-Coder-V1 (IQuest Lab, 2026): Llama by another name. Models of it that run their layers twice have a
class of their own and are refused."""

from dataclasses import replace

from compress.models.archs.llama import LLAMA
from compress.models.config_facts import implies_own_code
from compress.models.family import FAMILIES

FAMILIES.add(
    "iquestcoder",
    replace(
        LLAMA,
        model_type="iquestcoder",
        architecture="LlamaForCausalLM",
        other_names=("IQuestCoderForCausalLM",),
        implied=implies_own_code("IQuestCoderConfig", "IQuestCoderModel", "IQuestCoderForCausalLM"),
        known_fields=LLAMA.known_fields | {"auto_map"},
        fixed_fields={"clip_qkv": None, "use_sliding_window": False},
        defaults={
            **LLAMA.defaults,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
        },
    ),
)
