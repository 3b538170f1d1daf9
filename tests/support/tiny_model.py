"""A tiny Llama of random weights with a tokenizer: a model directory in a second."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from compress.data.corpus import python_documents
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.family import family_of
from compress.models.initialise import fresh_decoder
from compress.models.weights import MemorySource, Weights
from tests.support.tiny_run import CONFIG


def write_tiny_model(path: Path, *, untouched: Weights | None = None, **changes: Any) -> Path:
    """Write the model of `tiny_run.CONFIG`, changed, with untouched parts, and a byte-level BPE learnt from a
    few documents."""
    config = {**CONFIG, **changes}
    arch = family_of(config).read_config(config)
    path.mkdir(exist_ok=True)
    decoder = fresh_decoder(arch, generator=torch.Generator().manual_seed(0))
    write_checkpoint(path, MemorySource(decoder, dtype=torch.bfloat16, untouched=untouched))
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
