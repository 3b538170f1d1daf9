"""An EAGLE-3 head in the layout of `speculators`, as vLLM loads it: with method `eagle3` in its speculative
config and the directory as model, or the directory alone, which names its target model. One that was read
from a directory has that directory's name, which vLLM looks for in its working directory.

    config.json         speculators_model_type, speculators_config {algorithm, proposal_methods,
                        default_proposal_method, verifier}, transformer_layer_config (a Llama config),
                        draft_vocab_size, eagle_aux_hidden_state_layer_ids
    model.safetensors   fc, layers.0.*, norm, lm_head; d2t int64 [W] offsets, t2d bool [V];
                        embed_tokens where the head has its own

Codes are those of compressed-tensors, and its `quantization_config` is part of
`transformer_layer_config`, from which vLLM makes the head's config. Fields that change the function and
are not listed here (`norm_before_fc`, ...) are refused when they are read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.artifact.tensors import load_tensors, save_tensors
from compress.errors import UnsupportedFormat
from compress.export import FORMATS, codecs
from compress.export.refusals import check_rules
from compress.models.arch import DTYPES, Arch
from compress.models.checkpoint_writer import with_shared_scales
from compress.models.config_file import CONFIG_NAME, read_config
from compress.models.eagle3 import Eagle3Facts, Eagle3Head, checked_head, vocabulary_tensors
from compress.models.family import family_of, family_of_arch
from compress.models.layer_shape import Rope
from compress.models.limits import MAX_LAYERS, MAX_SIZE
from compress.models.weights import dense
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import QuantizedWeight
from compress.untrusted.fields import Fields

TENSORS_NAME = "model.safetensors"
NAMES = {
    "fc": "fc",
    "layers.0.embed_norm": "layers.0.input_layernorm",
    "layers.0.hidden_norm": "layers.0.hidden_norm",
    **{f"layers.0.attn.{name}": f"layers.0.self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    "layers.0.ffn_norm": "layers.0.post_attention_layernorm",
    **{f"layers.0.ffn.{name}": f"layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")},
    "norm": "norm",
    "head": "lm_head",
    "embed": "embed_tokens",
}
"""Module here -> module there."""
LINEARS = tuple(name for name in NAMES if "norm" not in name and name != "embed")
_CODES = "compressed-tensors"
_OTHER_FUNCTIONS = ("norm_before_fc", "fc_norm", "norm_output")
_ROPE_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor"),
}


def is_eagle3(path: Path) -> bool:
    """Return whether a directory holds a head in this layout."""
    return (path / CONFIG_NAME).exists() and read_config(path).get("speculators_model_type") == "eagle3"


def write_speculators(
    directory: Path, head: Eagle3Head, *, verifier: str, architectures: list[str], k: int
) -> None:
    """Write a head. `verifier` is the target model as its users call it, without its place on this machine,
    with its architectures; `k` tokens are proposed by default.

    Raises:
        UnsupportedFormat: codes that the layout cannot express.
    """
    scheme = scheme_of(head)
    codec = FORMATS.get(_CODES).codec
    if scheme is not None:
        check_rules(_CODES, head.facts.arch, scheme)
    tensors: dict[str, Tensor] = vocabulary_tensors(head.vocabulary_W, head.facts.arch.vocab_size)
    own = {} if head.embed_VD is None else {"embed.weight": head.embed_VD}
    for name, value in {**_with_shared_scales(head), **own}.items():
        module, _, leaf = name.rpartition(".")
        leaves = codec.encode(value) if isinstance(value, QuantizedWeight) else {leaf: value}
        tensors |= {f"{NAMES[module]}.{each}": tensor.contiguous() for each, tensor in leaves.items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(directory / TENSORS_NAME, tensors)
    config = _config(head.facts, scheme, verifier=verifier, architectures=architectures, k=k)
    (directory / CONFIG_NAME).write_text(
        json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def _with_shared_scales(head: Eagle3Head) -> dict[str, Tensor | QuantizedWeight]:
    """Return the weights of a head, with one global scale where consumers multiply linears as one."""
    prefix = "layers.0."
    layer = {
        name.removeprefix(prefix): each for name, each in head.weights.items() if name.startswith(prefix)
    }
    shared = with_shared_scales(head.facts.arch.layers[0], layer)
    return {**head.weights, **{prefix + name: each for name, each in shared.items()}}


def open_eagle3(path: Path) -> Eagle3Head:
    """Read a head.

    Raises:
        UnsupportedFormat: the head computes something else than ours, or tensors are missing.
    """
    config = read_config(path)
    facts = _facts(config, path)
    layer = Fields(config, f"{path / CONFIG_NAME}", UnsupportedFormat).fields("transformer_layer_config")
    said = layer.mapping("quantization_config", default={})
    tensors: dict[str, Tensor | QuantizedWeight] = dict(load_tensors(path))
    if said:
        _decode_(tensors, said, path)
    ours = {f"{disk}.weight": f"{name}.weight" for name, disk in NAMES.items()}
    return checked_head(
        facts, {ours.get(name, name): value for name, value in tensors.items()}, where=str(path)
    )


def _decode_(tensors: dict[str, Tensor | QuantizedWeight], said: Mapping[str, Any], path: Path) -> None:
    """Replace the codes of a linear by one weight."""
    method = str(said.get("quant_method"))
    if method not in codecs():
        raise UnsupportedFormat(
            f"{path}: a head quantized with quant_method '{method}'; read are {', '.join(sorted(codecs()))}."
        )
    codec = codecs()[method]
    for disk, scheme in codec.schemes(said, [NAMES[name] for name in LINEARS]).items():
        names = {leaf: f"{disk}.{leaf}" for leaf in codec.leaves(scheme)}
        if absent := sorted(name for name in names.values() if name not in tensors):
            raise UnsupportedFormat(f"{path} lacks {absent[0]}, which its quantization_config promises.")
        leaves = {leaf: dense(tensors.pop(name)) for leaf, name in names.items()}
        try:
            tensors[f"{disk}.weight"] = codec.decode(leaves, scheme)
        except UnsupportedFormat as error:
            raise UnsupportedFormat(f"{path}: {disk} is not read: {error}") from None


def scheme_of(head: Eagle3Head) -> ModelScheme | None:
    """Return the scheme of a head's linears, and the head's."""
    codes = {name: value.scheme for name, value in head.weights.items() if isinstance(value, QuantizedWeight)}
    of_head = codes.pop("head.weight", None)
    schemes = list(dict.fromkeys(codes.values()))
    if not schemes and of_head is None:
        return None
    if len(schemes) != 1 or len(codes) < len(LINEARS) - 1:
        raise UnsupportedFormat(
            "an EAGLE-3 head is written with one scheme for fc and all linears of its layer, or dense."
        )
    return ModelScheme(schemes[0], of_head)


def _config(
    facts: Eagle3Facts, scheme: ModelScheme | None, *, verifier: str, architectures: list[str], k: int
) -> dict[str, Any]:
    arch = facts.arch
    rope = arch.layers[0].rope
    assert rope is not None, "an EAGLE-3 layer encodes positions"
    layer = {
        **family_of_arch(arch).write_config(arch),
        "attention_bias": False,
        "hidden_act": arch.activation,
        "max_position_embeddings": arch.max_position,
        "mlp_bias": False,
        "rms_norm_eps": arch.norm_eps,
        "rope_parameters": _rope_parameters(rope),
    }
    if scheme is not None:
        layer["quantization_config"] = FORMATS.get(_CODES).quantization_config(scheme, head=NAMES["head"])
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": k,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": facts.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(facts.layer_ids),
        "norm_before_residual": facts.norm_before_residual,
        **dict.fromkeys(_OTHER_FUNCTIONS, False),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": arch.dtype,
    }


def _facts(config: Mapping[str, Any], path: Path) -> Eagle3Facts:
    missing = [
        name
        for name in (
            "transformer_layer_config",
            "draft_vocab_size",
            "eagle_aux_hidden_state_layer_ids",
            "norm_before_residual",
        )
        if config.get(name) is None
    ]
    if missing:
        raise UnsupportedFormat(
            f"{path}: config.json of this EAGLE-3 head does not say {', '.join(missing)}, and programs "
            "differ on it."
        )
    stated = Fields(config, f"{path / CONFIG_NAME}", UnsupportedFormat)
    layer = stated.mapping("transformer_layer_config")
    other = [name for name in _OTHER_FUNCTIONS if config.get(name)] + [
        name for name in ("attention_bias", "mlp_bias") if layer.get(name)
    ]
    if other or layer.get("model_type") != "llama" or layer.get("num_hidden_layers") != 1:
        said = f"{layer.get('num_hidden_layers')} layer(s) of {layer.get('model_type')}" + "".join(
            f", {name}" for name in other
        )
        raise UnsupportedFormat(
            f"{path}: an EAGLE-3 head of one llama layer without biases is read; this one has {said}."
        )
    arch: Arch = family_of(layer).read_config(
        {key: value for key, value in layer.items() if key != "quantization_config"}
    )
    dtype = stated.text("dtype", default=arch.dtype)
    if dtype not in DTYPES:
        raise stated.wrong("dtype", dtype, f"one of {', '.join(DTYPES)}")
    return Eagle3Facts(
        arch.replace(config={}, dtype=dtype, tied_head=False),
        tuple(stated.integers("eagle_aux_hidden_state_layer_ids", 0, MAX_LAYERS)),
        stated.integer("draft_vocab_size", 1, MAX_SIZE),
        stated.flag("norm_before_residual"),
    )


def _rope_parameters(rope: Rope) -> dict[str, Any]:
    said: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    said |= {name: getattr(rope, name) for name in _ROPE_FIELDS.get(rope.kind, ())}
    return said | (
        {"original_max_position_embeddings": rope.original_max_position}
        if rope.kind in ("llama3", "yarn")
        else {}
    )
