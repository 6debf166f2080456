"""A model of sentence-transformers keeps its class, and `encode` or `predict` computes it packed.

    model = packhorse.accelerate(SentenceTransformer("all-MiniLM-L6-v2"))

All that the library does around the model stays its own: prompts, tokens, pools of processes,
quantization, training. Only `_inference`, the method behind `encode` and `predict` that runs the
modules batch by batch, is replaced on this one object. It takes the tokens that the model's own
`preprocess` makes, lays them end to end, and runs them in an `Encoder` that holds a copy of the
weights. Where a call, or a change of the model, asks for something that the encoder does not
compute (hooks, adapters, features of the user's own), the library's method runs as before.

Weights may change between two calls. Each call compares the tensors with those that were copied, by
identity and by torch's version counter, and a model that was in training mode is always copied
again; only writes through `.data` to a model in eval mode go unnoticed. Every copy is checked: a
few of the inputs at hand run both ways, and if they differ, the library's way is taken.
"""

# sentence-transformers types its modules as nn.Module, whose attributes are unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from packhorse.errors import InputError, PackhorseError
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.loading import load
from packhorse.runtime.sentences import progress_bar
from packhorse.tokens.tokenizer import Encoding

if TYPE_CHECKING:
    from sentence_transformers.base.model import BaseModel

ModelT = TypeVar("ModelT", bound="BaseModel")

OVERRIDE = "_inference"  # since sentence-transformers 6.2
# By class: the head of the encoder that does the same.
HEADS = {"SentenceTransformer": "embed", "CrossEncoder": "classify", "SparseEncoder": "sparse"}
# What `preprocess` may return. Other features would not reach the encoder.
FEATURES = {"input_ids", "attention_mask", "token_type_ids", "prompt_length", "modality"}
PREPROCESS_BATCH = 256  # inputs that are tokenized, and padded, together
COMPARED_INPUTS = 4  # inputs that run both ways after the weights were copied
OUTPUT_VALUES = ("sentence_embedding", "token_embeddings", None)
# The arguments of `_inference` that are handled here; all others go to `preprocess`.
SHARED_OPTIONS = {"prompt", "batch_size", "show_progress_bar", "device"}
DENSE_OPTIONS = {"output_value", "save_to_cpu", "normalize_embeddings", "truncate_dim"}
SPARSE_OPTIONS = {"convert_to_sparse_tensor", "save_to_cpu", "max_active_dims"}
CALL_OPTIONS = {
    "SentenceTransformer": SHARED_OPTIONS | DENSE_OPTIONS,
    "CrossEncoder": SHARED_OPTIONS | {"activation_fn", "apply_softmax"},
    "SparseEncoder": SHARED_OPTIONS | SPARSE_OPTIONS,
}
# How far numbers may lie apart, as a part of the largest of them.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class AccelerationWarning(UserWarning):
    """An accelerated model runs as its library runs it."""


class NotPackedError(Exception):
    """This call or this model cannot be computed packed; the message says why."""


def accelerate(model: ModelT) -> ModelT:
    """Make a model of sentence-transformers compute packed in `encode` or `predict`; return it.

    The model stays what it is: its class, its attributes, its training. Results are those of
    before, within 1e-5 in float32. Takes a SentenceTransformer, a CrossEncoder or a SparseEncoder
    that `packhorse.load` could open from its folder, and raises for any other; the weights are
    held twice. `del model._inference` undoes it. Needs sentence-transformers 6.2.
    """
    kind = _kind(model)
    if not hasattr(type(model), OVERRIDE):
        raise InputError("accelerate needs sentence-transformers 6.2 or later; upgrade it")
    if isinstance(vars(model).get(OVERRIDE), PackedInference):
        return model
    packed = PackedInference(model, kind)
    try:
        _check_modules(model)
        packed.open()
    except (NotPackedError, PackhorseError) as error:
        raise InputError(f"this {kind} cannot be accelerated: {error}") from error
    setattr(model, OVERRIDE, packed)
    return model


def _kind(model: Any) -> str:
    """Return the name of the library's class that the model is of."""
    for ancestor in type(model).__mro__:
        if ancestor.__module__.startswith("sentence_transformers.") and ancestor.__name__ in HEADS:
            return ancestor.__name__
    raise InputError(
        f"accelerate takes a {', '.join(HEADS)} of sentence-transformers, not a "
        f"{type(model).__name__}"
    )


@dataclass(frozen=True, eq=False)
class _ModelState:
    """Identifies a model's weights and settings, so that a change of them is noticed."""

    parts: tuple[weakref.ref[Any], ...]  # modules, parameters and buffers
    versions: tuple[tuple[int, int], ...]  # of each tensor, with the place of its data
    settings: tuple[str, ...]  # of the modules after the first

    def matches(self, model: BaseModel) -> bool:
        """Whether the model is unchanged.

        Parts are compared by weak references and not by `id`, which a new tensor may have in common
        with one that was freed.
        """
        now = _model_state(model)
        return (
            len(self.parts) == len(now.parts)
            and all(a() is b() for a, b in zip(self.parts, now.parts, strict=True))
            and self.versions == now.versions
            and self.settings == now.settings
        )


class PackedInference:
    """In place of a model's `_inference`: the same arguments and results, computed packed.

    It is copied by `copy.deepcopy`, and pickled, with its model; the copy opens its own encoder.
    """

    def __init__(self, model: BaseModel, kind: str) -> None:
        self.model = model
        self.kind = kind
        self._encoder: Encoder | None = None
        self._model_state: _ModelState | None = None  # of the model when it was copied, or refused
        self._checked = False  # whether results were compared with the library's

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of."""
        return {"model": self.model, "kind": self.kind}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a copy, without an encoder."""
        self.model = state["model"]
        self.kind = state["kind"]
        self._encoder = None
        self._model_state = None
        self._checked = False

    def __call__(self, inputs: list[Any], **options: Any) -> Any:
        """Compute the inputs of `encode` or `predict`."""
        try:
            return self._packed(inputs, options)
        except NotPackedError:
            return self._original(inputs, options)

    def open(self) -> Encoder:
        """Copy the model into an encoder; raise if it cannot be computed packed."""
        model = self.model
        self._encoder = None
        self._checked = False
        self._model_state = _model_state(model)
        if model.dtype not in TOLERANCE:
            raise NotPackedError(f"its weights are {model.dtype}")
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder, create_model_card=False)
            encoder = load(folder, device=model.device, dtype=model.dtype)
        if HEADS[self.kind] not in encoder.heads:
            raise NotPackedError(f"it has no {HEADS[self.kind]!r} head")
        self._encoder = encoder
        return encoder

    def _original(self, inputs: list[Any], options: dict[str, Any]) -> Any:
        return getattr(type(self.model), OVERRIDE)(self.model, inputs, **options)

    def _packed(self, inputs: list[Any], options: dict[str, Any]) -> Any:
        model = self.model
        was_training = model.training
        _check_call(model, options)
        if not inputs:
            raise NotPackedError("there is nothing to compute")
        model._resolve_inference_device(options.get("device"))  # moves the model there
        model.eval()
        _check_modules(model)
        if was_training or self._model_state is None or not self._model_state.matches(model):
            self._reopen()
        if self._encoder is None:
            raise NotPackedError("this state of the model was refused before")
        if not self._checked:
            self._compare(
                self._encoder, inputs[:COMPARED_INPUTS], options | {"show_progress_bar": False}
            )
        return self._compute(self._encoder, inputs, options)

    def _reopen(self) -> None:
        """Copy the model again after it was changed; warn if it cannot be packed any more."""
        try:
            self.open()
        except (NotPackedError, PackhorseError) as error:
            self._refuse(str(error))

    def _compare(self, encoder: Encoder, inputs: list[Any], options: dict[str, Any]) -> None:
        """Compare a few results with the library's own; take its way if they differ."""
        if options.get("output_value", "") is None:
            options = options | {"output_value": "sentence_embedding"}
        ours = _flat(self._compute(encoder, inputs, options))
        theirs = _flat(self._original(inputs, options))
        self._checked = True
        if ours.shape != theirs.shape:
            self._refuse(f"its results have the shape {[*ours.shape]}, not {[*theirs.shape]}")
        largest = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
        difference = float((ours - theirs).abs().max()) if theirs.numel() else 0.0
        if not difference <= TOLERANCE[encoder.dtype] * largest:
            self._refuse(f"packed, its results differ by {difference:.1e}")

    def _refuse(self, reason: str) -> NoReturn:
        """Use the library's own method until the model changes again, and warn about it."""
        self._encoder = None
        message = f"this {self.kind} is not computed packed any more: {reason}"
        # The level is that of the call of `encode` or `predict` in the user's code.
        warnings.warn(message, AccelerationWarning, stacklevel=6)
        raise NotPackedError(reason)

    def _compute(self, encoder: Encoder, inputs: list[Any], options: dict[str, Any]) -> Any:
        """Compute the result that `_inference` of the model's class has."""
        if self.kind == "CrossEncoder":
            return self._scores(encoder, inputs, options)
        if self.kind == "SparseEncoder":
            return self._sparse_vectors(encoder, inputs, options)
        return self._vectors(encoder, inputs, options)

    def _vectors(self, encoder: Encoder, inputs: list[Any], options: dict[str, Any]) -> Any:
        if options["output_value"] is None:
            # All features are the library's, but the vectors are those of the other calls.
            vectors_alone = {"output_value": "sentence_embedding", "normalize_embeddings": False}
            vectors = self._vectors(encoder, inputs, options | vectors_alone)
            rows = self._original(inputs, options)
            pairs = zip(rows, vectors.to(self.model.device), strict=True)
            return [{**row, "sentence_embedding": vector} for row, vector in pairs]
        tokens = options["output_value"] == "token_embeddings"
        rows = self._run(encoder, inputs, options, "hidden" if tokens else "embed")
        width = options["truncate_dim"]
        results = [self._tensor(row) for row in rows]
        if tokens:
            return results
        vectors = torch.stack(results)[:, :width]
        if options["normalize_embeddings"]:
            vectors = nn.functional.normalize(vectors, p=2, dim=1)
        return vectors.cpu() if options["save_to_cpu"] else vectors

    def _scores(self, encoder: Encoder, inputs: list[Any], options: dict[str, Any]) -> Any:
        rows = self._run(encoder, inputs, options, "classify")
        scores = torch.from_numpy(np.stack(rows)).to(self.model.device)  # [n, C], float32
        if (activation := options["activation_fn"]) is not None:
            scores = activation(scores)
        if self.model.num_labels == 1 and scores.ndim > 1:
            scores = scores.squeeze(-1)
        if options["apply_softmax"] and scores.ndim > 1:
            scores = nn.functional.softmax(scores, dim=1)
        return scores

    def _sparse_vectors(self, encoder: Encoder, inputs: list[Any], options: dict[str, Any]) -> Any:
        settings = encoder.sparse_settings
        if settings is None:
            raise NotPackedError("it has no sparse vectors")
        rows = self._run(encoder, inputs, options, "sparse")
        if (limit := options["max_active_dims"]) is not None:
            rows = [row[np.argsort(-row["weight"], kind="stable")[:limit]] for row in rows]
            rows = [np.sort(row, order="index") for row in rows]
        numbers = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        entries = np.concatenate(rows)
        vectors = torch.sparse_coo_tensor(
            torch.from_numpy(np.stack([numbers, entries["index"]])),
            torch.from_numpy(np.ascontiguousarray(entries["weight"])).to(self.model.dtype),
            (len(rows), settings.width),
            is_coalesced=True,
            check_invariants=False,
        ).to("cpu" if options["save_to_cpu"] else self.model.device)
        return vectors if options["convert_to_sparse_tensor"] else vectors.to_dense()

    def _tensor(self, row: np.ndarray) -> Tensor:
        return torch.from_numpy(row).to(self.model.device, self.model.dtype)

    def _run(
        self, encoder: Encoder, inputs: list[Any], options: dict[str, Any], head: str
    ) -> list[np.ndarray]:
        """Return the outputs of a head for each input, in their order."""
        sequences = self._tokens(encoder, inputs, options)
        with progress_bar(bool(options["show_progress_bar"])) as progress:
            return [row for (row,) in encoder.run(sequences, head, progress=progress)]

    def _tokens(
        self, encoder: Encoder, inputs: list[Any], options: dict[str, Any]
    ) -> list[Encoding]:
        """Return what the model's own `preprocess` makes of the inputs, without the padding."""
        excludes_prompt = encoder.embedder is not None and not encoder.embedder.include_prompt
        known = CALL_OPTIONS[self.kind]
        passed_on = {name: value for name, value in options.items() if name not in known}
        order = np.argsort([-self.model._input_length(entry) for entry in inputs], kind="stable")
        sequences: dict[int, Encoding] = {}
        for begin in range(0, len(order), PREPROCESS_BATCH):
            chosen = order[begin : begin + PREPROCESS_BATCH].tolist()
            features = self.model.preprocess(
                [inputs[i] for i in chosen], prompt=options["prompt"], **passed_on
            )
            prompt_length = int(features.get("prompt_length", 0)) if excludes_prompt else 0
            sequences |= zip(chosen, _encodings(features, prompt_length), strict=True)
        return [sequences[i] for i in range(len(inputs))]


def _encodings(features: dict[str, Any], prompt_length: int) -> list[Encoding]:
    """Return the rows of a padded batch as sequences."""
    if unknown := set(features) - FEATURES:
        raise NotPackedError(f"its inputs have {', '.join(sorted(unknown))}")
    if features.get("modality", "text") != "text":
        raise NotPackedError(f"its inputs are {features['modality']}")
    ids = features["input_ids"].numpy().astype(np.int32)  # [n, L]
    mask = features["attention_mask"].numpy().astype(bool)
    types = features.get("token_type_ids")
    kinds = np.zeros(ids.shape, np.uint8) if types is None else types.numpy().astype(np.uint8)
    lengths = mask.sum(1)
    # Only where all padding is on the right do tokens keep their positions without it.
    if not (mask == (np.arange(mask.shape[1]) < lengths[:, None])).all() or not lengths.all():
        raise NotPackedError("its padding is not at the end")
    sequences: list[Encoding] = []
    for row, length in enumerate(lengths.tolist()):
        sequences.append(
            Encoding(
                ids=ids[row, :length],
                types=kinds[row, :length],
                offsets=np.zeros((length, 2), np.int32),
                special=np.zeros(length, bool),
                spans=(slice(0, length),),
                prompt_length=prompt_length,
            )
        )
    return sequences


def _check_call(model: BaseModel, options: dict[str, Any]) -> None:
    """Raise for arguments that only the library's own method understands."""
    if "output_value" in options and options["output_value"] not in OUTPUT_VALUES:
        raise NotPackedError(f"output_value is {options['output_value']!r}")
    if torch.is_autocast_enabled(model.device.type):
        raise NotPackedError("autocast is on")
    unknown = set(options) - CALL_OPTIONS[_kind(model)] - {"task", "processing_kwargs"}
    if unknown:
        raise NotPackedError(f"it has further arguments: {', '.join(sorted(unknown))}")


def _check_modules(model: BaseModel) -> None:
    """Raise if running the modules does more than their weights say: hooks, adapters …"""
    if model._compiled_call_impl is not None:
        raise NotPackedError("it is compiled")
    for module in model.modules():
        attributes = vars(module)
        if (
            attributes["_forward_hooks"]
            or attributes["_forward_pre_hooks"]
            or "_hf_hook" in attributes  # of the package accelerate
        ):
            raise NotPackedError(f"{type(module).__name__} has hooks")
        if "forward" in attributes:
            raise NotPackedError(f"the forward of {type(module).__name__} was replaced")
        if attributes.get("_hf_peft_config_loaded"):
            raise NotPackedError("it has adapters")


def _model_state(model: BaseModel) -> _ModelState:
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_inference() for tensor in tensors):
        raise NotPackedError("its weights were made in inference mode, where changes are not seen")
    settings = tuple(repr(cast("Any", module).get_config_dict()) for module in [*model][1:])
    return _ModelState(
        tuple(weakref.ref(part) for part in [*model.modules(), *tensors]),
        tuple((tensor._version, tensor.data_ptr()) for tensor in tensors),
        settings,
    )


def _flat(results: Any) -> Tensor:
    """Return all numbers of a result in one row."""
    if isinstance(results, list):
        return torch.cat([_flat(result) for result in results])
    dense = results.to_dense() if results.is_sparse else results
    return dense.detach().float().cpu().flatten()
