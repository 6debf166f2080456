"""The compiled C of wheels: every variant that this machine runs, beside the reference.

The libraries are built by the wheel's own build (`hatch_build.py`). Those for ARM run under
qemu-aarch64 where it and a compiler for ARM are installed.
"""

from __future__ import annotations

import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F

from packhorse import native
from packhorse.attention import native as attending
from packhorse.attention.kernels import pick
from packhorse.attention.native import Native
from packhorse.attention.reference import Reference
from packhorse.c_sources import C_SOURCES, PACKAGE, VARIANTS, library_name, wheel_libraries
from packhorse.model import freeze as freezing
from packhorse.model import int8
from packhorse.model.bert import AddNorm
from packhorse.model.freeze import FrozenAddNorm, PackedLinear
from packhorse.native import Obstacle
from packhorse.packing.batch import Packed
from packhorse.processor import CPU_LEVELS, Features, runs_variant
from packhorse.runtime.proof import SyntheticSequence
from packhorse.tokens import wordpiece
from packhorse.tokens.wordpiece import AsciiWordPiece

pytest.importorskip("hatchling", reason="hatchling is not installed: make test does that")
pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(
        platform.system() != "Linux" or shutil.which("cc") is None, reason="needs Linux and cc"
    ),
]
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 instruction sets")
CACHED = (
    attending._function,
    attending._multiplies_bf16,
    freezing._add_norm,
    freezing._has_fused_add_norm,
    freezing._products,
    freezing._has_products,
    int8.is_native,
    int8._functions,
    wordpiece._functions,
)
LENGTHS = (5, 130, 1, 33, 257, 16)
VOCABULARY = ["[UNK]", "horse", "pack", "##horse", "##s", "a", ".", "!"]
TEXT = "Packhorses: a horse! PACKS."


def clear() -> None:
    for function in CACHED:
        function.cache_clear()


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """hatch_build.py, which is no part of the package."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    try:
        import hatch_build
    finally:
        sys.path.pop(0)
    return hatch_build


def test_a_library_of_another_header_has_another_name(tmp_path: Path) -> None:
    for name in ("int8.c", "vectors.h"):
        shutil.copy(PACKAGE / "model" / name, tmp_path)
    before = library_name(tmp_path / "int8.c", (), "avx2")
    assert before == library_name(PACKAGE / "model" / "int8.c", (), "avx2")
    header = tmp_path / "vectors.h"
    header.write_text(header.read_text("utf-8").replace("13.5f", "13.0f"), "utf-8")
    assert library_name(tmp_path / "int8.c", (), "avx2") != before


@pytest.fixture(scope="module")
def libraries(build: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel for this machine has."""
    folder = tmp_path_factory.mktemp("compiled")
    assert build.compile_all(folder) == ""
    return folder


@pytest.fixture
def installed(libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The libraries as in an installed wheel, without a compiler and a cache."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("CC", "/no/such/cc")
    monkeypatch.setattr(native, "WHEEL_FOLDER", libraries)
    clear()
    yield libraries
    clear()


@contextmanager
def held_to(level: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that the processor has what this level has; torch keeps what it has."""
    levels = list(CPU_LEVELS)
    names = [CPU_LEVELS[name].adds for name in levels[: levels.index(level) + 1]]
    features = Features(**{name: True for name in names}, march=CPU_LEVELS[level].march)
    with monkeypatch.context() as patch:
        for module in (native, attending, int8, sys.modules["packhorse.processor"]):
            patch.setattr(module, "features", lambda: features)
        clear()
        yield
    clear()


def packed_batch(lengths: tuple[int, ...] = LENGTHS) -> Packed:
    return Packed.build([SyntheticSequence(np.zeros(n, int), np.zeros(n, int)) for n in lengths])


def attention_error(kernel: Native | Reference, qkv: Tensor, packed: Packed) -> float:
    """The largest difference to the reference in float64."""
    exact = qkv.double()
    expected = Reference()(exact, Reference().plan(packed))
    return float((kernel(qkv, kernel.plan(packed)) - expected).abs().max())  # pyright: ignore


def check_attention(dtype: torch.dtype) -> None:
    packed = packed_batch()
    for heads, width in ((2, 32), (1, 64), (3, 24), (1, 128)):
        qkv = torch.randn(sum(LENGTHS), 3, heads, width).to(dtype)
        allowed = 1e-5
        if dtype == torch.bfloat16:
            allowed = 1.5 * attention_error(Reference(), qkv, packed)
        assert attention_error(Native(), qkv, packed) <= allowed
        # And no bit depends on a neighbor.
        before = Native()(qkv, Native().plan(packed))
        qkv[:5], qkv[135:] = 1e30, float("nan")
        after = Native()(qkv, Native().plan(packed))
        assert torch.equal(after[5:135], before[5:135])
        assert not torch.equal(after[:5], before[:5])


def norm(width: int, dtype: torch.dtype) -> AddNorm:
    made = AddNorm(width, 1e-12)
    torch.nn.init.normal_(made.weight, 1, 0.3)
    torch.nn.init.normal_(made.bias)
    return made.to(dtype)


def exact_norm(norm: AddNorm, x: Tensor, residual: Tensor) -> Tensor:
    weight, bias = norm.weight.double(), norm.bias.double()
    return F.layer_norm(x.double() + residual.double(), weight.shape, weight, bias, norm.eps)


def check_add_norm(dtype: torch.dtype) -> None:
    for width in (7, 64, 100, 384):
        layer = norm(width, dtype)
        x, residual = torch.randn(2, 40, width).to(dtype)
        with torch.inference_mode():
            result = FrozenAddNorm(layer)(x, residual)
            truth = exact_norm(layer, x, residual)
            allowed = 1e-5
            if dtype == torch.bfloat16:
                allowed = float((layer(x, residual) - truth).abs().max())
        assert float((result - truth).abs().max()) <= allowed


def check_products() -> None:
    for rows, inputs, columns in ((7, 390, 40), (40, 64, 100)):
        linear = torch.nn.Linear(inputs, columns)
        x = torch.randn(rows, inputs)
        with torch.inference_mode():
            truth = F.gelu(F.linear(x.double(), linear.weight.double(), linear.bias.double()))
            result = PackedLinear(linear, "gelu")(x)
            assert float((result - truth).abs().max()) < 1e-5
            assert float((PackedLinear(linear)(x) - truth).abs().max()) > 1e-3  # the control


def library() -> Library:
    vocabulary = {word: id for id, word in enumerate(VOCABULARY)}
    made = Library(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


def check_int8() -> None:
    """The integer sums of a layer are the same on every processor; the rest is rounding."""
    linear = torch.nn.Linear(131, 70)
    for x in (torch.randn(50, 131), torch.randn(50, 131).bfloat16()):
        layer = int8.Int8Linear(linear, "gelu")
        assert layer.native
        with torch.inference_mode():
            weight, tokens = int8.quantize_weight(linear.weight), int8.quantize_tokens(x)
            expected = tokens.dequantize().double() @ weight.dequantize().double().T
            expected = F.gelu(expected + linear.bias.double())
            assert (layer(x) - expected).abs().max() < 1e-5
            assert (F.gelu(linear(x.float())) - expected).abs().max() > 1e-3  # int8 is not fp32


def check_tokenizer() -> None:
    expected = library().encode(TEXT, add_special_tokens=False).ids
    rules = AsciiWordPiece.of(library())
    assert rules is not None
    (tokens,) = rules.encode([TEXT])
    assert tokens is not None and tokens[0].tolist() == expected and len(set(expected)) > 4


# ---- what a wheel has ----


def test_the_list_is_what_the_modules_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set()

    def record(source: Path, name: str, types: object, defines: tuple = (), returns: object = None):
        asked.add((source, defines))

    for module in (attending, freezing, wordpiece):
        monkeypatch.setattr(module, "function", record)
    monkeypatch.setattr(attending, "features", lambda: Features(avx512_bf16=True))
    clear()
    for bf16 in (False, True):
        attending._function(bf16)
        freezing._add_norm(bf16)
    freezing._products()
    wordpiece._functions()
    clear()
    listed = {(source.path, source.defines) for source in C_SOURCES}
    assert asked <= listed
    assert {path for path, _ in listed} == set(PACKAGE.rglob("*.c"))


def test_a_wheel_has_every_variant_and_needs_nothing_but_libc(libraries: Path) -> None:
    expected = {
        library_name(source.path, source.defines, variant) for source, variant in wheel_libraries()
    }
    assert {path.name for path in libraries.iterdir()} == expected
    for path in libraries.iterdir():
        content = path.read_bytes()
        assert b"gomp" not in content.lower() and b"libomp" not in content
        assert str(PACKAGE).encode() not in content  # no path of the machine that built it


@on_x86
def test_no_variant_has_instructions_of_a_larger_processor(libraries: Path) -> None:
    disassembler = shutil.which("objdump")
    if disassembler is None:
        pytest.skip("there is no objdump")
    listings = {
        path.name.split("-")[-2]: subprocess.run(
            [disassembler, "-d", path], capture_output=True, text=True, check=True
        ).stdout
        for path in libraries.glob("native-*")
    }
    assert "zmm" not in listings["avx2"] and "zmm" in listings["avx512"]
    assert "vdpbf16ps" not in listings["avx512"] and "vdpbf16ps" in listings["bf16"]


@on_x86
@pytest.mark.parametrize("level", CPU_LEVELS)
def test_every_variant_equals_the_reference(
    level: str, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not runs_variant(level):
        pytest.skip(f"this processor has no {level}")
    with held_to(level, monkeypatch):
        for dtype in (torch.float32, torch.bfloat16):
            check_attention(dtype)
            check_add_norm(dtype)
        check_products()
        check_int8()
        check_tokenizer()
        chosen = {source.purpose: loaded_variant(source) for source in C_SOURCES}
    names = list(CPU_LEVELS)
    for source in C_SOURCES:
        below = [name for name in source.variants if name in names[: names.index(level) + 1]]
        assert chosen[source.purpose] == (below[0] if below else None)


def loaded_variant(source) -> str | None:
    try:
        library = native.loaded(source)
    except Obstacle as reason:
        assert "runs none of its variants" in str(reason)
        return None
    assert library.from_wheel
    return library.variant


def test_without_a_compiler_and_a_cache_the_kernel_is_that_of_the_wheel(installed: Path) -> None:
    cpu = torch.device("cpu")
    assert pick(cpu, torch.float32).name == "native"
    check_attention(torch.float32)
    for path in (installed / "nowhere", installed):  # the control: without the libraries it is lost
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "WHEEL_FOLDER", path)
            clear()
            assert (attending.obstacle() is None) == (path == installed)


def test_a_damaged_library_is_replaced_by_the_compiler(
    libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "compiled"
    shutil.copytree(libraries, broken)
    for path in broken.iterdir():
        path.write_bytes(b"not a library")
    monkeypatch.setattr(native, "WHEEL_FOLDER", broken)
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "cache"))
    assert native.loaded(C_SOURCES[0]).path.is_relative_to(tmp_path / "cache")


def test_another_source_or_definition_is_not_taken_from_the_wheel(
    libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "WHEEL_FOLDER", libraries)
    source = C_SOURCES[0]
    assert native._installed_library(source.path, source.defines)
    assert not native._installed_library(source.path, (*source.defines, "CHUNK=64"))
    changed = tmp_path / source.path.name
    changed.write_bytes(source.path.read_bytes() + b"/* changed */\n")
    assert not native._installed_library(changed, source.defines)


def test_a_build_without_a_working_compiler_says_why(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    assert "/bin/false" in build.compile_all(tmp_path)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.compile_all(tmp_path) == "there is no C compiler"


# ---- ARM, emulated ----


@pytest.fixture(scope="module")
def emulated(
    build: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[bytes]]:
    """Calls a function of a library for ARM: the buffers among its arguments, as it left them."""
    compiler = shutil.which("aarch64-linux-gnu-gcc")
    emulator = shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs Debian's packages qemu-user and gcc-aarch64-linux-gnu")
    folder = tmp_path_factory.mktemp("arm")
    program = folder / "call_library"
    source = Path(__file__).with_name("call_library.c")
    subprocess.run([compiler, "-O1", "-o", program, source, "-ldl"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", compiler)
        patch.setenv("PACKHORSE_BUILD_PLATFORM", "manylinux_2_17_aarch64")
        (folder / "compiled").mkdir()
        assert build.compile_all(folder / "compiled") == ""
        assert build.wheel_platform() == "manylinux_2_17_aarch64"

    def call(purpose: str, function: str, *arguments: object) -> list[bytes]:
        (source,) = (source for source in C_SOURCES if source.purpose == purpose)
        name = library_name(source.path, source.defines, "neon")
        parts: list[bytes] = []
        sizes: list[int] = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                content = argument.tobytes()
                sizes.append(len(content))
                parts.append(b"b" + struct.pack("<q", len(content)) + content)
            elif isinstance(argument, float):
                parts.append(b"f" + struct.pack("<f", argument))
            elif isinstance(argument, int):
                parts.append(b"l" + struct.pack("<q", argument))
            else:
                parts.append(b"p")
        command = [emulator, "-L", "/usr/aarch64-linux-gnu", program, folder / "compiled" / name]
        result = subprocess.run(
            [*map(str, command), function], input=b"".join(parts), capture_output=True, check=False
        )
        assert result.returncode == 0, result.stderr
        rest = result.stdout[8:]
        buffers: list[bytes] = []
        for size in sizes:
            buffers.append(rest[:size])
            rest = rest[size:]
        return buffers

    return call


def emulated_attention(call: Callable[..., list[bytes]], qkv: Tensor, packed: Packed) -> Tensor:
    """What `attention.native.attend` does, with the library for ARM."""
    plan = Native().plan(packed)
    q, k, v = (np.ascontiguousarray(x.numpy()) for x in qkv.unbind(1))
    _, heads, width = q.shape
    step = heads * width
    longest = plan.longest
    buffers = call(
        "attention fp32",
        "packhorse_attend",
        *(q, k, v, np.zeros_like(q), plan.items.numpy(), 0),
        *(len(plan.items), heads, width, step, step, step, 0, longest, longest, longest),
        *(width**-0.5 * float(np.log2(np.e)), width**0.5, None, 2),
    )
    return torch.from_numpy(np.frombuffer(buffers[3], np.float32).reshape(q.shape).copy())


@pytest.mark.parametrize(("heads", "width"), [(2, 32), (1, 64), (3, 24)])
def test_attention_on_arm(heads: int, width: int, emulated: Callable[..., list[bytes]]) -> None:
    packed = packed_batch()
    qkv = torch.randn(sum(LENGTHS), 3, heads, width)
    result = emulated_attention(emulated, qkv, packed)
    expected = Reference()(qkv.double(), Reference().plan(packed))
    assert float((result - expected).abs().max()) < 1e-5
    qkv[:5], qkv[135:] = 1e30, float("nan")
    after = emulated_attention(emulated, qkv, packed)
    assert torch.equal(after[5:135], result[5:135])
    assert not torch.equal(after[:5], result[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_norm_on_arm(dtype: torch.dtype, emulated: Callable[..., list[bytes]]) -> None:
    width, rows = 100, 10
    columns = -(-width // freezing.BLOCK) * freezing.BLOCK
    layer = norm(width, dtype)
    x, residual = torch.randn(2, rows, width).to(dtype)
    padded = [F.pad(p.detach().float(), (0, columns - width)) for p in (layer.weight, layer.bias)]
    as_numpy = [t.contiguous().view(torch.uint8).numpy() for t in (x, residual)]
    buffers = emulated(
        "add-norm fp32" if dtype == torch.float32 else "add-norm bf16",
        "packhorse_add_norm",
        *as_numpy,
        *(t.numpy() for t in padded),
        *(np.zeros_like(as_numpy[0]), np.zeros((2, columns), np.float32)),
        *(rows, width, columns, layer.eps, None, 2),
    )
    result = torch.frombuffer(bytearray(buffers[4]), dtype=dtype).reshape(rows, width)
    with torch.inference_mode():
        truth = exact_norm(layer, x, residual)
        plain = float((layer(x, residual) - truth).abs().max())
    assert float((result - truth).abs().max()) <= (1e-5 if dtype == torch.float32 else plain)


def test_the_tokenizer_on_arm(emulated: Callable[..., list[bytes]]) -> None:
    rules = AsciiWordPiece.of(library())
    assert rules is not None
    trie = rules._build()
    size = len(TEXT)
    buffers = emulated(
        "tokenizer",
        "packhorse_wordpiece",
        *(np.frombuffer(TEXT.encode(), np.uint8), np.array([size]), 1),
        *(trie._edges, trie.mask, trie._tokens, 0, 100, 1),
        *(np.zeros(size, np.int32), np.zeros((size, 2), np.int32), np.zeros(1, np.int64)),
        np.zeros(size + 1, np.int64),
    )
    expected = library().encode(TEXT, add_special_tokens=False)
    (count,) = np.frombuffer(buffers[-2], np.int64)
    ids = np.frombuffer(buffers[4], np.int32)[:count]
    offsets = np.frombuffer(buffers[5], np.int32).reshape(-1, 2)[:count]
    assert ids.tolist() == expected.ids
    assert [tuple(row) for row in offsets.tolist()] == expected.offsets


def test_variants_of_arm_are_not_for_x86() -> None:
    assert [name for _, name in wheel_libraries("arm64")] == ["neon"] * 4
    assert not runs_variant("neon") or not VARIANTS["avx2"].is_for(platform.machine())
