"""A hub on this machine over the folders of `local_models`, for HF_ENDPOINT."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class LocalHub:
    """Answers what huggingface_hub asks for: the files of a revision, and each file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path).strip("/")
        parts = path.removeprefix("api/models/").split("/")
        repository = "/".join(parts[:2])
        if not (self.root / repository).is_dir():
            return self.send(request, 404, {"X-Error-Code": "RepoNotFound"})
        kind = parts[2] if len(parts) > 2 else "revision"
        revision = parts[3] if len(parts) > 3 else "main"
        folder = self.folder(repository, revision)
        if folder is None:
            return self.send(request, 404, {"X-Error-Code": "RevisionNotFound"})
        commit = revision if len(revision) == 40 else self.commit(repository, folder.name)
        headers = {"X-Repo-Commit": commit}
        if kind in ("revision", "tree"):
            names = sorted(
                p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()
            )
            if kind == "revision":
                siblings = [{"rfilename": name} for name in names]
                body: Any = {"id": repository, "sha": commit, "siblings": siblings, "tags": []}
            else:
                within = "/".join(parts[4:])
                body = [
                    {
                        "type": "file",
                        "path": n,
                        "size": (folder / n).stat().st_size,
                        "oid": "0" * 40,
                    }
                    for n in names
                    if n.startswith(f"{within}/" if within else "")
                ]
            return self.send(request, 200, headers, json.dumps(body).encode())
        file = folder / "/".join(parts[4:])
        if not file.is_file():
            return self.send(request, 404, headers | {"X-Error-Code": "EntryNotFound"})
        content = file.read_bytes()
        headers["ETag"] = f'"{hashlib.sha1(content).hexdigest()}"'
        self.send(request, 200, headers, content)

    def folder(self, repository: str, revision: str) -> Path | None:
        """The folder of a branch or commit; one that is not there by name may be the main one."""
        home = self.root / repository
        for folder in sorted(home.iterdir()):
            if revision in (folder.name, self.commit(repository, folder.name)):
                return folder
        return home / "main" if len(revision) == 40 else None

    def commit(self, repository: str, name: str) -> str:
        return (
            name if len(name) == 40 else hashlib.sha1(f"{repository}@{name}".encode()).hexdigest()
        )

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
        if request.command == "GET":
            request.wfile.write(body)
