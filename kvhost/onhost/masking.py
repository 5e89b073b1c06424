"""Takes secrets out of command lines and texts, for the scripts beside it that show them."""

from __future__ import annotations

import re

_SECRET = r"(?:api[-_]?key|key|token|secret|password|passwd|passphrase|credentials?|auth)"
SECRET_NAME = re.compile(rf"(?i)(?:^|[-_.]){_SECRET}$")
_QUOTED = r"""\\?"[^"\n]*"|\\?'[^'\n]*'"""
#: what a secret looks like, and what is kept of it; kvhost/commands/run_log.py masks by these too
SECRET_TEXT = (
    (
        re.compile(
            rf"(?i)((?:^|[\s&?;,'\"{{_.-]){_SECRET}\\?['\"]?\s*[=:]\s*)"
            rf"(?:{_QUOTED}|['\"]?[^\s'\"&,}}]+)"
        ),
        r"\1",
    ),
    (
        re.compile(
            rf"(?i)((?<!-)--?(?:[\w-]{{0,60}}[-_])?{_SECRET}(?:\\?['\"]\s*,\s*|\s+))"
            rf"(?!-)(?:{_QUOTED}|\S+)"
        ),
        r"\1",
    ),
    # to the last @: a password may hold one, and after a ":" also a "/" where that is no port's
    (
        re.compile(r"(://)(?:[^\s/@:\"']*:(?!\d{1,5}/)[^\s\"']{0,500}|[^\s/\"']{1,500})(?=@)"),
        r"\1",
    ),
    (re.compile(r"(?i)(\bbearer\s+)\S+"), r"\1"),
    (re.compile(r"\b(hf_|sk-)[A-Za-z0-9_-]{8,}"), r"\1"),
)


def mask_text(text: str) -> str:
    for pattern, keep in SECRET_TEXT:
        text = pattern.sub(keep + "***", text)
    return text


def masked(argv: list[str]) -> list[str]:
    """A command line without its secrets: every value after a flag that names one, key=value."""
    out: list[str] = []
    after, first = False, False  # after a flag that names a secret; it is the first value of it
    for word in argv[:80]:
        if first or (after and not word.startswith("-")):
            out.append("***")
            first = False
            continue
        name, has_value, _ = word.partition("=")
        secret = bool(SECRET_NAME.search(name))
        after = first = secret and word.startswith("-") and not has_value
        out.append(f"{name}=***" if secret and has_value else mask_text(word)[:300])
    return out
