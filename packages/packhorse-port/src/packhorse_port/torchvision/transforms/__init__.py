"""torchvision's transforms of images, as classes around the functions in `functional`.

Random transforms draw from torch's generator in torchvision's order, so that a seed gives the same
crops and flips. As in torchvision most are modules, which can be put into a `Sequential`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.errors import InputError
from packhorse_port.torchvision import missing_name
from packhorse_port.torchvision.transforms import functional as functional
from packhorse_port.torchvision.transforms.functional import InterpolationMode as InterpolationMode


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise missing_name(f"transforms.{name}")


class Compose:
    """Apply transforms one after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, img: Any) -> Any:
        for transform in self.transforms:
            img = transform(img)
        return img

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.transforms))})"


class Lambda:
    """Apply a function of the user."""

    def __init__(self, lambd: Callable[[Any], Any]) -> None:
        if not callable(lambd):
            raise InputError(f"Lambda takes a function, not {lambd!r}")
        self.lambd = lambd

    def __call__(self, img: Any) -> Any:
        return self.lambd(img)


class ToTensor:
    """Convert an image to a tensor of values from 0 to 1, channels first."""

    def __call__(self, pic: Any) -> Tensor:
        return functional.to_tensor(pic)

    def __repr__(self) -> str:
        return "ToTensor()"


class PILToTensor:
    """Convert an image to a tensor of its bytes, channels first."""

    def __call__(self, pic: Any) -> Tensor:
        return functional.pil_to_tensor(pic)


class ToPILImage:
    """Convert a tensor or an array to an image."""

    def __init__(self, mode: str | None = None) -> None:
        self.mode = mode

    def __call__(self, pic: Any) -> Any:
        return functional.to_pil_image(pic, self.mode)


class ConvertImageDtype(nn.Module):
    """Convert to another dtype, and scale to its range."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, image: Tensor) -> Tensor:
        return functional.convert_image_dtype(image, self.dtype)


class Normalize(nn.Module):
    """Subtract each channel's mean and divide by its standard deviation."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> None:
        super().__init__()
        self.mean = mean
        self.std = std
        self.inplace = inplace

    def forward(self, tensor: Tensor) -> Tensor:
        return functional.normalize(tensor, self.mean, self.std, self.inplace)

    def extra_repr(self) -> str:
        return f"mean={self.mean}, std={self.std}"


class Resize(nn.Module):
    """Resize to a height and width, or so that the shorter side has a length."""

    def __init__(
        self,
        size: int | Sequence[int],
        interpolation: InterpolationMode = InterpolationMode.BILINEAR,
        max_size: int | None = None,
        antialias: bool | None = True,
    ) -> None:
        super().__init__()
        self.arguments = (size, interpolation, max_size, antialias)

    def forward(self, img: Any) -> Any:
        return functional.resize(img, *self.arguments)


class CenterCrop(nn.Module):
    """Crop the center."""

    def __init__(self, size: int | Sequence[int]) -> None:
        super().__init__()
        self.size = size

    def forward(self, img: Any) -> Any:
        return functional.center_crop(img, self.size)


class Pad(nn.Module):
    """Add a border."""

    def __init__(
        self, padding: int | Sequence[int], fill: float = 0, padding_mode: str = "constant"
    ) -> None:
        super().__init__()
        self.arguments = (padding, fill, padding_mode)

    def forward(self, img: Any) -> Any:
        return functional.pad(img, *self.arguments)


class Grayscale(nn.Module):
    """Convert to grayscale, in one channel or three."""

    def __init__(self, num_output_channels: int = 1) -> None:
        super().__init__()
        self.num_output_channels = num_output_channels

    def forward(self, img: Any) -> Any:
        return functional.rgb_to_grayscale(img, self.num_output_channels)


class RandomCrop(nn.Module):
    """Crop at a random position, of the image or of the image with a border."""

    def __init__(
        self,
        size: int | Sequence[int],
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: float = 0,
        padding_mode: str = "constant",
    ) -> None:
        super().__init__()
        sizes = [size] if isinstance(size, int) else list(size)
        self.size = (sizes[0], sizes[-1])
        self.padding = padding
        self.pad_if_needed = pad_if_needed
        self.border = (fill, padding_mode)

    def forward(self, img: Any) -> Any:
        tall, wide = self.size
        if self.padding is not None:
            img = functional.pad(img, self.padding, *self.border)
        _, height, width = functional.get_dimensions(img)
        if self.pad_if_needed and width < wide:
            img = functional.pad(img, [wide - width, 0], *self.border)
        if self.pad_if_needed and height < tall:
            img = functional.pad(img, [0, tall - height], *self.border)
        return functional.crop(img, *self.draw_corner(img), tall, wide)

    def draw_corner(self, img: Any) -> tuple[int, int]:
        """A random top left corner of the crop."""
        _, height, width = functional.get_dimensions(img)
        tall, wide = self.size
        if height < tall or width < wide:
            raise InputError(f"RandomCrop of {tall}×{wide} from an image of {height}×{width}")  # noqa: RUF001
        if (height, width) == (tall, wide):
            return 0, 0
        top = int(torch.randint(0, height - tall + 1, size=(1,)).item())
        return top, int(torch.randint(0, width - wide + 1, size=(1,)).item())


class RandomHorizontalFlip(nn.Module):
    """Flip left and right with probability `p`."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, img: Any) -> Any:
        return functional.hflip(img) if torch.rand(1) < self.p else img


class RandomVerticalFlip(nn.Module):
    """Flip top and bottom with probability `p`."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, img: Any) -> Any:
        return functional.vflip(img) if torch.rand(1) < self.p else img
