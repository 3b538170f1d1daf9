"""Facts of `config.json` that an export states once more, for a program that looks for them elsewhere than
`transformers`.
"""

from typing import Any

from compress.models.arch import Arch


def restated_fields(arch: Arch) -> dict[str, Any]:
    """Return the fields to add to the config of the language model.

    vLLM 0.32 reads the growth of Ministral 3's queries where Mistral's own files state it; without the field
    its queries do not grow. Those of Llama 4 it reads where `transformers` does.
    """
    if arch.query_growth is None or arch.growth_unrotated:
        return {}
    beta, num_positions = arch.query_growth
    return {"llama_4_scaling": {"beta": beta, "original_max_position_embeddings": num_positions}}
