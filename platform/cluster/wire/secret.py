"""Prove who is at the other end of the control channel: no secret travels on it, and each member has its own token.

The driver has a key; member N of a session has the token HMAC(key, session, N). In its greeting a member proves that it
has its token, by a nonce of its own; in the welcome the driver proves the same, so that neither talks to a stranger.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

MEMBER, DRIVER = "member", "driver"  # who proves it


def new() -> str:
    """Draw a key, a session or a nonce: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def token(key: str, session: str, number: int) -> str:
    """Derive the secret of member `number` from the run's key; who has it cannot derive another."""
    return _digest(key, "token", session, str(number))


def proof(own: str, who: str, nonce: str) -> str:
    """Show that `who` has the token `own`, for one nonce."""
    return _digest(own, who, nonce)


def same(given: str, wanted: str) -> bool:
    """Compare in a time that does not depend on where they differ; any text is compared."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), wanted.encode())


def _digest(key: str, *words: str) -> str:
    return hmac.new(key.encode(), "\0".join(words).encode(), hashlib.sha256).hexdigest()
