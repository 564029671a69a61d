"""Mutual authentication on the control channel: no secret travels on it, and each member has its own token.

The driver has a key; member N of a session has the token HMAC(key, session, N). On a new connection the driver sends a
nonce, its challenge. In its greeting a member proves that it holds its token, for that nonce and one that it chose; in
the welcome the driver proves for the same two that it holds the same token. Each side thus knows its peer, and neither
message can be replayed on another connection.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

MEMBER, DRIVER = "member", "driver"  # which side a proof is from


def new() -> str:
    """Draw a random key, session or nonce for the authentication between driver and workers: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def token(key: str, session: str, number: int) -> str:
    """Derive the secret token with which member `number` of a switchboard's `session` authenticates, from the run's
    `key`; its holder cannot derive another member's. 64 hexadecimal digits."""
    return _hmac(key, "token", session, str(number))


def proof(own: str, who: str, challenge: str, nonce: str) -> str:
    """Compute the proof that side `who` (MEMBER or DRIVER) of a control connection holds the member's token `own`, for
    the driver's `challenge` and a `nonce` that the member chose: 64 hexadecimal digits, sent in place of the token."""
    return _hmac(own, who, challenge, nonce)


def same(given: str, wanted: str) -> bool:
    """Compare two proofs of a worker's or driver's secret, in constant time; `given`: any text, from the peer."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), wanted.encode())


def _hmac(key: str, *words: str) -> str:
    """Return the HMAC-SHA256 under `key` of `words`, joined by NUL, to authenticate a worker: 64 hex digits."""
    return hmac.new(key.encode(), "\0".join(words).encode(), hashlib.sha256).hexdigest()
