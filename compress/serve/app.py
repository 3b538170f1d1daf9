"""The routes of the server, and the count of every answer."""

from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import compress
from compress.serve.chat import Chat
from compress.serve.completions import Completions
from compress.serve.endpoint import Endpoint
from compress.serve.generate import Generate, error_response
from compress.serve.metrics import CONTENT_TYPE
from compress.serve.refusal import Refusal, shutting_down
from compress.serve.service import Service

ENDPOINTS: tuple[Endpoint, ...] = (Completions(), Chat())
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def build_app(service: Service) -> ASGIApp:
    """Return the ASGI application of a service."""
    page = (files("compress.serve") / "page.html").read_text(encoding="utf-8")

    async def models(request: Request) -> Response:
        _identify(service, request)
        return JSONResponse({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        _identify(service, request)
        if request.path_params["name"] != service.settings.model_name:
            raise Refusal("there is no such model here.", status=404, param="model", code="model_not_found")
        return JSONResponse(_model(service))

    async def health(request: Request) -> Response:
        if service.draining:
            raise shutting_down()
        if service.failed.is_set():
            raise Refusal("the engine has failed.", status=503, code="engine_failed")
        return JSONResponse({"status": "ok"})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": compress.__version__})

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE)

    async def index(request: Request) -> Response:
        return HTMLResponse(page, headers=_PAGE_HEADERS)

    gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/": index,
        "/health": health,
        "/metrics": metrics,
        "/version": version,
        "/v1/models": models,
        "/v1/models/{name:path}": model,
    }
    routes = [Route(path, answer, methods=["GET"]) for path, answer in gets.items()]
    routes += [Route(each.path, Generate(service, each), methods=["POST"]) for each in ENDPOINTS]
    app = Starlette(
        routes=routes,
        exception_handlers={Refusal: _refused, HTTPException: _http_error, Exception: _defect},
    )
    known = frozenset({"/", "/health", "/metrics", "/version", "/v1/models", *(e.path for e in ENDPOINTS)})
    return _counted(app, service, known)


def _counted(app: ASGIApp, service: Service, known: frozenset[str]) -> ASGIApp:
    """Return the application with a count of its answers by path and status."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in known else "other"
        method = scope["method"] if scope["method"] in ("GET", "POST") else "other"

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                service.metrics.answered(method=method, path=path, status=message["status"])
            await send(message)

        await app(scope, receive, counting)

    return counted


def _identify(service: Service, request: Request) -> str:
    address = None if request.client is None else request.client.host
    return service.clients.identify(request.headers, address)


def _model(service: Service) -> dict[str, object]:
    return {
        "id": service.settings.model_name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "compress",
        "root": service.settings.model_name,
        "parent": None,
        "max_model_len": service.llm.engine.max_model_len,
    }


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: "there is nothing at this path.", 405: "this path has another method."}
    message = messages.get(error.status_code, error.detail)
    response = error_response(Refusal(message, status=error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _defect(request: Request, error: Exception) -> Response:
    return error_response(
        Refusal("an internal error; the server's log has it.", status=500, code="internal_error")
    )
