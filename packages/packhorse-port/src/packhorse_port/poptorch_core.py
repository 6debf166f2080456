"""`poptorch.poptorch_core`: of PopTorch's compiled part, the errors that scripts catch."""

from packhorse_port.hardware import Error as Error
from packhorse_port.hardware import RecoverableError as RecoverableError
from packhorse_port.hardware import UnrecoverableError as UnrecoverableError
