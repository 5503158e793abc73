"""Compressed bodies, made without a compressor where the format lets data stand as it is."""

from __future__ import annotations

import functools
import gzip
import zlib

MAX_STORED_BYTES = 65_536
BOMB_BYTES = 64 * 2**20
ZSTD_BLOCK_BYTES = 128 * 1024
_ZSTD_MAGIC = 0xFD2FB528.to_bytes(4, "little")


def deflated(data: bytes) -> bytes:
    """HTTP's `deflate` (RFC 9110, 8.4.1.2): in the zlib format."""
    return zlib.compress(data)


def stored_brotli(data: bytes) -> bytes:
    """One uncompressed meta-block, and an empty last one (RFC 7932, section 9.2)."""
    assert 0 < len(data) <= MAX_STORED_BYTES, "a meta-block of four nibbles holds 1 to 65,536 bytes"
    # From the lowest bit: WBITS 0 (window of 64 KiB), ISLAST 0, MNIBBLES 00,
    # MLEN - 1 in 16 bits, ISUNCOMPRESSED 1.
    head = (len(data) - 1) << 4 | 1 << 20
    return head.to_bytes(3, "little") + data + b"\x03"


def stored_zstd(data: bytes) -> bytes:
    """One frame of a single raw block (RFC 8878, section 3.1)."""
    single_segment = b"\xa0"  # descriptor: the window is the content, whose size has 4 bytes
    return _zstd_frame(single_segment, len(data)) + _zstd_block(data, kind=0, size=len(data), is_last=True)


def zstd_bomb(begin: bytes) -> bytes:
    """`begin`, and spaces up to BOMB_BYTES, in two kilobytes: a block may be one byte, repeated."""
    num_blocks = BOMB_BYTES // ZSTD_BLOCK_BYTES
    blocks = [_zstd_block(begin, kind=0, size=len(begin), is_last=False)]
    blocks += [
        _zstd_block(b" ", kind=1, size=ZSTD_BLOCK_BYTES, is_last=number == num_blocks - 1)
        for number in range(num_blocks)
    ]
    window_of_8_mib = b"\x80\x68"  # the largest that HTTP allows (RFC 9659)
    return _zstd_frame(window_of_8_mib, len(begin) + num_blocks * ZSTD_BLOCK_BYTES) + b"".join(blocks)


@functools.lru_cache(maxsize=4)
def gzip_bomb(begin: bytes) -> bytes:
    """`begin`, and spaces up to BOMB_BYTES, in some 64 kilobytes."""
    return gzip.compress(begin.ljust(BOMB_BYTES), compresslevel=6)


def _zstd_frame(descriptors: bytes, num_bytes: int) -> bytes:
    """The head of a frame. `descriptors`: its own, and the window's, if it has one."""
    return _ZSTD_MAGIC + descriptors + num_bytes.to_bytes(4, "little")


def _zstd_block(content: bytes, *, kind: int, size: int, is_last: bool) -> bytes:
    return (is_last | kind << 1 | size << 3).to_bytes(3, "little") + content
