"""TensorFlow, which writes and reads the records that we read, and records written by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def record_files() -> ModuleType:
    """Records of every form, put together by plain loops (see the module)."""
    path = Path(__file__).with_name("record_files.py")
    spec = importlib.util.spec_from_file_location("record_files", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module
