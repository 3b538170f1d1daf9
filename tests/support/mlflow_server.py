"""The part of MLflow's REST interface that `mlflow+http://` uses, in this process and in memory. What it
answers is what a server of version 3.17 does; `make registries` runs the same tests against that.
"""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

from tests.support.quiet_server import QuietServer

API = "/api/2.0/mlflow/"
ARTIFACTS = "/api/2.0/mlflow-artifacts/artifacts/"


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Tracking:
    """Registered models with versions and aliases, experiments with runs, and artifacts of runs."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.experiments: dict[str, str] = {}
        self.artifacts: dict[str, bytes] = {}
        self.num_drops = 0
        """Answers to GET that are lost with the connection, after half of the body or `in_headers`."""
        self.in_headers = False
        self.lock = threading.RLock()

    def call(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        method = getattr(self, re.sub(r"\W", "_", path), None)
        if method is None:
            raise Refused(404, "ENDPOINT_NOT_FOUND", f"no endpoint {path}")
        with self.lock:
            return dict(method(fields) or {})

    def registered_models_create(self, fields: dict[str, Any]) -> dict[str, Any]:
        if fields["name"] in self.models:
            raise Refused(400, "RESOURCE_ALREADY_EXISTS", "Registered Model already exists.")
        self.models[fields["name"]] = {"tags": {}, "versions": [], "aliases": {}}
        return {"registered_model": self._model(fields["name"])}

    def registered_models_get(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"registered_model": self._model(fields["name"])}

    def registered_models_search(self, fields: dict[str, Any]) -> dict[str, Any]:
        wanted = re.match(r"name='([^']*)'", fields.get("filter", ""))
        names = [name for name in self.models if wanted is None or name == wanted[1]]
        return {"registered_models": [self._model(name) for name in names]}

    def registered_models_set_tag(self, fields: dict[str, Any]) -> None:
        self._find(fields["name"])["tags"][fields["key"]] = fields["value"]

    def registered_models_alias(self, fields: dict[str, Any]) -> dict[str, Any] | None:
        model = self._find(fields["name"])
        if "version" in fields:
            if fields["alias"].lower() == "latest":
                raise Refused(400, "INVALID_PARAMETER_VALUE", "'latest' alias name is reserved.")
            model["aliases"][fields["alias"]] = int(fields["version"])
            return None
        if fields["alias"] not in model["aliases"]:
            raise Refused(400, "INVALID_PARAMETER_VALUE", "Registered model alias not found.")
        return {"model_version": self._version(fields["name"], model["aliases"][fields["alias"]])}

    def model_versions_create(self, fields: dict[str, Any]) -> dict[str, Any]:
        if "://" not in fields["source"] or fields["source"].startswith("file:"):
            raise Refused(400, "INVALID_PARAMETER_VALUE", "Invalid model version source.")
        versions = self._find(fields["name"])["versions"]
        versions.append(
            {
                "source": fields["source"],
                "run_id": fields.get("run_id", ""),
                "tags": {each["key"]: each["value"] for each in fields.get("tags", ())},
            }
        )
        return {"model_version": self._version(fields["name"], len(versions))}

    def model_versions_get(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model_version": self._version(fields["name"], int(fields["version"]))}

    def model_versions_search(self, fields: dict[str, Any]) -> dict[str, Any]:
        name = re.fullmatch(r"name='(.*)'", fields["filter"])
        assert name is not None
        count = len(self.models[name[1]]["versions"]) if name[1] in self.models else 0
        return {"model_versions": [self._version(name[1], number) for number in range(count, 0, -1)]}

    def model_versions_set_tag(self, fields: dict[str, Any]) -> None:
        version = self._find(fields["name"])["versions"][int(fields["version"]) - 1]
        version["tags"][fields["key"]] = fields["value"]

    def experiments_get_by_name(self, fields: dict[str, Any]) -> dict[str, Any]:
        found = self.experiments.get(fields["experiment_name"])
        if found is None:
            raise Refused(404, "RESOURCE_DOES_NOT_EXIST", "Could not find experiment.")
        return {"experiment": {"experiment_id": found, "name": fields["experiment_name"]}}

    def experiments_create(self, fields: dict[str, Any]) -> dict[str, Any]:
        self.experiments[fields["name"]] = str(len(self.experiments) + 1)
        return {"experiment_id": self.experiments[fields["name"]]}

    def runs_create(self, fields: dict[str, Any]) -> dict[str, Any]:
        run_id = uuid4().hex
        info = {
            "run_id": run_id,
            "experiment_id": fields["experiment_id"],
            "run_name": fields.get("run_name", ""),
            "status": "RUNNING",
            "artifact_uri": f"mlflow-artifacts:/{fields['experiment_id']}/{run_id}/artifacts",
        }
        self.runs[run_id] = {"info": info, "data": {"metrics": []}}
        return {"run": self.runs[run_id]}

    def runs_get(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"run": self.runs[fields["run_id"]]}

    def runs_log_metric(self, fields: dict[str, Any]) -> None:
        metric = {name: fields[name] for name in ("key", "value", "timestamp")}
        self.runs[fields["run_id"]]["data"]["metrics"].append(metric)

    def runs_update(self, fields: dict[str, Any]) -> dict[str, Any]:
        self.runs[fields["run_id"]]["info"]["status"] = fields["status"]
        return {"run_info": self.runs[fields["run_id"]]["info"]}

    def _find(self, name: str) -> dict[str, Any]:
        if name not in self.models:
            raise Refused(404, "RESOURCE_DOES_NOT_EXIST", f"Registered Model with name={name} not found")
        return self.models[name]

    def _model(self, name: str) -> dict[str, Any]:
        model = self._find(name)
        aliases = [{"alias": alias, "version": str(number)} for alias, number in model["aliases"].items()]
        return {"name": name, "tags": _pairs(model["tags"]), "aliases": aliases}

    def _version(self, name: str, number: int) -> dict[str, Any]:
        versions = self._find(name)["versions"]
        if not 1 <= number <= len(versions):
            raise Refused(404, "RESOURCE_DOES_NOT_EXIST", "Model Version not found")
        each = versions[number - 1]
        return {**each, "tags": _pairs(each["tags"]), "name": name, "version": str(number), "status": "READY"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    tracking: Tracking

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        self._call({key: values[0] for key, values in query.items()})

    def do_POST(self) -> None:
        self._call(json.loads(self._body() or b"{}"))

    do_PATCH = do_POST

    def do_PUT(self) -> None:
        self.tracking.artifacts[urlsplit(self.path).path.removeprefix(ARTIFACTS)] = self._body()
        self._answer(200, {})

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def _call(self, fields: dict[str, Any]) -> None:
        try:
            answer = self.tracking.call(urlsplit(self.path).path.removeprefix(API), fields)
        except Refused as refused:
            self._answer(refused.status, {"error_code": refused.code, "message": str(refused)})
            return
        self._answer(200, answer)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        dropped = self.command == "GET" and self.tracking.num_drops > 0
        self.tracking.num_drops -= dropped
        self.close_connection |= dropped
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if dropped and self.tracking.in_headers:
            self.flush_headers()
            return
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if dropped:
            body = body[: len(body) // 2]
        self.wfile.write(body)


def start(tracking: Tracking) -> str:
    """Serve on a free port of the loopback address while this process runs; return the URL."""
    handler = type("BoundHandler", (Handler,), {"tracking": tracking})
    server = QuietServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def _pairs(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items()]
