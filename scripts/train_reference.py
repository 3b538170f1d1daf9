"""Train the bundled reference model from text to `compress/reference/`: tokenizer, weights, log, card.

    python -m scripts.train_reference --data TEXT_DIR --out compress/reference

TEXT_DIR holds `*.jsonl.xz` files with lines {"source", "id", "text"}; the standard library of the running
Python is added to them. One document in a hundred (by sha256 of its id; for Python one in sixteen,
`compress.data.corpus.is_evaluation`) is never trained on and measures bits per byte. Everything is decided by
the seed, the text and the rounding of the hardware; both of the first are recorded with the result. Needs
only torch, numpy, tokenizers and safetensors, so that it runs on a bare GPU machine.
"""

import argparse
import dataclasses
import hashlib
import json
import lzma
import math
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from compress.artifact.tensors import load_tensors
from compress.data.corpus import Document, python_documents
from compress.digest import digest_bytes, digest_file
from compress.distill.losses import next_token
from compress.distill.train import TokenStream, TrainConfig, train
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.decoder import Decoder
from compress.models.family import family_of
from compress.models.initialise import fresh_decoder
from compress.models.weights import MemorySource, build_decoder

SEED = 0
SEQ_LEN = 1024
VOCAB_SIZE = 8192
END_OF_TEXT = "<|endoftext|>"
MIN_CHARS = 200
TOKENIZER_CHARS = 60_000_000
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": SEQ_LEN,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "dtype": "bfloat16",
}


def held_out(doc_id: str) -> bool:
    return int.from_bytes(hashlib.sha256(doc_id.encode()).digest(), "big") % 100 == 0


def read_jsonl(path: Path) -> Iterator[Document]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if len(row["text"]) >= MIN_CHARS:
                yield Document(f"{row['source']}/{row['id']}", row["text"])


def collect(data: Path) -> tuple[list[Document], dict[str, list[Document]]]:
    """(training documents, held-out documents by source)."""
    training: list[Document] = []
    evaluation: dict[str, list[Document]] = {"python": list(python_documents("evaluation"))}
    for path in sorted(data.glob("*.jsonl.xz")):
        for document in read_jsonl(path):
            source = document.id.partition("/")[0]
            (evaluation.setdefault(source, []) if held_out(document.id) else training).append(document)
    training += python_documents("calibration")
    return training, evaluation


def train_tokenizer(training: list[Document]) -> Tokenizer:
    """Byte-level BPE; digits in threes, words and white space split as GPT-2 does. Learnt from an even sample
    of the training text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    total_chars = sum(len(document.text) for document in training)
    every = max(1, math.ceil(total_chars / TOKENIZER_CHARS))
    sample = sorted(training, key=lambda document: hashlib.sha256(document.id.encode()).digest())[::every]
    tokenizer.train_from_iterator((document.text for document in sample), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[Document], *, seed: int) -> np.ndarray:
    """uint16 stream of all documents in a seeded order, each behind an end-of-text token."""
    order = np.random.default_rng(seed).permutation(len(documents))
    pieces = []
    for start in range(0, len(order), 1024):
        texts = [documents[idx].text for idx in order[start : start + 1024]]
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            pieces.append(np.array([0, *encoding.ids], dtype=np.uint16))
    return np.concatenate(pieces)


@torch.no_grad()
def bits_per_byte(
    model: Decoder, tokenizer: Tokenizer, documents: list[Document], device: torch.device
) -> dict[str, float]:
    """Convention A: documents joined by blank lines, windows of SEQ_LEN without overlap, mean over predicted
    tokens, tail dropped."""
    text = "\n\n".join(document.text for document in documents)
    tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
    windows = tokens[: tokens.numel() // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)
    nll = 0.0
    for batch in windows.split(32):
        nll += float(next_token(model, batch.to(device))) * batch.shape[0]
    tokens_per_byte = tokens.numel() / len(text.encode())
    mean_nll = nll / windows.shape[0]
    return {
        "bits_per_byte": mean_nll * tokens_per_byte / math.log(2),
        "perplexity": math.exp(mean_nll),
        "bytes": len(text.encode()),
    }


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": SEQ_LEN,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(facts, indent=2) + "\n")


def prepare(data: Path, work: Path) -> tuple[Tokenizer, np.ndarray, dict[str, list[Document]]]:
    """Tokenizer and training stream, made once per work directory."""
    work.mkdir(parents=True, exist_ok=True)
    training, evaluation = collect(data)
    tokenizer_file = work / "tokenizer.json"
    tokens_file = work / "tokens.npy"
    if not tokens_file.exists():
        train_tokenizer(training).save(str(tokenizer_file))
        np.save(tokens_file, encode(Tokenizer.from_file(str(tokenizer_file)), training, seed=SEED))
    return Tokenizer.from_file(str(tokenizer_file)), np.load(tokens_file), evaluation


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="directory with *.jsonl.xz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "train-reference",
        help="tokenizer and token stream are kept here",
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--peak-lr", type=float, default=6e-3)
    parser.add_argument(
        "--weight-decay", type=float, default=0.5, help="high, because the text is read many times over"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    started_s = time.perf_counter()
    device = torch.device(args.device)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    tokenizer, stream, evaluation = prepare(args.data, args.work)
    print(f"{stream.size:,} training tokens after {time.perf_counter() - started_s:.0f} s", flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    arch: Arch = family_of(CONFIG).read_config(CONFIG)
    model = fresh_decoder(arch, generator=torch.Generator().manual_seed(SEED)).to(device)
    micro = min(args.batch_size, 64)
    config = TrainConfig(
        args.steps,
        args.batch_size,
        micro,
        args.peak_lr,
        "muon",
        weight_decay=args.weight_decay,
        compile=device.type == "cuda",
    )
    windows = TokenStream(
        torch.from_numpy(stream.astype(np.int32)).to(device),
        seq_len=SEQ_LEN,
        batch_size=args.batch_size,
        seed=SEED,
    )
    with (args.out / "training_log.jsonl").open("w") as log:
        for row in train(model, next_token, windows.batch, config, device=device):
            log.write(
                json.dumps({key: round(value, 6) for key, value in dataclasses.asdict(row).items()}) + "\n"
            )
            if row.step % 500 == 0 or row.step == args.steps:
                print(
                    f"step {row.step} loss {row.loss:.4f} {row.tokens_per_s / 1e6:.2f} M tokens/s", flush=True
                )

    write_checkpoint(args.out, MemorySource(model, dtype=torch.bfloat16))
    write_tokenizer(tokenizer, args.out)
    stored = build_decoder(Checkpoint(args.out), dtype=torch.float32, device=device)
    results = {
        source: bits_per_byte(stored, tokenizer, documents, device)
        for source, documents in sorted(evaluation.items())
    }
    for source, result in results.items():
        print(
            f"{source}: {result['bits_per_byte']:.4f} bits per byte, perplexity {result['perplexity']:.2f}",
            flush=True,
        )
    facts = {
        "seed": SEED,
        "num_params": arch.num_params,
        "training_tokens": args.steps * args.batch_size * SEQ_LEN,
        "stream_tokens": int(stream.size),
        "stream_digest": digest_bytes(stream.tobytes()),
        "data": {path.name: digest_file(path) for path in sorted(args.data.glob("*.jsonl.xz"))},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "options": {name: getattr(args, name) for name in ("steps", "batch_size", "peak_lr", "weight_decay")},
        "optimizer": config.optimizer,
        "seq_len": SEQ_LEN,
        "seconds": round(time.perf_counter() - started_s, 1),
        "weights_digest": digest_file(args.out / "model.safetensors"),
        "num_tensors": len(load_tensors(args.out / "model.safetensors")),
        "held_out": results,
    }
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
