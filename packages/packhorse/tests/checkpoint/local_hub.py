"""The few answers of the Hugging Face hub that its client needs, for HF_ENDPOINT."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
REPOSITORIES = ("org/tiny", "org/gated", "org/private")


class Hub:
    """A hub on this machine, whose repositories all hold the same files.

    org/private asks for the token "secret"; the files of org/gated are refused.
    """

    def __init__(self, files: dict[str, bytes], repositories: tuple[str, ...] = REPOSITORIES):
        self.files = files
        self.repositories = repositories
        self.asked: list[tuple[str, str]] = []  # path, token
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.answer(self)

            do_HEAD = do_GET

            def do_POST(self) -> None:
                owner.receive(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = urlsplit(request.path).path.strip("/")
        token = request.headers.get("authorization", "")
        self.asked.append((path, token))
        parts = path.removeprefix("api/models/").split("/")
        if len(parts) < 4:
            return self.send(request, 404, {})
        repository, kind, revision = "/".join(parts[:2]), parts[2], parts[3]
        commit = COMMITS.get(revision, revision)
        headers = {"X-Repo-Commit": commit}
        if repository not in self.repositories:
            return self.send(request, 404, {"X-Error-Code": "RepoNotFound"})
        if repository == "org/private" and token != "Bearer secret":
            return self.send(request, 404, {"X-Error-Code": "RepoNotFound"})
        if repository == "org/gated" and kind == "resolve":
            return self.send(request, 403, {"X-Error-Code": "GatedRepo"})
        if commit not in COMMITS.values():
            return self.send(request, 404, {"X-Error-Code": "RevisionNotFound"})
        if kind == "revision":
            siblings = [{"rfilename": name} for name in self.files]
            body = {"id": repository, "sha": commit, "siblings": siblings}
            return self.send(request, 200, headers, json.dumps(body).encode())
        if kind == "tree":
            body = [
                {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for n, c in self.files.items()
            ]
            return self.send(request, 200, headers, json.dumps(body).encode())
        content = self.files["/".join(parts[4:])]
        headers["ETag"] = f'"{hashlib.sha1(content).hexdigest()}"'
        return self.send(request, 200, headers, content)

    def receive(self, request: BaseHTTPRequestHandler) -> None:
        """A new repository, and a commit with the files themselves in it (none by LFS)."""
        path = urlsplit(request.path).path.strip("/")
        body = request.rfile.read(int(request.headers.get("content-length", 0)))
        self.asked.append((path, request.headers.get("authorization", "")))
        if request.headers.get("authorization") != "Bearer secret":
            return self.send(request, 401, {}, b'{"error": "no token"}')
        if path == "api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            self.repositories = (*self.repositories, name)
            return self.send(request, 200, {}, json.dumps({"url": f"{self.url}/{name}"}).encode())
        if "/preupload/" in path:
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return self.send(request, 200, {}, json.dumps({"files": modes}).encode())
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            name = "/".join(path.split("/")[2:4])
            address = f"{self.url}/{name}/commit/{'a' * 40}"
            made = {"commitOid": "a" * 40, "commitUrl": address}
            return self.send(request, 200, {}, json.dumps(made).encode())
        return self.send(request, 200, {}, b'{"errors": [], "warnings": []}')  # validate-yaml

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        body: bytes = b"",
    ) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.send_header("Content-Type", "application/json")
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)
