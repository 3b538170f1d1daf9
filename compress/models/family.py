"""Families of models as tables: how one Hugging Face architecture spells the canonical decoder in
`config.json` and in tensor names.

`read_config` turns a config into an `Arch`, `write_config` is its inverse; `to_disk` renames modules. An
unknown field is an error and not a guess: it may change the function. Families are data, one file each in
`archs/`, found by `FAMILIES`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch, LayerShape
from compress.models.rope_config import read_rope
from compress.plugins import PluginSet

# Fields that describe training, generation, bookkeeping or the tokenizer: they do not change the forward
# pass.
INERT_FIELDS = frozenset(
    [
        "architectures",
        "model_type",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "attention_dropout",
        "_name_or_path",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "torchscript",
        "use_bfloat16",
        "pruned_heads",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "is_decoder",
        "cross_attention_hidden_size",
        "add_cross_attention",
        "tie_encoder_decoder",
        "id2label",
        "label2id",
        "task_specific_params",
        "problem_type",
        "_attn_implementation_autoset",
        "tokenizer_class",
        "prefix",
        "sep_token_id",
        "decoder_start_token_id",
        "finetuning_task",
        "max_length",
        "min_length",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "diversity_penalty",
        "early_stopping",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "output_scores",
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "tf_legacy_loss",
        "quantization_config",
        "unsloth_version",
    ]
)
SHAPE_FIELDS = frozenset(
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
    ]
)
# Canonical module -> module on disk: the spelling that Llama introduced and most decoders kept.
OUTER_MODULES = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn": "self_attn",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_CANONICAL_LAYER = re.compile(r"layers\.(\d+)\.(.+)")

Windows = Callable[[Mapping[str, Any]], list[int | None]]


def no_window(config: Mapping[str, Any]) -> list[int | None]:
    return [None] * config["num_hidden_layers"]


@dataclass(frozen=True)
class Family:
    """One architecture as data. Bias entries name a boolean config field, or are constants of the
    architecture. `heads_divide_hidden`: `transformers` refuses a config whose number of heads does not
    divide the hidden size."""

    model_type: str
    architecture: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    ffn_bias: bool | str = False
    qk_norm: bool = False
    heads_divide_hidden: bool = False
    windows: Windows = no_window
    known_fields: frozenset[str] = frozenset()
    fixed_fields: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    outer_modules: Mapping[str, str] = field(default_factory=lambda: OUTER_MODULES)
    layer_modules: Mapping[str, str] = field(default_factory=lambda: LAYER_MODULES)
    layer_prefix: str = "model.layers."
    ignored_tensors: str = r"rotary_emb\.inv_freq$"

    def read_config(self, raw: Mapping[str, Any]) -> Arch:
        """Read the facts of a `config.json`.

        Raises:
            UnsupportedArch: a field is missing, unknown, or has a value that the decoder does not support;
                the message names it.
        """
        config = {**self.defaults, **raw}
        self._refuse_unknown(config)
        try:
            num_heads = config["num_attention_heads"]
            hidden_size = config["hidden_size"]
            head_dim = config.get("head_dim") or hidden_size // num_heads
            windows = self.windows(config)
            layers = tuple(
                LayerShape(
                    num_heads=num_heads,
                    num_kv_heads=config.get("num_key_value_heads") or num_heads,
                    head_dim=head_dim,
                    intermediate_size=config["intermediate_size"],
                    rope=read_rope(config, _layer_type(config, idx)),
                    window=windows[idx],
                )
                for idx in range(config["num_hidden_layers"])
            )
            return Arch(
                family=self.model_type,
                vocab_size=config["vocab_size"],
                hidden_size=hidden_size,
                max_position=config["max_position_embeddings"],
                layers=layers,
                norm_eps=config["rms_norm_eps"],
                activation=config["hidden_act"],
                tied_head=bool(config["tie_word_embeddings"]),
                qkv_bias=_flag(self.qkv_bias, config),
                o_bias=_flag(self.o_bias, config),
                ffn_bias=_flag(self.ffn_bias, config),
                qk_norm=self.qk_norm,
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
                config=dict(raw),
            )
        except KeyError as error:
            raise UnsupportedArch(
                f"config.json of this {self.model_type} model has no field {error}."
            ) from None
        except (TypeError, ValueError, IndexError) as error:
            raise UnsupportedArch(
                f"config.json of this {self.model_type} model has a value of the wrong kind: {error}."
            ) from error

    def write_config(self, arch: Arch) -> dict[str, Any]:
        """Return the `config.json` of an `Arch`: the source's config with every field rewritten that the
        facts decide.

        Raises:
            UnsupportedArch: the widths differ between layers, which a stock config cannot express.
        """
        first = arch.layers[0]
        if not arch.is_uniform:
            raise UnsupportedArch(
                "the layers differ in width; a stock Hugging Face config states one width for all layers."
            )
        config = dict(arch.config)
        config.update(
            architectures=[self.architecture],
            model_type=self.model_type,
            vocab_size=arch.vocab_size,
            hidden_size=arch.hidden_size,
            intermediate_size=first.intermediate_size,
            num_hidden_layers=arch.num_layers,
            num_attention_heads=first.num_heads,
            num_key_value_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            tie_word_embeddings=arch.tied_head,
            dtype=arch.dtype,
        )
        config.pop("torch_dtype", None)
        config.pop("quantization_config", None)
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: arch.num_layers]
        return config

    def to_disk(self, module: str) -> str:
        """Disk name of a canonical module: `layers.3.attn.q` -> `model.layers.3.self_attn.q_proj`."""
        if match := _CANONICAL_LAYER.fullmatch(module):
            return f"{self.layer_prefix}{match[1]}.{self.layer_modules[match[2]]}"
        return self.outer_modules[module]

    def _refuse_unknown(self, config: Mapping[str, Any]) -> None:
        known = INERT_FIELDS | SHAPE_FIELDS | self.known_fields | self.fixed_fields.keys()
        unknown = sorted(key for key, value in config.items() if key not in known and value is not None)
        if unknown:
            raise UnsupportedArch(
                f"config.json of this {self.model_type} model has field(s) that may change the function and "
                "are not known here: "
                f"{', '.join(unknown)}. Remove them if they are notes of another tool; otherwise this model "
                "is not supported yet."
            )
        for key, value in self.fixed_fields.items():
            if config.get(key) not in (None, value):
                raise UnsupportedArch(
                    f"config.json says {key} = {config[key]!r}; the decoder computes {value!r} only."
                )


FAMILIES: PluginSet[Family] = PluginSet("architecture", "compress.models.archs")


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a `config.json`.

    Raises:
        UnsupportedArch: no family is registered for this `model_type`.
    """
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES.names():
        raise UnsupportedArch(
            f"architecture '{model_type}' ({', '.join(config.get('architectures') or ['no class named'])}) "
            "is not supported; "
            f"known: {', '.join(FAMILIES.names())}."
        )
    return FAMILIES.get(model_type)


def windows_by_layer_type(config: Mapping[str, Any]) -> list[int | None]:
    """Return the sliding windows of families that state `layer_types` (or, before that field existed,
    `max_window_layers`)."""
    num_layers = config["num_hidden_layers"]
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 0)
        types = [
            "sliding_attention" if window is not None and idx >= first else "full_attention"
            for idx in range(num_layers)
        ]
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedArch(
            f"config.json names layer_types {sorted(unknown)}; known: full_attention, sliding_attention."
        )
    return [window if kind == "sliding_attention" else None for kind in types]


def _layer_type(config: Mapping[str, Any], idx: int) -> str:
    types = config.get("layer_types")
    return types[idx] if types else "full_attention"


def _flag(rule: bool | str, config: Mapping[str, Any]) -> bool:
    return rule if isinstance(rule, bool) else bool(config.get(rule, False))
