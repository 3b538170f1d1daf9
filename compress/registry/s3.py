"""A registry in S3-compatible storage: `s3://bucket/prefix`, with the objects of an OCI image layout 1.1, so
that a copy of the prefix on a disk is one that other programs read.

    <prefix>/oci-layout              <prefix>/blobs/sha256/<hex>              <prefix>/index.json

A blob above one part is sent in parts, and parts that a killed push left are used by the next one; it appears
when its last part is there and its digest was compared. `index.json` is replaced by a conditional write
(If-Match, for the first one If-None-Match), and read and written again where another push came first: all
tags of a push move in one step. A server that ignores the conditions is refused before anything is written.

Credentials, region and endpoint come from where boto3 takes them (environment, profile, instance).
"""

import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, cast
from urllib.parse import urlsplit

from compress.artifact.manifest import MAX_MANIFEST_BYTES
from compress.digest import digest_bytes
from compress.errors import LockHeld, StorageError, UsageError
from compress.plugins import check_extra
from compress.registry.image import Descriptor
from compress.registry.index import ImageIndex
from compress.registry.protocol import REGISTRIES, Tag
from compress.registry.resuming import Dropped, ResumingStream, Source
from compress.registry.upload import changed_source, open_source
from compress.untrusted.host import is_loopback
from compress.untrusted.parse import Malformed, parse_json
from compress.untrusted.text import one_line

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

PART_BYTES = 16 << 20
_MAX_PARTS = 10_000
_LAYOUT = b'{"imageLayoutVersion": "1.0.0"}\n'
_MAX_ATTEMPTS = 60
_PAUSE_S = 0.05
_MOVED = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_MISSING = ("NoSuchKey", "404", "NotFound")
_NO_ETAG = '"00000000000000000000000000000000"'  # the ETag of no object


class S3:
    """The registry below one prefix of a bucket; made by the first push."""

    num_transfers = 4

    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix
        self._checked = False

    def __str__(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def repository(self, name: str) -> "S3":
        del name  # a blob is stored once for all names
        return self

    def check_place(self) -> None:
        with self._explained():
            listed = self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._key(""), MaxKeys=1)
        if listed.get("KeyCount") and self._head("oci-layout") is None:
            raise UsageError(f"{self} holds other things; give a prefix of its own to push to.")

    def has(self, blob: Descriptor) -> bool:
        return self._head(_blob(blob)) == blob.size_bytes

    def put(self, blob: Descriptor, source: Path | bytes) -> None:
        self._create()
        with open_source(blob, source, str(self)) as reading, self._explained():
            if blob.size_bytes > PART_BYTES:
                self._put_parts(blob, reading)
                return
            data = reading.read(blob.size_bytes + 1)
            if digest_bytes(data) != blob.digest:
                raise changed_source(blob)
            self._client.put_object(Bucket=self._bucket, Key=self._key(_blob(blob)), Body=data)

    @contextlib.contextmanager
    def get(self, blob: Descriptor) -> Iterator[BinaryIO]:
        stream = ResumingStream(lambda position: self._open_at(blob, position), blob.size_bytes)
        with stream.begin():
            yield cast(BinaryIO, stream)

    def find(self, digest: str) -> Descriptor | None:
        return self._index()[0].find(digest)

    def read_tag(self, name: str, tag: str) -> Descriptor | None:
        return self._index()[0].read_tag(name, tag)

    def write_tag(self, name: str, tags: Sequence[str], manifest: Descriptor) -> None:
        self._change(lambda index: index.with_tags(name, tags, manifest))

    def write_tag_if(
        self, name: str, tags: Sequence[str], manifest: Descriptor, *, guard: str, expected: str | None
    ) -> bool:
        return self._change(
            lambda index: index.with_tags_if(name, tags, manifest, guard=guard, expected=expected)
        )

    def tags(self) -> tuple[Tag, ...]:
        return self._index()[0].tags()

    def attach(self, manifest: Descriptor, subject: Descriptor) -> None:
        self._change(lambda index: index.with_attached(manifest, subject))

    def attached(self, subject: Descriptor) -> tuple[Descriptor, ...]:
        return self._index()[0].attached(subject)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _head(self, name: str) -> int | None:
        """Return the size of an object, None where there is none."""
        with self._explained(missing=_MISSING):
            return int(self._client.head_object(Bucket=self._bucket, Key=self._key(name))["ContentLength"])
        return None

    def _put_parts(self, blob: Descriptor, reading: BinaryIO) -> None:
        where = {"Bucket": self._bucket, "Key": self._key(_blob(blob))}
        upload = self._begun_upload(where)
        known = self._parts(where, upload)
        part_bytes = max(PART_BYTES, -(-blob.size_bytes // _MAX_PARTS))
        hasher = hashlib.sha256()
        parts: list[dict[str, Any]] = []
        num_bytes = 0
        while chunk := reading.read(part_bytes):
            hasher.update(chunk)
            num_bytes += len(chunk)
            number = len(parts) + 1
            tag = known.get(number)
            if tag is None or tag.strip('"') != hashlib.md5(chunk, usedforsecurity=False).hexdigest():
                sent = self._client.upload_part(**where, UploadId=upload, PartNumber=number, Body=chunk)
                tag = sent["ETag"]
            parts.append({"PartNumber": number, "ETag": tag})
        if num_bytes != blob.size_bytes or "sha256:" + hasher.hexdigest() != blob.digest:
            self._client.abort_multipart_upload(**where, UploadId=upload)
            raise changed_source(blob)
        with self._explained(missing=("NoSuchUpload",)):  # another push of the same blob has just finished it
            self._client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})
        if not self.has(blob):
            raise StorageError(f"the {blob} was sent to {self} and is not there; push again.")

    def _begun_upload(self, where: dict[str, str]) -> str:
        """Return an upload of this blob that a killed push left, or a new one."""
        listed = self._client.list_multipart_uploads(Bucket=where["Bucket"], Prefix=where["Key"])
        for each in listed.get("Uploads", ()):
            if each["Key"] == where["Key"]:
                return str(each["UploadId"])
        return str(self._client.create_multipart_upload(**where)["UploadId"])

    def _parts(self, where: dict[str, str], upload: str) -> dict[int, str]:
        pages = self._client.get_paginator("list_parts").paginate(**where, UploadId=upload)
        return {part["PartNumber"]: part["ETag"] for page in pages for part in page.get("Parts", ())}

    def _open_at(self, blob: Descriptor, position: int) -> Source:
        from botocore.exceptions import ClientError

        ranged = {"Range": f"bytes={position}-"} if position else {}
        try:
            with self._explained(passed=("InvalidRange", *_MISSING)):
                answer = self._client.get_object(Bucket=self._bucket, Key=self._key(_blob(blob)), **ranged)
        except ClientError as error:
            if _code(error) == "InvalidRange":
                return BytesIO()
            raise StorageError(f"the {blob} is not in {self}; push the artifact again.") from None
        if position and not answer.get("ContentRange", "").startswith(f"bytes {position}-"):
            raise StorageError(f"{self} gives another part of the {blob} than the one that was requested.")
        return _Body(answer["Body"], str(self))

    def _index(self) -> tuple[ImageIndex, str | None]:
        """Return the index and its ETag; an empty index and None before the first tag.

        Raises:
            UsageError: there is no registry.
            StorageError: it cannot be read.
        """
        where = f"{self}/index.json"
        data, tag = self._read("index.json")
        if data is None:
            if self._head("oci-layout") is None:
                raise UsageError(f"there is no registry at {self}; the first push creates one.")
            return ImageIndex.empty(where), None
        try:
            return ImageIndex.from_json(parse_json(data), where), tag
        except Malformed as error:
            raise StorageError(f"{where} is damaged ({error}).") from None

    def _read(self, name: str) -> tuple[bytes | None, str | None]:
        with self._explained(missing=_MISSING):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(name))
            data = bytes(answer["Body"].read(MAX_MANIFEST_BYTES + 1))
            if len(data) > MAX_MANIFEST_BYTES:
                raise StorageError(f"{self}/{name} is larger than an index can be.")
            return data, answer["ETag"]
        return None, None

    def _change(self, edit: Callable[[ImageIndex], ImageIndex | None]) -> bool:
        """Replace the index by what `edit` returns for it, in one step; return whether it did not refuse.

        Raises:
            LockHeld: others replaced it each time.
        """
        self._create()
        for _ in range(_MAX_ATTEMPTS):
            index, tag = self._index()
            changed = edit(index)
            if changed is None:
                return False
            condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
            if self._write("index.json", changed.to_bytes(), condition):
                return True
            time.sleep(random.uniform(0, _PAUSE_S * 4))
        raise LockHeld(f"others write to the index of {self} all the time; try again.")

    def _write(self, name: str, data: bytes, condition: dict[str, str]) -> bool:
        """Write an object under a condition; return whether the condition held."""
        with self._explained(missing=_MOVED):
            self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=data, **condition)
            return True
        return False

    def _create(self) -> None:
        """Make the layout where there is none.

        Raises:
            StorageError: the server ignores the conditions of a write, so that pushes could undo one another.
        """
        if self._checked:
            return
        self.check_place()
        self._write("oci-layout", _LAYOUT, {"IfNoneMatch": "*"})
        if self._write("oci-layout", _LAYOUT, {"IfMatch": _NO_ETAG}) or self._write(
            "oci-layout", _LAYOUT, {"IfNoneMatch": "*"}
        ):
            raise StorageError(
                f"the server of {self} ignores conditional writes (If-Match), without which two pushes could "
                "lose a tag; use one that has them."
            )
        self._checked = True

    @contextlib.contextmanager
    def _explained(self, *, missing: Sequence[str] = (), passed: Sequence[str] = ()) -> Iterator[None]:
        """Turn errors of the client into those of a registry; codes in `missing` end the block quietly, those
        in `passed` go on.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            code = _code(error)
            if code in passed:
                raise
            if code not in missing:
                self._refuse(error, code)
        except BotoCoreError as error:
            raise Dropped(f"{self} cannot be reached: {one_line(str(error))[:200]}.") from None

    def _refuse(self, error: "ClientError", code: str) -> NoReturn:
        if code == "NoSuchBucket":
            raise UsageError(f"there is no bucket '{self._bucket}'; make it before the first push.") from None
        if code in ("SlowDown", "InternalError", "ServiceUnavailable", "503", "500"):
            raise Dropped(f"{self} is busy ({code}); try again later.") from None
        message = one_line(str(error.response.get("Error", {}).get("Message", "")))[:200]
        raise StorageError(f"{self} refuses: {code} {message}".rstrip(" .") + ".") from None


class _Body:
    """The body of an object, as bytes that arrive."""

    def __init__(self, body: Any, place: str) -> None:
        self._body = body
        self._place = place

    def read(self, size: int, /) -> bytes:
        from botocore.exceptions import BotoCoreError
        from urllib3.exceptions import HTTPError

        try:
            return bytes(self._body.read(size))
        except (BotoCoreError, HTTPError, OSError) as error:
            raise Dropped(f"the connection to {self._place} was lost: {type(error).__name__}.") from None

    def close(self) -> None:
        self._body.close()


def _blob(blob: Descriptor) -> str:
    return f"blobs/sha256/{blob.digest.removeprefix('sha256:')}"


def _code(error: "ClientError") -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _refuse_redirect(response: Any, **details: object) -> None:
    """Refuse a redirect that names no region. The client finds out where to send a redirected request by
    HeadBucket, and where that is redirected too it would ask again without an end.
    """
    del details
    if response is None:
        return
    status = response[1].get("ResponseMetadata", {}).get("HTTPStatusCode")
    headers = response[1].get("ResponseMetadata", {}).get("HTTPHeaders", {})
    if status in (301, 302, 303, 307, 308) and "x-amz-bucket-region" not in headers:
        target = one_line(str(urlsplit(headers.get("location", "")).hostname))[:100]
        raise StorageError(f"the S3 server redirects to '{target}'; nothing is sent to another host.")


def _open(place: str, *, plain_http: bool) -> S3:
    check_extra("boto3", extra="s3", needed_by="registries of this kind")
    import boto3
    from botocore.config import Config

    bucket, _, prefix = place.partition("/")
    config = Config(
        connect_timeout=10,
        read_timeout=60,
        retries={"mode": "standard", "max_attempts": 5},
        max_pool_connections=S3.num_transfers + 2,
        request_checksum_calculation="when_required",  # servers other than Amazon's know no newer sums
        response_checksum_validation="when_required",
    )
    client = boto3.client("s3", config=config)
    client.meta.events.register_first("needs-retry.s3.HeadBucket", _refuse_redirect)
    endpoint = urlsplit(client.meta.endpoint_url)
    if endpoint.scheme != "https" and not plain_http and not is_loopback(endpoint.hostname):
        raise UsageError(
            f"the endpoint of s3://{bucket} at {endpoint.hostname} has no TLS; where that is on purpose, "
            "write s3+http://."
        )
    return S3(client, bucket, prefix.strip("/"))


@REGISTRIES.register("s3")
def open_s3(place: str) -> S3:
    """Return the registry of `s3://bucket[/prefix]`."""
    return _open(place, plain_http=False)


@REGISTRIES.register("s3+http")
def open_s3_without_tls(place: str) -> S3:
    """Return the registry of `s3+http://bucket[/prefix]`, whose endpoint may be without TLS."""
    return _open(place, plain_http=True)
