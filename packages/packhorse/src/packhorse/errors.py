"""Every error that a user can cause: one base class and its kinds.

A message says what is wrong and what to do next. The CLI prints it as one line and exits with the
`exit_code` of the class; the HTTP server maps classes to statuses. Bugs stay ordinary exceptions.
"""

__all__ = [
    "CheckpointError",
    "DeadlineExceeded",
    "InputError",
    "KernelError",
    "MissingExtra",
    "Overloaded",
    "PackhorseError",
    "RankLost",
    "RequestFailed",
    "RunnerStopped",
]


class PackhorseError(Exception):
    """Base of all errors that are part of the interface."""

    exit_code = 2
    retry_after = 0.0  # seconds after which the request may succeed; 0: unknown


class InputError(PackhorseError, ValueError):
    """An argument, a text or a file of the user cannot be used."""


class CheckpointError(PackhorseError):
    """A model folder or file is missing, damaged, or does not contain what is needed."""


class KernelError(PackhorseError):
    """An attention kernel does not support the device, dtype or pass that it should run."""


class Overloaded(PackhorseError):
    """The queue is full; nothing is wrong with the request, so try again later."""


class DeadlineExceeded(PackhorseError):
    """The request cannot be, or was not, answered within the time that it allows."""


class RunnerStopped(PackhorseError):
    """The runner was closed or its engine died; it will answer no more requests."""


class RequestFailed(PackhorseError):
    """The model ran and failed on this request; the cause, if there is one, is attached."""


class RankLost(PackhorseError):
    """Another process of the team has ended or does not answer; this one cannot go on alone."""

    exit_code = 4


class MissingExtra(PackhorseError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed; install it with: pip install 'packhorse[{extra}]'"
        )
