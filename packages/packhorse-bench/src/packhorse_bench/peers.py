"""Other libraries that encode texts (peers), each behind one function with the same interface.

Every peer runs the way its own documentation recommends, because a peer that is used badly proves
nothing: sentence-transformers through `encode`, ONNX Runtime on a graph that its own optimizer has
fused, OpenVINO on the model as it converts it from torch, transformers compiled with CUDA graphs if
there is a GPU. All get inference mode, as many threads as we have, the requested dtype, and results
that stay on the device until the end. Texts are tokenized inside the clock by transformers' fast
tokenizer; with random token ids instead of texts, the models alone are compared. A batch is padded
to its longest sequence, in the order of arrival or sorted by length; vectors are the normalized
mean. A peer that does not support a case raises `Unserved`; the caller makes that, and any other
error of a peer, a row of the table.

Shapes: n sequences of a batch, L their padded length, E hidden width.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packhorse import device as devices
from packhorse import executable
from packhorse.processor import level
from packhorse.reports import docstrings
from packhorse.reports.padded import (
    PeerEngine,
    PeerSetting,
    TextsOrTokens,
    mean_pool,
    padded,
    padding_engine,
    pooled,
    silence_libraries,
    transformers,
    transformers_model,
    transformers_states,
)

SHAPES = 8  # widths that a compiled peer is compiled for, as many as torch.compile keeps
CPU_ONLY = "measured on the CPU only"
CALIBRATION_TEXTS = 300  # NNCF's own default
CALIBRATION_STRIDE = 7  # between docstrings, so that they are of many modules
STATES = "last_hidden_state"  # of an exported model, as optimum calls it


class Unserved(Exception):
    """A peer does not support this case; the message is the reason shown in its row."""


def failure_reason(error: Exception) -> str:
    """The first line of an error, for the row of a peer that could not be measured."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; pip install 'packhorse[peers]'"
    first_line = (str(error).strip().splitlines() or [""])[0][:200]
    return first_line if isinstance(error, Unserved) else f"{type(error).__name__}: {first_line}"


def transformers_compiled(setting: PeerSetting, dtype: str) -> PeerEngine:
    """transformers under torch.compile: at one fixed shape, or sorted at a few shapes."""
    states = transformers_states(setting, dtype)
    graphs = "reduce-overhead" if setting.device.type == "cuda" else None
    if setting.device.type == "cpu" and executable.cpp_compiler() is None:
        raise Unserved("torch.compile needs a C++ compiler on a CPU")
    compiled = torch.compile(states, dynamic=False, mode=graphs)
    vectors = pooled(compiled, setting.device)
    step = -(-setting.longest // SHAPES)  # rounded up

    def run(work: TextsOrTokens, order: str) -> np.ndarray:
        def width(longest: int) -> int:
            narrow = min(-(-longest // step) * step, setting.longest)
            return narrow if order == "sorted" else setting.longest

        return padded(vectors, setting.ids(work), order, setting.batch_size, width, full=True)

    return PeerEngine("transformers compiled", dtype, ("fixed", "sorted"), run)


def sentence_transformers(setting: PeerSetting, dtype: str) -> PeerEngine:
    """sentence-transformers' `encode`, which sorts by length itself, so there is no other order."""
    from sentence_transformers import SentenceTransformer

    with silence_libraries():
        model = SentenceTransformer(
            str(setting.folder),
            device=str(setting.device),
            model_kwargs={"dtype": devices.parse_dtype(dtype)},
        )
    model.max_seq_length = setting.longest

    def run(work: TextsOrTokens, order: str) -> np.ndarray:
        texts = [item for item in work if isinstance(item, str)]
        if len(texts) < len(work):
            raise Unserved("encode takes texts, not token ids")
        vectors = model.encode(
            texts,
            batch_size=setting.batch_size,
            normalize_embeddings=True,
            show_progress_bar=False,
            convert_to_tensor=True,
        )
        return vectors.float().cpu().numpy()

    return PeerEngine("sentence-transformers", dtype, ("sorted",), run)


def onnxruntime(setting: PeerSetting, dtype: str) -> PeerEngine:
    """ONNX Runtime on a graph that its own optimizer fused; int8 is dynamic, scaled per channel."""
    import onnxruntime as library  # pyright: ignore[reportMissingImports]

    _only(setting, dtype, "fp32", "int8")
    model = fused_onnx(setting)
    if dtype == "int8":
        model = _quantized(model)
    options = library.SessionOptions()
    options.intra_op_num_threads = setting.threads
    options.log_severity_level = 3
    session = library.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])

    def vectors(ids: np.ndarray, mask: np.ndarray) -> Tensor:
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        (hidden,) = session.run(None, feed)
        return mean_pool(torch.from_numpy(hidden), torch.from_numpy(mask))

    return padding_engine("onnxruntime", dtype, setting, vectors)


def openvino(setting: PeerSetting, dtype: str) -> PeerEngine:
    """OpenVINO on the model as it converts it from torch; in int8 what NNCF quantizes."""
    import openvino as library  # pyright: ignore[reportMissingImports]

    _only(setting, dtype, "fp32", "bf16", "int8")
    # What is not int8 in an int8 model is faster in bf16 where the processor multiplies that.
    beside_int8 = "bf16" if devices.fast_bf16(setting.device) else "f32"
    hint = {"fp32": "f32", "bf16": "bf16", "int8": beside_int8}[dtype]
    settings = {
        "INFERENCE_PRECISION_HINT": hint,
        "INFERENCE_NUM_THREADS": setting.threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    with silence_libraries():
        model = library.convert_model(_three_inputs(setting), example_input=_example())
        if dtype == "int8":
            model = _with_nncf(model, setting)
        compiled = library.compile_model(model, "CPU", settings)

    def vectors(ids: np.ndarray, mask: np.ndarray) -> Tensor:
        hidden = compiled([ids, mask, np.zeros_like(ids)])[0]
        return mean_pool(torch.from_numpy(hidden), torch.from_numpy(mask))

    return padding_engine("openvino", dtype, setting, vectors)


def _with_nncf(model: Any, setting: PeerSetting) -> Any:
    """The model in int8 as NNCF's guide makes transformers: ranges of 300 texts, SmoothQuant."""
    if find_spec("nncf") is None:
        raise Unserved("OpenVINO makes int8 with nncf; pip install nncf")
    import nncf  # pyright: ignore[reportMissingImports]

    texts = [docstring.text for docstring in docstrings.read()][::CALIBRATION_STRIDE]
    samples: list[tuple[np.ndarray, ...]] = []
    for row in setting.ids(texts[:CALIBRATION_TEXTS]):
        ids = row[None].astype(np.int64)
        samples.append((ids, np.ones_like(ids), np.zeros_like(ids)))
    return nncf.quantize(
        model,
        nncf.Dataset(samples),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(samples),
    )


def ctranslate2(setting: PeerSetting, dtype: str) -> PeerEngine:
    """CTranslate2, which drops padding in its linear layers by itself."""
    if (limit := level()) is not None:  # its own switch, which it reads when it is imported
        os.environ["CT2_FORCE_CPU_ISA"] = "AVX2" if limit == "avx2" else "AVX512"
    import ctranslate2 as library  # pyright: ignore[reportMissingImports]
    from ctranslate2.converters import TransformersConverter  # pyright: ignore[reportMissingImports]

    types = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
    _only(setting, dtype, *types)
    if dtype != "int8" and types[dtype] not in library.get_supported_compute_types("cpu"):
        raise Unserved(f"CTranslate2 has no {dtype} on this processor")
    folder = setting.scratch / "ctranslate2"
    if not folder.exists():
        with silence_libraries():
            TransformersConverter(str(setting.folder)).convert(str(folder))
    encoder = library.Encoder(
        str(folder), compute_type=types[dtype], intra_threads=setting.threads, inter_threads=1
    )

    def vectors(ids: np.ndarray, mask: np.ndarray) -> Tensor:
        rows = [row[:length].tolist() for row, length in zip(ids, mask.sum(1), strict=True)]
        hidden = np.array(encoder.forward_batch(rows).last_hidden_state)
        return mean_pool(torch.from_numpy(hidden), torch.from_numpy(mask))

    return padding_engine("ctranslate2", dtype, setting, vectors)


PEERS = {
    "transformers": transformers,
    "sentence-transformers": sentence_transformers,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "ctranslate2": ctranslate2,
}
# Libraries that read no switch for the instructions they use: `--cpu` does not limit them.
UNLIMITED = ("onnxruntime", "openvino")
INT8 = ("onnxruntime", "openvino", "ctranslate2")


def _only(setting: PeerSetting, dtype: str, *served: str) -> None:
    if setting.device.type != "cpu":
        raise Unserved(CPU_ONLY)
    if dtype not in served:
        raise Unserved(f"computes in {' or '.join(served)}, not in {dtype}")


def _three_inputs(setting: PeerSetting, **options: Any) -> torch.nn.Module:
    """A BERT from ids, mask and types [n, L] to states [n, L, E], to be exported."""
    model = transformers_model(setting, "fp32", **options)

    class Exported(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor, attention_mask: Tensor, types: Tensor) -> Tensor:
            inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
            return self.model(**inputs, token_type_ids=types).last_hidden_state

    return Exported().eval()


def _example() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.ones(3, 17, dtype=torch.long)
    return ids, ids.clone(), torch.zeros_like(ids)


def fused_onnx(setting: PeerSetting) -> Path:
    """The model as ONNX with ONNX Runtime's Attention, SkipLayerNormalization and BiasGelu nodes.

    Its optimizer knows the graph that torch's older exporter makes of eager attention; in the newer
    exporter's graph it finds no attention at all.
    """
    from onnxruntime.transformers import optimizer  # pyright: ignore[reportMissingImports]

    path = setting.scratch / "model.onnx"
    if path.exists():
        return path
    plain = setting.scratch / "plain.onnx"
    names = ["input_ids", "attention_mask", "token_type_ids"]
    model = _three_inputs(setting, attn_implementation="eager")
    with silence_libraries(), torch.no_grad():
        torch.onnx.export(
            model,
            _example(),
            str(plain),
            input_names=names,
            output_names=[STATES],
            dynamic_axes={name: {0: "batch", 1: "length"} for name in (*names, STATES)},
            dynamo=False,
            opset_version=17,
        )
        config: Any = model.get_submodule("model").config
        fused = optimizer.optimize_model(
            str(plain),
            model_type="bert",
            num_heads=config.num_attention_heads,
            hidden_size=config.hidden_size,
            opt_level=0,  # no processor-specific rewriting before its own; sessions do that later
        )
    if not fused.get_fused_operator_statistics()["Attention"]:
        raise Unserved("ONNX Runtime's optimizer fused no attention of this model")
    fused.save_model_to_file(str(path))
    return path


def _quantized(model: Path) -> Path:
    from onnx import TensorProto  # pyright: ignore[reportMissingImports]
    from onnxruntime.quantization import QuantType, quantize_dynamic  # pyright: ignore[reportMissingImports]

    path = model.with_name("int8.onnx")
    unknown = {"DefaultTensorType": TensorProto.FLOAT}  # of what the fused nodes put out
    with silence_libraries():
        quantize_dynamic(
            model, path, weight_type=QuantType.QInt8, per_channel=True, extra_options=unknown
        )
    return path
