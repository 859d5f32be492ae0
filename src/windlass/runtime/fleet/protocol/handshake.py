"""Mutual authentication of root and worker by a shared secret, which is never sent. Bytes only: no socket, no clock.

Both send a hello with their version and a nonce. Each then sends the HMAC-SHA256, keyed with the secret, of its role and both hellos: the
root first, so that a stranger learns only a version. A proof cannot be replayed (the nonces are new) or reflected (the roles differ). Two
further HMACs are the keys with which each side signs its frames. Nothing is encrypted: an eavesdropper can read weights and messages, but
cannot change them unnoticed. (HMAC: RFC 2104.)
"""

from __future__ import annotations

import hmac
import secrets
from typing import NamedTuple

import msgspec

from windlass import __version__
from windlass.errors import BadInput
from windlass.foreign import shown

NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_HELLO_BYTES = 512
"""Of any frame of the handshake."""
PROTOCOL = 2
"""Version of the messages (messages.py); to be raised when they change."""
VERSION = f"{__version__} (protocol {PROTOCOL})"
ROOT, WORKER = "root", "worker"


DECODE_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)
"""What msgspec raises; ValueError for invalid UTF-8, RecursionError for deep nesting."""


class NotAdmitted(BadInput):
    """The other side has another version, or does not know the secret."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="windlass"):
    version: str
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True, tag="proof"):
    mac: bytes


class ProofRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The last frame: the proof was wrong."""


HandshakeMessage = Hello | Proof | ProofRefused
_decode = msgspec.msgpack.Decoder(HandshakeMessage).decode


class SigningKeys(NamedTuple):
    mine: bytes
    theirs: bytes


class Handshake:
    """One side of it."""

    def __init__(self, secret: bytes, role: str, version: str = VERSION) -> None:
        self._secret, self._role, self._peer_role, self._version = secret, role, WORKER if role == ROOT else ROOT, version
        self.hello = msgspec.msgpack.encode(Hello(version, secrets.token_bytes(NONCE_BYTES)))
        self._other_hello = b""

    def receive_hello(self, data: bytes) -> None:
        """Raises NotAdmitted, with both versions, unless they are the same."""
        hello = self._decode_frame(data)
        if not isinstance(hello, Hello) or len(hello.nonce) != NONCE_BYTES:
            raise NotAdmitted("it does not speak Windlass's protocol")
        if hello.version != self._version:
            raise NotAdmitted(
                f"the {self._peer_role} is Windlass {shown(hello.version, 40)}, this {self._role} {self._version};"
                " install the same version on both machines"
            )
        self._other_hello = data

    def proof(self) -> bytes:
        return msgspec.msgpack.encode(Proof(self._mac("proof", self._role)))

    def receive_proof(self, data: bytes) -> None:
        message = self._decode_frame(data)
        if isinstance(message, ProofRefused):
            raise NotAdmitted(f"the {self._peer_role} has another secret; give both the same --secret-file")
        if not isinstance(message, Proof) or not hmac.compare_digest(message.mac, self._mac("proof", self._peer_role)):
            raise NotAdmitted(f"the {self._peer_role} does not know the secret; give both the same --secret-file")

    def keys(self) -> SigningKeys:
        return SigningKeys(self._mac("frames", self._role), self._mac("frames", self._peer_role))

    def _mac(self, what: str, role: str) -> bytes:
        """msgpack prefixes every part with its length, so that no two inputs encode alike."""
        root, worker = (self.hello, self._other_hello) if self._role == ROOT else (self._other_hello, self.hello)
        return hmac.digest(self._secret, msgspec.msgpack.encode(("windlass", what, role, root, worker)), "sha256")

    def _decode_frame(self, data: bytes) -> HandshakeMessage:
        try:
            return _decode(data)
        except DECODE_ERRORS:
            raise NotAdmitted("it does not speak Windlass's protocol") from None


PROOF_REFUSED = msgspec.msgpack.encode(ProofRefused())
