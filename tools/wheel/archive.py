# SPDX-License-Identifier: Apache-2.0
"""Writing a zip file whose bytes depend on nothing but its content.

Python's zipfile cannot copy a compressed member as it is, and compressing 480 MB of
kernels anew takes a minute and gives bytes that differ between zlib builds. So the
three kinds of zip record are written here. Our own members are stored uncompressed.
Layout: PKWARE's APPNOTE.TXT, sections 4.3.7 (local), 4.3.12 (central), 4.3.16 (end).
"""

import stat
import struct
import zipfile
import zlib
from typing import BinaryIO

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
VERSION = 20  # of the zip format: folders and deflate
MADE_ON_UNIX = 3 << 8
DATE, TIME = 1 << 5 | 1, 0  # 1980-01-01 00:00, the earliest date a zip file can state
UTF8 = 0x800
LIMIT = 0xFFFFFFFF


class Writer:
    """Appends members to an empty binary file; `close` writes the directory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._directory: list[bytes] = []

    def add(self, name: str, data: bytes, executable: bool = False) -> None:
        """A new member, stored without compression."""
        mode = stat.S_IFREG | (0o755 if executable else 0o644)
        self._append(name, data, zipfile.ZIP_STORED, zlib.crc32(data), len(data), mode << 16)

    def copy(self, source: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
        """A member of another archive, its compressed bytes untouched."""
        raw = _compressed_bytes(source, info)
        size, attributes = info.file_size, info.external_attr
        self._append(info.filename, raw, info.compress_type, info.CRC, size, attributes)

    def close(self) -> None:
        """Write the central directory. The file itself stays open."""
        start = self._file.tell()
        for entry in self._directory:
            self._file.write(entry)
        count, size = len(self._directory), self._file.tell() - start
        if count > 0xFFFF or start + size > LIMIT:
            raise ValueError("the archive needs zip64, which wheels of this size should not")
        self._file.write(END.pack(b"PK\5\6", 0, 0, count, count, size, start, 0))

    def _append(
        self, name: str, raw: bytes, method: int, crc: int, size: int, attributes: int
    ) -> None:
        offset, encoded = self._file.tell(), name.encode()
        if offset + len(raw) > LIMIT or size > LIMIT:
            raise ValueError(f"{name} needs zip64, which wheels of this size should not")
        flags = 0 if name.isascii() else UTF8
        common = (VERSION, flags, method, TIME, DATE, crc, len(raw), size, len(encoded))
        self._file.write(LOCAL.pack(b"PK\3\4", *common, 0) + encoded)
        self._file.write(raw)
        tail = (0, 0, 0, 0, attributes, offset)  # extra, comment, disk, internal
        central = CENTRAL.pack(b"PK\1\2", MADE_ON_UNIX | VERSION, *common, *tail)
        self._directory.append(central + encoded)


def _compressed_bytes(source: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    file = source.fp
    assert file is not None, "the source archive is closed"
    file.seek(info.header_offset)
    header = LOCAL.unpack(file.read(LOCAL.size))
    name_length, extra_length = header[-2:]
    file.seek(name_length + extra_length, 1)
    return file.read(info.compress_size)
