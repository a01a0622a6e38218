"""The five tasks of the Long-Range Arena, on small files in the published formats."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from small_data import write_cifar10

from flowformer import data
from flowformer.data.listops import VOCABULARY

ROWS = ["( ( ( [MAX 6 ) 3 ) ] )\t6", "( ( ( ( [SM ( ( ( [MED 1 ) 2 ) ] ) ) 9 ) 9 ) ] )\t9", "4\t4"]


def tokens_of(case, vocabulary=VOCABULARY):
    return [vocabulary[i] for i in case["tokens"]]


class TestListOps:
    @pytest.fixture
    def folder(self, tmp_path, request):
        home = tmp_path / getattr(request, "param", "lra_release") / "listops-1000"
        home.mkdir(parents=True)
        for part in ("train", "val", "test"):
            # the published files end lines as csv does
            (home / f"basic_{part}.tsv").write_bytes(("Source\tTarget\r\n" + "\r\n".join(ROWS) + "\r\n").encode())
        return tmp_path

    @pytest.mark.parametrize("folder", ["lra_release", "lra_release/lra_release"], indirect=True)
    def test_drops_parentheses_and_keeps_brackets(self, folder):
        train, valid, test, info = data.load("lra/listops", folder, partial=True)
        assert len(train) == len(valid) == len(test) == 3
        assert tokens_of(train[0]) == ["[MAX", "6", "3", "]"]
        assert tokens_of(train[1]) == ["[SM", "[MED", "1", "2", "]", "9", "9", "]"]
        assert tokens_of(train[2]) == ["4"]
        assert [case["label"].item() for case in test] == [6, 9, 4]
        assert (info.vocab_size, info.num_classes, info.padding_id, info.max_length) == (17, 10, 0, 2000)
        assert "basic_train.tsv: 3 rows instead of 96,000" in info.differs

    def test_cuts(self, folder):
        train = data.load("lra/listops", folder, partial=True, max_length=3).train
        assert [len(case["tokens"]) for case in train] == [3, 3, 1]
        assert tokens_of(train[1]) == ["[SM", "[MED", "1"]

    def test_blocks_do_not_matter(self, folder, monkeypatch):
        """A file larger than what is read at once, lines across the border included."""
        path = folder / "lra_release" / "listops-1000" / "basic_train.tsv"
        many = [ROWS[i % 3] for i in range(700_000)]
        path.write_text("Source\tTarget\n" + "\n".join(many) + "\n")
        assert path.stat().st_size > 1 << 24
        train = data.load("lra/listops", folder, partial=True).train
        assert len(train) == len(many)
        assert all(tokens_of(train[i]) == tokens_of(train[i % 3]) for i in range(0, len(many), 997))
        assert tokens_of(train[699_999]) == tokens_of(train[0])

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("Source\tTarget\r\n", ""),
            ("[SM", "[SUM"),
            ("[SM", "[XM"),
            ("\t9", " 9"),
            ("\t9", "\t19"),
            ("\t9", "\tx"),
            ("4\t4\r\n", "4\t4"),
            ("4\t4\r\n", "4"),
            ("4\t4\r\n", "\t4\r\n"),
            ("1 )", "1 \0"),
            ("\r\n".join(["", *ROWS]), ""),
        ],
    )
    def test_a_damaged_file_is_named(self, folder, old, new):
        path = folder / "lra_release" / "listops-1000" / "basic_val.tsv"
        content = path.read_bytes().decode()
        assert old in content
        path.write_bytes(content.replace(old, new).encode())
        with pytest.raises(data.DamagedDataError, match=r"basic_val\.tsv"):
            data.load("lra/listops", folder, partial=True)

    def test_must_be_complete(self, folder):
        with pytest.raises(data.DamagedDataError, match="3 rows, the published data has 96,000"):
            data.load("lra/listops", folder)


class TestText:
    @pytest.fixture
    def folder(self, tmp_path):
        for part in ("train", "test"):
            for mood, texts in (("neg", ["bad é", "worse"]), ("pos", ["good" * 10])):
                home = tmp_path / "aclImdb" / part / mood
                home.mkdir(parents=True)
                for number, text in enumerate(texts):
                    (home / f"{number}_3.txt").write_text(text, encoding="utf-8")
        return tmp_path

    def test_bytes_from_one(self, folder):
        train, valid, test, info = data.load("lra/text", folder, partial=True)
        assert (len(train), valid, len(test)) == (3, None, 3)
        assert bytes((train[0]["tokens"] - 1).tolist()).decode() == "bad é"
        assert [case["label"].item() for case in train] == [0, 0, 1]
        assert (info.vocab_size, info.padding_id, info.max_length) == (257, 0, 4000)
        assert "neg: 2 reviews instead of 12,500" in info.differs

    def test_cuts(self, folder):
        train = data.load("lra/text", folder, partial=True, max_length=6).train
        assert [len(case["tokens"]) for case in train] == [6, 5, 6]

    def test_the_checksum_sees_what_is_cut(self, folder):
        before = data.load("lra/text", folder, partial=True, max_length=2).info.checksum
        (folder / "aclImdb" / "test" / "neg" / "1_3.txt").write_text("worst")
        assert data.load("lra/text", folder, partial=True, max_length=2).info.checksum != before

    def test_damage(self, folder):
        with pytest.raises(data.DamagedDataError, match="12,500"):
            data.load("lra/text", folder)
        (folder / "aclImdb" / "test" / "neg" / "1_3.txt").write_text("")
        with pytest.raises(data.DamagedDataError, match=r"1_3\.txt is empty"):
            data.load("lra/text", folder, partial=True)


class TestPairs:
    LINES = "1.0\tA\tB\tfirst paper\tsecond paper\n0.0\tB\tC\tsecond paper\t\n"

    @pytest.fixture(params=["lra/retrieval", "acl"])
    def named(self, request, tmp_path):
        home = tmp_path / {"lra/retrieval": "lra_release/tsv_data", "acl": "acl"}[request.param]
        home.mkdir(parents=True)
        for part in ("train", "eval", "test"):
            (home / f"new_aan_pairs.{part}.tsv").write_text(self.LINES)
        return request.param, tmp_path, home

    def test_both_texts(self, named):
        name, folder, _ = named
        train, valid, test, info = data.load(name, folder, partial=True)
        assert len(train) == len(valid) == len(test) == 2
        texts = [bytes((case[key] - 1).tolist()) for case in train for key in ("first", "second")]
        assert texts == [b"first paper", b"second paper", b"second paper", b" "]
        assert [case["label"].item() for case in train] == [1, 0]
        assert (info.vocab_size, info.max_length, info.num_classes) == (257, 4000, 2)

    def test_a_text_is_kept_once(self, named):
        name, folder, _ = named
        splits = data.load(name, folder, partial=True)
        assert splits.train.columns["first"].flat.numel() == len("first papersecond paper ")
        assert splits.train.columns["first"].flat is splits.test.columns["second"].flat

    def test_the_stand_in_is_labelled(self, named):
        name, folder, _ = named
        if name == "acl":
            assert "stand-in" in data.load(name, folder).info.differs
        else:
            with pytest.raises(data.DamagedDataError, match="2 pairs, the published data has 147,086"):
                data.load(name, folder)

    @pytest.mark.parametrize("line", ["1.0\tA\tB\tcut", "2.0\tA\tB\tx\ty\n", "\n", "1.0\tA\tB\tx\ty\tz\n"])
    def test_a_damaged_line_is_named(self, named, line):
        name, folder, home = named
        (home / "new_aan_pairs.eval.tsv").write_text(self.LINES + line)
        with pytest.raises(data.DamagedDataError, match=r"pairs\.eval\.tsv, line 3"):
            data.load(name, folder, partial=True)


class TestImage:
    def test_grey_in_reading_order(self, tmp_path):
        home = write_cifar10(tmp_path)
        ramp = np.arange(1024, dtype=np.uint16) // 4
        content = {b"data": np.tile(ramp.astype(np.uint8), (4, 3)), b"labels": [0, 1, 2, 3]}
        (home / "test_batch").write_bytes(pickle.dumps(content))
        train, valid, test, info = data.load("lra/image", tmp_path, partial=True)
        assert (len(train), len(valid), len(test)) == (18, 2, 4)
        # a grey pixel keeps its value, to one part in 255
        assert (test[0]["tokens"] - torch.from_numpy(ramp.astype(int))).abs().max() <= 1
        assert (info.vocab_size, info.padding_id, info.max_length) == (256, None, 1024)

    def test_luma(self, tmp_path):
        write_cifar10(tmp_path)
        train = data.load("lra/image", tmp_path, partial=True).train
        for case in train:
            label = case["label"].item()
            expected = (0.2989 * 10 + 0.587 * 20 + 0.114 * 5) * label
            assert case["tokens"].unique().numel() == 1
            assert abs(case["tokens"][0].item() - expected) <= 1

    def test_validation_is_the_end_of_training(self, tmp_path):
        write_cifar10(tmp_path)
        valid = data.load("lra/image", tmp_path, partial=True).valid
        assert [case["label"].item() for case in valid] == [6, 7]


class TestPathfinder:
    @pytest.fixture
    def folder(self, tmp_path):
        home = tmp_path / "lra_release" / "pathfinder32" / "curv_contour_length_14"
        (home / "metadata").mkdir(parents=True)
        # 2 comes before 10
        for part in (10, 2):
            (home / "imgs" / str(part)).mkdir(parents=True)
            rows = []
            for i in range(5):
                image = np.full((32, 32), part * 10 + i, np.uint8)
                image[0, 1] = 200
                Image.fromarray(image).save(home / "imgs" / str(part) / f"sample_{i}.png")
                rows.append(f"imgs/{part} sample_{i}.png {i} {i % 2} 1.0 14 4 2 0.5 1 1\n")
            (home / "metadata" / f"{part}.npy").write_text("".join(rows))
        return tmp_path

    def test_images_in_order(self, folder):
        train, valid, test, info = data.load("lra/pathfinder", folder, partial=True)
        cases = [*train, *valid, *test]
        assert (len(train), len(valid), len(test)) == (8, 1, 1)
        assert [case["tokens"][0].item() for case in cases] == [20, 21, 22, 23, 24, 100, 101, 102, 103, 104]
        assert [case["label"].item() for case in cases] == [0, 1, 0, 1, 0] * 2
        assert all(case["tokens"][1] == 200 and case["tokens"].shape == (1024,) for case in cases)
        assert (info.vocab_size, info.num_classes, info.max_length) == (256, 2, 1024)
        assert "10 images instead of 200,000" in info.differs

    @pytest.mark.parametrize("damage", ["empty", "cut", "gone", "large", "list"])
    def test_a_damaged_file_is_named(self, folder, damage):
        home = folder / "lra_release" / "pathfinder32" / "curv_contour_length_14"
        path = home / "imgs" / "2" / "sample_3.png"
        match damage:
            case "empty":
                path.write_bytes(b"")
            case "cut":
                file = io.BytesIO()
                Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32), np.uint8)).save(file, "png")
                path.write_bytes(file.getvalue()[:500])
            case "gone":
                path.unlink()
            case "large":
                Image.new("L", (64, 64)).save(path)
            case "list":
                path = home / "metadata" / "2.npy"
                path.write_text("imgs/2 sample_0.png 0\n")
        with pytest.raises(data.DamagedDataError, match=path.name):
            data.load("lra/pathfinder", folder, partial=True)
