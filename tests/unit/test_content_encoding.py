"""Compressed bodies: what comes out, and what is refused."""

from __future__ import annotations

import gzip
import random
import tracemalloc
import zlib

import brotli
import pytest

from gateway.errors import ApiError
from gateway.openai.content_encoding import ENCODINGS, MAX_PIECES, check_encoding, decoded, zstd
from tests.http_client import COMPRESS

TEXT = b'{"model": "fake", "messages": []}' * 20
LIMIT = 10_000


def bare_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


ANY = [*COMPRESS.items(), ("deflate", bare_deflate)]
each_encoding = pytest.mark.parametrize(
    ("encoding", "compress"), ANY, ids=["gzip", "deflate", "br", "zstd", "bare deflate"]
)


async def refusal(data: bytes, encoding: str, limit: int = LIMIT) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await decoded(data, encoding, limit)
    return caught.value


@each_encoding
async def test_what_was_compressed_comes_out(encoding, compress):
    assert await decoded(compress(TEXT), encoding, len(TEXT)) == TEXT
    assert await decoded(compress(b""), encoding, LIMIT) == b""


async def test_what_was_not_compressed_stays_as_it_is():
    assert await decoded(TEXT, "identity", LIMIT) is TEXT


@each_encoding
async def test_one_byte_more_than_allowed_is_413(encoding, compress):
    assert (await refusal(compress(TEXT), encoding, len(TEXT) - 1)).status == 413


@each_encoding
async def test_every_cut_is_400(encoding, compress):
    """Also where all of the text is there, and only its checksum or its end is not."""
    data = compress(random.Random(7).randbytes(50))
    for length in range(len(data)):
        assert (await refusal(data[:length], encoding)).status == 400, length


@pytest.mark.parametrize(("encoding", "compress"), COMPRESS.items(), ids=list(COMPRESS))
async def test_bytes_behind_the_end_are_400(encoding, compress):
    assert (await refusal(compress(TEXT) + b"junk", encoding)).status == 400


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("zstd", zstd.compress)])
async def test_pieces_that_follow_each_other_are_one_body(encoding, compress):
    assert await decoded(compress(b"one ") * MAX_PIECES, encoding, LIMIT) == b"one " * MAX_PIECES
    assert (await refusal(compress(b"one ") * (MAX_PIECES + 1), encoding)).status == 400
    assert (await refusal(compress(TEXT) * 2, encoding, 2 * len(TEXT) - 1)).status == 413


@each_encoding
async def test_a_small_body_cannot_become_a_large_one(encoding, compress):
    bomb = compress(bytes(200_000_000) if encoding == "zstd" else bytes(20_000_000))
    tracemalloc.start()
    assert (await refusal(bomb, encoding, 1_000_000)).status == 413
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8_000_000


async def test_a_zstd_frame_that_tells_of_too_much_is_413_whatever_its_window():
    whole = zstd.compress(bytes(20_000_000))  # the size is told, and the window is as large
    assert (await refusal(whole, "zstd", 1_000_000)).status == 413


async def test_a_zstd_window_larger_than_the_encoding_may_have_is_400():
    options = {zstd.CompressionParameter.window_log: 27}
    compressor = zstd.ZstdCompressor(options=options)
    data = compressor.compress(TEXT) + compressor.flush()  # no size is told ahead, so the window is
    assert (await refusal(data, "zstd")).status == 400


async def test_brotli_is_bounded_between_its_own_blocks():
    data = brotli.compress(random.Random(7).randbytes(300_000))
    assert len(await decoded(data, "br", 300_000)) == 300_000
    assert (await refusal(data, "br", 299_999)).status == 413


def test_an_encoding_that_is_not_read_is_415_with_those_that_are():
    with pytest.raises(ApiError) as caught:
        check_encoding("compress")
    assert caught.value.status == 415
    assert caught.value.headers["Accept-Encoding"] == ", ".join(ENCODINGS)
    for encoding in ENCODINGS:
        check_encoding(encoding)
