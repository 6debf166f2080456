"""How this room says no: what is wrong, what to write instead, and the line of the script."""

from __future__ import annotations

from packhorse.errors import InputError
from packhorse_port.notices import caller


def refuse(text: str) -> InputError:
    """The error to raise, with the line of the script in front where there is one."""
    line = caller()
    return InputError(f"{line}: {text}" if line else text)
