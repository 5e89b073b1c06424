"""Why a host, or one on the way to it, is not reached, with what to do about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

#: paramiko's words where what answers begins as no sshd does
_NO_SSH = ("SSH protocol banner", "Indecipherable protocol version", "Invalid SSH banner")


@dataclass(frozen=True)
class Place:
    """Whom an error is of, and how what is known of it is kept: what helps must work for it."""

    address: str
    port: int
    #: where its key is kept, and the command that takes it out there
    known: str
    forget: str
    #: what to write for another login, and so that an unknown key is taken
    login: str = "Is user right, and is the key (key: FILE) among the machine's authorized_keys?"
    once: str = "host_key: once"
    strict: str = "host_key is known"
    #: before its name: what it is, if not the host itself
    role: str = ""

    def __str__(self) -> str:
        return f"{self.role}{self.address} port {self.port}"


def explained(place: Place, said: str) -> str:
    """The error with what to do about it."""
    if "does not match" in said:
        return (
            f"{place} shows another host key than the one kept in {place.known}. "
            "Either the machine is another one (a provider gave the address to a new one), or "
            f"somebody stands in between. If you know that it is new: {place.forget}"
        )
    if "StrictPolicy" in said:
        return (
            f"{place} is not in {place.known}, and {place.strict}. Put its key there, from the "
            f"provider's page or the machine's console, or set {place.once}"
        )
    if "Authentication error" in said or "No authentication methods" in said:
        return f"{place} lets nobody in with this login and key: {said}. {place.login}"
    if any(words in said for words in _NO_SSH):
        return (
            f"{place} cannot be reached by SSH: it takes the connection, and then "
            "closes it or says what is no SSH. Is it sshd's port? A provider's proxy does so too "
            "while the machine still starts, and sshd where too many log in at once"
        )
    if "resolve" in said:
        return f"{place.role}{place.address}: no such name: {said}"
    if any(words in said for words in ("Could not connect", "timed out", "SSH error", "EOF error")):
        return f"{place} cannot be reached: {said}"
    return said
