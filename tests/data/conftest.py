"""TensorFlow, which writes and reads the records that we read, and records written by hand."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def tf() -> ModuleType:
    """TensorFlow, quiet and on one thread."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensorflow = pytest.importorskip("tensorflow", reason="tensorflow-cpu is not installed")
        tensorflow.config.threading.set_inter_op_parallelism_threads(1)
        tensorflow.config.threading.set_intra_op_parallelism_threads(1)
    return tensorflow


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
