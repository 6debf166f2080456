"""The command line, run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from packhorse.cli import main


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """What --json wrote."""
        return json.loads(self.out)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., CommandResult]:
    """Run `packhorse` with these arguments."""

    def run(*arguments: object) -> CommandResult:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return CommandResult(code, *capfd.readouterr())

    return run
