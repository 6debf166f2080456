"""Which GELU a model computes: said by the user, shown by its graph, or by its configuration.

`hidden_act: gelu` means the exact form (erf) in transformers. In Google's configurations it means
whatever the code computed: erf until February 2019, its approximation by tanh since. A graph shows
which; a checkpoint without one is read as transformers reads it, and the user is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from packhorse.checkpoint.contents import Contents
from packhorse.checkpoint.names.families import ACTIVATIONS, family_of
from packhorse.errors import CheckpointError, InputError

Form = Literal["erf", "tanh"]
SPELLED = {"erf": "gelu", "tanh": "gelu_new"}  # in a configuration of transformers
FORMS = {"gelu": "erf", "gelu_tanh": "tanh"}  # by our own names
UNSURE = (
    "{key} is 'gelu' and no graph (.meta) shows which GELU that is: it is read as the exact one, "
    "as transformers does. Google's code computed that until February 2019, and an approximation "
    "by tanh since; if the model was trained with the later code, pass --gelu tanh (gelu='tanh'), "
    "else --gelu erf"
)


class GeluWarning(UserWarning):
    """Nothing says which GELU a TensorFlow checkpoint was trained with."""


@dataclass(frozen=True)
class Gelu:
    """The form of a model's GELU, and why it is that; empty for other activations."""

    form: str = ""
    why: str = ""


def choose(
    raw: dict[str, Any], contents: Contents, asked: str | None
) -> tuple[dict[str, Any], Gelu]:
    """The configuration with the form of GELU written into it; warns where it is a guess."""
    if asked not in (None, *get_args(Form)):
        raise InputError(f"--gelu (gelu=) is {asked!r}; it is erf or tanh")
    key = family_of(raw).config["activation"]
    said = raw.get(key, "gelu")
    configured = FORMS.get(ACTIVATIONS.get(said, "")) if isinstance(said, str) else None
    if configured is None:
        if asked:
            raise InputError(
                f"--gelu (gelu=) chooses a form of GELU, but the configuration says {key} {said!r}"
            )
        return raw, Gelu()
    gelu = _decide(raw, key, contents, asked)
    if not gelu.why:
        warnings.warn(UNSURE.format(key=key), GeluWarning, stacklevel=4)
        gelu = Gelu(gelu.form, "transformers reads it so; no graph shows it")
    if gelu.form != configured:
        raw = {**raw, key: SPELLED[gelu.form]}
    return raw, gelu


def _decide(raw: Mapping[str, Any], key: str, contents: Contents, asked: str | None) -> Gelu:
    """The form, and why; without a reason where nothing tells."""
    shown = contents.gelu
    graph = contents.graph.name if contents.graph else "its graph"
    if asked:
        against = f", although {graph} computes it by {' and '.join(sorted(shown))}"
        return Gelu(asked, "--gelu (gelu=) says so" + (against if shown - {asked} else ""))
    if len(shown) > 1:
        raise CheckpointError(
            f"{graph} computes GELU in both forms, by erf and by tanh; say which of them the "
            f"layers use: --gelu erf or --gelu tanh (gelu=)"
        )
    if shown:
        return Gelu(next(iter(shown)), f"the nodes of {graph} compute it so")
    said = raw.get(key)
    form = FORMS[ACTIVATIONS[said or "gelu"]]
    # What transformers writes names its model_type; Google's own configurations do not.
    clear = form == "tanh" or (said and "model_type" in raw)
    if contents.format in ("tf1", "frozen") and not clear:
        return Gelu(form)
    return Gelu(form, f"the configuration says {key} {said!r}" if said else "BERT's is")
