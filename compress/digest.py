"""Content digests: `sha256:<hex>` over bytes, files and canonical JSON (sorted keys, no spaces, UTF-8, no
NaN).
"""

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from compress.untrusted.files import open_plain

_CHUNK_BYTES = 1 << 20
_MAX_HASHERS = 16


def digest_bytes(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    hasher = hashlib.sha256()
    with open_plain(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return "sha256:" + hasher.hexdigest()


def digest_files(paths: Iterable[Path]) -> list[str]:
    """Return the digest of each file, of which `num_hashers` are read at a time."""
    with ThreadPoolExecutor(num_hashers()) as pool:
        return list(pool.map(digest_file, paths))


def num_hashers() -> int:
    """Return how many files are hashed at once: SHA-256 runs near 1.5 GB/s on one core, below one NVMe disk,
    and hashlib releases the GIL."""
    return min(os.cpu_count() or 1, _MAX_HASHERS)


def canonical_json(value: Any) -> bytes:
    """Return the one byte form of a JSON value that digests are taken over."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def significant(value: float, digits: int = 6) -> float:
    """Return `value` rounded to `digits` significant digits: the rest of a measured number is noise."""
    return float(f"{value:.{digits}g}")


def digest_json(value: Any) -> str:
    return digest_bytes(canonical_json(value))
