"""PopTorch's errors, for scripts that catch them: `except poptorch.Error`.

An error that Packhorse raises is one of them. No IPU fails here, so the other two are never raised.
"""

from __future__ import annotations

from packhorse.errors import PackhorseError

Error = PackhorseError


class RecoverableError(Error):
    """An IPU failed and can be reset."""

    recovery_action = ""


class UnrecoverableError(Error):
    """An IPU failed for good."""
