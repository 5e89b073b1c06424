"""A client for a bucket that several hosts share: S3, as AWS, Ceph, MinIO and Swift speak it.

A module beside kvhost_resp.py, with the methods that kvhost_store.py lists; in lib/ on the host,
and only the standard library: purge.py has no engine. Requests are signed (Signature Version 4,
https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-authenticating-requests.html) with the
SHA-256 of what they send, so a store takes nothing that was changed on the way; the same digest
lies with each value, and what does not have it when it comes back is a miss. A key of kvhost,
kvhost:NAMESPACE:…, is an object kvhost/NAMESPACE/… of the bucket.
"""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import hashlib
import hmac
import html
import http.client
import io
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote
from xml.etree import ElementTree

if TYPE_CHECKING:
    from kvhost.onhost.kvhost_resp import Said, StoreError, dial, reason
else:  # it lies beside this file, in lib/
    from kvhost_resp import Said, StoreError, dial, reason

#: of what is signed, where nothing is sent
NOTHING = hashlib.sha256(b"").hexdigest()
#: the SHA-256 of a value, stored with it
DIGEST = "x-amz-meta-kvhost-sha256"
#: bytes of a list or of an error; S3 lists 1000 names at once
LONGEST_TEXT = 16 << 20
#: answers after which the store is not asked for a while
AWAY = (429, 500, 502, 503, 504)
#: keys that S3 deletes in one request
DELETES = 1000
VERSIONS = (
    "the bucket keeps versions: what was removed stays in it as earlier ones, which a lifecycle "
    "rule of its own has to remove"
)


class Place(NamedTuple):
    """Where the bucket is. ``ca``: as of kvhost_resp.py."""

    host: str
    port: int
    bucket: str
    access: str
    region: str
    tls: bool = False
    ca: str | None = None

    def __str__(self) -> str:
        return f"s3+{'https' if self.tls else 'http'}://{self.authority}/{self.bucket}"

    @property
    def authority(self) -> str:
        """As it stands in the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def place_of(params: Any) -> Place:
    """From the JSON that services.py renders. Raises KeyError, TypeError."""
    return Place(
        str(params["host"]), int(params["port"]), str(params["bucket"]), str(params["access"]),
        str(params["region"]), bool(params.get("tls")), params.get("ca"),
    )  # fmt: skip


def encoded(query: Mapping[str, str]) -> str:
    """A query as it is signed and sent.

    >>> encoded({"prefix": "kvhost/a b", "delete": ""})
    'delete=&prefix=kvhost%2Fa%20b'
    """
    return "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in sorted(query.items()))


def authorization(
    access: str, secret: str, region: str, method: str, path: str, query: str,
    headers: Mapping[str, str],
) -> str:  # fmt: skip
    """The header of that name: Signature Version 4 over all of ``headers``, whose names are in
    lower case and have x-amz-date and x-amz-content-sha256 among them."""
    names, when = ";".join(sorted(headers)), headers["x-amz-date"]
    lines = (method, path, query, *(f"{name}:{headers[name]}" for name in sorted(headers)), "",
             names, headers["x-amz-content-sha256"])  # fmt: skip
    scope = (when[:8], region, "s3", "aws4_request")
    key = b"AWS4" + secret.encode()
    for word in scope:
        key = hmac.new(key, word.encode(), hashlib.sha256).digest()
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    signed = "\n".join(("AWS4-HMAC-SHA256", when, "/".join(scope), digest))
    signature = hmac.new(key, signed.encode(), hashlib.sha256).hexdigest()
    return (
        f"AWS4-HMAC-SHA256 Credential={access}/{'/'.join(scope)},SignedHeaders={names},"
        f"Signature={signature}"
    )


class Wire:
    """A socket for http.client: one answer ends in time, however slowly it comes."""

    def __init__(self, raw: socket.socket, timeout: float) -> None:
        self.raw, self.timeout = raw, timeout
        self.begin()

    def begin(self) -> None:
        self.deadline = time.monotonic() + self.timeout

    def wait(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.raw.settimeout(left)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(Answer(self))

    def sendall(self, data: Any) -> None:
        view = memoryview(data)
        while view:
            self.wait()
            view = view[self.raw.send(view) :]

    def close(self) -> None:
        self.raw.close()


class Answer(io.RawIOBase):
    """What one answer is read from: its end is not that of the connection."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = wire

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        self.wire.wait()
        return self.wire.raw.recv_into(target)


class Http(http.client.HTTPConnection):
    """Opens again by itself what was closed after an answer."""

    def __init__(self, place: Place, timeout: float) -> None:
        super().__init__(place.host, place.port)
        self.place, self.seconds = place, timeout

    def connect(self) -> None:
        self.sock: Any = Wire(dial(self.place, self.seconds), self.seconds)


class Connection:
    """One connection to the store. Methods raise StoreError and Said, as those of kvhost_resp.py;
    none waits longer than ``timeout`` for one answer."""

    #: as of kvhost_resp.py; each key of a look-up is a request of its own
    workers, lookers = 8, 16

    def __init__(self, place: Place, password: str | None, timeout: float) -> None:
        if password is None:
            raise StoreError(f"{place}: it asks for a secret key: set shared_tier_password_file "
                             "or KVHOST_SHARED_PASSWORD")  # fmt: skip
        self.place, self.secret, self.timeout = place, password, timeout
        self.http = Http(place, timeout)
        try:
            self.introduce()
        except BaseException:
            self.close()
            raise

    def introduce(self) -> None:
        """Asks for what is never there: the answer tells a wrong key from a missing bucket, and
        that what is asked for may be read. (An answer to HEAD would have no words.)"""
        answer = self.request("GET", "kvhost:-")
        code, words = self.error(answer)
        if answer.status in AWAY:
            raise self.away(answer, code)
        if answer.status not in (200, 404) or code == "NoSuchBucket":
            raise StoreError(f"{self.place}: {meaning(answer.status, code, words)}")
        if answer.status == 404 and code != "NoSuchKey":
            raise StoreError(f"{self.place}: this is no answer of S3: 404 {answer.reason[:40]!r}")

    def close(self) -> None:
        self.http.close()

    # what is asked

    def there(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are there."""
        return [self.has(key) for key in keys]

    def has(self, key: str) -> bool:
        answer = self.request("HEAD", key)
        if answer.status not in (200, 404):
            self.refuse(answer)
        answer.read()
        return answer.status == 200

    def get_into(self, key: str, target: memoryview) -> bool:
        """False where nothing is, or something of another size."""
        answer = self.request("GET", key)
        if answer.status != 200:
            code, words = self.error(answer)
            if answer.status == 404 and code != "NoSuchBucket":
                return False
            self.refuse(answer, code, words)
        view = target.cast("B") if target.format != "B" else target
        if answer.length != len(view):
            self.close()  # what comes is not waited for; the next request opens again
            return False
        had = 0
        while had < len(view):
            count = self.read(answer, view[had:])
            if not count:
                self.close()
                raise Said("a value ended before its length")
            had += count
        answer.read()
        if answer.headers.get(DIGEST) != hashlib.sha256(view).hexdigest():
            raise Said("what a value came with is not the SHA-256 of what came")
        return True

    def put(self, key: str, value: memoryview) -> None:
        """The value goes out as it lies in memory."""
        digest = hashlib.sha256(value).hexdigest()
        self.done(self.request("PUT", key, body=value, more={DIGEST: digest}))

    def find(self, pattern: str) -> Iterator[str]:
        """Keys that fit a pattern such as kvhost:NAMESPACE:*, each once."""
        query = {"list-type": "2", "prefix": path_of(re.split(r"[*?\[]", pattern)[0])}
        while True:
            tree = self.tree(self.request("GET", query=query))
            for name in tree.iterfind("{*}Contents/{*}Key"):
                key = (name.text or "").replace("/", ":")
                if path_of(key) == name.text and fnmatch.fnmatchcase(key, pattern):
                    yield key
            after = tree.findtext("{*}NextContinuationToken")
            if tree.findtext("{*}IsTruncated") != "true" or not after:
                return
            query["continuation-token"] = after

    def forget(self, keys: Sequence[str]) -> None:
        """Removes them. Raises Said, at the end, where some stay, be it as earlier versions."""
        stays = ""
        for start in range(0, len(keys), DELETES):
            rows = "".join(f"<Object><Key>{html.escape(path_of(key))}</Key></Object>"
                           for key in keys[start : start + DELETES])  # fmt: skip
            body = f"<Delete>{rows}</Delete>".encode()
            # S3 wants this one, against errors on the way and not against people
            md5 = hashlib.new("md5", body, usedforsecurity=False).digest()
            more = {"content-md5": base64.b64encode(md5).decode()}
            tree = self.tree(self.request("POST", query={"delete": ""}, body=body, more=more))
            failed = tree.find("{*}Error")
            if failed is not None:
                said = f"{failed.findtext('{*}Code')}: {failed.findtext('{*}Message')}"
                stays = f"some of what was to be removed stays: {said[:200]}"
            elif tree.find("{*}Deleted/{*}DeleteMarker") is not None:
                stays = stays or VERSIONS
        if stays or (keys and self.keeps_versions()):
            raise Said(stays or VERSIONS)

    def keeps_versions(self) -> bool:
        """As far as this user may ask. (AWS says so of a removal too, Swift does not.)"""
        try:
            tree = self.tree(self.request("GET", query={"versioning": ""}))
        except Said:
            return False
        return tree.find("{*}Status") is not None

    # requests and answers

    def request(
        self, method: str, key: str = "", *, query: Mapping[str, str] | None = None,
        body: bytes | memoryview = b"", more: Mapping[str, str] | None = None,
    ) -> http.client.HTTPResponse:  # fmt: skip
        """The answer, its head read and its body not."""
        place, sent = self.place, encoded(query or {})
        path = f"/{place.bucket}" + (f"/{quote(path_of(key), safe='/-_.~')}" if key else "")
        headers = {
            "host": place.authority,
            "x-amz-content-sha256": hashlib.sha256(body).hexdigest() if body else NOTHING,
            "x-amz-date": time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()),
            **(more or {}),
        }
        headers["authorization"] = authorization(
            place.access, self.secret, place.region, method, path, sent, headers
        )
        try:
            if self.http.sock is not None:
                self.http.sock.begin()
            target = f"{path}?{sent}" if sent else path
            # a store may refuse before it has all, and read no more
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.http.request(method, target, body or None, headers)
            return self.http.getresponse()
        except StoreError:  # of connect()
            self.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            raise self.failed(error) from None

    def failed(self, error: OSError | http.client.HTTPException) -> StoreError:
        self.close()
        if isinstance(error, (http.client.RemoteDisconnected, http.client.IncompleteRead)):
            return StoreError(f"{self.place}: the store closed the connection")
        if isinstance(error, OSError):
            return StoreError(f"{self.place}: {reason(error, self.timeout)}")
        return StoreError(f"{self.place}: this is no answer of S3: {str(error)[:40]!r}")

    def read(self, answer: http.client.HTTPResponse, target: memoryview) -> int:
        try:
            return answer.readinto(target)
        except (OSError, http.client.HTTPException) as error:
            raise self.failed(error) from None

    def text(self, answer: http.client.HTTPResponse) -> bytes:
        """All of a body that holds no value."""
        try:
            text = answer.read(LONGEST_TEXT)
            if answer.read(1):
                raise http.client.HTTPException("no end")
        except (OSError, http.client.HTTPException) as error:
            raise self.failed(error) from None
        return text

    def tree(self, answer: http.client.HTTPResponse) -> ElementTree.Element:
        if answer.status != 200:
            self.refuse(answer)
        try:
            return ElementTree.fromstring(self.text(answer))
        except ElementTree.ParseError:
            raise StoreError(f"{self.place}: this is no answer of S3") from None

    def error(self, answer: http.client.HTTPResponse) -> tuple[str, str]:
        """Code and message of an answer that is none of success."""
        found = self.text(answer).decode(errors="replace")
        words = [re.search(f"<{tag}>([^<]*)</{tag}>", found) for tag in ("Code", "Message")]
        code, message = (html.unescape(word[1]).strip() if word else "" for word in words)
        return code, message

    def done(self, answer: http.client.HTTPResponse) -> None:
        if answer.status not in (200, 204):
            self.refuse(answer)
        self.text(answer)

    def refuse(
        self, answer: http.client.HTTPResponse, code: str | None = None, words: str = ""
    ) -> None:
        """Raises StoreError of a store that is busy or broken, or has the bucket no more; else
        Said."""
        if code is None:
            code, words = self.error(answer)
        if code == "NoSuchBucket":
            raise StoreError(f"{self.place}: {meaning(answer.status, code, words)}")
        if answer.status in AWAY:
            raise self.away(answer, code)
        raise Said(f"{answer.status} {code or answer.reason}: {words}"[:200].rstrip(": "))

    def away(self, answer: http.client.HTTPResponse, code: str) -> StoreError:
        self.close()
        return StoreError(f"{self.place}: it answers {answer.status} {code or answer.reason}"[:300])


def path_of(key: str) -> str:
    """A key as the bucket has it.

    >>> path_of("kvhost:ns-ab:00000001:0:c0ffee:-")
    'kvhost/ns-ab/00000001/0/c0ffee/-'
    """
    return key.replace(":", "/")


def meaning(status: int, code: str, words: str) -> str:
    """What a refusal at the beginning means, and what to do about it."""
    if code == "SignatureDoesNotMatch":  # Swift says so of an unknown access key too
        return ("it refuses the access key or its secret key (shared_tier_access_key, "
                "shared_tier_password_file or KVHOST_SHARED_PASSWORD)")  # fmt: skip
    if code == "InvalidAccessKeyId":
        return "it does not know the access key (shared_tier_access_key)"
    if code == "NoSuchBucket":
        return "it has no such bucket, and kvhost makes none"
    if code == "RequestTimeTooSkewed":
        return "the clock of this host and the store's differ by too much"
    if code == "AuthorizationHeaderMalformed" or status in (301, 307):
        return f"the bucket is in another region or elsewhere (shared_tier_region): {words[:200]}"
    if code == "AccessDenied":
        return "it refuses the access key: that may not read there, or list (AccessDenied)"
    if not code:
        return f"this is no answer of S3: HTTP {status}"
    return f"it refuses: {status} {code}: {words[:200]}"
