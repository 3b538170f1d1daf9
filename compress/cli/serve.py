"""`compress serve`: a model with OpenAI's HTTP interface, until a signal ends it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from compress.cli.output import note
from compress.cli.run import DeviceOption, OfflineOption
from compress.errors import EnvironmentUnfit, UsageError

KEY_VARIABLE = "COMPRESS_API_KEY"
_MAX_KEY_FILE_BYTES = 1 << 20
_LOCAL = ("127.0.0.1", "::1", "localhost")


def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="A directory (artifact or checkpoint), a registry reference, hf:// or builtin://reference.",
            show_default=False,
        ),
    ],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 is any free one.")] = 8000,
    served_model_name: Annotated[
        str | None,
        typer.Option("--served-model-name", help="The name clients give; MODEL by default."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            help=f"File of API keys, one a line; without it {KEY_VARIABLE} may hold one.",
            show_default=False,
        ),
    ] = None,
    max_batch_size: Annotated[
        int, typer.Option("--max-batch-size", min=1, help="Texts that are generated at once.")
    ] = 32,
    max_model_len: Annotated[
        int | None,
        typer.Option("--max-model-len", min=1, help="Tokens of a prompt and its text.", show_default=False),
    ] = None,
    kv_cache_mib: Annotated[
        int | None,
        typer.Option("--kv-cache-mib", min=1, help="Size of the KV cache in MiB.", show_default=False),
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
    speculative: Annotated[
        str | None,
        typer.Option(
            "--speculative",
            help="Propose tokens: ngram, draft, mtp, or a draft or assistant: a directory or hf://.",
            show_default=False,
        ),
    ] = None,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Share what prompts begin with.")
    ] = True,
    itl_target_ms: Annotated[
        float | None,
        typer.Option(
            "--itl-target-ms",
            help="Cut long prompts so that other texts get a token within this time.",
            show_default=False,
        ),
    ] = None,
    max_queued: Annotated[int, typer.Option("--max-queued", min=1, help="Texts that may wait.")] = 2048,
    max_body_bytes: Annotated[
        int, typer.Option("--max-body-bytes", min=1024, help="Longest request body.")
    ] = 4 << 20,
    request_timeout_s: Annotated[
        float | None,
        typer.Option("--request-timeout", min=0.001, help="Seconds after which a text ends as it is."),
    ] = None,
    grace_s: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds for running requests after SIGTERM.")
    ] = 30.0,
    device: DeviceOption = None,
    offline: OfflineOption = False,
) -> None:
    """Serve a model over HTTP, with OpenAI's interface, metrics at /metrics and a page at /."""
    try:
        import prometheus_client  # noqa: F401 - the extra is whole or not there
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise EnvironmentUnfit(
            f"serving needs the package '{error.name}'; `pip install 'compress[serve]'` brings it."
        ) from None
    from compress.api import load
    from compress.serve.server import listen
    from compress.serve.server import serve as run
    from compress.serve.settings import ServerSettings

    settings = ServerSettings(
        model_name=served_model_name or model,
        api_keys=_api_keys(api_key_file),
        max_queued=max_queued,
        max_choices=min(128, max_queued),
        max_body_bytes=max_body_bytes,
        request_timeout_s=request_timeout_s,
        grace_s=grace_s,
    )
    if host not in _LOCAL and not settings.api_keys:
        note(f"warning: {host} may be reached by others, and no API key is asked for (--api-key-file).")
    listener = listen(host, port)
    with listener:
        llm = load(
            model,
            device=device,
            kv_format=kv_format,
            speculative=speculative,
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            kv_cache_bytes=None if kv_cache_mib is None else kv_cache_mib << 20,
            prefix_cache=prefix_cache,
            itl_target_ms=itl_target_ms,
            offline=offline,
        )
        run(
            llm,
            settings,
            listener,
            log=_log,
            ready=lambda url: note(f"serving {settings.model_name} at {url}"),
        )


def _log(record: Mapping[str, Any]) -> None:
    note(json.dumps(record))


def _api_keys(file: Path | None) -> tuple[str, ...]:
    """Return the keys of a file, or the one of the environment variable.

    Raises:
        UsageError: the file cannot be read, or holds no key.
    """
    if file is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        return (key,) if key else ()
    from compress.untrusted.files import read_text

    try:
        lines = read_text(file, max_bytes=_MAX_KEY_FILE_BYTES).splitlines()
    except OSError as error:
        raise UsageError(
            f"--api-key-file {file} cannot be read: {error.strerror or error}.", where=file
        ) from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise UsageError(f"--api-key-file {file} holds no key; write one a line.", where=file)
    return keys
