"""Bodies that were compressed on their way: read within a bound, and never in part."""

from __future__ import annotations

import asyncio
import sys
import zlib

import brotli

from gateway.errors import invalid_request, too_large, unsupported_media_type

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ENCODINGS = ("identity", "gzip", "deflate", "br", "zstd")

# A body may be several compressed pieces one behind the other, as some writers make them; each costs a
# copy of what is behind it.
MAX_PIECES = 16
_MAX_ZSTD_WINDOW_LOG = 23  # 8 MiB: what RFC 9659 allows the encoding of this name
_GZIP, _ZLIB, _BARE_DEFLATE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


class _GarbledError(Exception):
    """The bytes are not what their encoding says, or end before their end."""


class _TooLongError(Exception):
    pass


def check_encoding(encoding: str) -> None:
    """Raises ApiError 415 for one that is not read here."""
    if encoding not in ENCODINGS:
        raise unsupported_media_type(
            f"Content-Encoding must be one of {', '.join(ENCODINGS)}, not {encoding[:40]!r}.",
            headers={"Accept-Encoding": ", ".join(ENCODINGS)},
        )


async def decoded(data: bytes, encoding: str, max_bytes: int) -> bytes:
    """The body as it was before it was compressed. Raises ApiError 400 or 413."""
    if encoding == "identity":
        return data
    try:
        # In a thread: a few bytes can be megabytes.
        return await asyncio.to_thread(_decompress, data, encoding, max_bytes)
    except _TooLongError as error:
        raise too_large(max_bytes) from error
    except (_GarbledError, zlib.error, zstd.ZstdError, brotli.error) as error:
        form = "zstd with a window of at most 8 MiB" if encoding == "zstd" else encoding
        raise invalid_request(
            f"The request body is not whole, or is not in {form}, as its Content-Encoding says."
        ) from error


def _decompress(data: bytes, encoding: str, max_bytes: int) -> bytes:
    if encoding == "br":
        return _from_brotli(data, max_bytes)
    pieces: list[bytes] = []
    room = max_bytes + 1  # one byte more shows that there is more
    while data or not pieces:
        if len(pieces) == MAX_PIECES:
            raise _GarbledError
        decompressor = _decompressor(data, encoding, max_bytes)
        pieces.append(decompressor.decompress(data, max_length=room))
        room -= len(pieces[-1])
        if room == 0:
            raise _TooLongError
        if not decompressor.eof:
            raise _GarbledError
        data = decompressor.unused_data
    return b"".join(pieces)


def _decompressor(data: bytes, encoding: str, max_bytes: int) -> zlib._Decompress | zstd.ZstdDecompressor:
    if encoding == "zstd":
        told_bytes = zstd.get_frame_info(data).decompressed_size
        if told_bytes is not None and told_bytes > max_bytes:  # its window may be too large as well
            raise _TooLongError
        return zstd.ZstdDecompressor(
            options={zstd.DecompressionParameter.window_log_max: _MAX_ZSTD_WINDOW_LOG}
        )
    if encoding == "gzip":
        return zlib.decompressobj(_GZIP)
    # By its name "deflate" has a wrapping of zlib, which some clients leave away; RFC 1950 has its beginning.
    is_wrapped = data[:1] != b"" and data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0
    return zlib.decompressobj(_ZLIB if is_wrapped else _BARE_DEFLATE)


def _from_brotli(data: bytes, max_bytes: int) -> bytes:
    """It gives output in blocks of its own size, so that the bound is looked at between them."""
    decompressor = brotli.Decompressor()
    pieces: list[bytes] = []
    room = max_bytes
    while True:
        pieces.append(decompressor.process(data, output_buffer_limit=room + 1))
        data = b""
        room -= len(pieces[-1])
        if room < 0:
            raise _TooLongError
        if decompressor.is_finished():
            return b"".join(pieces)
        if not pieces[-1]:
            raise _GarbledError
