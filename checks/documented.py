"""The code blocks of README and the documentation, and what each of them needs to run.

A block runs in any environment with the wheel, unless a comment before it, which no reader sees,
says otherwise:

    <!-- needs: gpu -->
    ```sh
    packhorse train --config bert-large-mlperf --train corpus
    ```

Notes of benchmarks are no documentation in this sense: they record what was once run, for hours and
on other machines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# Why a block is not run from the wheel.
NEEDS = {
    "clone": "runs in a clone of the repository",
    "data": "needs a task's own data",
    "docker": "runs Docker",
    "gpu": "needs a GPU and hours",
    "internet": "downloads from the internet",
    "peers": "measures other libraries for minutes",
}
BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>[^\n]*?) -->\n+)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of code in a Markdown file."""

    document: Path
    line: int  # of its first line of code
    language: str
    text: str
    needs: str  # a key of NEEDS; empty: it runs anywhere

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return f"{self.document.relative_to(REPOSITORY)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Lines of a shell, with continuation lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks(document: Path) -> list[Block]:
    """All fenced blocks of a file, in order."""
    text = document.read_text("utf-8")
    return [
        Block(
            document,
            text.count("\n", 0, match.start("text")) + 1,
            match["language"],
            match["text"],
            match["needs"] or "",
        )
        for match in BLOCK.finditer(text)
    ]


def documents() -> list[Path]:
    """README, the pages of the site and the descriptions of the packages."""
    pages = sorted((REPOSITORY / "docs").rglob("*.md"))
    return [
        REPOSITORY / "README.md",
        *sorted((REPOSITORY / "packages").glob("*/README.md")),
        *(page for page in pages if page not in notes()),
    ]


def notes() -> list[Path]:
    """The notes of benchmarks."""
    return sorted((REPOSITORY / "docs" / "benchmarks").glob("2*.md"))
