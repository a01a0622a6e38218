"""The helpers that every layer uses."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from flowformer import _utils
from flowformer._utils import atomic_file, check_choice, check_options, check_positive, optional_import


class TestChecks:
    def test_a_choice(self):
        check_choice("colour", "red", ("red", "blue"))
        with pytest.raises(ValueError, match=r"unknown colour 'bleu' \(did you mean 'blue'\?\); accepted: red, blue\."):
            check_choice("colour", "bleu", ("red", "blue"))
        with pytest.raises(ValueError, match=r"unknown colour 7; accepted: red"):
            check_choice("colour", 7, ("red",))

    def test_options(self):
        check_options("this", ["rank"], {"rank": 1})
        with pytest.raises(ValueError, match=r"this has no option 'rnak' \(did you mean 'rank'\?\); accepted: rank\."):
            check_options("this", ["rnak"], ["rank"])
        with pytest.raises(ValueError, match="accepted: none"):
            check_options("this", ["rank"], [])

    @pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, "2", None])
    def test_what_is_not_positive(self, value):
        with pytest.raises(ValueError, match="size must be a positive whole number, got"):
            check_positive(fine=1, size=value)

    def test_an_optional_package_names_its_extra(self):
        with pytest.raises(ImportError, match=r"no_such_package is not installed; pip install 'flowformer\[rl\]'"):
            optional_import("no_such_package.part", "rl")
        assert optional_import("json", "rl") is json

    def test_a_broken_package_is_not_called_missing(self, tmp_path, monkeypatch):
        (tmp_path / "broken_package.py").write_text("import what_it_needs")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ModuleNotFoundError, match="what_it_needs"):
            optional_import("broken_package", "rl")


class TestAtomicFile:
    def test_replaces_the_old_content(self, tmp_path):
        path = tmp_path / "file"
        for content in ("old", b"new", "third\n"):
            _utils.write_atomically(path, content)
            assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
        assert os.listdir(tmp_path) == ["file"]

    def test_an_error_leaves_the_old_content_and_nothing_else(self, tmp_path):
        path = tmp_path / "file"
        path.write_text("old")
        with pytest.raises(TypeError), atomic_file(path) as file:
            file.writelines(["new", None])
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["file"]

    def test_a_full_disk_is_named(self, tmp_path):
        path = tmp_path / "file"
        with pytest.raises(OSError, match=rf"No space left on device: '{path}'"), atomic_file(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with pytest.raises(OSError, match=r"^in words$"), atomic_file(path):
            raise OSError("in words")

    def test_writers_with_the_same_process_id_do_not_mix(self, tmp_path):
        """As on two machines that share a folder, or in two threads; the last to finish wins."""
        path = tmp_path / "file"
        with atomic_file(path) as first:
            first.write("first")
            with atomic_file(path) as second:
                second.write("second, longer")
            assert path.read_text() == "second, longer"
        assert path.read_text() == "first"
        assert os.listdir(tmp_path) == ["file"]

    def test_text_is_utf_8_in_any_locale(self, tmp_path):
        """Tables of results have ± in them, and their page says that it is in UTF-8."""
        code = (
            "import pathlib, runpy, sys; write = runpy.run_path(sys.argv[1])['write_atomically']\n"
            "write(pathlib.Path('file'), 'a \\xb1 b')"
        )
        ascii_locale = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        subprocess.run([sys.executable, "-c", code, _utils.__file__], env=ascii_locale, cwd=tmp_path, check=True)
        assert (tmp_path / "file").read_bytes() == "a ± b".encode()

    def test_a_killed_writer_leaves_the_old_content(self, tmp_path):
        path = tmp_path / "file"
        path.write_text("old")
        code = (
            "import os, pathlib, sys; from flowformer._utils import atomic_file\n"
            "with atomic_file(pathlib.Path(sys.argv[1])) as file:\n"
            "    file.write('new'); file.flush(); os.kill(os.getpid(), 9)"
        )
        assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -9
        assert path.read_text() == "old"


class TestCommit:
    @pytest.fixture
    def checkout(self, tmp_path, monkeypatch):
        """A repository of somebody with this file at a place in it."""

        def place(folder):
            (tmp_path / folder / "flowformer").mkdir(parents=True)
            monkeypatch.setattr(_utils, "__file__", str(tmp_path / folder / "flowformer" / "_utils.py"))
            git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
            subprocess.run([*git, "init", "-q"], check=True)
            (tmp_path / "file").write_text("one")
            subprocess.run([*git, "add", "file"], check=True)
            subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
            return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout

        return place

    def test_of_a_checkout(self, checkout, tmp_path):
        commit = checkout("src")
        assert _utils.git_commit() == commit[:12]
        (tmp_path / "file").write_text("two")
        assert _utils.git_commit() == f"{commit[:12]}+"

    def test_of_a_package_installed_into_another_repository(self, checkout):
        checkout("vendor")
        assert _utils.git_commit() == "unknown"
