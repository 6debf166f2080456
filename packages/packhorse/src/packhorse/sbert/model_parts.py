"""`model[0]`, `model[1]` …: descriptions of a model's modules, which cannot run.

Code written for sentence-transformers asks these modules for a length, a pooling mode or the width
of a vector. They hold no weights: the encoder has those, fused and prepared for its device.

`model` is a `PackedModel` everywhere here; it is typed Any because its module imports this one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

TASKS = {
    "SentenceTransformer": "feature-extraction",
    "CrossEncoder": "sequence-classification",
    "SparseEncoder": "fill-mask",
}


class ModelPart:
    """One module: the name of its class, its settings as attributes, and the model it is in."""

    def __init__(self, model: Any, kind: str, settings: dict[str, Any]) -> None:
        self._model = model
        self.kind = kind
        self._settings = settings

    def __repr__(self) -> str:
        return f"{self.kind}({self._settings})"

    def __getattr__(self, name: str) -> Any:
        """Return a setting of the module."""
        settings: dict[str, Any] = self.__dict__.get("_settings", {})
        if name in settings:
            return settings[name]
        raise AttributeError(
            f"{self.__dict__.get('kind')} has no {name} here; packhorse.accelerate leaves "
            "sentence-transformers' own modules as they are"
        )

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings of the module."""
        return dict(self._settings)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._model.tokenizer

    @property
    def max_seq_length(self) -> int:
        """How many tokens a text may have; assign to change it."""
        return self._model.max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self._model.max_seq_length = value

    @property
    def processing_kwargs(self) -> dict[str, Any]:
        """The options of every call to `preprocess`; may be changed."""
        return self._model.processing_kwargs

    def preprocess(self, inputs: Any, prompt: str | None = None, **options: Any) -> dict[str, Any]:
        """Return the token ids, types and mask of texts, as rows of one length."""
        return self._model.preprocess(inputs, prompt, **options)

    @property
    def config(self) -> SimpleNamespace:
        """The settings of `config.json`, as attributes."""
        return SimpleNamespace(**self._model._config)

    @property
    def auto_model(self) -> ModelPart:
        """The transformer, of which only the configuration can be read."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> ModelPart:
        """Move the whole model: all of its modules compute on one device."""
        self._model.to(*args, **kwargs)
        return self

    @property
    def device(self) -> Any:
        """Where the model computes."""
        return self._model.device

    def get_embedding_dimension(self) -> int | None:
        """Return the width of the module's output; None if it is not known."""
        return self._settings.get("embedding_dimension")


def parts_of(model: Any) -> list[ModelPart]:
    """Return the modules of a model in the order in which they run."""
    encoder = model.encoder
    width = int(model._config.get("hidden_size") or encoder.width)
    task = TASKS[model.model_type]
    parts = [
        ModelPart(model, "Transformer", {"transformer_task": task, "embedding_dimension": width})
    ]
    head = encoder.embedder
    if model.model_type == "SparseEncoder" and encoder.sparse_settings is not None:
        size = encoder.sparse_settings.width
        parts.append(ModelPart(model, "SpladePooling", {"embedding_dimension": size}))
    elif model.model_type == "SentenceTransformer" and head is not None:
        modes = "+".join(head.pooling)
        settings = {
            "pooling_mode": modes,
            "include_prompt": head.include_prompt,
            "embedding_dimension": width * len(head.pooling),
        }
        parts.append(ModelPart(model, "Pooling", settings))
        for stage in head.stages:
            outputs = getattr(stage, "outputs", None)
            parts.append(ModelPart(model, type(stage).__name__, {"embedding_dimension": outputs}))
        if head.normalize:
            parts.append(ModelPart(model, "Normalize", {"embedding_dimension": encoder.width}))
    return parts
