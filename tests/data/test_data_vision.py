"""CIFAR-10 from pickles that are not trusted, and ImageNet from folders."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from small_data import write_cifar10

from flowformer import data


class TestCifar10:
    @pytest.mark.parametrize("protocol", [2, 4, 5])
    def test_channels_are_standardised(self, tmp_path, protocol):
        write_cifar10(tmp_path, protocol=protocol)
        train, valid, test, info = data.load("cifar10", tmp_path, partial=True, augment=False)
        assert (len(train), valid, len(test)) == (20, None, 4)
        for case in (train[9], test[3]):
            value = torch.tensor([10, 20, 5]) * case["label"] / 255
            expected = (value - torch.tensor([0.4914, 0.4822, 0.4465])) / torch.tensor([0.2470, 0.2435, 0.2616])
            torch.testing.assert_close(case["image"], expected[:, None, None].expand(3, 32, 32))
        assert [case["label"].item() for case in train][4:8] == [1, 2, 3, 4]
        assert (info.num_classes, info.num_features) == (10, 3)

    def test_python_2_pickles(self, tmp_path):
        """The official files name NumPy's modules as they were called then."""
        home = write_cifar10(tmp_path)
        for path in home.iterdir():
            content = path.read_bytes()
            assert b"numpy._core.multiarray" in content
            path.write_bytes(content.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
        assert len(data.load("cifar10", tmp_path, partial=True).train) == 20

    def test_augmentation_shifts_and_mirrors(self, tmp_path):
        home = write_cifar10(tmp_path)
        image = np.random.default_rng(0).integers(0, 256, (3, 32, 32), np.uint8)
        content = {b"data": image.reshape(1, -1), b"labels": [1]}
        (home / "data_batch_1").write_bytes(pickle.dumps(content))
        plain = data.load("cifar10", tmp_path, partial=True, augment=False).train[0]["image"]
        augmented = data.load("cifar10", tmp_path, partial=True)
        padded = torch.nn.functional.pad(plain, (4, 4, 4, 4))
        crops = [padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
        possible = [x for crop in crops for x in (crop, crop.flip(-1))]
        torch.manual_seed(0)
        seen = set()
        for _ in range(40):
            found = augmented.train[0]["image"]
            (index,) = [i for i, x in enumerate(possible) if torch.equal(x, found)]
            seen.add(index)
        assert len(seen) > 25
        assert {index % 2 for index in seen} == {0, 1}
        assert torch.equal(augmented.test[0]["image"], augmented.test[0]["image"])

    def test_nothing_is_run(self, tmp_path):
        home = write_cifar10(tmp_path)

        class Trap:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "run"),)

        (home / "data_batch_3").write_bytes(pickle.dumps({b"data": Trap(), b"labels": []}))
        with pytest.raises(data.DamagedDataError, match=r"data_batch_3 .* asks for posix\.mkdir"):
            data.load("cifar10", tmp_path, partial=True)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        "content",
        [
            {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]},
            {b"data": np.zeros((2, 3071), np.uint8), b"labels": [0, 1]},
            {b"data": np.zeros((2, 3072), np.int64), b"labels": [0, 1]},
            {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 10]},
            {b"data": np.zeros((2, 3072), np.uint8), b"labels": 0},
            {b"labels": [0, 1]},
            [1, 2],
        ],
    )
    def test_a_wrong_batch_is_named(self, tmp_path, content):
        (write_cifar10(tmp_path) / "test_batch").write_bytes(pickle.dumps(content))
        with pytest.raises(data.DamagedDataError, match="test_batch"):
            data.load("cifar10", tmp_path, partial=True)

    @pytest.mark.parametrize("size", [0, 1, 50, 3000])
    @pytest.mark.parametrize("protocol", [2, 5])
    def test_a_cut_batch_is_named(self, tmp_path, size, protocol):
        path = write_cifar10(tmp_path, protocol=protocol) / "data_batch_5"
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(data.DamagedDataError, match="data_batch_5"):
            data.load("cifar10", tmp_path, partial=True)

    @pytest.mark.parametrize(
        ("written", "read"),
        [
            pytest.param(b"latin1", b"lztin1", id="LookupError"),
            pytest.param(b"\x80\x02", b"\x96\x02", id="MemoryError"),
            pytest.param(b"tq\x18b", b"0q\x18b", id="SystemError"),
        ],
    )
    def test_a_batch_with_a_wrong_byte_is_named(self, tmp_path, written, read):
        """Whatever the unpickler raises."""
        path = write_cifar10(tmp_path) / "data_batch_2"
        content = path.read_bytes()
        assert written in content
        path.write_bytes(content.replace(written, read, 1))
        with pytest.raises(data.DamagedDataError, match="data_batch_2 is damaged or not a batch"):
            data.load("cifar10", tmp_path, partial=True)

    def test_must_be_complete(self, tmp_path):
        write_cifar10(tmp_path)
        with pytest.raises(data.DamagedDataError, match="4 images, the published data has 10,000"):
            data.load("cifar10", tmp_path)


class TestImageNet:
    @pytest.fixture
    def folder(self, tmp_path):
        noise = np.random.default_rng(0)
        for part in ("train", "val"):
            for number, name in enumerate(("n01440764", "n01443537")):
                home = tmp_path / "imagenet" / part / name
                home.mkdir(parents=True)
                for i in range(2):
                    picture = noise.integers(0, 256, (40 + 10 * i, 60, 3), np.uint8)
                    Image.fromarray(picture).save(home / f"{name}_{number}{i}.JPEG", "jpeg")
        return tmp_path

    def test_images(self, folder):
        train, valid, test, info = data.load("imagenet", folder, partial=True, size=32)
        assert (len(train), valid, len(test)) == (4, None, 4)
        assert [case["label"].item() for case in test] == [0, 0, 1, 1]
        assert all(case["image"].shape == (3, 32, 32) for case in [*train, *test])
        assert torch.equal(test[1]["image"], test[1]["image"])
        assert not torch.equal(train[1]["image"], train[1]["image"])
        assert (info.num_classes, info.differs) == (
            2,
            "train: 4 images instead of 1,281,167; val: 4 images instead of 50,000",
        )

    def test_a_grey_image_has_three_channels(self, folder):
        path = folder / "imagenet" / "val" / "n01440764" / "n01440764_00.JPEG"
        Image.new("L", (50, 50), 128).save(path, "jpeg")
        image = data.load("imagenet", folder, partial=True, size=32).test[0]["image"]
        mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        expected = ((128 / 255 - mean) / deviation)[:, None, None].expand(3, 32, 32)
        torch.testing.assert_close(image, expected, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("size", [0, 600])
    def test_a_damaged_image_is_named(self, folder, size):
        path = folder / "imagenet" / "train" / "n01443537" / "n01443537_10.JPEG"
        path.write_bytes(path.read_bytes()[:size])
        train = data.load("imagenet", folder, partial=True, size=32).train
        assert train[3]["label"] == 1
        with pytest.raises(data.DamagedDataError, match=r"n01443537_10\.JPEG is damaged"):
            train[2]

    def test_folders_must_agree(self, folder):
        (folder / "imagenet" / "val" / "n01443537").rename(folder / "imagenet" / "val" / "n00000000")
        with pytest.raises(data.DamagedDataError, match="one folder per class"):
            data.load("imagenet", folder, partial=True)

    def test_erasing_and_plain_augmentation(self, folder):
        def transforms(**options):
            train = data.load("imagenet", folder, partial=True, size=32, **options).train
            return [type(each).__name__ for each in train.transform.transforms]

        assert "RandAugment" in transforms()
        assert "RandomErasing" not in transforms()
        assert transforms(erase=0.25)[-1] == "RandomErasing"
        plain = transforms(augment=False)
        assert "RandomHorizontalFlip" in plain
        assert not {"RandAugment", "ColorJitter", "RandomErasing"} & set(plain)
