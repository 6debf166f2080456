"""torchvision's functions on images: a tensor [..., C, H, W], an array [H, W(, C)], or Pillow's.

Results are those of torchvision: Pillow's own operations on its images, torch's on tensors with
torchvision's rounding. Datasets return arrays if Pillow is not installed; an array is treated as a
tensor with the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.nn.functional import pad as pad_tensor

from packhorse.errors import InputError

# Pillow's names, by torch's.
FILTERS = {"nearest": "NEAREST", "bilinear": "BILINEAR", "bicubic": "BICUBIC"}


class InterpolationMode(Enum):
    """How pixels are interpolated."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


@cache
def pillow() -> Any:
    """Pillow's `Image` module, or None if it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        return None
    return Image


def is_pillow(image: Any) -> bool:
    return pillow() is not None and isinstance(image, pillow().Image)


def from_array(array: np.ndarray) -> Any:
    """An image of these bytes: Pillow's if it is installed, else the array."""
    return pillow().fromarray(array) if pillow() else array


def _on_tensor(image: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to a tensor, or to an array as if it were one."""
    if isinstance(image, Tensor):
        return change(image)
    if not isinstance(image, np.ndarray):
        raise InputError(f"an image is a tensor, an array or Pillow's, not {type(image).__name__}")
    changed = change(_channels_first(image)).numpy()
    return changed[0] if image.ndim == 2 else changed.transpose(1, 2, 0)


def _channels_first(array: np.ndarray) -> Tensor:  # [H, W] or [H, W, C] → [C, H, W]
    if array.ndim not in (2, 3):
        raise InputError(f"an image has 2 or 3 dimensions, not {array.ndim}")
    array = array[:, :, None] if array.ndim == 2 else array
    return torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1)))


def get_dimensions(image: Any) -> list[int]:
    """Channels, height, width."""
    if is_pillow(image):
        return [len(image.getbands()), image.height, image.width]
    shape = list(image.shape)
    if isinstance(image, np.ndarray):
        return [1 if image.ndim == 2 else shape[2], *shape[:2]]
    return [1 if image.ndim == 2 else shape[-3], *shape[-2:]]


def pil_to_tensor(image: Any) -> Tensor:
    """The pixels as a tensor, channels first."""
    array = np.array(image, copy=True) if is_pillow(image) else np.asarray(image)
    return _channels_first(array)


def to_tensor(image: Any) -> Tensor:
    """The pixels as a tensor, channels first; bytes are divided by 255."""
    if not (isinstance(image, np.ndarray) or is_pillow(image)):
        raise InputError(f"ToTensor takes an array or an image, not {type(image).__name__}")
    tensor = pil_to_tensor(image)
    if tensor.dtype == torch.bool:  # an image of black and white
        return tensor.to(torch.get_default_dtype())
    if tensor.dtype != torch.uint8:
        return tensor
    return tensor.to(torch.get_default_dtype()).div(255)


def to_pil_image(image: Any, mode: str | None = None) -> Any:
    """Convert to an image of bytes; fractions are truncated, as in torchvision."""
    if isinstance(image, Tensor):
        if image.is_floating_point() and mode != "F":
            image = image.mul(255).byte()
        array = image.detach().cpu().numpy()
        image = array if array.ndim == 2 else array.transpose(1, 2, 0)
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[:, :, 0]
    result = from_array(np.ascontiguousarray(image))
    converts = mode and is_pillow(result) and result.mode != mode
    return result.convert(mode) if converts else result


def normalize(
    tensor: Tensor, mean: Sequence[float], std: Sequence[float], inplace: bool = False
) -> Tensor:
    """Subtract each channel's mean and divide by its standard deviation."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise InputError("Normalize takes a tensor of fractions; put ToTensor before it")
    means, stds = (
        torch.as_tensor(v, dtype=tensor.dtype, device=tensor.device) for v in (mean, std)
    )
    if (stds == 0).any():
        raise InputError(f"Normalize divides by std, and {std} holds a zero")
    means, stds = (v.view(-1, 1, 1) if v.ndim == 1 else v for v in (means, stds))
    return (tensor if inplace else tensor.clone()).sub_(means).div_(stds)


def resize(
    image: Any,
    size: int | Sequence[int],
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
    max_size: int | None = None,
    antialias: bool | None = True,
) -> Any:
    """Resize to `size` (height, width), or the shorter side to it in proportion."""
    _, height, width = get_dimensions(image)
    target = [size] if isinstance(size, int) else list(size)
    if len(target) == 1:
        target = _in_proportion(height, width, target[0], max_size)
    if [height, width] == target:
        return image
    mode = InterpolationMode(interpolation).value
    if is_pillow(image):
        return image.resize((target[1], target[0]), pillow().Resampling[FILTERS[mode]])
    return _on_tensor(image, lambda tensor: _resized(tensor, target, mode, bool(antialias)))


def _in_proportion(height: int, width: int, size: int, max_size: int | None) -> list[int]:
    short, long = sorted((height, width))
    new_short = size
    new_long = int(size * long / short)
    if max_size is not None and new_long > max_size:
        new_short = int(max_size * new_short / new_long)
        new_long = max_size
    return [new_short, new_long] if height <= width else [new_long, new_short]


def _resized(tensor: Tensor, size: list[int], mode: str, antialias: bool) -> Tensor:
    smooth = mode != "nearest"
    batch = tensor if tensor.ndim == 4 else tensor.reshape(1, -1, *tensor.shape[-2:])
    fractions = batch if batch.is_floating_point() else batch.float()
    resized = interpolate(
        fractions,
        size,
        mode=mode,
        align_corners=False if smooth else None,
        antialias=antialias and smooth,
    )
    if not tensor.is_floating_point():
        resized = (resized.clamp(0, 255) if tensor.dtype == torch.uint8 else resized).round()
    return resized.to(tensor.dtype).reshape(*tensor.shape[:-2], *size)


def pad(
    image: Any, padding: int | Sequence[int], fill: float = 0, padding_mode: str = "constant"
) -> Any:
    """Add a border: on all sides; left-right and top-bottom; or left, top, right, bottom."""
    sides = [padding] if isinstance(padding, int) else list(padding)
    if len(sides) not in (1, 2, 4):
        raise InputError(f"padding is 1, 2 or 4 numbers, not {len(sides)}")
    left, top, right, bottom = (sides * (4 // len(sides)))[:4]
    if is_pillow(image):
        if padding_mode == "constant":
            return _expanded(image, (left, top, right, bottom), fill)
        array = np.asarray(image)
        widths = [(top, bottom), (left, right), (0, 0)][: array.ndim]
        return from_array(np.pad(array, widths, mode=_numpy_mode(padding_mode)))
    widths = (left, right, top, bottom)
    return _on_tensor(image, lambda tensor: _padded(tensor, widths, fill, padding_mode))


def _expanded(image: Any, sides: tuple[int, ...], fill: float) -> Any:
    from PIL import ImageOps

    bands = len(image.getbands())
    return ImageOps.expand(image, sides, int(fill) if bands == 1 else (int(fill),) * bands)


def _numpy_mode(mode: str) -> Any:
    return {"edge": "edge", "reflect": "reflect", "symmetric": "symmetric"}[mode]


def _padded(tensor: Tensor, widths: tuple[int, ...], fill: float, mode: str) -> Tensor:
    if mode == "constant":
        return pad_tensor(tensor, widths, value=fill)
    if mode not in ("edge", "reflect"):
        raise InputError(f"padding_mode of a tensor is constant, edge or reflect, not {mode}")
    batch = tensor.reshape(1, -1, *tensor.shape[-2:]).float()
    padded = pad_tensor(batch, widths, mode="replicate" if mode == "edge" else mode)
    return padded.to(tensor.dtype).reshape(*tensor.shape[:-2], *padded.shape[-2:])


def crop(image: Any, top: int, left: int, height: int, width: int) -> Any:
    """A window of the image; parts outside of it are black."""
    if is_pillow(image):
        return image.crop((left, top, left + width, top + height))
    _, tall, wide = get_dimensions(image)
    missing_right = max(0, left + width - wide)
    missing_bottom = max(0, top + height - tall)
    image = pad(image, [max(0, -left), max(0, -top), missing_right, missing_bottom])
    top = max(0, top)
    left = max(0, left)
    return _on_tensor(image, lambda tensor: tensor[..., top : top + height, left : left + width])


def center_crop(image: Any, output_size: int | Sequence[int]) -> Any:
    """The center of the image; a smaller image is surrounded by black."""
    height, width = _height_and_width(output_size)
    _, tall, wide = get_dimensions(image)
    extra_width = max(0, width - wide)
    extra_height = max(0, height - tall)
    if extra_width or extra_height:
        left = extra_width // 2
        top = extra_height // 2
        image = pad(image, [left, top, extra_width - left, extra_height - top])
        _, tall, wide = get_dimensions(image)
    return crop(image, round((tall - height) / 2), round((wide - width) / 2), height, width)


def _height_and_width(size: int | Sequence[int]) -> tuple[int, int]:
    sizes = [size] if isinstance(size, int) else list(size)
    return sizes[0], sizes[-1]


def hflip(image: Any) -> Any:
    """Flip left and right."""
    if is_pillow(image):
        return image.transpose(pillow().Transpose.FLIP_LEFT_RIGHT)
    return _on_tensor(image, lambda tensor: tensor.flip(-1))


def vflip(image: Any) -> Any:
    """Flip top and bottom."""
    if is_pillow(image):
        return image.transpose(pillow().Transpose.FLIP_TOP_BOTTOM)
    return _on_tensor(image, lambda tensor: tensor.flip(-2))


def rgb_to_grayscale(image: Any, num_output_channels: int = 1) -> Any:
    """Brightness (ITU-R 601), in one channel or three equal ones."""
    if is_pillow(image):
        gray = image.convert("L")
        return gray if num_output_channels == 1 else pillow().merge("RGB", [gray, gray, gray])
    return _on_tensor(image, lambda tensor: _grayscale(tensor, num_output_channels))


def _grayscale(tensor: Tensor, channels: int) -> Tensor:
    if tensor.shape[-3] == 3:
        red, green, blue = tensor.unbind(-3)
        gray = (0.2989 * red + 0.587 * green + 0.114 * blue).to(tensor.dtype).unsqueeze(-3)
    else:
        gray = tensor[..., :1, :, :]
    return gray.expand(*gray.shape[:-3], channels, *gray.shape[-2:]).clone()


def convert_image_dtype(image: Tensor, dtype: torch.dtype = torch.float) -> Tensor:
    """Convert to another dtype and its range: 0 to 1, or 0 to the largest integer."""
    if image.dtype == dtype:
        return image
    if image.is_floating_point():
        # Scaled by slightly less than the range, so that 1.0 stays inside it; as in torchvision.
        return (
            image.to(dtype)
            if dtype.is_floating_point
            else image.mul(torch.iinfo(dtype).max + 1.0 - 1e-3).to(dtype)
        )
    largest = torch.iinfo(image.dtype).max
    if dtype.is_floating_point:
        return image.to(dtype) / largest
    new_largest = torch.iinfo(dtype).max
    if largest > new_largest:
        divisor = (largest + 1) // (new_largest + 1)
        return image.div(divisor, rounding_mode="floor").to(dtype)
    return image.to(dtype) * ((new_largest + 1) // (largest + 1))
