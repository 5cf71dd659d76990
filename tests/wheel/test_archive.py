# SPDX-License-Identifier: Apache-2.0
"""The zip writer, read back by Python's own zip reader."""

import io
import zipfile

import pytest

from tools.wheel.archive import Writer


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/text.py", "x = 1\n" * 5000)
        archive.writestr("a/empty.py", "")
        library = zipfile.ZipInfo("a/lib.so", (2026, 10, 20, 8, 40, 20))
        library.external_attr = 0o100755 << 16
        archive.writestr(library, bytes(range(256)) * 99)
        archive.writestr("a/名前.txt", "text")
    return zipfile.ZipFile(path)


def written(source) -> bytes:
    buffer = io.BytesIO()
    writer = Writer(buffer)
    for info in source.infolist():
        writer.copy(source, info)
    writer.add("b/new.py", b"y = 2\n")
    writer.add("b/new.so", b"\x7fELF", executable=True)
    writer.close()
    return buffer.getvalue()


def test_members_read_back_as_they_were(source):
    copy = zipfile.ZipFile(io.BytesIO(written(source)))
    assert copy.testzip() is None
    assert copy.namelist() == [*source.namelist(), "b/new.py", "b/new.so"]
    for info in source.infolist():
        assert copy.read(info.filename) == source.read(info.filename)
        assert copy.getinfo(info.filename).compress_size == info.compress_size
    assert copy.read("b/new.py") == b"y = 2\n"


def test_permissions_survive_and_dates_do_not(source):
    copy = zipfile.ZipFile(io.BytesIO(written(source)))
    modes = {info.filename: oct(info.external_attr >> 16) for info in copy.infolist()}
    assert modes["a/lib.so"] == modes["b/new.so"] == "0o100755"
    assert modes["b/new.py"] == "0o100644"
    assert {info.date_time for info in copy.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_the_same_input_gives_the_same_bytes(source):
    assert written(source) == written(source)
