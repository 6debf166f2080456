"""Write docs/openapi.json, the committed description of the API, independent of served models.

    python -m packhorse.serve.openapi docs/openapi.json     # after a change of routes or bodies

A test compares the file with the application, so that a change of the API shows in a diff.
"""

from __future__ import annotations

import sys
from pathlib import Path

import orjson

from packhorse import atomic
from packhorse.serve import app
from packhorse.serve.hosting import ServedModels
from packhorse.serve.settings import ServeSettings


def document() -> bytes:
    """Return the content of the file."""
    layout = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(app.create(ServeSettings(), ServedModels([])).openapi(), option=layout)


def write(path: Path) -> None:
    """Replace the file."""
    with atomic.new_file(path) as file:
        file.write(document())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
