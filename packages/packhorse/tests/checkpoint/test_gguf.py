"""GGUF files: those that llama.cpp's converter wrote, and those that the package gguf writes.

The committed ones are made by make_ggufs.py, with the model of transformers that each came from.
"""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

import packhorse
from packhorse import gguf as container
from packhorse.checkpoint import gguf as reader
from packhorse.checkpoint import load
from packhorse.checkpoint.inspection import inspect
from packhorse.checkpoint.writing import write
from packhorse.errors import CheckpointError, MissingExtra
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence
from packhorse.tokens import Tokenizer
from packhorse.tokens import files as token_files

from .test_later import jina_states

FILES = Path(__file__).parent / "ggufs"
CLASSES = {
    "bert": "BertModel",
    "distilbert": "DistilBertModel",
    "xlm-roberta": "XLMRobertaModel",
    "nomic": "NomicBertModel",
    "modern-bert": "ModernBertModel",
    "jina-v3": "JinaEmbeddingsV3Model",
    "eurobert": "EuroBertModel",
    "qwen3": "Qwen3Model",
}
# A GGUF file does not tell the rules of Llama's tokenizer, which EuroBERT has.
TOKENIZERS = [kind for kind in (*CLASSES, "jina-v2") if kind != "eurobert"]
CHARACTERS = ["\ufb01 horse", "horse \uff41", "\u2460", "a\u0301b \ufb01\ufb01"]  # of a charsmap
TEXTS = ["the horse", "A horse, a pack.", "abc def ing? pack!", "q", "horse  \u00e9 \u732b the"]


def theirs(transformers: ModuleType, kind: str, rounded: torch.dtype | None = None) -> Any:
    """The model of transformers that a file was made of; `rounded`: weights through this dtype."""
    cls = getattr(transformers, CLASSES[kind])
    raw = json.loads((FILES / f"{kind}.config.json").read_text())
    if kind == "nomic":  # the keys of its own code are there for llama.cpp's converter
        raw = {key: value for key, value in raw.items() if not key.startswith(("rotary", "n_"))}
    tensors = load_file(FILES / f"{kind}.safetensors")
    if rounded:
        # The converter leaves norms, biases and tables of positions and types as they are.
        keep = ("bias", "position_embeddings.weight", "token_type_embeddings.weight")
        tensors = {
            name: t if t.ndim < 2 or name.endswith(keep) else t.to(rounded).float()
            for name, t in tensors.items()
        }
    config = cls.config_class(**raw)
    return cls.from_pretrained(None, config=config, state_dict=tensors).eval()


def hidden(model: Any, rows: list[list[int]]) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(input_ids=torch.tensor([row]))[0][0] for row in rows])


def ours(path: Path, rows: list[list[int]]) -> Tensor:
    batch = [SimpleNamespace(ids=row, types=[0] * len(row)) for row in rows]
    with torch.inference_mode():
        return load(path).model.bert(Packed.build(batch))  # pyright: ignore[reportArgumentType]


def ids(kind: str, texts: list[str]) -> list[list[int]]:
    return [row.ids.tolist() for row in Tokenizer.load(FILES / f"{kind}.gguf").encode(texts)]


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(5, 59, n).tolist() for n in (7, 40, 1)]


ROUNDED = {"distilbert": torch.float16, "xlm-roberta": torch.bfloat16}


@pytest.mark.parametrize("kind", CLASSES)
def test_hidden_states(kind: str, rows: list[list[int]], transformers: ModuleType) -> None:
    result = ours(FILES / f"{kind}.gguf", rows)
    model = theirs(transformers, kind, ROUNDED.get(kind))
    assert_close(result, hidden(model, rows), atol=1e-5, rtol=0)
    names = ("query", "q_lin", "qkv", "q_proj", "Wqkv")
    names = ("v_proj",) if kind == "qwen3" else names  # whose queries are normalized
    queries = [p for name, p in model.named_parameters() if any(n in name for n in names)]
    with torch.no_grad():  # the comparison can fail
        queries[0].mul_(1.5)
    assert (result - hidden(model, rows)).abs().max() > 1e-4


def test_eight_bits(rows: list[list[int]], transformers: ModuleType) -> None:
    contents = reader.read(FILES / "bert-q8.gguf")
    want = reader.read(FILES / "bert.gguf").tensors
    assert any("from Q8_0 to float32" in note for note in contents.notes)
    assert contents.tensors.keys() == want.keys()
    changed = 0
    for name, tensor in contents.tensors.items():
        step = want[name].abs().max() / 127
        assert (tensor - want[name]).abs().max() <= 0.51 * step, name
        changed += not torch.equal(tensor, want[name])
    assert changed >= 12
    assert_close(
        ours(FILES / "bert-q8.gguf", rows),
        hidden(theirs(transformers, "bert"), rows),
        atol=0.1,
        rtol=0,
    )


def test_jina_v2(rows: list[list[int]]) -> None:
    """ALiBi and gates: transformers has no class, so the reference is that of Jina's own files."""
    raw = json.loads((FILES / "jina-v2.config.json").read_text())
    stored = load_file(FILES / "jina-v2.safetensors")
    tensors = {f"bert.{name}": tensor.double() for name, tensor in stored.items()}
    entries = [SyntheticSequence(np.array(row), np.zeros(len(row), int)) for row in rows]
    want = torch.cat([jina_states(tensors, entry, raw) for entry in entries])
    result = ours(FILES / "jina-v2.gguf", rows)
    assert_close(result, want.float(), atol=1e-5, rtol=0)
    tensors["bert.encoder.layer.0.mlp.gated_layers.weight"] *= 1.5  # the comparison can fail
    moved = torch.cat([jina_states(tensors, entry, raw) for entry in entries])
    assert (result - moved).abs().max() > 1e-4


def test_gates_apart(library: Any, rows: list[list[int]], tmp_path: Path) -> None:
    """Older files of Jina's models have gates and values as two tensors."""
    source = library.GGUFReader(FILES / "jina-v2.gguf")
    writer = library.GGUFWriter(tmp_path / "old.gguf", "jina-bert-v2")
    for name, value in reader_header("jina-v2").metadata.items():
        if name.startswith("jina-bert-v2."):
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            (writer.add_bool if isinstance(value, bool) else add)(name, value)
    for tensor in source.tensors:
        if "ffn_up" in tensor.name:
            gates, values = np.split(np.array(tensor.data), 2)
            writer.add_tensor(tensor.name.replace("up", "gate"), gates.copy())
            writer.add_tensor(tensor.name, values.copy())
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert torch.equal(ours(tmp_path / "old.gguf", rows), ours(FILES / "jina-v2.gguf", rows))


def reader_header(kind: str) -> container.GgufFile:
    with (FILES / f"{kind}.gguf").open("rb") as file:
        return container.read_header(file)


def test_an_adapter_alone_is_refused(tmp_path: Path) -> None:
    data = (FILES / "bert.gguf").read_bytes()
    old = text("general.type") + struct.pack("<I", 8) + text("model")
    assert old in data
    path = tmp_path / "lora.gguf"
    path.write_bytes(data.replace(old, old[: -len(text("model"))] + text("adapter")) + bytes(32))
    with pytest.raises(CheckpointError, match="it holds 'adapter', and not a model; merge"):
        load(path)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizer(kind: str) -> None:
    from tokenizers import Tokenizer as Library

    library = Library.from_file(str(FILES / f"{kind}.tokenizer.json"))
    tokenizer = Tokenizer.load(FILES / f"{kind}.gguf")
    for text in [*TEXTS, *CHARACTERS, "[MASK] of  2,000'S |||EMAIL||| e\u0301\n\n x <mask>"]:
        assert tokenizer.encode([text])[0].ids.tolist() == library.encode(text).ids, text
    pair = tokenizer.encode([("the horse", "a pack")])[0].ids.tolist()
    assert pair == library.encode("the horse", "a pack").ids
    assert len({tuple(tokenizer.encode([text])[0].ids.tolist()) for text in TEXTS}) == len(TEXTS)


def test_a_table_of_characters() -> None:
    """SentencePiece's own, as it compiled it: "\ufb01" is "hi", and of one letter or of two."""
    tokenizer = Tokenizer.load(FILES / "jina-v3.gguf")
    written = ["hi horse", "horse a", "b", "cb hihi"]
    rows = [
        [row.ids.tolist() for row in tokenizer.encode(texts)] for texts in (CHARACTERS, written)
    ]
    assert rows[0] == rows[1]
    plain = Tokenizer.load(FILES / "xlm-roberta.gguf")  # the control: the same words without one
    rows = [[row.ids.tolist() for row in plain.encode(texts)] for texts in (CHARACTERS, written)]
    assert all(first != second for first, second in zip(*rows, strict=True))


def test_pooling_is_that_of_the_file(transformers: ModuleType) -> None:
    model = packhorse.load(FILES / "bert.gguf")
    result = torch.from_numpy(model.embed(["the horse", "a pack."]))
    rows = ids("bert", ["the horse", "a pack."])
    states = [hidden(theirs(transformers, "bert"), [row]) for row in rows]
    assert_close(result, torch.stack([state[0] for state in states]), atol=1e-5, rtol=0)
    assert (result - torch.stack([state.mean(0) for state in states])).abs().max() > 0.01
    # Without a pooling in the file, vectors are means.
    mean = torch.from_numpy(packhorse.load(FILES / "distilbert.gguf").embed(["the horse"]))
    model = theirs(transformers, "distilbert", torch.float16)
    assert_close(mean[0], hidden(model, rows[:1]).mean(0), atol=1e-5, rtol=0)


def test_inspect_and_convert(tmp_path: Path, transformers: ModuleType) -> None:
    inspection = inspect(FILES / "bert-q8.gguf")
    assert inspection.format == "gguf" and inspection.runs and inspection.family == "bert"
    assert inspection.config["layers"] == 2 and inspection.fingerprints
    write(tmp_path / "out", load(FILES / "bert.gguf"))
    model = transformers.AutoModel.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert rows == ids("bert", TEXTS)
    assert_close(hidden(model.eval(), rows), ours(FILES / "bert.gguf", rows), atol=1e-5, rtol=0)


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("gguf", reason="the package gguf is not installed")


QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_as_its_own_package_does(kind: str, library: Any, tmp_path: Path) -> None:
    dtype = library.GGMLQuantizationType[kind]
    block, size = library.GGML_QUANT_SIZES[dtype]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (6, 2 * size), np.uint8)
    raw.reshape(12, size)[:, 1::2] &= 0x3B  # scales that are finite wherever a block has them
    path = write_gguf(library, tmp_path, {"token_embd.weight": (raw, dtype)})
    result = reader.read(path).tensors["token_embd.weight"]
    want = library.dequantize(raw, dtype)
    assert result.shape == (6, 2 * block) and np.isfinite(want).all() and want.std() > 0
    assert np.array_equal(result.numpy(), want)


def write_gguf(library: Any, folder: Path, tensors: dict[str, Any], **more: Any) -> Path:
    path = folder / "model.gguf"
    writer = library.GGUFWriter(path, "bert")
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_context_length(40)
    writer.add_layer_norm_eps(1e-12)
    for name, (array, dtype) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_package_reads_the_same(library: Any) -> None:
    for path in sorted(FILES.glob("*.gguf")):
        with path.open("rb") as file:
            header = container.read_header(file)
        theirs = library.GGUFReader(path)
        places = {t.name: (int(t.data_offset), int(t.tensor_type)) for t in theirs.tensors}
        assert {t.name: (t.begin, t.kind) for t in header.tensors.values()} == places
        assert header.metadata.keys() == {k for k in theirs.fields if not k.startswith("GGUF.")}


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    path = tmp_path / "model.gguf"
    path.write_bytes(changed("token_embd.weight", kind=12))
    with pytest.raises(MissingExtra, match=r"gguf is not installed; .*packhorse\[gguf\]"):
        reader.read(path)


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def changed(name: str, kind: int) -> bytes:
    """The file of BERT with another type of a tensor's numbers."""
    data = (FILES / "bert.gguf").read_bytes()
    at = data.index(text(name)) + len(text(name))
    rank = struct.unpack_from("<I", data, at)[0]
    at += 4 + 8 * rank
    return data[:at] + struct.pack("<I", kind) + data[at + 4 :]


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data.replace(old, new, 1) + bytes(32)  # a longer header moves tensors


BASE = text("nomic-bert.rope.freq_base") + struct.pack("<If", 6, 1000)
HEADER = b"GGUF" + struct.pack("<I", 3)
BAD: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated header": (lambda data: data[:900], "bytes are missing: it is truncated"),
    "truncated tensors": (lambda data: data[:-50], "bytes are missing: the file is truncated"),
    "version 1": (replaced(HEADER, b"GGUF" + struct.pack("<I", 1)), "GGUF's version 1"),
    "big-endian": (replaced(HEADER, b"GGUF" + struct.pack(">I", 3)), "or is big-endian"),
    "a billion keys": (
        lambda data: data[:16] + struct.pack("<Q", 10**9) + data[24:],
        "1000000000 keys, more than 10000",
    ),
    "a text of a terabyte": (
        lambda data: data[:24] + struct.pack("<Q", 1 << 40) + data[32:],
        "byte 32: 1099511627776 bytes are missing",
    ),
    "a language model": (
        replaced(
            text("general.architecture") + struct.pack("<I", 8) + text("bert"),
            text("general.architecture") + struct.pack("<I", 8) + text("qwen"),
        ),
        "its architecture 'qwen' is not read; those that are: bert",
    ),
    "no number of heads": (
        replaced(b"bert.attention.head_count", b"bert.attention.xxxx_count"),
        "the key bert.attention.head_count is missing",
    ),
    "a tensor of another name": (
        replaced(b"blk.1.ffn_down.weight", b"blk.1.ffn_dxwn.weight"),
        r"1 missing \(blk.1.ffn_down.weight \[32, 64\]\).*1 unknown \(blk.1.ffn_dxwn.weight",
    ),
    "a list for a name": (
        replaced(
            text("general.architecture") + struct.pack("<I", 8) + text("bert"),
            text("general.architecture") + struct.pack("<IIQ", 9, 8, 1) + text("bert"),
        ),
        r"its architecture \['bert'\] is not read",
    ),
    "a list of booleans for one": (
        replaced(
            text("bert.attention.causal") + struct.pack("<I?", 7, False),
            text("bert.attention.causal") + struct.pack("<IIQ??", 9, 7, 2, False, False),
        ),
        "its attention is causal",
    ),
    "rotary positions of base 0": (
        lambda _: (FILES / "nomic.gguf").read_bytes().replace(BASE, BASE[:-4] + bytes(4)),
        "rope_theta 0.0 of the rotary positions is not a number above 0",
    ),
    "a list for a pooling": (
        replaced(
            text("bert.pooling_type") + struct.pack("<I", 4),
            text("bert.pooling_type") + struct.pack("<IIQ", 9, 4, 1),
        ),
        r"its pooling is of type \[2\]",
    ),
    "a tensor without axes": (
        replaced(
            text("token_types.weight") + struct.pack("<IQQ", 2, 32, 2),
            text("token_types.weight") + struct.pack("<I", 0),
        ),
        "'token_types.weight': byte [0-9]+: 0 axes",
    ),
    "a tensor without numbers": (
        replaced(
            text("token_types.weight") + struct.pack("<IQQ", 2, 32, 2),
            text("token_types.weight") + struct.pack("<IQQQ", 3, 0, 1 << 39, 1 << 39),
        ),
        "has sizes that are no counts",
    ),
    "a tensor twice": (
        replaced(b"blk.1.ffn_down.weight", b"blk.0.ffn_down.weight"),
        "two tensors have one name",
    ),
}


ODD = ["x", -1, 3.5, math.nan, np.array([1, 2]), np.array([]), ["a"], [], 1 << 40, 0]


@pytest.mark.parametrize("kind", ["bert", "modern-bert", "qwen3", "jina-v3"])
def test_a_key_of_another_type_is_refused_or_read(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = FILES / f"{kind}.gguf"
    header = reader_header(kind)
    ours = [key for key in header.metadata if not key.startswith(("general.", "tokenizer."))]
    words = [key for key in header.metadata if key.startswith("tokenizer.")]
    cases = [(load, key) for key in ("general.architecture", "general.type", *ours)]
    refused = 0
    for read, key in [*cases, *((Tokenizer.load, key) for key in words)]:
        for value in ODD:
            changed = replace(header, metadata=header.metadata | {key: value})
            for module in (reader, token_files):
                monkeypatch.setattr(module, "read_header", lambda _, changed=changed: changed)
            try:
                read(path)
            except CheckpointError:
                refused += 1
    assert refused > 100


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, tmp_path: Path) -> None:
    change, message = BAD[case]
    data = (FILES / "bert.gguf").read_bytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(change(data))
    assert path.read_bytes() != data
    with pytest.raises(CheckpointError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600


KEYS = 16  # the byte at which their number stands


def with_keys(data: bytes, *keys: bytes) -> bytes:
    (count,) = struct.unpack_from("<Q", data, KEYS)
    return data[:KEYS] + struct.pack("<Q", count + len(keys)) + b"".join(keys) + data[KEYS + 8 :]


def list_of(value: str, count: int) -> bytes:
    return text(f"x.{count}") + struct.pack("<IIQ", 9, 8, count) + text(value) * count


TOO_MUCH: dict[str, tuple[bytes, ...]] = {
    "a long list": (list_of("ab", 5_000_000),),
    "many lists": tuple(list_of("a\N{GRINNING FACE}", 90_000 + number) for number in range(50)),
    "one long text": (text("x") + struct.pack("<I", 8) + text("a\N{GRINNING FACE}" * 8_000_000),),
}
MEASURED = """
import resource, sys, time
from packhorse import checkpoint
def most(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
good, *bad = sys.argv[1:]
checkpoint.load(good)
before = most()
for path in bad:
    start = time.process_time()
    try:
        checkpoint.load(path)
    except checkpoint.CheckpointError as error:
        print((most() - before) / 1024, time.process_time() - start, error)
"""


def test_texts_take_little_memory_and_time(tmp_path: Path) -> None:
    good = FILES / "bert.gguf"
    paths = [tmp_path / f"{number}.gguf" for number in range(len(TOO_MUCH))]
    for path, keys in zip(paths, TOO_MUCH.values(), strict=True):
        path.write_bytes(with_keys(good.read_bytes(), *keys))
    command = [sys.executable, "-c", MEASURED, str(good), *map(str, paths)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    smallest = min(path.stat().st_size for path in paths)
    for path, line in zip(paths, ran.stdout.splitlines(), strict=True):
        memory, seconds, message = line.split(maxsplit=2)
        assert str(path) in message
        assert "5000000 texts of" in message or "more than 600000 texts, or" in message
        assert float(memory) < smallest / 2**20 + 64
        assert float(seconds) < 20  # of the processor; the first took 106 without the limits


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    data = (FILES / "bert.gguf").read_bytes()
    path = tmp_path / "model.gguf"
    for size in [*range(0, 4000, 97), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            reader.read(path)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    old = text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("bert")
    data = (FILES / "bert.gguf").read_bytes()
    path.write_bytes(data.replace(old, old.replace(b"bert", b"gpt2")))
    load(path)  # the weights are read all the same
    message = r"of the kind 'gpt2' with the rules 'default', .*--vocab tokenizer.json"
    with pytest.raises(CheckpointError, match=message):
        packhorse.load(path)
