"""The datasets and transforms of torchvision that tutorials use, if torchvision is not available.

torchvision is compiled for one version of torch; if the two do not match it fails at import, and a
script that only needs MNIST fails with it. These have torchvision's names, arguments and results,
on tensors, arrays and (if Pillow is installed) Pillow's images. There are no models, operators or
decoders. torch is not imported before it is used.
"""

from importlib import import_module
from typing import Any

__version__ = "0+packhorse"

PROVIDES = {
    "datasets": ("CIFAR10", "FakeData", "FashionMNIST", "MNIST"),
    "transforms": (
        "CenterCrop",
        "Compose",
        "ConvertImageDtype",
        "Grayscale",
        "InterpolationMode",
        "Lambda",
        "Normalize",
        "PILToTensor",
        "Pad",
        "RandomCrop",
        "RandomHorizontalFlip",
        "RandomVerticalFlip",
        "Resize",
        "ToPILImage",
        "ToTensor",
        "functional",
    ),
    "__version__": (),
}


def missing_name(name: str) -> AttributeError:
    """The error for a name that only torchvision has."""
    return AttributeError(
        f"packhorse's stand-in for torchvision has no {name}; for this one install"
        " torchvision itself, in the version made for your torch"
    )


def __getattr__(name: str) -> Any:
    if name in PROVIDES:
        return import_module(f"{__name__}.{name}")
    if name.startswith("__"):
        raise AttributeError(name)
    raise missing_name(name)
