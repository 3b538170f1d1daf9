"""Workload files: a JSON document that fixes the lengths of requests, and by a seed and a digest every token.

    {"name", "seed", "vocab", "requests": [{"prompt_tokens", "output_tokens"}, ...],
     "sha256_of_all_ids_int32_le": "..."}

Tokens follow from `seed` and `vocab` by the rule in `workload.py`; the digest is that of all prompt tokens as
little-endian 32-bit integers and is checked before anything runs. A request may have `arrival_s`; then all
have.
"""

from pathlib import Path

from compress.errors import StorageError, UsageError
from compress.untrusted.fields import Fields
from compress.untrusted.parse import Malformed, read_json
from compress.validate.load.arrivals import Traffic
from compress.validate.load.lengths import Lengths
from compress.validate.load.trace import MAX_TOKENS
from compress.validate.load.workload import Workload, draw_requests, token_digest

MAX_FILE_BYTES = 64 << 20
MAX_REQUESTS = 1 << 20
DIGEST_KEY = "sha256_of_all_ids_int32_le"


def read_workload(path: Path, *, traffic: Traffic, seed: int = 0) -> Workload:
    """Return the workload of a file; requests without arrivals of their own follow `traffic`, drawn by
    `seed`.

    Raises:
        UsageError: the file is no workload, or its tokens have another digest than it states.
    """
    try:
        content = Fields(read_json(path, max_bytes=MAX_FILE_BYTES), f"'{path}'", UsageError)
    except (OSError, StorageError) as error:
        raise UsageError(f"the workload {path} cannot be read: {error}.") from None
    except Malformed as error:
        raise UsageError(f"the workload {path} is not JSON: {error}.") from None
    rows = [Fields(each, f"a request of '{path}'", UsageError) for each in content.items("requests")]
    if not 1 <= len(rows) <= MAX_REQUESTS:
        raise UsageError(f"the workload {path} has {len(rows)} requests; it must have 1 to {MAX_REQUESTS:,}.")
    lengths = Lengths(
        tuple(each.integer("prompt_tokens", 1, MAX_TOKENS) for each in rows),
        tuple(each.integer("output_tokens", 1, MAX_TOKENS) for each in rows),
    )
    vocab_size = content.integer("vocab", 1, 1 << 31)
    requests = draw_requests(lengths, vocab_size=vocab_size, seed=content.integer("seed", 0, 1 << 62))
    name = content.text("name", default=path.stem)
    stated = content.text(DIGEST_KEY)
    found = token_digest(requests).removeprefix("sha256:")
    if found != stated:
        raise UsageError(
            f"the tokens of the workload {path} have the digest {found}, and the file states {stated}: its "
            "lengths, its seed or its rule were changed."
        )
    if rows[0].has("arrival_s"):
        arrivals_s = tuple(each.number("arrival_s", 0.0, 1e9) for each in rows)
        if any(later < earlier for earlier, later in zip(arrivals_s, arrivals_s[1:], strict=False)):
            raise UsageError(f"the requests of the workload {path} are not in the order of their arrival_s.")
        return Workload(name, requests, arrivals_s, Traffic(max_concurrency=traffic.max_concurrency), "trace")
    return Workload(name, requests, traffic.arrivals_s(len(requests), seed=seed), traffic, traffic.mode)
