"""`compress generate`: text from a model, printed as it is generated; the speed follows on stderr."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.output import JsonFlag, count_text, emit, note, write_piece
from compress.cli.run import DeviceOption, OfflineOption

if TYPE_CHECKING:
    from compress.llm import LLM, Output


def generate(
    model: Annotated[
        str,
        typer.Argument(
            help="A directory (artifact or checkpoint), a registry reference, hf:// or builtin://reference.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        str, typer.Argument(help="Text to continue, or - to read it from stdin.", show_default=False)
    ],
    chat: Annotated[
        bool, typer.Option("--chat", help="The text is a question: use the model's chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Generate at most so many.")] = 256,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="0 takes the likeliest token; above, draw.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw among the likeliest tokens of this probability.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option("--top-k", min=0, help="Draw among so many likeliest tokens; 0: all.")
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed draws the same text.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")
    ] = None,
    speculative: Annotated[
        str | None,
        typer.Option(
            "--speculative",
            help="Propose tokens by ngram (prompt lookup), draft (that of the artifact), mtp (the layer of "
            "the checkpoint that predicts a further token), or by a draft or an assistant: a directory or "
            "hf://org/name@revision.",
            show_default=False,
        ),
    ] = None,
    kv_format: Annotated[
        str | None,
        typer.Option(
            "--kv-format",
            help="KV cache: DENSE, FP8_STATIC, FP8_ATTENTION, *_TOKEN_HEAD; by default what "
            "the artifact states.",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = None,
    offline: OfflineOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Generate text with a model and print it as it comes."""
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    from compress.api import load
    from compress.llm import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
    )
    llm = load(model, device=device, kv_format=kv_format, speculative=speculative, offline=offline)
    stream = llm.stream([{"role": "user", "content": text}] if chat else text, params)
    for piece in stream:
        if not as_json:
            write_piece(piece)
    output = stream.output
    if as_json:
        emit(_document(output, llm), "", as_json=True)
    else:
        write_piece("\n")
    note(_speed(output, llm))


def _document(output: "Output", llm: "LLM") -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "num_prompt_tokens": output.num_prompt_tokens,
        "ttft_ms": output.timing.ttft_ms,
        "tpot_ms": output.timing.tpot_ms,
        "tokens_per_s": output.tokens_per_s,
        "acceptance_length": None if llm.acceptance is None else llm.acceptance.acceptance_length,
    }


def _speed(output: "Output", llm: "LLM") -> str:
    """Return the line that ends a generation, such as `24 tokens, 9.4 tokens/s, first token after 128 ms`."""
    count = count_text(len(output.token_ids), "token")
    cut = ", all of --max-tokens" if output.finish_reason == "length" else ""
    parts = [
        f"{count}{cut}",
        f"{output.tokens_per_s:.1f} tokens/s",
        f"first token after {output.timing.ttft_ms:.0f} ms",
    ]
    if llm.acceptance is not None:
        parts.append(f"{llm.acceptance.acceptance_length:.2f} tokens a step by speculation")
    return ", ".join(parts)
