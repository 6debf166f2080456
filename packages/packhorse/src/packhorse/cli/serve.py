"""`packhorse serve`: serve models over HTTP until a signal ends it.

Every setting is a flag (`cli.settings`), except API keys. The line that says where it listens is
printed once requests are answered; with --json it is one line of JSON on stdout.
"""

import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note
from packhorse.cli.settings import PrintConfig, flags_class, passed
from packhorse.errors import MissingExtra
from packhorse.serve.settings import KEY_VARIABLE, PREFIX, ServeSettings, resolve
from packhorse.settings import service_variables, setting_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from packhorse.serve.starting import StartedModel

    ServeFlags = ServeSettings
else:
    ServeFlags = flags_class(ServeSettings, negatives=False, consume_multiple=False)


def serve(
    *,
    config: Annotated[Path | None, Parameter(help="Settings in TOML.")] = None,
    print_config: PrintConfig = False,
    flags: ServeFlags = ServeFlags(),  # noqa: B008 (frozen)
    json: JsonFlag = False,
) -> None:
    """Serve models over HTTP, in the dialects of TEI, OpenAI, Cohere and Hugging Face.

    Settings come from defaults, then the file, then the environment
    (PACKHORSE_SERVE_…), then flags; docs/limits.md has them all. API keys come
    from PACKHORSE_API_KEY or --api-key-file. SIGTERM drains and exits with 0.

    Try:
      packhorse serve
      packhorse serve --model qa=FOLDER --model all-MiniLM-L6-v2 --port 9000
      PACKHORSE_API_KEY=secret packhorse serve --host 0.0.0.0
      packhorse serve --grpc-port 8081
      packhorse serve --engine ray --replicas 2 --max-replicas 8
    """
    settings = resolve(config, os.environ, passed(flags))
    if ignored := service_variables(os.environ, PREFIX):
        names = ", ".join(sorted(ignored))
        note(f"ignored, because Kubernetes sets them for a Service of this name: {names}")
    # Replicas, compilers and other child processes do not need the key, so they must not get it.
    os.environ.pop(KEY_VARIABLE, None)
    if print_config:
        print(settings.toml(), end="")
        public = setting_fields(ServeSettings)  # all but the keys
        return emit({name: getattr(settings, name) for name in public}, json)
    if not settings.is_local and not settings.keys:
        note(f"warning: everyone who reaches {settings.host} may use this server (--insecure)")
    _require_packages()
    if settings.grpc_port:
        _require_grpc()

    def ready(host: str, port: int, started: "Sequence[StartedModel]") -> None:
        models = [{"name": model.name, "tasks": list(model.tasks)} for model in started]
        facts = {"host": host, "port": port, "pid": os.getpid(), "models": models}
        facts |= {"grpc_port": settings.grpc_port, "unix_socket": settings.unix_socket}
        emit({**facts, "tls": bool(settings.tls_cert)}, json)
        sys.stdout.flush()  # whoever started the server waits for this line

    if settings.engine == "ray":
        from packhorse.serve.cluster import cluster_app
        from packhorse.serve.life import run

        return run(settings, ready, cluster_app)
    from packhorse.serve.processes import supervisor

    if fronts := supervisor.count_fronts(settings):
        return supervisor.run(settings, ready, fronts)
    from packhorse.serve.life import local_app, run

    if settings.devices:
        settings = replace(settings, device=settings.devices[0], devices=())
    run(settings, ready, local_app)


def _require_packages() -> None:
    """Name a missing package before a model is loaded."""
    if find_spec("fastapi") is None:
        raise MissingExtra("fastapi", "serve")
    if find_spec("uvicorn") is None:
        raise MissingExtra("uvicorn", "serve")
    if find_spec("httptools") is None:
        raise MissingExtra("httptools", "serve")
    if find_spec("orjson") is None:
        raise MissingExtra("orjson", "serve")
    if find_spec("prometheus_client") is None:
        raise MissingExtra("prometheus-client", "serve")


def _require_grpc() -> None:
    if find_spec("grpc") is None:
        raise MissingExtra("grpcio", "grpc")
    if find_spec("grpc_reflection") is None:
        raise MissingExtra("grpcio-reflection", "grpc")
