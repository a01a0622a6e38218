"""Images: CIFAR-10 from its pickle files, ImageNet-1K from one folder per class.

Shapes: M images, Y rows, X columns.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from .._utils import optional_import
from . import store
from .splits import DataInfo, Item, Splits
from .store import DataSet

_CIFAR_MEAN = torch.tensor([0.4914, 0.4822, 0.4465])[:, None, None]
_CIFAR_STD = torch.tensor([0.2470, 0.2435, 0.2616])[:, None, None]
_CIFAR_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


class Cifar10(NamedTuple):
    """CIFAR-10 in memory: images (M, 3, 32, 32) uint8 and labels (M,) of each part, in the official order."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    checksum: str
    differs: str


class CifarImages(Dataset[Item]):
    """CIFAR-10 images with standardised channels.

    Args:
        images, labels: (M, 3, 32, 32) uint8 and (M,).
        augment: shift each image by up to 4 pixels and mirror it, at random.
    """

    def __init__(self, images: Tensor, labels: Tensor, augment: bool = False) -> None:
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        image = (self.images[index].float() / 255 - _CIFAR_MEAN) / _CIFAR_STD
        if self.augment:
            down, right, mirror = torch.randint(9, (2,)).tolist() + torch.randint(2, (1,)).tolist()
            image = F.pad(image, (4, 4, 4, 4))[:, down : down + 32, right : right + 32]
            image = image.flip(-1) if mirror else image
        return {"image": image, "label": self.labels[index]}


class FolderImages(Dataset[Item]):
    """Image files in one folder per class; a file is read when its item is indexed.

    Args:
        root: the folder that contains the folders of the classes.
        transform: function from a PIL image to a tensor (3, Y, X).
    """

    def __init__(self, root: Path, transform: Any) -> None:
        self.reader = optional_import("timm.data.readers", "timm").create_reader("", str(root))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> Item:
        file, label = self.reader[index]
        with file:
            try:
                image = optional_import("PIL.Image", "train").open(file).convert("RGB")
            except (OSError, SyntaxError) as error:
                raise store.DamagedDataError(f"{file.name} is damaged: {error}") from error
        return {"image": self.transform(image), "label": torch.tensor(label)}


def cifar10(folder: Path, *, partial: bool = False, augment: bool = True) -> Splits:
    """Read CIFAR-10 as images with the official training and test parts; there is no validation part.

    Args:
        augment: shift and mirror training images at random.
    """
    data = read_cifar10(folder, partial=partial)
    info = DataInfo("cifar10", data.checksum, num_classes=10, num_features=3, max_length=1024, differs=data.differs)
    return Splits(CifarImages(*data.train, augment=augment), None, CifarImages(*data.test), info)


def read_cifar10(folder: Path, *, partial: bool = False) -> Cifar10:
    """Read the Python version of CIFAR-10 from folder/cifar-10-batches-py."""
    paths = list(CIFAR10.require(folder).values())
    batches = [_read_batch(path) for path in paths]
    differs = [
        store.complete(path, "images", len(labels), CIFAR10.sizes[path.name], partial=partial)
        for path, (_, labels) in zip(paths, batches, strict=True)
    ]
    images, labels = (torch.cat(part) for part in zip(*batches[:5], strict=True))
    return Cifar10((images, labels), batches[5], store.checksum(paths), store.notes(*differs))


class _Unpickler(pickle.Unpickler):
    """Unpickler that accepts only arrays and plain containers, since a downloaded pickle may execute any code."""

    _ALLOWED = (
        "numpy ndarray",
        "numpy dtype",
        "numpy.core.multiarray _reconstruct",
        "numpy._core.multiarray _reconstruct",
        "numpy._core.numeric _frombuffer",
        "numpy.core.numeric _frombuffer",
        "_codecs encode",
    )

    def find_class(self, module: str, name: str) -> Any:
        if f"{module} {name}" not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which images do not need")
        # NumPy 2 renamed numpy.core to numpy._core; files may have been written with either name
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Read the images (M, 3, 32, 32) uint8 and labels (M,) of one pickle file."""
    content = path.read_bytes()
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        images, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
    except Exception as error:  # damaged bytes can make the unpickler raise any error, even MemoryError or SystemError
        raise store.DamagedDataError(
            f"{path} is damaged or not a batch of CIFAR-10: {type(error).__name__}: {error}"
        ) from error
    shaped = labels.ndim == 1 and images.shape == (len(labels), 3072)
    if images.dtype != np.uint8 or not shaped or not np.isin(labels, range(10)).all():
        raise store.DamagedDataError(
            f"{path} is damaged: expected bytes of shape (images, 3072) and labels from 0 to 9, got {images.dtype} "
            f"of shape {images.shape} and labels of shape {labels.shape}."
        )
    return torch.from_numpy(images.copy()).view(-1, 3, 32, 32), torch.from_numpy(labels).long()


def imagenet(
    folder: Path, *, partial: bool = False, size: int = 224, augment: bool = True, erase: float = 0.0
) -> Splits:
    """Read ImageNet-1K from folder/imagenet/{train,val}/<class>/*.JPEG with the paper's augmentation.

    The official validation images are the test part. The checksum covers only the names and sizes of the files, since
    their content is 150 GB. A damaged image raises `DamagedDataError` only when its item is indexed.

    Args:
        size: Y = X of an image. Test images are scaled to 8/7 of this size and cropped at the centre.
        augment: apply RandAugment and colour jitter to training images; False applies random crops and mirroring only.
        erase: probability that a random rectangle of a training image is replaced by noise; DeiT uses 0.25.
    """
    roots = IMAGENET.require(folder)
    timm = optional_import("timm.data", "timm")
    common = {"input_size": size, "interpolation": "bicubic"}
    train = FolderImages(
        roots["train"],
        timm.create_transform(
            **common,
            is_training=True,
            auto_augment="rand-m9-mstd0.5-inc1" if augment else None,
            color_jitter=0.4 if augment else None,
            re_prob=erase,
            re_mode="pixel",
        ),
    )
    test = FolderImages(roots["val"], timm.create_transform(**common, crop_pct=0.875))
    classes = train.reader.class_to_idx
    if test.reader.class_to_idx != classes:
        raise store.DamagedDataError(
            f"{roots['train']} has {len(classes)} classes, {roots['val']} {len(test.reader.class_to_idx)}, and they "
            "are not the same. Images must lie in one folder per class, in both."
        )
    differs = [
        store.complete(roots[part], "images", len(images), IMAGENET.sizes[part], partial=partial)
        for part, images in (("train", train), ("val", test))
    ]
    digest = hashlib.sha256()
    for images in (train, test):
        for path, _ in images.reader.samples:
            digest.update(f"{Path(path).name} {Path(path).stat().st_size}\n".encode())
    info = DataInfo(
        "imagenet",
        digest.hexdigest()[:16],
        num_classes=len(classes),
        num_features=3,
        max_length=size**2,
        differs=store.notes(*differs),
    )
    return Splits(train, None, test, info)


CIFAR10 = DataSet(
    "cifar10",
    store.Source(
        "CIFAR-10",
        "Download https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz and unpack it in {folder}.",
        "180 MB",
    ),
    files=lambda folder: {file: folder / "cifar-10-batches-py" / file for file in _CIFAR_FILES},
    reader=cifar10,
    sizes=dict.fromkeys(_CIFAR_FILES, 10_000),
)
IMAGENET = DataSet(
    "imagenet",
    store.Source(
        "ImageNet-1K",
        "Register at https://image-net.org, download ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, and unpack "
        "them into one folder per class, {folder}/imagenet/train/n01440764/*.JPEG and likewise for val.",
        "150 GB",
    ),
    files=lambda folder: {part: folder / "imagenet" / part for part in ("train", "val")},
    reader=imagenet,
    sizes={"train": 1_281_167, "val": 50_000},
)
RECORDS = (CIFAR10, IMAGENET)
