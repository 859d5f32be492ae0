"""How root and worker prove to each other that both know the secret, without saying it. Bytes only: no socket, no clock.

The root says hello with its version and a random number, the worker likewise. Each then sends the HMAC-SHA256, under the secret, of who it
is and both hellos: the root first, so that a stranger learns nothing but a version. What one says is of no use to whoever hears it, neither
later (the numbers are new) nor to the other side (who it is differs). Two further HMACs are the keys with which each signs from then on.
Nothing is encrypted: whoever is on the wire can read weights and numbers, but not change a bit of them unnoticed. (HMAC: RFC 2104.)
"""

from __future__ import annotations

import hmac
import secrets
from typing import NamedTuple

import msgspec

from windlass import __version__
from windlass.errors import BadInput

NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_HELLO_BYTES = 512
"""Of any frame before both have proved themselves."""
PROTOCOL = 2
"""Of the words in messages.py: to be counted up when they change."""
VERSION = f"{__version__} (protocol {PROTOCOL})"
ROOT, WORKER = "root", "worker"


DECODE_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)
"""What msgspec raises: also where a text is no UTF-8, and where lists lie in lists without end."""


class NotAdmitted(BadInput):
    """The other side speaks, but another version, or does not know the secret."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="windlass"):
    version: str
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True, tag="proof"):
    mac: bytes


class ProofRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The last frame: the proof is not one."""


HandshakeMessage = Hello | Proof | ProofRefused
_decode = msgspec.msgpack.Decoder(HandshakeMessage).decode


class SigningKeys(NamedTuple):
    mine: bytes
    theirs: bytes


class Handshake:
    """One side of it."""

    def __init__(self, secret: bytes, role: str, version: str = VERSION) -> None:
        self._secret, self._role, self._other, self._version = secret, role, WORKER if role == ROOT else ROOT, version
        self.hello = msgspec.msgpack.encode(Hello(version, secrets.token_bytes(NONCE_BYTES)))
        self._heard = b""

    def hear_hello(self, data: bytes) -> None:
        """Raises NotAdmitted, with both versions, unless they are the same."""
        hello = self._decoded(data)
        if not isinstance(hello, Hello) or len(hello.nonce) != NONCE_BYTES:
            raise NotAdmitted("it does not speak as Windlass does")
        if hello.version != self._version:
            raise NotAdmitted(
                f"the {self._other} is Windlass {_shown(hello.version)}, this {self._role} {self._version};"
                " install the same version on both machines"
            )
        self._heard = data

    def proof(self) -> bytes:
        return msgspec.msgpack.encode(Proof(self._signed("proof", self._role)))

    def hear_proof(self, data: bytes) -> None:
        said = self._decoded(data)
        if isinstance(said, ProofRefused):
            raise NotAdmitted(f"the {self._other} has another secret; give both the same --secret-file")
        if not isinstance(said, Proof) or not hmac.compare_digest(said.mac, self._signed("proof", self._other)):
            raise NotAdmitted(f"the {self._other} does not know the secret; give both the same --secret-file")

    def keys(self) -> SigningKeys:
        return SigningKeys(self._signed("frames", self._role), self._signed("frames", self._other))

    def _signed(self, what: str, role: str) -> bytes:
        """Every part has a length before it: no two handshakes can be read as one another."""
        root, worker = (self.hello, self._heard) if self._role == ROOT else (self._heard, self.hello)
        return hmac.digest(self._secret, msgspec.msgpack.encode(("windlass", what, role, root, worker)), "sha256")

    def _decoded(self, data: bytes) -> HandshakeMessage:
        try:
            return _decode(data)
        except DECODE_ERRORS:
            raise NotAdmitted("it does not speak as Windlass does") from None


PROOF_REFUSED = msgspec.msgpack.encode(ProofRefused())


def _shown(version: str) -> str:
    """A stranger's words, on one short line."""
    return ascii(version)[1:-1][:40]
