"""Signatures of S3 requests: the examples of Amazon's own page."""

from __future__ import annotations

from plato.core import sigv4
from plato.core.sigv4 import Keys

KEYS = Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "us-east-1")
AT = "20130524T000000Z"
HOST = "https://examplebucket.s3.amazonaws.com"


def test_get_of_a_range() -> None:
    signed = sigv4.signed(KEYS, "GET", f"{HOST}/test.txt", sigv4.NOTHING, AT, {"Range": "bytes=0-9"})
    assert signed["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
        " SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,"
        " Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )
    assert signed["host"] == "examplebucket.s3.amazonaws.com"


def test_put_of_a_name_that_is_encoded() -> None:
    digest = "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072"
    headers = {"date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"}
    url = f"{HOST}/{sigv4.path_of('test$file.text')}"
    assert url.endswith("/test%24file.text")
    signed = sigv4.signed(KEYS, "PUT", url, digest, AT, headers)
    assert signed["authorization"].endswith("98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd")
