"""The beginning-of-sequence token of a model, wherever its files state it: as `transformers` puts it before a
text.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from compress.data.model_tokens import prepended_bos
from compress.data.tokenizer import load_tokenizer

BOS = 1
OTHER = 2


def write_model(path: Path, config: dict[str, Any], tokenizer_config: dict[str, Any], first: str) -> Path:
    """Write the files of a model whose tokenizer puts the token `first` before every text."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<s>": BOS, "<cls>": OTHER}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_config})
    )
    return path


@pytest.mark.parametrize(
    ("config", "tokenizer_config"),
    [
        ({"model_type": "llama", "bos_token_id": BOS}, {}),
        ({"model_type": "gemma4", "text_config": {"bos_token_id": BOS}}, {}),
        ({"model_type": "gemma3", "text_config": {}}, {"bos_token": "<s>"}),
        ({"model_type": "gemma3", "text_config": {}}, {"bos_token": {"content": "<s>"}}),
        ({"model_type": "llama", "bos_token_id": OTHER}, {"bos_token": "<s>"}),
    ],
)
def test_a_bos_that_the_tokenizer_puts_is_found_wherever_it_is_stated(
    tmp_path: Path, config: dict[str, Any], tokenizer_config: dict[str, Any]
) -> None:
    path = write_model(tmp_path, config, tokenizer_config, "<s>")
    tokenizer, _ = load_tokenizer(path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))("a a")
    assert [prepended_bos(tokenizer, path), 0, 0] == theirs["input_ids"]


def test_a_first_token_that_nothing_calls_bos_is_none(tmp_path: Path) -> None:
    path = write_model(
        tmp_path, {"model_type": "llama", "bos_token_id": BOS}, {"cls_token": "<cls>"}, "<cls>"
    )
    assert prepended_bos(load_tokenizer(path)[0], path) is None


def test_a_bos_that_the_tokenizer_does_not_put_is_none(tmp_path: Path) -> None:
    path = write_model(tmp_path, {"model_type": "llama", "bos_token_id": BOS}, {"bos_token": "<s>"}, "<s>")
    tokenizer, _ = load_tokenizer(path)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    assert prepended_bos(tokenizer, path) is None
