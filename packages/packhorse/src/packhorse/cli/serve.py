"""`packhorse serve`: models behind HTTP, until a signal ends it.

Every setting is a flag, made from `Settings` itself, so that the two cannot differ; API keys are no
setting and no flag. The line that says where it listens is printed when requests are answered, with
--json as one line of JSON on stdout.
"""

import os
import sys
from dataclasses import asdict, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from cyclopts import Group, Parameter

from packhorse.cli.console import JsonFlag, emit, note
from packhorse.errors import MissingExtra
from packhorse.serve.settings import KEY_VARIABLE, KINDS, Settings, resolve

if TYPE_CHECKING:
    from packhorse.serve.hosting import ServedModels

FIELDS = [each for each in fields(Settings) if each.name in KINDS]
GROUPS = list(dict.fromkeys(each.metadata["group"] for each in FIELDS))


def _flag(name: str, group: str, help: str, least: float | None) -> Any:
    kind = KINDS[name]
    kind = list[get_args(kind)[0]] if get_origin(kind) is tuple else kind
    place = Group(group, sort_key=1 + GROUPS.index(group))
    names = (f"--{name.replace('_', '-')}", *(["-m"] if name == "model" else []))
    return Annotated[
        kind | None,
        Parameter(
            name=names,
            group=place,
            help=help,
            show_default=False,
            negative="" if kind is bool else None,
            negative_iterable=(),
        ),
    ]


if TYPE_CHECKING:
    Flags = Settings
else:
    # A twin of Settings whose fields are None unless given: a default must not hide a file's word.
    Flags = Parameter(name="*")(
        make_dataclass(
            "Flags",
            [(f.name, _flag(f.name, **f.metadata), field(default=None)) for f in FIELDS],
            namespace={"__module__": __name__},
            frozen=True,
            kw_only=True,
        )
    )


def serve(
    *,
    config: Annotated[Path | None, Parameter(help="Settings in TOML.")] = None,
    print_config: Annotated[
        bool, Parameter(negative="", show_default=False, help="Show the settings; stop.")
    ] = False,
    flags: Flags = Flags(),  # noqa: B008 (frozen)
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
      packhorse serve --engine ray --replicas 2 --max-replicas 8
    """
    given = {name: value for name, value in asdict(flags).items() if value is not None}
    settings = resolve(config, os.environ, given)
    os.environ.pop(KEY_VARIABLE, None)  # replicas, compilers and other children have no use for it
    if print_config:
        shown = {name: value for name, value in asdict(settings).items() if name in KINDS}
        print(settings.toml(), end="")
        return emit(shown, json)
    if not settings.is_local and not settings.keys:
        note(f"warning: everyone who reaches {settings.host} may use this server (--insecure)")
    _check_extra()
    from packhorse.serve.life import local_app, run

    def ready(host: str, port: int, hosts: "ServedModels") -> None:
        models = [{"name": each.name, "tasks": list(each.tasks)} for each in hosts]
        emit({"host": host, "port": port, "pid": os.getpid(), "models": models}, json)
        sys.stdout.flush()  # whoever started it waits for this line

    if settings.engine == "ray":
        from packhorse.serve.cluster import cluster_app

        return run(settings, ready, cluster_app)
    run(settings, ready, local_app)


def _check_extra() -> None:
    """Say what is missing before a model is loaded."""
    from importlib.util import find_spec

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
