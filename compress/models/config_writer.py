"""The way back from the facts of a model to its `config.json`, by the table of its family (`family.py`)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.layer_types import FIELDS_BY_LAYER, after_last
from compress.untrusted.fields import Fields

if TYPE_CHECKING:
    from compress.models.family import Family

PER_LAYER = "per_layer_config"
"""The field in which `transformers` states widths that single layers have for themselves, by their index."""
_NO_PREDICTORS = {
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
    "mtp_num_hidden_layers": 0,
    "num_mtp_modules": 0,
    "use_mtp": False,
}
"""Fields that count the layers that predict further tokens, with their values where there are none."""
_OF_ATTENTION = ("num_attention_heads", "num_key_value_heads")
"""Fields that no config of a model without attention states."""


def why_unstated(family: "Family", arch: Arch) -> str | None:
    """Return the reason why no config of the family can state the layers of a model, None where one
    can."""
    try:
        family.restated(arch)
    except UnsupportedArch as error:
        return str(error)
    if reason := _why_layers_unstated(family, arch):
        return reason
    try:
        return _why_heads_unstated(family, arch)
    except UnsupportedArch as error:
        return str(error)


def _why_layers_unstated(family: "Family", arch: Arch) -> str | None:
    """Return the reason why no config of the family can state the widths of single layers, None where one
    can."""
    if family.heads_by_layer is not None or "num_heads" in family.full_widths:
        of_one_width = (replace(each, num_heads=each.num_kv_heads) for each in arch.layers)
        arch = arch.replace(layers=tuple(of_one_width))
    if family.ffn_by_layer:
        of_one_width = (replace(each, intermediate_size=1) for each in arch.layers)
        arch = arch.replace(layers=tuple(of_one_width))
    if not family.full_widths:
        return None if arch.is_uniform else "layers differ in width, which a stock config.json cannot say."
    of_kind = {(layer.window is None, layer.widths[:3]) for layer in arch.layers}
    ffns = {
        ((layer.kv_source is None, layer.experts is None), layer.intermediate_size) for layer in arch.layers
    }
    one_or_by_kind = "num_heads" in family.full_widths or len({layer.num_heads for layer in arch.layers}) == 1
    if one_or_by_kind and all(len(found) == len({kind for kind, _ in found}) for found in (of_kind, ffns)):
        return None
    return f"layers of one type differ in width, which no config.json of {family.model_type} can say."


def _why_heads_unstated(family: "Family", arch: Arch) -> str | None:
    """Return the reason why the config of a model would be read with other heads, None where it would not.

    Raises:
        UnsupportedArch: it would not be read.
    """
    first = next((layer for layer in arch.layers if layer.attends), None)
    if first is None or arch.has_latents:
        return None
    if family.heads_span_hidden and first.num_heads * first.head_dim != arch.hidden_size:
        return (
            f"configs of {arch.family} are read with heads of hidden_size / number of heads, "
            f"{arch.hidden_size} / {first.num_heads} here, and its heads have {first.head_dim}: keep "
            "the number of heads and the hidden size."
        )
    for layer, read in zip(arch.layers, family.read_config(_fields(family, arch)).layers, strict=True):
        if layer.attends and layer.num_kv_heads != read.num_kv_heads:
            return (
                f"no config.json of {family.model_type} can say that {layer.num_heads} query heads have "
                f"{layer.num_kv_heads} KV heads, which readers would take for {read.num_kv_heads}: keep all "
                "KV heads."
            )
    return None


def written_config(family: "Family", arch: Arch) -> dict[str, Any]:
    """Return the `config.json` of an `Arch`: the source's config with every field rewritten that the
    facts decide.

    Raises:
        UnsupportedArch: the widths differ between layers in a way that no config can express.
    """
    if reason := family.why_unstated(arch):
        raise UnsupportedArch(reason)
    return _fields(family, arch)


def _fields(family: "Family", arch: Arch) -> dict[str, Any]:
    """Return the fields of the config of an `Arch`, whether or not readers would build this model of them."""
    first = next((layer for layer in arch.layers if layer.window is not None), arch.layers[0])
    config = dict(arch.config)
    written = {
        "architectures": [family.class_name(arch.config)],
        "model_type": family.model_type,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": first.num_heads,
        "num_key_value_heads": first.num_kv_heads,
        "tie_word_embeddings": arch.tied_head,
        "dtype": arch.dtype,
    }
    if family.attention_free:
        written = {name: value for name, value in written.items() if name not in _OF_ATTENTION}
    config |= {family.spelled.get(name, name): value for name, value in written.items()}
    if family.derives_head_dim:
        config.pop("head_dim", None)
    elif not arch.has_latents and not family.attention_free:
        config["head_dim"] = first.head_dim
    if family.heads_by_layer is not None:
        stated_heads = config.get(family.heads_by_layer)
        heads = [layer.num_heads for layer in arch.layers]
        if heads != (stated_heads or [first.num_heads] * arch.num_layers):
            config[family.heads_by_layer] = heads
        elif stated_heads:  # nobody reads the other field then
            config["num_attention_heads"] = arch.config["num_attention_heads"]
    full = [layer for layer in arch.layers if layer.window is None]
    if family.full_widths and full:
        config.update({field: getattr(full[0], name) for name, field in family.full_widths.items()})
        config.pop(PER_LAYER, None)
    dense = [layer.intermediate_size for layer in arch.layers if layer.experts is None]
    if dense and not family.attention_free:
        size = dense[0]
        by_layer = isinstance(config.get(family.dense_size), list) or len(set(dense)) > 1
        source = Fields({**family.defaults, **config}, "the source's config", UnsupportedArch)
        config.update(
            {family.dense_size: size} if family.dense_fields is None else family.dense_fields(source, size)
        )
        if family.ffn_by_layer and by_layer:
            config[family.dense_size] = dense
    if family.mixture is not None:
        values = {**family.defaults, **config, **family.aliased(config)}
        stated = Fields(values, "the source's config", UnsupportedArch)
        experts = family.mixture.write([layer.experts for layer in arch.layers], stated)
        for name, value in experts.items():
            for each in family.stated_names(name, config):
                by_layer = isinstance(config.get(each), list) and not isinstance(value, list)
                config[each] = [value] * arch.num_layers if by_layer else value
    config |= dict.fromkeys(family.stated_names("tie_word_embeddings", config), arch.tied_head)
    config |= family.restated(arch)
    config.pop("torch_dtype", None)
    config.pop("quantization_config", None)
    num_before = family.stated(arch.config).get("num_hidden_layers")
    for name in FIELDS_BY_LAYER:
        if isinstance(config.get(name), (list, str)):
            config[name] = config[name][: arch.num_layers]
            if family.mtp is not None:  # what the source states of layers that predict further tokens stays
                config[name] += after_last(arch.config.get(name), num_before, config[name])
    return config


def without_predictors(family: "Family", config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the config of a model of so many layers that is written without the layers that predict further
    tokens: fields by layer end with the last layer, and each field that counts such layers has the value for
    none, but in families in which the count decides what other parts compute.
    """
    text = family.stated(config)
    stated = {name: text[name] for name in FIELDS_BY_LAYER if isinstance(text.get(name), (list, str))}
    ended = family.changed(config, **{name: each[:num_layers] for name, each in stated.items()})
    return ended if family.mtp is not None and family.mtp.count_decides else _counted(ended)


def _counted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, and the configs inside of it, with the values for no such layers."""
    counted = {name: _counted(each) if isinstance(each, dict) else each for name, each in config.items()}
    return counted | {name: none for name, none in _NO_PREDICTORS.items() if config.get(name)}
