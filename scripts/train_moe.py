"""Train a small mixture of experts and measure what quantizing and pruning do to it.

    python -m scripts.train_moe --out WORK --results benchmarks/h200/moe_quality.json   # a GPU

The model is of Qwen3's family: 6 layers, 16 experts of which a token goes to 2, about 34 M parameters, of
which 9 M compute each token. Its text is the standard library of the running Python, in the tokens of the
bundled reference model; an auxiliary loss (arXiv 2101.03961, equation 4) keeps the router from a few experts.

Rows of the table: plain rounding, GPTQ and `balanced` at W4A16 in groups of 64, on little and on much
calibration text, with each policy for starved experts; and 16 experts pruned to 12 by REAP and at random, as
they are and recovered. Measured is the KL of the candidate from the model, on documents that were not trained
on.
"""

import argparse
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from compress.calibrate.arithmetic import compute_dtype
from compress.calibrate.expert_scores import best_experts, expert_scores
from compress.calibrate.guide import GuideFiles, make_guide
from compress.calibrate.sequential import Compression, run_sequential
from compress.context import Context
from compress.data.corpus import python_documents
from compress.distill.losses import Divergence, next_token
from compress.distill.objective import Objective, Teacher
from compress.distill.train import TokenStream, TrainConfig, train
from compress.models.canonical import OUTER_NAME, layer_name, load_weights
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.decoder import Decoder
from compress.models.expert_pruning import ExpertSubset
from compress.models.family import family_of
from compress.models.initialise import fresh_decoder
from compress.models.weights import MemorySource, WeightSource, build_decoder
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.registry.model_source import BUILTIN
from compress.stages.quantize.layers import quantization_passes
from compress.stages.quantize.spec import Quantize
from scripts.bench_setup import write_results

SEED = 0
SEQ_LEN = 512
BATCH = 32
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 0,
    "eos_token_id": 0,
    "dtype": "bfloat16",
}
BALANCE = 0.01
"""Factor of the auxiliary loss, that of the paper."""
SCHEME = "W4A16_G64"
METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"round": {"kind": "rtn"}, "measure_error": True},
    "gptq": {"round": {"kind": "gptq"}},
    "balanced": {"preset": "balanced"},
}
POLICIES = ("keep", "shrink", "all_tokens")
SAMPLES = (4, 16, 128)
NUM_KEPT = 12


class Balance:
    """The next-token loss plus the balance of the routers, which hooks on the mixtures collect."""

    def __init__(self, model: Decoder) -> None:
        self._terms: list[Tensor] = []
        for layer in model.layers:
            layer.moe.register_forward_pre_hook(self._collect)

    def _collect(self, moe: nn.Module, args: tuple[Any, ...]) -> None:
        facts = moe.facts
        probs_TE = moe.router(args[0].flatten(0, -2)).float().softmax(-1)
        chosen_TR = probs_TE.topk(facts.top_k, dim=-1).indices
        load_E = torch.bincount(chosen_TR.flatten(), minlength=facts.num_experts) / chosen_TR.numel()
        self._terms.append(facts.num_experts * (load_E * probs_TE.mean(0)).sum())

    def __call__(self, model: nn.Module, tokens_BS: Tensor) -> Tensor:
        self._terms.clear()
        loss = next_token(model, tokens_BS)
        return loss + BALANCE * torch.stack(self._terms).mean()


def tokens_of(split: str) -> Tensor:
    """Return the tokens of the documents of one split, in a row."""
    tokenizer = Tokenizer.from_file(str(BUILTIN["reference"] / "tokenizer.json"))
    texts = [document.text for document in python_documents(split)]
    rows = [torch.tensor([0, *each.ids]) for each in tokenizer.encode_batch_fast(texts)]
    return torch.cat(rows).to(torch.int32)


def windows(tokens: Tensor, num: int) -> Tensor:
    """Return int32 [num, SEQ_LEN], evenly spaced in the row."""
    step = (len(tokens) - SEQ_LEN) // num
    return torch.stack([tokens[idx * step : idx * step + SEQ_LEN] for idx in range(num)])


def train_model(out: Path, stream: Tensor, steps: int, device: torch.device) -> dict[str, Any]:
    """Train the model and write its checkpoint; return how."""
    started_s = time.perf_counter()
    arch = family_of(CONFIG).read_config(CONFIG)
    model = fresh_decoder(arch, generator=torch.Generator().manual_seed(SEED)).to(device)
    config = TrainConfig(steps, BATCH, BATCH, 2e-3, "adamw", weight_decay=0.1)
    batches = TokenStream(stream.to(device), seq_len=SEQ_LEN, batch_size=BATCH, seed=SEED)
    log = [
        {"step": row.step, "loss": round(row.loss, 4)}
        for row in train(model, Balance(model), batches.batch, config, device=device)
    ]
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    write_checkpoint(out, MemorySource(model, dtype=torch.bfloat16))
    return {
        "steps": steps,
        "tokens": steps * BATCH * SEQ_LEN,
        "seconds": round(time.perf_counter() - started_s, 1),
        "num_params": arch.num_params,
        "num_active_linear_params": arch.num_active_linear_params,
        "log": log[:: max(1, len(log) // 10)] + log[-1:],
    }


class Stored:
    """The canonical files of a run as a source."""

    kv_format: str | None = None

    def __init__(self, source: WeightSource, directory: Path, scheme: ModelScheme) -> None:
        self.arch = source.arch
        self._directory = directory
        self._scheme = scheme

    def outer(self) -> Mapping[str, Any]:
        return load_weights(self._directory / OUTER_NAME, self._scheme)

    def layer(self, layer_idx: int) -> Mapping[str, Any]:
        path = self._directory / layer_name(layer_idx)
        return load_weights(path, self._scheme, prefix=f"layers.{layer_idx}.")


@torch.no_grad()
def kl(source: nn.Module, candidate: nn.Module, tokens_NS: Tensor, device: torch.device) -> dict[str, float]:
    """Return the mean KL(source || candidate) in nats a token, and how often both have the same top token."""
    total = same = 0.0
    for tokens in tokens_NS.to(device=device, dtype=torch.int64).split(4):
        p = source(tokens).float().log_softmax(-1)
        q = candidate(tokens).float().log_softmax(-1)
        total += float((p.exp() * (p - q)).sum(-1).mean()) * len(tokens)
        same += float((p.argmax(-1) == q.argmax(-1)).float().mean()) * len(tokens)
    return {"kl": round(total / len(tokens_NS), 6), "same_top": round(same / len(tokens_NS), 4)}


def quantized(
    work: Path, source: WeightSource, tokens_NS: Tensor, method: str, policy: str, device: torch.device
) -> tuple[Stored, list[dict[str, Any]], float]:
    """Quantize the model; return it, the rows of its linears and the seconds."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    experts = {"starved": policy}
    spec = Quantize.model_validate({"scheme": SCHEME, "experts": experts, **METHODS[method]})
    scheme = ModelScheme(SCHEMES[SCHEME])
    ctx = Context(str(device), SEED, work)
    in_dtype = compute_dtype(str(device), torch.bfloat16)
    started_s = time.perf_counter()
    if spec.guide is not None:
        make_guide(spec.guide, source, tokens_NS, ctx, compute_dtype=in_dtype)
    assert spec.experts is not None
    compression = Compression(
        quantization_passes(spec, scheme, torch.bfloat16),
        scheme=scheme,
        true_sequential=spec.true_sequential,
        guide=None if spec.guide is None else GuideFiles(ctx),
        experts=spec.experts.policy(),
    )
    rows = run_sequential(source, tokens_NS, compression, work, ctx, compute_dtype=in_dtype)
    return Stored(source, work, scheme), rows, time.perf_counter() - started_s


def pruned(
    source: WeightSource, kept: list[list[int]], stream: Tensor, steps: int, device: torch.device
) -> tuple[Decoder, Decoder]:
    """Return the model with those experts, as it is and recovered by distillation."""
    subset = ExpertSubset(source, kept)
    before = build_decoder(subset, dtype=torch.float32, device=device)
    student = build_decoder(subset, dtype=torch.float32, device=device).requires_grad_(True)
    teacher = Teacher(build_decoder(source, dtype=torch.bfloat16, device=device), device=device)
    objective = Objective(Divergence(), teacher, compute_dtype=torch.bfloat16)
    batches = TokenStream(stream.to(device), seq_len=SEQ_LEN - 1, batch_size=BATCH, seed=SEED + 1)
    config = TrainConfig(steps, BATCH, BATCH, 3e-4, "adamw", weight_decay=0.0)
    for _ in train(student, objective, batches.batch, config, device=device):
        pass
    return before, student.requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="work directory")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--recover-steps", type=int, default=200)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--samples", type=int, nargs="+", default=list(SAMPLES))
    parser.add_argument("--commit", help="of the measured tree; this checkout's by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    stream = tokens_of("calibration")
    held_out = windows(tokens_of("evaluation"), args.held_out)
    print(f"{len(stream):,} tokens", flush=True)
    trained = train_model(args.out / "model", stream, args.steps, device)
    print(trained, flush=True)
    source = Checkpoint(args.out / "model")
    model = build_decoder(source, dtype=torch.bfloat16, device=device)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(row, flush=True)
        facts = {"model": trained, "scheme": SCHEME, "seq_len": SEQ_LEN}
        write_results(args.results, rows, device=device, commit=args.commit, facts=facts)

    ctx = Context(str(device), SEED, args.out)
    scores = expert_scores(source, windows(stream, 64), ctx, compute_dtype=torch.float32)
    reference = build_decoder(source, dtype=torch.float32, device=device)
    generator = torch.Generator().manual_seed(SEED)
    shuffled = [torch.rand(len(each), generator=generator) for each in scores]
    for name, values in (("reap", scores), ("random", shuffled)):
        kept = [best_experts(each, NUM_KEPT) for each in values]
        before, after = pruned(source, kept, stream, args.recover_steps, device)
        row = {"method": f"prune-{name}", "experts": NUM_KEPT, "of": CONFIG["num_experts"]}
        add({**row, "recovered": False, **kl(reference, before, held_out, device)})
        add({**row, "recovered": True, "steps": args.recover_steps, **kl(reference, after, held_out, device)})
    for num_samples in args.samples:
        calibration = windows(stream, num_samples)
        for method in METHODS:
            for policy in POLICIES if method != "rtn" else ("keep",):
                stored, layers, seconds = quantized(
                    args.out / "quantized", source, calibration, method, policy, device
                )
                candidate = build_decoder(stored, dtype=torch.bfloat16, device=device)
                counts = [
                    row["tokens"] for row in layers if row["linear"].endswith(".down") and "tokens" in row
                ]
                add(
                    {
                        "method": method,
                        "starved": policy,
                        "num_samples": num_samples,
                        **kl(model, candidate, held_out, device),
                        "seconds": round(seconds, 2),
                        "experts_below_512_tokens": sum(count < 512 for count in counts),
                        "experts_without_a_token": sum(count == 0 for count in counts),
                        "fewest_tokens": min(counts),
                    }
                )


if __name__ == "__main__":
    main()
