"""A client of one host that serves the OCI distribution API 1.1 (https://github.com/opencontainers/distribution-spec):
requests with credentials, tokens, redirects and errors. `oci.py` decides what is requested.

- TLS, except where the reference is `oci+http://` or the host is this machine and answers without it.
- Credentials (docker_login.py) go to the host of the reference, and to the token server that it names over
  TLS; never to where a request is redirected.
- What is written is never redirected to another host.
- A dropped connection, 429 and 5xx raise `Dropped`, which callers try again.

The client `oras` does not fit here, because it neither resumes a transfer nor compares a digest while it
reads (`docs/adr/0010-distribution-client.md`).
"""

import base64
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookiejar import DefaultCookiePolicy
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlencode, urljoin, urlsplit, urlunsplit

from compress.errors import EnvironmentUnfit, StorageError
from compress.registry.docker_login import Login, environment, find_login
from compress.registry.resuming import Dropped, persist
from compress.untrusted.host import is_loopback
from compress.untrusted.parse import Malformed, parse_json
from compress.untrusted.text import one_line

if TYPE_CHECKING:
    import requests

TIMEOUT_S = (10.0, 60.0)
"""Seconds to connect, and between two pieces of an answer."""
_MAX_REDIRECTS = 5
_MAX_DOCUMENT_BYTES = 4 << 20
_REDIRECTS = (301, 302, 303, 307, 308)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_USUAL_HOSTS = {"docker.io": "registry-1.docker.io"}


@dataclass(frozen=True)
class Request:
    """One request. `path` is below the host, or a URL that the host gave; `repository` and `actions` are what
    a token must allow; `accepted` are the statuses that are no error.
    """

    method: str
    path: str
    repository: str
    actions: str = "pull"
    accepted: tuple[int, ...] = (200,)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    stream: bool = False


class Distribution:
    """One host, and what is known of it: its scheme and its tokens."""

    def __init__(self, host: str, *, plain_http: bool = False) -> None:
        self.host = host
        self._plain_http = plain_http
        self._origin: str | None = "http" if plain_http else None
        self._tokens: dict[tuple[str, str], str] = {}
        self._challenges: dict[tuple[str, str], str] = {}
        self._login: tuple[Login | None] | None = None
        self._threads = threading.local()

    def send(self, request: Request) -> "requests.Response":
        """Return the answer to a request, with credentials where the host asks for them.

        Raises:
            Dropped: the connection was lost, or the host is busy.
            StorageError: the host refuses, redirects to where it must not, or answers something else.
        """
        scope = (request.repository, request.actions)
        response = self._follow(request, self._tokens.get(scope))
        if response.status_code == 401:
            response.close()
            self._tokens[scope] = self._authorize(response.headers.get("WWW-Authenticate", ""), scope)
            response = self._follow(request, self._tokens[scope])
        if response.status_code in request.accepted:
            return response
        raise self._refusal(request, response)

    def send_persistently(self, request: Request) -> "requests.Response":
        """Return the answer to a request that may be repeated; tried again where the connection drops."""
        return persist(lambda: self.send(request))

    def location(self, response: "requests.Response") -> str:
        """Return the URL where an upload goes on, which must be at the same host.

        Raises:
            StorageError: there is none, or it is elsewhere.
        """
        target = urlsplit(urljoin(f"{self._base()}/", response.headers.get("Location", "")))
        base = urlsplit(self._base())
        if "Location" not in response.headers or target.hostname != base.hostname:
            raise StorageError(
                f"the registry at {self.host} wants an upload to go on at "
                f"'{one_line(str(target.hostname))}'; nothing is sent to another host."
            )
        return urlunsplit((base.scheme, base.netloc, target.path, target.query, ""))

    def document(self, response: "requests.Response", *, max_bytes: int = _MAX_DOCUMENT_BYTES) -> Any:
        """Return the JSON value of an answer.

        Raises:
            StorageError: it is none, or longer.
        """
        data = self.content(response, max_bytes=max_bytes)
        try:
            return parse_json(data)
        except Malformed as error:
            raise StorageError(
                f"the registry at {self.host} gave an answer that is not JSON: {error}."
            ) from None

    def content(self, response: "requests.Response", *, max_bytes: int) -> bytes:
        """Return the body of an answer.

        Raises:
            Dropped: the connection was lost.
            StorageError: it is longer than `max_bytes`.
        """
        source = BodySource(response, self.host)
        try:
            data = b""
            while len(data) <= max_bytes and (part := source.read(max_bytes + 1 - len(data))):
                data += part
        finally:
            source.close()
        if len(data) > max_bytes:
            raise StorageError(
                f"the registry at {self.host} gave more than {max_bytes:,} bytes where a manifest belongs."
            )
        return data

    def _base(self) -> str:
        if self._origin is None:
            self._origin = self._find_scheme()
        return f"{self._origin}://{_USUAL_HOSTS.get(self.host, self.host)}"

    def _find_scheme(self) -> str:
        """Return https; http for a host on this machine that answers without TLS."""
        from requests.exceptions import ConnectionError as Unreachable
        from requests.exceptions import Timeout

        if not is_loopback(urlsplit(f"//{self.host}").hostname):
            return "https"
        try:
            self._session().get(f"https://{self.host}/v2/", timeout=TIMEOUT_S, allow_redirects=False).close()
        except (Unreachable, Timeout):
            return "http"
        return "https"

    def _session(self) -> "requests.Session":
        session: requests.Session | None = getattr(self._threads, "session", None)
        if session is None:
            session = new_session()
            self._threads.session = session
        return session

    def _follow(self, request: Request, authorization: str | None) -> "requests.Response":
        url = urljoin(f"{self._base()}/", request.path)
        headers = {"Accept-Encoding": "identity", **request.headers}
        home = _origin_of(urlsplit(url))
        for _ in range(_MAX_REDIRECTS + 1):
            at_home = _origin_of(urlsplit(url)) == home
            sent = {**headers, "Authorization": authorization} if authorization and at_home else headers
            response = self._once(request, url, sent)
            if response.status_code not in _REDIRECTS or "Location" not in response.headers:
                return response
            response.close()
            url = self._redirected(request, url, response.headers["Location"])
        raise StorageError(f"the registry at {self.host} redirects without an end.")

    def _once(self, request: Request, url: str, headers: Mapping[str, str]) -> "requests.Response":
        from requests.exceptions import RequestException, SSLError

        try:
            response = self._session().request(
                request.method,
                url,
                headers=dict(headers),
                data=request.body or None,
                timeout=TIMEOUT_S,
                allow_redirects=False,
                stream=True,
            )
            if not request.stream and request.method != "GET":
                response.content  # noqa: B018  reads the rest, so that the connection is used again
        except SSLError as error:
            raise StorageError(
                f"the registry at {self.host} cannot be reached over TLS: {_reason(error)}. "
                "Where it has none on purpose, write oci+http://."
            ) from None
        except RequestException as error:
            raise Dropped(f"the registry at {self.host} cannot be reached: {_reason(error)}.") from None
        if response.status_code == 429 or response.status_code >= 500:
            response.close()
            raise Dropped(f"the registry at {self.host} answered {response.status_code}; try again later.")
        return response

    def _redirected(self, request: Request, url: str, location: str) -> str:
        """Return the URL of a redirect.

        Raises:
            StorageError: it leads from TLS to none, has credentials of its own, or moves what is written.
        """
        target = urlsplit(urljoin(url, location))
        shown = one_line(str(target.hostname))
        if request.method not in ("GET", "HEAD") and _origin_of(target) != _origin_of(urlsplit(url)):
            raise StorageError(
                f"the registry at {self.host} redirects a write to '{shown}'; nothing is sent there."
            )
        if target.scheme not in ("https", "http") or target.username is not None:
            raise StorageError(
                f"the registry at {self.host} redirects to '{shown}' in a way that is not safe."
            )
        if target.scheme == "http" and not self._plain_http and not is_loopback(target.hostname):
            raise StorageError(f"the registry at {self.host} redirects to '{shown}' without TLS.")
        return urlunsplit(target)

    def _authorize(self, challenge: str, scope: tuple[str, str]) -> str:
        """Return the header that answers a challenge (RFC 6750, and the token protocol of docker)."""
        kind, _, rest = challenge.partition(" ")
        fields = dict(_CHALLENGE.findall(rest))
        login = self._find_login()
        if kind.lower() == "basic" and login is not None:
            return _basic(login)
        if kind.lower() != "bearer" or "realm" not in fields:
            raise StorageError(
                f"the registry at {self.host} wants credentials, and none are known; "
                f"`docker login {self.host}` or `skopeo login` stores them."
            )
        realm = urlsplit(fields["realm"])
        if realm.scheme != "https" and not (
            realm.scheme == "http" and (self._plain_http or is_loopback(realm.hostname))
        ):
            raise StorageError(
                f"the registry at {self.host} sends credentials to '{one_line(fields['realm'])}', "
                "which has no TLS."
            )
        wanted = {"service": fields.get("service", ""), "scope": f"repository:{scope[0]}:{scope[1]}"}
        return f"Bearer {persist(lambda: self._token(fields['realm'], wanted, login))}"

    def _token(self, realm: str, wanted: Mapping[str, str], login: Login | None) -> str:
        if login is not None and login.identity_token is not None:
            form = {**wanted, "grant_type": "refresh_token", "client_id": "compress"}
            body = urlencode({**form, "refresh_token": login.identity_token}).encode()
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            response = self._once(Request("POST", realm, "", body=body, stream=True), realm, headers)
        else:
            url = f"{realm}{'&' if '?' in realm else '?'}{urlencode(wanted)}"
            headers = {} if login is None else {"Authorization": _basic(login)}
            response = self._once(Request("GET", url, ""), url, headers)
        if response.status_code != 200:
            response.close()
            raise StorageError(
                f"the credentials for {self.host} are not accepted ({response.status_code}); log in again."
                if login is not None
                else f"the registry at {self.host} wants credentials; `docker login {self.host}` stores them."
            )
        answer = self.document(response)
        token = (answer.get("token") or answer.get("access_token")) if isinstance(answer, dict) else None
        if not isinstance(token, str) or one_line(token) != token:
            raise StorageError(f"the token server of {self.host} gave no token.")
        return token

    def _find_login(self) -> Login | None:
        if self._login is None:
            self._login = (find_login(self.host, environment()),)
        return self._login[0]

    def _refusal(self, request: Request, response: "requests.Response") -> StorageError:
        """Return the error for a status that was not expected, with the host's own words."""
        words = ""
        try:
            answer = self.document(response)
            first = answer["errors"][0]
            words = f": {one_line(str(first.get('message') or first.get('code')))[:200]}"
        except (StorageError, KeyError, IndexError, TypeError, AttributeError):
            words = ""
        verb = "refuses" if response.status_code in (401, 403) else "answered"
        what = f"{request.method} for '{request.repository}'" if request.repository else request.method
        return StorageError(f"the registry at {self.host} {verb} {response.status_code} to {what}{words}.")


class BodySource:
    """The body of an answer, as bytes that arrive."""

    def __init__(self, response: "requests.Response", host: str) -> None:
        self._response = response
        self._host = host

    def read(self, size: int, /) -> bytes:
        from requests.exceptions import RequestException
        from urllib3.exceptions import HTTPError

        try:
            return bytes(self._response.raw.read(size, decode_content=False))
        except (HTTPError, RequestException, OSError) as error:
            raise Dropped(f"the connection to {self._host} was lost: {_reason(error)}.") from None

    def close(self) -> None:
        self._response.close()


def new_session() -> "requests.Session":
    """Return a session that keeps no cookies and reads no credentials by itself.

    Raises:
        EnvironmentUnfit: the extra is not installed.
    """
    try:
        import requests
    except ImportError:
        raise EnvironmentUnfit(
            "oci:// needs the package requests: pip install 'compress[oci]'.", where="oci://"
        ) from None
    session = requests.Session()
    session.auth = _unchanged  # or requests would read ~/.netrc
    session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    return session


def _unchanged(request: Any) -> Any:
    return request


def _basic(login: Login) -> str:
    return "Basic " + base64.b64encode(f"{login.user}:{login.password}".encode()).decode()


def _origin_of(url: SplitResult) -> tuple[str, str | None, int]:
    return url.scheme, url.hostname, url.port or (443 if url.scheme == "https" else 80)


def _reason(error: Exception) -> str:
    """Return the innermost reason of an error of the HTTP client on one line, without URLs, which may hold
    signatures.
    """
    text = str(error).rpartition(": ")[2] or type(error).__name__
    return re.sub(r"https?://\S+", "(address)", one_line(text))[:200].rstrip("'\")( .")
