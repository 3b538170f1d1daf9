r"""Does a chat model lose less on chat when it is calibrated on chat?

    python -m scripts.bench_chat --out benchmarks/chat.json

A toy that speaks ChatML: the bundled model, trained a little on conversations about Python's standard
library, whose answers are docstrings. It is quantized with one recipe after calibration on

    plain            builtin://python, as text
    transcript       conversations as `User: ...` and `Assistant: ...` paragraphs
    chat             conversations by the model's template, every token counted
    chat, answers    the same, answers alone counted
    mix              half of the windows chat (answers), half plain

and judged by KL(source || candidate) on conversations and on plain text of modules that neither training nor
calibration saw. Windows, window length, seeds and settings are the same for all.

A run that was cut goes on from what lies in `--work`: the toy with its losses, and the rows.
"""

import argparse
import ast
import json
import shutil
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import compress
from compress.data.corpus import python_documents
from compress.data.model_tokens import read_tokens
from compress.distill.train import TrainConfig, Windows, train
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.decoder import Decoder
from compress.models.weights import MemorySource, build_decoder
from compress.registry.model_source import BUILTIN, resolve_model
from scripts.bench_setup import markdown, write_results

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUESTIONS = (
    "What does {} do?",
    "Explain {} of the module {}.",
    "How do I use {}?",
    "Please describe {} from {} in a few words.",
)
MIN_ANSWER_CHARS = 60
MAX_ANSWER_CHARS = 1200
TURNS = 3
HEAD = "license: PSF-2.0\nsource: docstrings of the running CPython\n"
CARDS = {
    "plain": "builtin://python",
    "transcript": "",
    "chat": "chat: {}\n",
    "chat, answers": "chat: {count: answers}\n",
    "mix": "",
}


def conversations(part: str) -> Iterator[dict[str, Any]]:
    """Yield conversations about the modules of one part of the embedded text: `training`, `calibration`
    (which share no module) or `evaluation`."""
    for document in python_documents("evaluation" if part == "evaluation" else "calibration"):
        trained = sha256(f"chat/{document.id}".encode()).digest()[0] % 3 != 0
        if document.id.startswith("topics/") or (part != "evaluation" and trained != (part == "training")):
            continue
        turns: list[dict[str, str]] = []
        for name, text in _documented(document.text):
            question = QUESTIONS[sha256(name.encode()).digest()[0] % len(QUESTIONS)]
            turns += [
                {"role": "user", "content": question.format(name, document.id)},
                {"role": "assistant", "content": text},
            ]
            if len(turns) == 2 * TURNS:
                yield {"id": f"{document.id}/{name}", "messages": turns}
                turns = []
        if turns:
            yield {"id": f"{document.id}/rest", "messages": turns}


def _documented(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = ast.get_docstring(node) or ""
            if MIN_ANSWER_CHARS <= len(text) <= MAX_ANSWER_CHARS:
                yield node.name, text


def write_cards(work: Path) -> dict[str, str]:
    """Write the conversations and their cards; return name -> card, with `training` and `evaluation`."""
    for part in ("training", "calibration", "evaluation"):
        rows = (json.dumps(row) + "\n" for row in conversations(part))
        (work / f"{part}.jsonl").write_text("".join(rows))
    found = {}
    stated = {**CARDS, "training": CARDS["chat, answers"], "evaluation": "chat: {}\n"}
    for name, chat in stated.items():
        path = work / f"{name.replace(', ', '-')}.yaml"
        part = name if name in ("training", "evaluation") else "calibration"
        body = (
            f"kind: local\ntitle: {name}\nformat: jsonl\ntext_field: messages\npaths: [{part}.jsonl]\n{chat}"
        )
        if name == "mix":
            cards = "cards: [{card: chat-answers.yaml}, {card: 'builtin://python'}]"
            body = f"kind: mix\ntitle: mix\n{cards}\n"
        path.write_text(HEAD + body)
        found[name] = CARDS["plain"] if name == "plain" else str(path)
    return found


def chat_model(work: Path, card: str, args: argparse.Namespace) -> tuple[Path, list[float]]:
    """Train the bundled model on conversations, the loss on answers alone; return its directory and the
    losses of its log."""
    place = work / "toy"
    log = work / "losses.json"
    if log.exists():
        return place, json.loads(log.read_text())
    start = work / "start"
    shutil.copytree(BUILTIN["reference"], start, dirs_exist_ok=True)
    (start / "chat_template.jinja").write_text(TEMPLATE)
    source = resolve_model("path", str(start), None)
    num_windows = args.steps * args.batch_size
    tokens, _ = read_tokens(
        source, card, num_samples=num_windows, seq_len=args.seq_len + 1, seed=7, offline=True
    )
    counted_NS = tokens.counted_NS
    assert counted_NS is not None
    model = build_decoder(Checkpoint(start), dtype=torch.float32, device=torch.device("cpu"))
    model.requires_grad_(True)
    windows = Windows(tokens.tokens_NS, batch_size=args.batch_size, seed=0)
    config = TrainConfig(args.steps, args.batch_size, args.batch_size, args.lr, warmup_frac=0.1, log_every=20)
    rows = train(
        model,
        answers_loss,
        lambda step: windows.weighted(step, counted_NS),
        config,
        device=torch.device("cpu"),
    )
    losses = []
    for row in rows:
        print(f"step {row.step} loss {row.loss:.3f} {row.tokens_per_s:,.0f} tokens/s", flush=True)
        losses.append(row.loss)
    shutil.copytree(start, place, dirs_exist_ok=True)
    write_checkpoint(place, MemorySource(model, dtype=torch.bfloat16))
    log.write_text(json.dumps(losses))
    return place, losses


def answers_loss(model: Decoder, tokens_BS: torch.Tensor, weights_BS: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the tokens that count."""
    nll_T = F.cross_entropy(
        model(tokens_BS[:, :-1]).flatten(0, 1), tokens_BS[:, 1:].flatten(), reduction="none"
    )
    return (nll_T * weights_BS[:, 1:].flatten()).mean()


def measured(
    args: argparse.Namespace, work: Path, model: Path, name: str, cards: dict[str, str], seed: int
) -> dict[str, Any]:
    """Quantize after calibration on one card and judge the result on chat and on plain text."""
    row: dict[str, Any] = {"calibration": name, "scheme": args.scheme, "preset": args.preset, "seed": seed}
    for judged, data in {"chat": cards["evaluation"], "plain": "builtin://python-eval"}.items():
        text = {"data": data, "num_samples": args.eval_samples, "seq_len": args.seq_len}
        result = compress.quantize(
            model,
            args.scheme,
            data=cards[name],
            num_samples=args.num_samples,
            seq_len=args.seq_len,
            preset=args.preset,
            validate={**text, "latency": None, "speculative": None},
            seed=seed,
            workspace=work / "workspace",
            run_dir=work / "runs" / f"{name}-{seed}-{judged}".replace(", ", "-"),
            device="cpu",
            offline=True,
        )
        accuracy = json.loads((Path(str(result.report)).with_name("report.json")).read_text())["accuracy"]
        for metric in ("kl_mean", "ppl_ratio", "top1"):
            row[f"{metric}_{judged}"] = accuracy[metric]["value"]
        row[f"kl_mean_{judged}_interval"] = [accuracy["kl_mean"]["lower"], accuracy["kl_mean"]["upper"]]
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=None, help="write the result file here")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "bench-chat")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--eval-samples", type=int, default=64)
    parser.add_argument("--scheme", default="W4A16_G128")
    parser.add_argument("--preset", default="balanced")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--commit", default=None, help="of the code that is measured; the checkout's by default"
    )
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    cards = write_cards(args.work)
    model, losses = chat_model(args.work, cards["training"], args)
    kept = args.work / "rows.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    rows = [row for row in rows if row["seed"] < args.seeds]
    known = {(row["seed"], row["calibration"]) for row in rows}
    for seed in range(args.seeds):
        for name in (each for each in CARDS if (seed, each) not in known):
            rows.append(measured(args, args.work, model, name, cards, seed))
            with kept.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    conditions = {
        name: getattr(args, name)
        for name in ("steps", "batch_size", "lr", "seq_len", "num_samples", "eval_samples", "seeds")
    }
    write_results(
        args.out,
        rows,
        device=torch.device("cpu"),
        commit=args.commit,
        facts={"conditions": conditions, "training_loss": losses},
    )
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the mean over seeds of each calibration, as Markdown."""
    lines = []
    for name in CARDS:
        own = [row for row in rows if row["calibration"] == name]
        means = {key: sum(row[key] for row in own) / len(own) for key in ("kl_mean_chat", "kl_mean_plain")}
        lines.append([name, *(f"{value:.5f}" for value in means.values()), str(len(own))])
    return markdown(["calibrated on", "KL on chat", "KL on plain text", "seeds"], lines)


if __name__ == "__main__":
    main()
