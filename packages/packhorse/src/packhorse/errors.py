"""Every error a user can cause, one base and its kinds.

A message says what is wrong and what to do next. The CLI prints it as one line and exits with the
kind's `exit_code`; the HTTP server maps kinds to statuses. Programming mistakes stay ordinary
exceptions: they are ours to fix, not the user's to read.
"""


class PackhorseError(Exception):
    """Base of all errors that are part of the interface."""

    exit_code = 2


class InputError(PackhorseError, ValueError):
    """What the user passed cannot be used: an argument, a text, a file of texts."""


class CheckpointError(PackhorseError):
    """A model folder or file is missing, damaged, or does not hold what was asked of it."""


class KernelError(PackhorseError):
    """An attention kernel was asked to run on a device, dtype or pass it does not serve."""


class Overloaded(PackhorseError):
    """More waits to be run than was allowed to; nothing is wrong with the request, try again."""


class RunnerStopped(PackhorseError):
    """The runner was closed or its engine died; no request of it will be answered any more."""


class RequestFailed(PackhorseError):
    """The model ran and failed on this one request; the cause, where there is one, is attached."""


class RankLost(PackhorseError):
    """Another process of the team has ended, or does not answer; this one cannot go on alone."""

    exit_code = 4


class MissingExtra(PackhorseError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed; install it with: pip install 'packhorse[{extra}]'"
        )
