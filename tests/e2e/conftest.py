"""A tiny model with a tokenizer, and recipes over it: whole runs in seconds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from compress.cli.app import main
from compress.data.corpus import python_documents
from compress.models.checkpoint import write_checkpoint
from compress.models.family import family_of
from compress.models.initialise import fresh_decoder
from compress.models.weights import MemorySource
from tests.support.tiny_run import CONFIG, RECIPE


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights; the tokenizer is a byte-level BPE learnt from a few documents."""
    path = tmp_path_factory.mktemp("model")
    decoder = fresh_decoder(family_of(CONFIG).read_config(CONFIG), generator=torch.Generator().manual_seed(0))
    write_checkpoint(path, MemorySource(decoder, dtype=torch.bfloat16))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    texts = [document.text for document, _ in zip(python_documents("calibration"), range(8), strict=False)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def recipe(model_dir: Path, work: Path) -> Callable[..., Path]:
    """Writes the recipe with changes at its top level; JSON is YAML."""

    def write(name: str = "recipe.yaml", **changes: Any) -> Path:
        path = work / name
        path.write_text(json.dumps({**RECIPE, "model": str(model_dir), **changes}))
        return path

    return write


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the CLI in this process: (exit code, stdout, stderr)."""

    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(each) for each in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return call
