"""`compress sign`: sign an artifact, in a directory or in a registry."""

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.output import JsonFlag, count_text, emit

TrustConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--trust-config", help="Roots of trust of a private Sigstore instance, a file.", show_default=False
    ),
]
SignatureOption = Annotated[
    Path | None,
    typer.Option(
        "--signature",
        help="Where the signature of a directory is; DIRECTORY.sig beside it by default.",
        show_default=False,
    ),
]


def sign(
    target: Annotated[
        str, typer.Argument(help="Directory of an artifact or a model, or a registry reference.")
    ],
    key: Annotated[
        Path | None,
        typer.Option("--key", help="Private key: an elliptic curve key, a PEM file.", show_default=False),
    ] = None,
    password_file: Annotated[
        Path | None,
        typer.Option(
            "--password-file",
            help="File with the key's password; the variable COMPRESS_KEY_PASSWORD may have it instead.",
            show_default=False,
        ),
    ] = None,
    keyless: Annotated[
        bool,
        typer.Option("--keyless", help="Sign by the identity of this workload or person, with Sigstore."),
    ] = False,
    trust_config: TrustConfigOption = None,
    signature: SignatureOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Sign every file of an artifact. The signature is written next to it, and `push` takes it along."""
    from compress.errors import UsageError
    from compress.registry.ref import is_ref
    from compress.sign.choice import signer_of
    from compress.sign.signature import sign_directory, signature_path

    signer = signer_of(key=key, password_file=password_file, keyless=keyless, trust_config=trust_config)
    if is_ref(target):
        from compress.registry.transfer import sign_pushed

        if signature is not None:
            raise UsageError("--signature is about a directory; in a registry a signature has its place.")
        digest = sign_pushed(target, signer)
        emit({"target": target, "signature": digest}, f"{target}: signed\n{digest}", as_json=as_json)
        return
    bundle = sign_directory(Path(target), signer, signature=signature)
    place = signature or signature_path(Path(target))
    text = f"{target}: {count_text(len(bundle.files), 'file')} signed\n{place}"
    document = {"target": target, "signature": str(place), "num_files": len(bundle.files)}
    emit(document, text, as_json=as_json)
