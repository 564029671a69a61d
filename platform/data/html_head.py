"""Head of an HTML page that is one file: it loads nothing, and runs nothing but what its policy names by hash."""

from __future__ import annotations

import base64
import hashlib
from html import escape

_HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
{styles}
"""


def html_head(title: str, policy: str, *styles: str) -> str:
    """Return the first lines of an HTML page, such as of a step's sequences, with title, security policy and styles."""
    inside = "\n".join(f"<style>{style}</style>" for style in styles)
    return _HEAD.format(title=escape(title), policy=policy, styles=inside)


def policy_hash(text: str) -> str:
    """Return the hash by which the policy of an HTML page allows a script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
