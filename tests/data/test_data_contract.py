"""What all loaders share: names, where data lies, what is said when it is missing or incomplete, batches."""

from __future__ import annotations

import pytest
import torch

from flowformer import data
from flowformer.data import store
from flowformer.data.splits import Columns, FlatSequences


class TestRoot:
    def test_argument_then_environment_then_cache(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("FLOWFORMER_DATA", raising=False)
        assert store.root() == tmp_path / ".cache" / "flowformer"
        monkeypatch.setenv("FLOWFORMER_DATA", "~/elsewhere")
        assert store.root() == tmp_path / "elsewhere"
        assert store.root(tmp_path / "here") == tmp_path / "here"


class TestNames:
    def test_cover_the_paper(self):
        names = data.names()
        assert len(names) == len(set(names)) == 11 + 10 + 9
        assert {"lra/listops", "wikitext103", "imagenet", "uea/PEMS-SF", "d4rl/walker2d-medium-expert"} <= set(names)

    @pytest.mark.parametrize("name", data.names())
    def test_a_missing_set_says_what_to_get_and_where_to_put_it(self, name, tmp_path):
        if name == "uea/JapaneseVowels":
            return  # comes with aeon
        with pytest.raises(data.MissingDataError, match=r"(Download|Register|Put) .* It takes .*(MB|GB)") as error:
            data.load(name, tmp_path)
        assert str(tmp_path) in str(error.value)
        assert "FLOWFORMER_DATA" in str(error.value)

    @pytest.mark.parametrize(
        "name", ["lra/listop", "uea/", "d4rl/ant-medium", "d4rl/hopper", "d4rl/", "minari/", "text", ""]
    )
    def test_unknown_names_are_refused(self, name, tmp_path):
        with pytest.raises(ValueError, match=r"unknown data set .*, and any uea/<Set> or d4rl/.* or minari/<id>\."):
            data.load(name, tmp_path)

    def test_the_nearest_name_is_offered(self, tmp_path):
        with pytest.raises(ValueError, match="did you mean 'lra/pathfinder'"):
            data.load("lra/pathfnder", tmp_path)

    def test_an_unknown_option_is_refused(self, tmp_path):
        with pytest.raises(TypeError, match="lenght"):
            data.load("enwik8", tmp_path, lenght=3)

    @pytest.mark.parametrize("name", ["lra/text", "lra/listops", "acl"])
    def test_a_length_is_positive(self, tmp_path, name):
        for length in (0, -1):
            with pytest.raises(ValueError, match=f"max_length must be a positive whole number, got {length}"):
                data.load(name, tmp_path, max_length=length)

    def test_a_set_of_the_archive_that_the_paper_does_not_have_may_be_a_slip(self, tmp_path):
        with pytest.raises(
            data.MissingDataError, match=r"JapaneseVowel \(did you mean 'JapaneseVowels'\?\) is missing"
        ):
            data.load("uea/JapaneseVowel", tmp_path)

    def test_what_is_not_generated_is_not_prepared(self, tmp_path):
        with pytest.raises(ValueError, match="generated, got 'enwik8'"):
            data.prepare("enwik8", tmp_path)

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("lra/listop", {}, "did you mean 'lra/listops'"),
            ("lra/listops", {"sed": 1}, "has no option 'sed' .did you mean 'seed'"),
            ("lra/listops", {"images": 1}, "has no option 'images'; accepted: seed, sizes, workers"),
            ("lra/listops", {"sizes": 3}, "must say how many rows train, val, test have, got 3"),
            (
                "lra/listops",
                {"sizes": {"train": 1, "val": 1, "test": 0}},
                "size of test must be a positive",
            ),
            ("lra/pathfinder", {"images": -1}, "images must be a positive whole number, got -1"),
            ("lra/pathfinder", {"images": 1, "workers": 0}, "workers must be a positive whole number, got 0"),
        ],
    )
    def test_a_wrong_wish_is_explained(self, tmp_path, name, options, message):
        with pytest.raises(ValueError, match=message):
            data.prepare(name, tmp_path, **options)


def test_a_part_without_cases_is_refused(tmp_path):
    data.prepare("lra/pathfinder", tmp_path, images=4, workers=1)
    with pytest.raises(data.DamagedDataError, match="is too small: nothing is left for its valid part"):
        data.load("lra/pathfinder", tmp_path, partial=True)


class TestComplete:
    def test_equal_or_unknown_counts_are_not_worth_a_word(self, tmp_path):
        assert store.complete(tmp_path, "rows", 3, 3) == store.complete(tmp_path, "rows", 3, None) == ""

    def test_fewer_are_refused_unless_asked_for(self, tmp_path):
        with pytest.raises(data.DamagedDataError, match=r"incomplete: it has 2 rows, the published data has 1,000"):
            store.complete(tmp_path / "a", "rows", 2, 1000)
        assert store.complete(tmp_path / "a", "rows", 2, 1000, partial=True) == "a: 2 rows instead of 1,000"

    def test_none_are_refused_in_any_case(self, tmp_path):
        for published in (1000, None):
            with pytest.raises(data.DamagedDataError, match=r"a has no rows\. Get it again"):
                store.complete(tmp_path / "a", "rows", 0, published, partial=True)

    def test_more_are_told(self, tmp_path):
        assert store.complete(tmp_path / "a", "rows", 4, 3) == "a: 4 rows instead of 3"


class TestChecksum:
    def test_depends_on_names_contents_and_borders(self, tmp_path):
        def of(**files):
            for name, content in files.items():
                (tmp_path / name).write_bytes(content)
            return store.checksum([tmp_path / name for name in files])

        sums = [of(a=b"12", b=b"3"), of(a=b"1", b=b"23"), of(b=b"3", a=b"12"), of(c=b"12", b=b"3")]
        assert len(set(sums)) == 4
        assert of(a=b"12", b=b"3") == sums[0]
        assert len(sums[0]) == 16


class TestCollate:
    def test_equal_lengths_have_no_mask(self):
        batch = data.collate([{"tokens": torch.arange(3), "label": torch.tensor(1)}] * 2)
        assert batch.keys() == {"tokens", "label"}
        assert batch["tokens"].shape == (2, 3)
        assert batch["label"].tolist() == [1, 1]

    def test_pads_at_the_end_with_zeros(self):
        series = [torch.randn(n, 2) for n in (4, 1, 3)]
        batch = data.collate([{"series": x} for x in series])
        assert batch["series"].shape == (3, 4, 2)
        assert batch["mask"].sum(1).tolist() == [4, 1, 3]
        for row, mask, x in zip(batch["series"], batch["mask"], series, strict=True):
            assert torch.equal(row[mask], x)
            assert (row[~mask] == 0).all()
            assert mask[: len(x)].all()

    def test_pairs_have_a_mask_each(self):
        items = [{"first": torch.arange(n), "second": torch.arange(m)} for n, m in ((2, 5), (3, 5))]
        batch = data.collate(items)
        assert batch["first_mask"].tolist() == [[True, True, False], [True, True, True]]
        assert batch["second"].shape == (2, 5)
        assert "second_mask" not in batch

    @pytest.mark.parametrize(("length", "padded"), [(None, 3), (2, 3), (3, 3), (5, 5)])
    def test_length_is_the_least(self, length, padded):
        batch = data.collate([{"tokens": torch.ones(3, dtype=torch.long)}] * 2, length=length)
        assert batch["tokens"].shape == (2, padded)
        assert batch["tokens"].sum() == 6
        assert ("mask" in batch) == (padded > 3)
        if padded > 3:
            assert batch["mask"].sum() == 6

    def test_a_mask_of_the_items_is_kept(self):
        batch = data.collate([{"mask": torch.tensor([True, False]), "states": torch.ones(2, 3)}] * 2)
        assert batch["mask"].tolist() == [[True, False]] * 2


class TestColumns:
    def test_must_agree_in_number(self):
        with pytest.raises(ValueError, match=r"as many cases, got .*'a': 2, 'b': 3"):
            Columns(a=torch.zeros(2), b=torch.zeros(3))

    def test_rows_may_overlap_and_repeat(self):
        rows = FlatSequences(torch.arange(5, dtype=torch.uint8), torch.tensor([0, 2]), torch.tensor([4, 5]), shift=255)
        assert rows[0].tolist() == [255, 256, 257, 258]
        assert [row.tolist() for row in rows.take(torch.tensor([1, 1]))] == [[257, 258, 259]] * 2
        assert rows[0].dtype == torch.long
