"""An assistant, read from the checkpoint in which it is published (`assistant.py`).

    config.json         model_type, backbone_hidden_size, text_config (of Gemma 4), use_ordered_embeddings,
                        num_centroids, centroid_intermediate_top_k, tie_word_embeddings
    model.safetensors   pre_projection, post_projection, model.layers.*, model.norm, model.embed_tokens,
                        masked_embedding.centroids and .token_ordering, lm_head where it is not tied

The table of Gemma 4 reads `text_config` and names the tensors. Checkpoints are dense.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.artifact.tensors import TensorFiles
from compress.errors import UnsupportedArch, UnsupportedFormat, UsageError
from compress.models.assistant import (
    CENTROIDS,
    HEAD,
    NORM,
    POST,
    PRE,
    Assistant,
    AssistantFacts,
    OrderedEmbeddings,
    arch_of_assistant,
    check_clusters,
    clusters,
    parameter_shapes,
)
from compress.models.config_fields import MAX_NAMED, listed
from compress.models.config_file import CONFIG_NAME, read_config
from compress.models.family import FAMILIES, Family
from compress.models.limits import MAX_LAYERS, MAX_SIZE
from compress.models.quantization_config import quant_method
from compress.models.wrapper import Wrapper
from compress.untrusted.fields import Fields

_TEXTS = {
    "gemma4_assistant": ("gemma4", "gemma4_text"),
    "gemma4_unified_assistant": ("gemma4_unified", "gemma4_unified_text"),
}
"""The `model_type` of an assistant -> the family of its targets and the type of its text config."""
ASSISTANT_TYPES = tuple(_TEXTS)
"""Each `model_type` of an assistant."""
_DISK = {PRE: "pre_projection", POST: "post_projection", NORM: "model.norm"}
_EMBED = "model.embed_tokens.weight"
_OWN_HEAD = "lm_head.weight"
_CENTROIDS = "masked_embedding.centroids.weight"
_ORDER = "masked_embedding.token_ordering"
_WITHOUT = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
}
"""Fields of the text config -> the value that they have in every assistant."""
_DEFAULTS = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
"""Fields of them that a text config may leave out -> what the class of `transformers` takes then."""
_KEYS = ("self_attn.k_proj.", "self_attn.v_proj.", "self_attn.k_norm.", "self_attn.v_norm.")
"""Modules of a layer that no layer of an assistant has and nothing reads, which some programs store."""


def is_assistant(path: Path) -> bool:
    """Return whether a directory holds an assistant, by its config."""
    return (path / CONFIG_NAME).is_file() and read_config(path).get("model_type") in _TEXTS


def assistant_facts(config: Mapping[str, Any]) -> AssistantFacts:
    """Return the facts of an assistant from its `config.json`.

    Raises:
        UsageError: the vocabulary is not clusters of equal size.
        UnsupportedArch: a field is missing, or has a value that assistants do not have.
        UnsupportedFormat: the config names a quantization.
    """
    stated = Fields(config, f"{CONFIG_NAME} of this assistant", UnsupportedArch)
    model_type = stated.text("model_type")
    if model_type not in _TEXTS:
        raise stated.wrong("model_type", model_type, f"one of {', '.join(_TEXTS)}")
    if (method := quant_method(config)) is not None:
        raise UnsupportedFormat(
            f"the assistant is quantized with quant_method '{method:.80}', and assistants are read dense; "
            "take the one that was published in 16 bits."
        )
    family = FAMILIES.get(_TEXTS[model_type][0])
    arch, num_read = arch_of_assistant(_names(model_type).read_config(_text_of(stated, model_type)))
    ordered = None
    if stated.flag("use_ordered_embeddings", default=False):
        ordered = OrderedEmbeddings(
            stated.integer("num_centroids", 1, MAX_SIZE, default=2048),
            stated.integer("centroid_intermediate_top_k", 1, MAX_SIZE, default=32),
        )
        check_clusters(ordered, arch.vocab_size)
    size = stated.integer("backbone_hidden_size", 1, MAX_SIZE)
    # No assistant caps its logits, whatever its text config states.
    arch = arch.replace(family=family.model_type, tied_head=False, logit_softcap=None, embed_scale=1.0)
    return AssistantFacts(arch, num_read, size, ordered)


def read_assistant(path: Path) -> Assistant:
    """Read an assistant.

    Raises:
        UsageError: there is none in the directory, or the order of its tokens is not one.
        UnsupportedArch: as `assistant_facts`, or a tensor is missing, misshapen, or one that is not read.
        UnsupportedFormat: as `assistant_facts`, or a tensor holds codes.
    """
    config = read_config(path)
    facts = assistant_facts(config)
    ties = Fields(config, f"{CONFIG_NAME} of this assistant", UnsupportedArch)
    tied = ties.flag("tie_word_embeddings", default=True)
    files = TensorFiles(path)
    names = _names_on_disk(facts, str(config["model_type"]), tied=tied)
    expected = {names[name]: shape for name, shape in parameter_shapes(facts).items()}
    _check(path, files, expected, facts)
    weights = {name: files.get(disk).reshape(expected[disk]) for name, disk in names.items()}
    if tied and _OWN_HEAD in files and not torch.equal(files.get(_OWN_HEAD), weights[f"{HEAD}.weight"]):
        raise UnsupportedArch(
            f"{path}: config.json ties the head to the embedding, but the stored '{_OWN_HEAD}' is another "
            "matrix. Set tie_word_embeddings to false if the stored head is the right one."
        )
    return Assistant(facts, weights, None if facts.ordered is None else _order(files, path, facts))


def _names(model_type: str) -> Family:
    """Return the table that reads the text config of an assistant and names its tensors."""
    wrapped, text = _TEXTS[model_type]
    family = FAMILIES.get(wrapped)
    assert isinstance(family, Wrapper)
    return family.text_families[text]


def _text_of(stated: Fields, model_type: str) -> dict[str, Any]:
    """Return the text config of an assistant as that of a model whose layers have keys of their own.

    Raises:
        UnsupportedArch: it is of another family, its layers have keys of their own, or what no assistant has.
    """
    text = stated.fields("text_config")
    kind = _TEXTS[model_type][1]
    if text.text("model_type", default=kind) != kind:
        raise text.wrong("model_type", text.text("model_type"), kind)
    for name, wanted in _WITHOUT.items():
        default = _DEFAULTS.get(name, wanted) if kind == "gemma4_text" else wanted
        found: Any = (
            text.flag(name, default=bool(default))
            if isinstance(wanted, bool)
            else text.integer(name, 0, MAX_SIZE, default=default)
        )
        if found != wanted:
            raise text.wrong(name, found, f"{wanted!r} in an assistant".lower())
    num_layers = text.integer("num_hidden_layers", 1, MAX_LAYERS)
    shared = text.integer("num_kv_shared_layers", 0, MAX_LAYERS, default=0)
    if shared not in (0, num_layers):
        raise text.wrong(
            "num_kv_shared_layers", shared, f"{num_layers}: all layers read keys and values of the target"
        )
    own = dict(stated.mapping("text_config"))
    dtype = {
        name: stated.text(name)
        for name in ("dtype", "torch_dtype")
        if stated.has(name) and not text.has(name)
    }
    return {**dtype, **own, "model_type": kind, "num_kv_shared_layers": 0}


def _names_on_disk(facts: AssistantFacts, model_type: str, *, tied: bool) -> dict[str, str]:
    """Return the tensor of each parameter of an assistant."""
    table = _names(model_type)
    names = {f"{module}.weight": f"{disk}.weight" for module, disk in _DISK.items()}
    names[f"{HEAD}.weight"] = _EMBED if tied else _OWN_HEAD
    if facts.ordered is not None:
        names[f"{CENTROIDS}.weight"] = _CENTROIDS
    for name in parameter_shapes(facts):
        if name not in names:
            _, idx, leaf = name.split(".", 2)
            names[name] = table.tensor(f"layers.{int(idx) - facts.num_read}.{leaf}")
    return names


def _check(
    path: Path, files: TensorFiles, expected: Mapping[str, tuple[int, ...]], facts: AssistantFacts
) -> None:
    """Check the names, the shapes and the dtypes of all tensors of a checkpoint.

    Raises:
        UnsupportedArch, UnsupportedFormat: as `read_assistant`.
    """
    absent = [name for name in expected if name not in files]
    if absent:
        raise UnsupportedArch(
            f"{path} lacks {listed(absent, MAX_NAMED)}, which its config.json describes; copy the assistant "
            "again."
        )
    others = {_EMBED, _OWN_HEAD, *((_ORDER,) if facts.ordered is not None else ())}
    for name in files.names():
        if name in expected:
            _check_tensor(path, files, name, expected[name])
        elif name not in others and not any(part in name for part in _KEYS):
            raise UnsupportedArch(f"{path} holds the tensor '{name}', which an assistant does not have.")


def _check_tensor(path: Path, files: TensorFiles, name: str, wanted: tuple[int, ...]) -> None:
    """Check the shape and the dtype of a tensor; a scalar may be [] or [1].

    Raises:
        UnsupportedArch, UnsupportedFormat: as `read_assistant`.
    """
    found = files.shape(name)
    if found != wanted and {found, wanted} != {(), (1,)}:
        raise UnsupportedArch(
            f"{path}: tensor '{name}' is {list(found)}, its config.json says {list(wanted)}."
        )
    dtype = files.dtype(name)
    if not dtype.is_floating_point or dtype.itemsize < torch.float16.itemsize:
        raise UnsupportedFormat(f"{path}: tensor '{name}' is {dtype}, and assistants are read dense.")


def _order(files: TensorFiles, path: Path, facts: AssistantFacts) -> Tensor:
    """Return the tokens of each cluster int64 [C, N].

    Raises:
        UsageError, UnsupportedArch: as `read_assistant`.
    """
    assert facts.ordered is not None
    size = facts.arch.vocab_size
    if _ORDER not in files:
        raise UnsupportedArch(f"{path} lacks {_ORDER}, which its config.json describes; copy it again.")
    found = files.shape(_ORDER)
    if torch.Size(found).numel() != size or files.dtype(_ORDER).is_floating_point:
        raise UnsupportedArch(
            f"{path}: tensor '{_ORDER}' is {files.dtype(_ORDER)} {list(found)}; it must have {size} whole "
            "numbers, one for each token."
        )
    try:
        return clusters(files.get(_ORDER), facts.ordered)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
