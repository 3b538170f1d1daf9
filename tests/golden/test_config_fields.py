"""A field of `config.json` at another value is refused, or computes what `transformers` computes with it."""

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from compress.errors import CompressError
from compress.models.checkpoint import Checkpoint
from compress.models.config_facts import IDLE_FIELDS
from compress.models.family import family_of
from compress.models.weights import build_decoder
from tests.golden.test_families import SEQ_LEN, tolerance
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import attention_of, auto_class, build_config, saved, tokens

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "sigmoid")
TYPES = ("full_attention", "sliding_attention")
WITHIN = ("text_config", "thinker_config")
"""Fields that hold the config of a text model, or another config that does."""
OF_OTHER_PARTS = ("vision_config", "audio_config")
"""Fields of flat configs that hold the configs of parts around the text model."""
GONE = object()
"""The value of a field that is left out."""
FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What the classes of `transformers` raise for values that nobody tried there."""
OTHERWISE = {
    ("nemotron_h", "time_step_min"),
    ("nemotron_h_omni", "time_step_min"),
    ("phimoe", "original_max_position_embeddings"),
    ("aya_vision", "logit_scale"),
    ("cohere2_vision", "logit_scale"),
    ("granite_speech", "logits_scaling"),
    ("granite_speech_plus", "logits_scaling"),
    *(("dbrx", f"{part}.rope_theta") for part in ("attn_config", "rope_parameters")),
}
"""Fields that the decoder reads in another way than `transformers` (`Family.computed_otherwise`)."""


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text config within a config, which may be the config itself."""
    inner = next((config[name] for name in WITHIN if name in config), None)
    return config if inner is None else text_of(inner)


def other_values(name: str, value: Any) -> list[Any]:
    """Return other values of the type of a field; of one that is null, values of several types."""
    if isinstance(value, bool):
        return [not value]
    if value is None:
        return [True, 2, 0.5]
    if isinstance(value, int):
        return [value + 1, value * 2, value // 2]
    if isinstance(value, float):  # an eps of 0 magnifies roundings of heads that are near nothing
        return [value * 1.5 + 0.01, *([] if name.endswith("eps") else [0.0])]
    if isinstance(value, str):
        return list(ACTIVATIONS) if value in ACTIVATIONS else ["nonsense"]
    if not isinstance(value, list) or not value:
        return []
    turned = [value[1:] + value[:1]]
    if all(isinstance(each, str) for each in value):
        return turned + [[kind] * len(value) for kind in sorted({*value, *TYPES})]
    if not all(type(each) in (int, float) for each in value):
        return turned
    return [*turned, [each * 2 for each in value], [value[0] + 1, *value[1:]]]


def variants(config: dict[str, Any], defaults: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Give the name of each field of a text config, another value, and the config that has it there: fields
    that the config states, those of its ropes, and the others of its class."""
    text = text_of(config)
    for name in sorted({*text, *defaults} - IDLE_FIELDS - {"vocab_size", *OF_OTHER_PARTS}):
        value = text.get(name, defaults.get(name))
        if not isinstance(value, dict):
            others = [each for each in other_values(name, value) if each != value]
            for other in [*others, *([GONE] if name in text else [])]:
                yield name, other, _changed(config, (name,), other)
            continue
        for path, inner in _leaves(text.get(name, {}), (name,)):
            for other in [*other_values(path[-1], inner), GONE]:
                yield ".".join(path), other, _changed(config, path, other)


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(value, dict):
        yield path, value
        return
    for name, inner in value.items():
        yield from _leaves(inner, (*path, name))


def _changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    place = text_of(changed)
    for name in path[:-1]:
        place = place[name]
    if value is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed


def earliest_of_equal(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return what `torch.topk` does, of equal numbers the first, which it leaves open: scores of few heads
    of an indexer are often 0."""
    del sorted
    both = x.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk([each.narrow(dim, 0, k) for each in both])


def logits_of_transformers(family: str, directory: Path, tokens_BS: Tensor) -> Tensor | None:
    """Return the logits; None where `transformers` fails with the config, or finds other tensors than its
    own."""
    how = {"attn_implementation": attention_of(family), "output_loading_info": True}
    try:
        found = auto_class(family).from_pretrained(directory, **how)
        model, info = found if isinstance(found, tuple) else (found, {})
        if any(info.get(keys) for keys in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            return None
        with torch.no_grad(), patch.object(Tensor, "topk", earliest_of_equal):
            logits: Tensor = model.eval()(tokens_BS).logits
    except FAILURES:
        return None
    return None if logits.isnan().any() else logits


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_field_at_another_value_is_refused_or_computes_the_same(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    stored = tmp_path / "stored"
    saved(stored, family, changes)
    config = json.loads((stored / "config.json").read_text())
    defaults = json.loads(build_config(family, changes).get_text_config().to_json_string(use_diff=False))
    tokens_BS = tokens(2, SEQ_LEN)
    wrong = []
    num_equal = 0
    for idx, (name, value, changed) in enumerate(variants(config, defaults)):
        if (family, name) in OTHERWISE:
            continue
        directory = tmp_path / str(idx)
        directory.mkdir()
        for file in stored.glob("*.safetensors*"):
            os.link(file, directory / file.name)
        (directory / "config.json").write_text(json.dumps(changed))
        try:
            max_position = family_of(changed).read_config(changed).max_position
            decoder = build_decoder(Checkpoint(directory), dtype=torch.float32, device=torch.device("cpu"))
        except CompressError:
            continue
        expected = logits_of_transformers(family, directory, tokens_BS)
        if expected is None or max_position < SEQ_LEN:
            continue
        with torch.no_grad():
            logits = decoder(tokens_BS)[..., : expected.shape[-1]]  # the others are rows of padding
        num_equal += 1
        if not (logits - expected).abs().max() <= 4 * tolerance(expected):
            wrong.append((name, "absent" if value is GONE else value))
    assert wrong == []
    assert num_equal > 0
