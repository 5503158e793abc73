"""Which compiler builds the kernels, and what is left of a build that was killed."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from kernels.cpu import build
from kernels.dispatch import BackEndUnavailable


def test_a_compiler_may_be_named_with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -DNDEBUG '-DNAME=two words'")
    assert build._compiler() == [shutil.which("g++"), "-DNDEBUG", "-DNAME=two words"]


def test_a_compiler_that_is_not_there_is_no_reason_to_give_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with caplog.at_level("WARNING"):
        assert build._compiler() == [shutil.which("c++")]
    [record] = caplog.records
    assert "CXX is 'no-such-compiler -O1'" in record.message


def test_a_compiler_that_fails_without_a_word_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackEndUnavailable, match=r"`/bin/false .*: it ended with 1 and said nothing"):
        build.run_compiler(["/bin/false"], [tmp_path / "a.cpp"], tmp_path / "a.so", [])


def test_a_quote_without_its_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ '-DNAME")
    with pytest.raises(BackEndUnavailable, match='CXX is "g\\+\\+ \'-DNAME": No closing quotation'):
        build._compiler()


def test_what_a_killed_compilation_left_is_removed_after_a_while(tmp_path: Path) -> None:
    old, running, library = tmp_path / "unfinished-a", tmp_path / "unfinished-b", tmp_path / "headrace-1.so"
    for folder in (old, running):
        folder.mkdir()
        (folder / "half.o").write_bytes(b"\x7fELF")
    library.write_bytes(b"\x7fELF")
    hours_ago = time.time() - 7200
    os.utime(old, (hours_ago, hours_ago))
    os.utime(library, (hours_ago, hours_ago))
    build._remove_abandoned(tmp_path)
    assert not old.exists()
    assert (running / "half.o").exists()
    assert library.exists()
