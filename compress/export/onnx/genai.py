"""`genai_config.json`, by which ONNX Runtime GenAI (0.18) finds the inputs, outputs and sizes of a decoder.

It generates with caches of one width for all layers, which it concatenates: the graph returns keys and
values of all positions (`past_present_share_buffer` false). Sampling is left to the caller; the search is
greedy by default.
"""

import json
from pathlib import Path
from typing import Any

from compress.artifact.atomic import write_atomic
from compress.data.chat import special_tokens
from compress.data.end_tokens import generation_end_ids, generation_fields
from compress.data.tokenizer import load_tokenizer
from compress.export.onnx.decoder import PAST_NAME, PRESENT_NAME
from compress.models.arch import Arch

CONFIG_NAME = "genai_config.json"
DECODER = "llama"
"""The type of a model that takes tokens and returns logits; its graph has the rest."""


def refusal_of_genai(arch: Arch) -> str | None:
    """Return why ONNX Runtime GenAI does not run a model, None where it does."""
    if len({(layer.num_kv_heads, layer.head_dim) for layer in arch.layers}) > 1:
        return "it has caches of one width, and layers of this model have several"
    return None


def write_genai_config(directory: Path, arch: Arch, graph_name: str) -> None:
    """Write the config for the graph of that name, next to the generation and tokenizer files of the model.

    Raises:
        UnsupportedFormat: one of these files is not readable JSON.
    """
    text = json.dumps(genai_config(arch, graph_name, directory), indent=2, sort_keys=True) + "\n"
    write_atomic(directory / CONFIG_NAME, text.encode())


def genai_config(arch: Arch, graph_name: str, directory: Path) -> dict[str, Any]:
    """Return the config of a model, whose generation and tokenizer files are in the directory.

    The beginning-of-sequence and the padding token are the first that is stated by `generation_config.json`,
    which `transformers` generates by, `config.json`, its text model's config, and `tokenizer_config.json`,
    the only one that states a beginning in Gemma 3 of 4B and more. The text ends with the tokens of both
    configs. A beginning that none of them states is -1.

    Raises:
        UnsupportedFormat: one of these files is not readable JSON.
    """
    first = arch.layers[0]
    ends = list(dict.fromkeys((*arch.eos_token_ids, *sorted(generation_end_ids(directory)))))
    begin, pad = (_stated(arch, directory, name) for name in ("bos_token", "pad_token"))
    end: int | list[int] = ends[0] if len(ends) == 1 else ends
    return {
        "model": {
            "type": DECODER,
            "vocab_size": arch.vocab_size,
            "context_length": arch.max_position,
            "bos_token_id": begin,
            "eos_token_id": end,
            "pad_token_id": pad if pad >= 0 else (ends[0] if ends else 0),
            "decoder": {
                "filename": graph_name,
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "hidden_size": arch.hidden_size,
                "head_size": first.head_dim,
                "num_attention_heads": first.num_heads,
                "num_key_value_heads": first.num_kv_heads,
                "num_hidden_layers": arch.num_layers,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": PAST_NAME.format("key"),
                    "past_value_names": PAST_NAME.format("value"),
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": PRESENT_NAME.format("key"),
                    "present_value_names": PRESENT_NAME.format("value"),
                },
            },
        },
        "search": {
            "do_sample": False,
            "max_length": arch.max_position,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": False,
        },
    }


def _stated(arch: Arch, directory: Path, name: str) -> int:
    """Return the id of a special token of a model; -1 where no file states one."""
    places = (generation_fields(directory), arch.config, arch.config.get("text_config") or {})
    tokens = [_token(each.get(f"{name}_id")) for each in places]
    named = special_tokens(directory).get(name)
    if named is not None and (directory / "tokenizer.json").exists():
        tokens.append(_token(load_tokenizer(directory)[0].token_to_id(named)))
    return next((token for token in tokens if token >= 0), -1)


def _token(stated: Any) -> int:
    """Return a token id of a config; -1 where there is none."""
    token = stated[0] if isinstance(stated, list) and stated else stated
    return token if isinstance(token, int) else -1
