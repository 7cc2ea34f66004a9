"""Store URLs as they may be shown: in messages, reprs and log lines, where a password must never stand.

A mistyped URL is shown as well, and it is unclear where its password begins: what is not clearly a host is left out.
"""

from __future__ import annotations

import re
from typing import Final

HIDDEN: Final = "***"

_HOST = r"(?:\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?"
_PLACE = re.compile(rf"(?:{_HOST}(?:,{_HOST})*)?(?:/[^:@]*)?")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_WITHOUT_SLASHES = re.compile(rf"{_SCHEME.pattern}:{_HOST}")
_OPTIONS = re.compile(r"[A-Za-z_]+=")
_USER = re.compile(r"(?:^|/)[^/?#]*:[^@]*@|[?&][A-Za-z_]*password=", re.DOTALL)
_LIKE_A_URL = re.compile(r"[^/]*:|.*/:|.*:.*@", re.DOTALL)
_WITH_COLON = re.compile(r"(?:rediss?|unix|sqlite|file|s3|https?)\b[^:/@]*(?=:)")
_PATHS = ("sqlite", "file")


def show_url(url: str) -> str:
    """The URL without user, password and options; of one that is mistyped, only its scheme.

    >>> show_url("redis://app:hunter2@cache:6379/0?timeout=3")
    'redis://cache:6379/0'
    >>> show_url("redis://app:hunter2cache:6379/0")
    'redis://***'
    """
    if not looks_like_url(url):
        return url  # a folder
    scheme, separator, rest = url.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        if re.fullmatch(_HOST, url):
            return url
        meant = _WITH_COLON.match(url)
        return f"{meant[0]}:{HIDDEN}" if meant else HIDDEN
    if scheme in _PATHS and rest.startswith("/") and not re.search(r":.*@", rest, re.DOTALL):
        return url
    before, question, options = rest.partition("?")
    if question and "@" in options and not _OPTIONS.match(options):
        before = rest  # an @ after a question mark: the question mark belongs to the password
    place = before.rpartition("@")[2]
    without_host = place.startswith("/") or not place
    if not _PLACE.fullmatch(place) or (without_host and "@" in before and scheme != "unix"):
        return f"{scheme}://{HIDDEN}"
    return f"{scheme}://{place}"


def looks_like_url(text: str) -> bool:
    """Whether it is a URL, or might be meant as one (`redis:host`, `redis//:password@host`), and not a folder."""
    return "://" in text or bool(_LIKE_A_URL.match(text))


def holds_password(url: str) -> bool:
    """Whether the URL shows a password.

    >>> holds_password("redis://app:hunter2@cache:6379/0"), holds_password("redis://cache:6379/0")
    (True, False)
    """
    if _WITHOUT_SLASHES.fullmatch(url):  # `redis:localhost`: mistyped, and nothing in it is where a password would be
        return False
    return looks_like_url(url) and (HIDDEN in show_url(url) or bool(_USER.search(url.partition("://")[2])))


def is_loopback(host: str) -> bool:
    """Whether a host is this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("localhost.example")
    (True, True, False)
    """
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
