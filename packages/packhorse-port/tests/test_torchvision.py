"""The stand-in for torchvision: its results by formula, its files read, fetched and missed."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from packhorse.errors import InputError, MissingExtra
from packhorse_port import torchvision
from packhorse_port.torchvision import datasets, files, transforms
from packhorse_port.torchvision.transforms import functional

Image = pytest.importorskip("PIL.Image")
GRADIENT = np.arange(24, dtype=np.uint8).reshape(4, 6)  # rows of 6
COLOR = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


@pytest.fixture(autouse=True)
def _no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine may have installed is not seen."""
    monkeypatch.delenv(files.VARIABLE, raising=False)
    monkeypatch.setattr(files, "DEBIAN", Path("/nonexistent"))


def idx(array: np.ndarray) -> bytes:
    shape = np.array(array.shape, ">u4").tobytes()
    return bytes([0, 0, 8, array.ndim]) + shape + array.tobytes()


def write_mnist(folder: Path, count: int = 6, zipped: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, first in (("train", 0), ("t10k", 100)):
        images = (
            np.zeros((count, 28, 28), np.uint8) + np.arange(first, first + count)[:, None, None]
        )
        for name, array in (
            (f"{part}-images-idx3-ubyte", images.astype(np.uint8)),
            (f"{part}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 10),
        ):
            data = gzip.compress(idx(array)) if zipped else idx(array)
            (folder / (name + ".gz" * zipped)).write_bytes(data)


def test_it_offers_what_it_says() -> None:
    for room in ("datasets", "transforms"):
        module = getattr(torchvision, room)
        assert all(hasattr(module, name) for name in torchvision.PROVIDES[room])
        with pytest.raises(AttributeError, match="install torchvision itself"):
            _ = module.Nothing
    with pytest.raises(AttributeError, match="has no models"):
        _ = torchvision.models


# Transforms


@pytest.mark.parametrize("make", [np.asarray, Image.fromarray])
@pytest.mark.parametrize("array", [GRADIENT, COLOR], ids=["gray", "color"])
def test_to_tensor_is_a_fraction_of_255(array: np.ndarray, make) -> None:
    created = transforms.ToTensor()(make(array))
    expected = torch.from_numpy(array.reshape(4, 6, -1)).permute(2, 0, 1).float() / 255
    assert created.dtype == torch.float32 and torch.equal(created, expected)
    back = transforms.ToPILImage()(created)
    assert np.array_equal(np.asarray(back), array)
    assert torch.equal(transforms.PILToTensor()(make(array)).float() / 255, expected)


def test_to_tensor_keeps_what_is_no_byte() -> None:
    created = transforms.ToTensor()(np.ones((2, 3), np.float64))
    assert created.dtype == torch.float64 and created.shape == (1, 2, 3)
    black_and_white = Image.fromarray(GRADIENT).convert("1")
    assert set(transforms.ToTensor()(black_and_white).unique().tolist()) <= {0.0, 1.0}
    with pytest.raises(InputError, match="not Tensor"):
        transforms.ToTensor()(created)


def test_normalize_by_channel() -> None:
    image = torch.rand(3, 4, 5)
    created = transforms.Normalize((0.1, 0.2, 0.3), (0.5, 2.0, 4.0))(image)
    for channel, (mean, std) in enumerate(((0.1, 0.5), (0.2, 2.0), (0.3, 4.0))):
        assert torch.equal(created[channel], (image[channel] - mean) / std)
    with pytest.raises(InputError, match="holds a zero"):
        transforms.Normalize((0.5,), (0.0,))(image)
    with pytest.raises(InputError, match="put ToTensor before"):
        transforms.Normalize((0.5,), (0.5,))(Image.fromarray(GRADIENT))


def test_resize_by_the_shorter_side_and_by_both() -> None:
    image = torch.arange(24.0).reshape(1, 4, 6)
    assert transforms.Resize(2)(image).shape == (1, 2, 3)
    assert transforms.Resize(8, max_size=9)(image).shape == (1, 6, 9)
    assert transforms.Resize((3, 7))(Image.fromarray(GRADIENT)).size == (7, 3)
    assert transforms.Resize(4)(image) is image
    twice = transforms.Resize((8, 12), transforms.InterpolationMode.NEAREST)
    assert torch.equal(twice(image), image.repeat_interleave(2, 1).repeat_interleave(2, 2))


def test_bilinear_halving_of_a_ramp_is_linear() -> None:
    """Half as wide: each new pixel lies between two old ones, weighted 1 3 3 1 by antialiasing."""
    ramp = torch.arange(16.0).expand(1, 16, 16)
    created = transforms.Resize((16, 8))(ramp)
    inner = torch.arange(1, 7) * 2 + 0.5
    assert torch.allclose(created[0, 0, 1:7], inner)
    whole = transforms.Resize((16, 8))(ramp.to(torch.uint8))
    assert whole.dtype == torch.uint8 and torch.equal(whole, created.round().to(torch.uint8))


@pytest.mark.parametrize("make", [np.asarray, Image.fromarray, torch.from_numpy])
def test_crops_pads_and_flips_move_pixels(make) -> None:
    def array(image) -> np.ndarray:
        return np.asarray(image)

    arguments = make(GRADIENT if make is not torch.from_numpy else GRADIENT.copy())
    if make is torch.from_numpy:
        arguments = arguments[None]

    def same(image, expected: np.ndarray) -> None:
        assert np.array_equal(array(image).reshape(expected.shape), expected)

    same(transforms.CenterCrop(2)(arguments), GRADIENT[1:3, 2:4])
    same(transforms.CenterCrop((2, 3))(arguments), GRADIENT[1:3, 2:5])  # Python rounds 1.5 to 2
    same(transforms.CenterCrop((6, 6))(arguments), np.pad(GRADIENT, ((1, 1), (0, 0))))
    same(functional.hflip(arguments), GRADIENT[:, ::-1])
    same(functional.vflip(arguments), GRADIENT[::-1])
    same(transforms.Pad(1, fill=9)(arguments), np.pad(GRADIENT, 1, constant_values=9))
    same(transforms.Pad((1, 2))(arguments), np.pad(GRADIENT, ((2, 2), (1, 1))))
    same(transforms.Pad((1, 0, 2, 3))(arguments), np.pad(GRADIENT, ((0, 3), (1, 2))))
    same(transforms.Pad(1, padding_mode="edge")(arguments), np.pad(GRADIENT, 1, mode="edge"))
    same(transforms.Pad(2, padding_mode="reflect")(arguments), np.pad(GRADIENT, 2, mode="reflect"))


def test_random_transforms_draw_as_torchvision_does() -> None:
    """Corner: two `randint`, top first. Flip: one `rand`, below p."""
    image, tall, wide = torch.arange(80.0).reshape(1, 8, 10), 3, 4
    for seed in range(5):
        torch.manual_seed(seed)
        top, remaining = (
            int(torch.randint(0, n, (1,))) for n in (8 + 2 - tall + 1, 10 + 2 - wide + 1)
        )
        flips = bool(torch.rand(1) < 0.5)
        expected = torch.nn.functional.pad(image, (1, 1, 1, 1))
        expected = expected[:, top : top + tall, remaining : remaining + wide]
        torch.manual_seed(seed)
        both = transforms.Compose(
            [transforms.RandomCrop((tall, wide), padding=1), transforms.RandomHorizontalFlip()]
        )
        assert torch.equal(both(image), expected.flip(-1) if flips else expected)
    assert transforms.RandomCrop(12, pad_if_needed=True)(image).shape == (1, 12, 12)
    assert transforms.RandomVerticalFlip(p=1.0)(image).equal(image.flip(-2))
    with pytest.raises(InputError, match="from an image of"):
        transforms.RandomCrop(12)(image)


def test_gray_and_types() -> None:
    color = torch.rand(3, 2, 2)
    gray = 0.2989 * color[0] + 0.587 * color[1] + 0.114 * color[2]
    assert torch.equal(transforms.Grayscale()(color), gray[None])
    assert torch.equal(transforms.Grayscale(3)(color), torch.stack([gray] * 3))
    assert transforms.Grayscale(3)(Image.fromarray(COLOR)).mode == "RGB"
    whole = torch.tensor([0, 1, 128, 255], dtype=torch.uint8)
    assert torch.equal(transforms.ConvertImageDtype(torch.float32)(whole), whole.float() / 255)
    back = transforms.ConvertImageDtype(torch.uint8)(torch.tensor([0.0, 0.5, 1.0]))
    assert back.tolist() == [0, 127, 255]  # x · (256 − 0.001), cut
    wide = transforms.ConvertImageDtype(torch.int16)(whole)
    assert wide.tolist() == [0, 128, 16384, 32640]
    assert torch.equal(transforms.ConvertImageDtype(torch.uint8)(wide), whole)
    assert transforms.Lambda(lambda x: x + 1)(1) == 2


# Datasets


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("kind", [datasets.MNIST, datasets.FashionMNIST])
def test_items_of_idx_files(kind, zipped: bool, tmp_path: Path) -> None:
    write_mnist(tmp_path / kind.__name__ / "raw", zipped=zipped)
    tested = kind(tmp_path, train=False)
    assert len(tested) == 6 and tested.data.shape == (6, 28, 28)
    image, label = tested[3]
    assert image.size == (28, 28) and image.getpixel((0, 0)) == 103 and label == 3
    changed = kind(str(tmp_path), transform=transforms.ToTensor(), target_transform=lambda t: -t)
    image, label = changed[3]
    assert image.shape == (1, 28, 28) and image[0, 0, 0] == 3 / 255 and label == -3
    assert changed.targets.dtype == torch.int64 and len(changed.classes) == 10
    assert changed.class_to_idx[changed.classes[9]] == 9


def test_without_pillow_an_image_is_an_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    with_it = datasets.MNIST(tmp_path, transform=transforms.ToTensor())[2][0]
    monkeypatch.setattr(functional, "pillow", lambda: None)
    image, _ = datasets.MNIST(tmp_path)[2]
    assert isinstance(image, np.ndarray)
    assert torch.equal(transforms.ToTensor()(image), with_it)


def test_folders_of_the_environment_and_debian(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path / "here", zipped=True)
    with pytest.raises(InputError, match="apt install dataset-fashion-mnist"):
        datasets.FashionMNIST(tmp_path / "none")
    monkeypatch.setattr(files, "DEBIAN", tmp_path / "here")
    assert len(datasets.FashionMNIST(tmp_path / "none")) == 6
    with pytest.raises(InputError) as caught:
        datasets.MNIST(tmp_path / "none")
    assert "apt" not in str(caught.value) and "PACKHORSE_DATASETS=digits" in str(caught.value)
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "here"))
    assert len(datasets.MNIST(tmp_path / "none")) == 6


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    images = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    whole = images.read_bytes()
    for damaged in (whole[:-1], b"", b"\x1f\x8b" + whole, b"\0\0\x0d" + whole[3:]):
        images.write_bytes(damaged)
        with pytest.raises(InputError, match="train-images-idx3-ubyte"):
            datasets.MNIST(tmp_path)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """An address, and the folder that is behind it."""
    folder = tmp_path / "server"
    folder.mkdir()
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(quiet, directory=str(folder))
    ) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}/", folder
        http_server.shutdown()
        thread.join()


def test_download_with_its_checksum(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = server
    write_mnist(folder, zipped=True)
    sums = [
        (path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in sorted(folder.iterdir())
    ]
    monkeypatch.setattr(datasets.MNIST, "mirrors", (address + "gone/", address))
    with pytest.raises(InputError, match="downloaded damaged"):
        datasets.MNIST(tmp_path / "a", download=True)
    assert not list((tmp_path / "a").rglob("*.gz"))
    monkeypatch.setattr(datasets.MNIST, "resources", sums)
    assert len(datasets.MNIST(tmp_path / "b", download=True)) == 6
    monkeypatch.setattr(datasets.MNIST, "mirrors", (address + "gone/",))
    assert len(datasets.MNIST(tmp_path / "b", download=True)) == 6, "it is here already"
    with pytest.raises(InputError, match=r"nothing could be downloaded.*Either"):
        datasets.MNIST(tmp_path / "c", download=True)
    # Some scripts give whole addresses.
    monkeypatch.setattr(datasets.MNIST, "resources", [(address + n, md5) for n, md5 in sums])
    assert len(datasets.MNIST(tmp_path / "d", download=True)) == 6


def test_digits_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    monkeypatch.setenv(files.VARIABLE, files.DIGITS)
    trained, tested = (datasets.FashionMNIST(tmp_path, train=train) for train in (True, False))
    assert (len(trained), len(tested)) == (1500, 297)
    real = load_digits()
    assert tested.targets.tolist() == real.target[1500:].tolist()
    small = tested.data[5, 3:27:3, 3:27:3].double() * 16 / 255
    assert np.abs(small.numpy() - real.images[1505]).max() < 0.05
    assert not tested.data[:, :2].any() and not tested.data[:, :, 26:].any()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtra, match="tutorials"):
        datasets.MNIST(tmp_path)


def test_cifar_of_the_binary_version(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cifar-10-binary"):
        datasets.CIFAR10(tmp_path)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    planes = np.arange(3072, dtype=np.uint8)
    (folder / "test_batch.bin").write_bytes(b"\x07" + planes.tobytes())
    image, label = datasets.CIFAR10(tmp_path, train=False)[0]
    red, green, _ = image.getpixel((1, 0))
    assert label == 7 and (red, green) == (planes[1], planes[1025])


def test_fake_data_is_the_same_for_an_index() -> None:
    before = torch.get_rng_state()
    fake = datasets.FakeData(size=3, image_size=(1, 4, 4), transform=transforms.ToTensor())
    assert torch.equal(fake[1][0], fake[1][0]) and not torch.equal(fake[1][0], fake[2][0])
    assert len(list(fake)) == len(fake) == 3 and 0 <= fake[0][1] < 10
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(IndexError):
        fake[3]


def test_a_packed_idx_file_is_unpacked_as_far_as_its_header_says(tmp_path: Path) -> None:
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx(np.zeros(10, np.uint8)) + bytes(64 << 20)))
    tracemalloc.start()
    with pytest.raises(InputError, match="no idx file of bytes"):
        files.read_idx(path)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    path.write_bytes(gzip.compress(b"\0\0\x08\1" + b"\xff" * 4))  # it says 4 GiB
    with pytest.raises(InputError, match="larger than"):
        files.read_idx(path)
