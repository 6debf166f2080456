"""The environment for child processes, without keys, tokens and passwords.

A compiler needs none of them, and what it starts (a wrapper, a plugin, ccache) could leak them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def secret_names(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The variables whose names suggest that they hold a secret."""
    return [name for name in environ if SECRET.search(name)]


def without_secrets(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a process that needs no secrets."""
    return {name: value for name, value in environ.items() if not SECRET.search(name)}
