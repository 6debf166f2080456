"""Is a value of a JSON document an object or a list? Checks that a type checker understands.

`isinstance(value, dict)` alone leaves the types of keys and values unknown.
"""

from typing import Any, TypeGuard


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether the value is an object; in JSON all its keys are strings."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether the value is a list."""
    return isinstance(value, list)
