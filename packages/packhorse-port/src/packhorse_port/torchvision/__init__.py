"""The datasets and transforms of torchvision that tutorials use, where torchvision cannot be had.

torchvision is compiled for one version of torch; where the two do not match it fails at import, and
then a script that only wants MNIST fails with it. These have torchvision's names, arguments and
results, on tensors, arrays and (where Pillow is installed) its images. Models, operators and
decoders are not here. Nothing of torch is imported before it is used.
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


def lacks(room: str, name: str) -> AttributeError:
    """What to say of a name that only torchvision has."""
    return AttributeError(
        f"packhorse's stand-in for torchvision has no {room}{name}; for this one install"
        " torchvision itself, in the version made for your torch"
    )


def __getattr__(name: str) -> Any:
    if name in PROVIDES:
        return import_module(f"{__name__}.{name}")
    if name.startswith("__"):
        raise AttributeError(name)
    raise lacks("", name)
