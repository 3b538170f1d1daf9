r"""What a token costs under speculation when proposals are kept at a given rate, against the model of that
cost. A BENCHMARK MODE: the rate is forced, so the tokens are nobody's text, and no acceptance of any draft
is claimed here.

    python -m scripts.bench_speculative_cost --out benchmarks/h200/speculative_cost.json
    python -m scripts.bench_speculative_cost --model qwen3.5-9b --proposers mtp \
        --out benchmarks/h200/speculative_cost_qwen3.5-9b.json
    python -m scripts.bench_speculative_cost --model tiny.json --scheme dense --draft tiny.json \
        --draft-scheme dense       # anywhere

With k proposals a step, each kept with probability a if those before it were, a step gives 1 + a + ... + a^k
tokens, and a token takes

    t = (k t_draft + t_verify) / (1 + a + ... + a^k)

Each part is measured without the other (`validate/probed_proposer.py`): `k t_draft` with the proposer timed,
`t_verify` as the median step whose proposals cost nothing. `t` is measured in another engine, end to end:
median over requests of (last token - first) / (n - 1). Rows hold both, for the tokens a step that the rate
predicts and for those that came out. Weights are random and of the named shapes; batch size, prompt and
output as given.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

from compress.models.random_source import RandomSource
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Finished
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.proposer import ProposerOptions
from compress.runtime.speculative.speculation import Speculative
from compress.validate.probed_proposer import ProbedOptions, ProposerProbe
from scripts.bench_setup import (
    argument_parser,
    markdown,
    model_dtype,
    parse_arguments,
    pick_device,
    read_arch,
    scheme_text,
    schemes_of,
    write_results,
)
from scripts.random_heads import EAGLE3_SCHEME, EAGLE3_VOCAB, random_head
from scripts.step_profile import drain, fill, queue

DENSE = "dense"


class Bench:
    """The model's weights and the conditions of all rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = pick_device()
        self.shape, self.target = self._source(args.model, args.scheme)

    def _source(self, model: str, scheme: str) -> tuple[str, RandomSource]:
        name, arch = read_arch(model)
        body, outer = schemes_of(scheme)
        return name, RandomSource(
            arch, device=self.device, dtype=model_dtype(self.device), scheme=body, head_scheme=outer
        )

    def proposers(self) -> dict[str, tuple[str, ProposerOptions]]:
        """Name -> what it is made of, its options."""
        args = self.args
        found = dict[str, tuple[str, ProposerOptions]]()
        if "draft_model" in args.proposers:
            shape, draft = self._source(args.draft, args.draft_scheme)
            found["draft_model"] = f"{shape} {args.draft_scheme}", DraftModel(draft)
        made = {"device": self.device, "dtype": model_dtype(self.device)}
        if "eagle3" in args.proposers:
            vocab = min(args.eagle3_vocab, self.target.arch.vocab_size)
            head = random_head("eagle3", self.target.arch, args.eagle3_scheme, vocab_size=vocab, **made)
            found["eagle3"] = f"{vocab:,} tokens, {args.eagle3_scheme}", head
        if "mtp" in args.proposers:
            head = random_head("mtp", self.target.arch, args.mtp_scheme, **made)
            found["mtp"] = f"a layer of the model, {args.mtp_scheme}", head
        return found

    def engine(self, proposer: ProposerOptions | None, rate: float | None = None) -> Engine:
        args = self.args
        speculative = None if proposer is None else Speculative(proposer, k=args.k, forced_rate=rate)
        gc.collect()
        config = EngineConfig(
            dtype=model_dtype(self.device),
            max_batch_size=args.batch_size,
            max_model_len=args.prompt_tokens + args.output_tokens,
            max_step_tokens=max(2048, args.batch_size * args.prompt_tokens),
            speculative=speculative,
        )
        return Engine(self.target, device=self.device, config=config)

    def tpot_ms(self, engine: Engine) -> tuple[float, list[float]]:
        """Median and all values, one a request; the first round compiles, and captures graphs."""
        args = self.args
        values = list[float]()
        for repeat in range(1 + args.repeats):
            queue(engine, args.batch_size, args.prompt_tokens, args.output_tokens)
            if repeat == 1:
                engine.reset_acceptance()
            finished: list[Finished] = []
            while engine.has_work:
                finished += engine.step()
            if repeat:
                spans = [
                    (each.token_times_s[-1] - each.token_times_s[0]) / (len(each.tokens) - 1)
                    for each in finished
                ]
                values += [span * 1e3 for span in spans]
        return statistics.median(values), values

    def parts_ms(self, options: ProposerOptions) -> tuple[float, float]:
        """Of k drafts and of their verification, none of which is kept."""
        probe = ProposerProbe()
        engine = self.engine(ProbedOptions(options, probe), 0.0)
        probe.mode = "timed"
        self.step_ms(engine)
        draft_ms = statistics.median(probe.seconds[len(probe.seconds) // 2 :]) * 1e3
        probe.mode = "idle"
        return draft_ms, self.step_ms(engine)

    def step_ms(self, engine: Engine) -> float:
        """Median of the steps of a steady batch."""
        args = self.args
        times = list[float]()
        for repeat in range(2):
            fill(engine, args.batch_size, args.prompt_tokens, args.output_tokens)
            for _ in range(args.output_tokens // 2):
                begin = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - begin)
            drain(engine)
            if not repeat:
                times.clear()
        return statistics.median(times) * 1e3

    def rows(self) -> list[dict[str, Any]]:
        plain_ms, _ = self.tpot_ms(self.engine(None))
        rows = []
        for name, (made_of, options) in self.proposers().items():
            draft_ms, verify_ms = self.parts_ms(options)
            for rate in self.args.rates:
                engine = self.engine(options, rate)
                measured_ms, values = self.tpot_ms(engine)
                assert engine.acceptance is not None
                promised = sum(rate**place for place in range(self.args.k + 1))
                came = engine.acceptance.acceptance_length
                parts = {"plain_ms": plain_ms, "verify_ms": verify_ms, "k_draft_ms": draft_ms}
                rows.append(
                    {"proposer": name, "made_of": made_of, "k": self.args.k, "forced_rate": rate, **parts}
                    | {"tokens_a_step_promised": promised, "tokens_a_step": came, "tpot_ms_p50": measured_ms}
                    | {"tpot_ms_min": min(values), "tpot_ms_max": max(values)}
                    | {
                        "predicted_ms": (draft_ms + verify_ms) / promised,
                        "predicted_from_tokens_ms": (draft_ms + verify_ms) / came,
                    }
                    | {"speedup": plain_ms / measured_ms}
                )
                del engine
        return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    header = [
        "proposer",
        "rate",
        "tokens a step",
        "plain ms",
        "k drafts ms",
        "verify ms",
        "ms a token",
        "predicted",
        "off",
        "speed-up",
    ]
    return markdown(
        header,
        [
            [
                f"{row['proposer']} ({row['made_of']})", f"{row['forced_rate']:.0%}",
                f"{row['tokens_a_step']:.2f}",
                f"{row['plain_ms']:.3f}", f"{row['k_draft_ms']:.3f}", f"{row['verify_ms']:.3f}",
                f"{row['tpot_ms_p50']:.3f}", f"{row['predicted_ms']:.3f}",
                f"{row['tpot_ms_p50'] / row['predicted_ms'] - 1:+.1%}", f"{row['speedup']:.2f}",
            ]
            for row in rows
        ],
    )  # fmt: skip


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--scheme",
        type=scheme_text,
        default="W4A16_G128",
        help=f"of the model; '{DENSE}' for its dtype, A+B for a head in B",
    )
    parser.add_argument("--draft", default="llama-3.2-1b", help="shape of the draft model")
    parser.add_argument("--draft-scheme", type=scheme_text, default="W4A16_G128")
    parser.add_argument(
        "--proposers", nargs="+", default=["draft_model", "eagle3"], choices=["draft_model", "eagle3", "mtp"]
    )
    parser.add_argument(
        "--eagle3-scheme",
        default=EAGLE3_SCHEME,
        help="of the head's layer and of its own output head",
    )
    parser.add_argument(
        "--eagle3-vocab", type=int, default=EAGLE3_VOCAB, help="tokens that an EAGLE-3 head may propose"
    )
    parser.add_argument("--mtp-scheme", type=scheme_text, default=DENSE, help="of the layer of an MTP head")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.7, 0.8, 0.9])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    args = parse_arguments(parser, lambda document: table(document["rows"]))
    bench = Bench(args)
    rows = bench.rows()
    print(table(rows))
    if args.out is not None:
        lengths = {
            "batch_size": args.batch_size,
            "prompt_tokens": args.prompt_tokens,
            "output_tokens": args.output_tokens,
        }
        facts = {
            "mode": "acceptance is forced; not a model's",
            "shape": bench.shape,
            "scheme": args.scheme,
        } | lengths
        write_results(args.out, rows, device=bench.device, commit=args.commit, facts=facts)


if __name__ == "__main__":
    main()
