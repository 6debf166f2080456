"""`make wheel`: what README and the documentation print runs from the wheel, outside the clone.

Every document gets an empty environment with the wheel and nothing else, and a folder with the
files that it names. Its shell lines run in order, as printed; `pip install` lines too, so a
document that needs an extra and does not say so fails. Its Python blocks then run as one script.
Hub ids come from a local hub. Blocks that are marked as needing more are listed and not run
(`documented`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ..documented import NEEDS, REPOSITORY, Block, blocks, documents
from .conftest import Environment

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(1800)]
RUNNABLE = [document for document in documents() if any(b.language for b in blocks(document))]


@pytest.mark.parametrize(
    "document", RUNNABLE, ids=lambda path: path.relative_to(REPOSITORY).as_posix()
)
def test_a_document_runs_from_the_wheel(
    document: Path,
    environment: Environment,
    scratch: Path,
    server: Callable[[str, Path], None],
) -> None:
    printed = [block for block in blocks(document) if not block.needs]
    if not any("pip install" in block.text for block in printed):
        environment.require("pip install packhorse", scratch)
    for block in blocks(document):
        if block.needs:
            print(f"not run: {block.place}: {NEEDS[block.needs]}")
        elif block.language == "sh":
            run_lines(block, environment, scratch, server)
    script = "\n".join(block.text for block in printed if block.language == "python")
    (scratch / "printed.py").write_text(script)
    environment.require("python printed.py", scratch)


def run_lines(
    block: Block, environment: Environment, scratch: Path, server: Callable[[str, Path], None]
) -> None:
    """Run the shell lines of a block; a server stays until the document is done."""
    for line in block.commands:
        if line.startswith("packhorse serve"):
            server(line, scratch)
        else:
            environment.require(line, scratch)


def test_a_line_that_fails_is_seen(environment: Environment, scratch: Path) -> None:
    """The control: commands of the clone are not found, and a failure is one."""
    with pytest.raises(AssertionError, match="packhorse"):
        environment.require("packhorse --version", scratch)
    with pytest.raises(AssertionError, match="No module named 'packhorse'"):
        environment.require("python -c 'import packhorse'", scratch)
