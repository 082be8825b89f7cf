"""By what a file is known: the digest of its bytes, in manifests, deltas, commits and the versions of weights.

    pieces, on their way to somewhere ──update──► ContentDigest ──hexdigest──► 64 hexadecimal digits
                                                            named before ──────► the same? ──► mismatch, if not

It has to find two kinds of wrong bytes. Torn, lost and flipped ones, from disks, file systems and processes that were
killed: any long checksum finds those. And other ones, made on purpose: a version of the weights comes from whatever
answers at the address of another host, and the administrator's key says who asks there, not who answers. Its digest
alone came by a way of its own, so nobody may be able to make other bytes for it: a cryptographic hash. It is BLAKE3
(https://github.com/BLAKE3-team/BLAKE3-specs), whose 256 bits are taken to be as hard to meet as those of SHA-256, since
a processor's vector units hash several pieces of it at once, and weights are large.

    digest = ContentDigest()
    digest.update(b"ab")
    digest.update(b"c")
    digest.hexdigest()  # == digest_of(b"abc") == "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"

Digests that others define stay what they are: of datasets (`sha256sum` shows them), Redis's users, SGLang's tensors.
"""

from typing import Final, TypeAlias

from blake3 import blake3

DIGEST_NAME: Final = "BLAKE3"


ContentDigest: TypeAlias = blake3
"""Of bytes that come in pieces; a large piece is hashed without the interpreter's lock."""


def digest_of(data: bytes) -> str:
    """Of bytes that are here at once."""
    return blake3(data).hexdigest()


def mismatch(expected: str, actual: str) -> str:
    """What a message says of two digests that differ."""
    return f"expected {DIGEST_NAME} {expected}, got {actual}"
