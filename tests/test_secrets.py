"""Secrets: where they come from, what is refused, and that none is ever shown."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from kvhost.secrets import Secret, SecretError, api_key, hf_token
from kvhost.settings import Settings

REVISION = "0123456789abcdef0123456789abcdef01234567"
HUB = {"model_source": "org/name", "model_revision": REVISION}
KEY = "Correct-Horse_7"


def written(tmp_path: Path, content: bytes, mode: int = 0o600) -> str:
    file = tmp_path / "key"
    file.write_bytes(content)
    file.chmod(mode)
    return str(file)


def value(secret: Secret | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
def test_a_key_is_read_from_its_file(tmp_path: Path, ending: bytes) -> None:
    settings = Settings(api_key_file=written(tmp_path, KEY.encode() + ending))
    assert value(api_key(settings, {})) == KEY


def test_a_key_is_read_from_the_environment() -> None:
    assert value(api_key(Settings(), {"KVHOST_API_KEY": KEY})) == KEY
    assert api_key(Settings(), {"HF_TOKEN": KEY}) is None
    assert api_key(Settings(), {}) is None


def test_a_file_counts_before_the_environment(tmp_path: Path) -> None:
    settings = Settings(api_key_file=written(tmp_path, KEY.encode()))
    assert value(api_key(settings, {"KVHOST_API_KEY": "another"})) == KEY


def test_a_file_that_cannot_be_used_does_not_fall_back_to_the_environment(tmp_path: Path) -> None:
    settings = Settings(api_key_file=written(tmp_path, b""))
    with pytest.raises(SecretError, match="empty"):
        api_key(settings, {"KVHOST_API_KEY": KEY})


def test_the_token_is_for_a_model_on_the_hub_only(tmp_path: Path) -> None:
    file = written(tmp_path, KEY.encode())
    assert value(hf_token(Settings(hf_token_file=file, **HUB), {})) == KEY  # type: ignore[arg-type]
    assert value(hf_token(Settings(**HUB), {"HF_TOKEN": KEY})) == KEY  # type: ignore[arg-type]
    assert hf_token(Settings(**HUB), {"KVHOST_API_KEY": KEY}) is None  # type: ignore[arg-type]
    for source in ("builtin", "/srv/model"):
        settings = Settings(model_source=source, hf_token_file=file)
        assert hf_token(settings, {"HF_TOKEN": KEY}) is None


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o602, 0o644, 0o610, 0o777])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = written(tmp_path, KEY.encode(), mode)
    with pytest.raises(SecretError, match=f"mode {mode:04o}.*write: chmod 600 {re.escape(file)}"):
        api_key(Settings(api_key_file=file), {})


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_file_of_its_owner_alone_is_taken(tmp_path: Path, mode: int) -> None:
    settings = Settings(api_key_file=written(tmp_path, KEY.encode(), mode))
    assert value(api_key(settings, {})) == KEY


def test_a_link_is_followed_and_the_file_behind_it_judged(tmp_path: Path) -> None:
    file = written(tmp_path, KEY.encode())
    link = tmp_path / "link"
    link.symlink_to(file)
    assert value(api_key(Settings(api_key_file=str(link)), {})) == KEY
    Path(file).chmod(0o644)
    with pytest.raises(SecretError, match="mode 0644"):
        api_key(Settings(api_key_file=str(link)), {})


UNUSABLE: list[tuple[bytes, str]] = [
    (b"", "empty"),
    (b"\n", "empty"),
    (b"\r\n", "empty"),
    (b"hunter2\n\n", "control character"),
    (b"hunter2\nhunter3\n", "control character"),
    (b" hunter2", "a space"),
    (b"hunter2 \n", "a space"),
    (b"hunter\t2", "control character"),
    (b"hunter2\0", "control character"),
    (b"hunter2\x1b[2J", "control character"),
    (b"hunter2\x7f", "control character"),
    ("hunter2\u00e4".encode(), "not ASCII"),
    (b"hunter2\xff", "not ASCII"),
    (b"\xef\xbb\xbfhunter2", "not ASCII"),
    (b"hunter2" * 1000, "too long"),
]


@pytest.mark.parametrize(("content", "said"), UNUSABLE)
def test_a_file_without_a_usable_secret_is_refused(
    tmp_path: Path, content: bytes, said: str
) -> None:
    file = written(tmp_path, content)
    with pytest.raises(SecretError, match=said) as caught:
        api_key(Settings(api_key_file=file), {})
    assert str(caught.value).startswith(f"api_key_file: {file} ")
    assert "hunter" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("text", ["", "\n", "hunter2 x", "hunter2\x00", "hunter2\u00e4"])
def test_a_variable_without_a_usable_secret_is_refused(text: str) -> None:
    with pytest.raises(SecretError, match=r"^KVHOST_API_KEY in the controller's env") as caught:
        api_key(Settings(), {"KVHOST_API_KEY": text})
    assert "hunter" not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="not a regular file"):
        api_key(Settings(api_key_file=str(tmp_path)), {})
    with pytest.raises(SecretError, match="not a regular file"):
        api_key(Settings(api_key_file="/dev/null"), {})
    with pytest.raises(SecretError, match="home directory"):
        api_key(Settings(api_key_file="~no-such-user-here/key"), {})


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(SecretError, match="not a regular file"):
        api_key(Settings(api_key_file=str(pipe)), {})


def test_a_path_that_leads_nowhere_is_not_shown() -> None:
    with pytest.raises(SecretError, match="No such file") as caught:
        api_key(Settings(api_key_file="hunter2"), {})
    assert "hunter2" not in str(caught.value)
    assert caught.value.__suppress_context__, "nor in the traceback"


def test_a_secret_may_be_as_long_as_a_header_and_no_longer(tmp_path: Path) -> None:
    settings = Settings(api_key_file=written(tmp_path, b"k" * 4096))
    assert value(api_key(settings, {})) == "k" * 4096
    with pytest.raises(SecretError, match="more than 4096 bytes"):
        api_key(Settings(api_key_file=written(tmp_path, b"k" * 4097)), {})


def test_a_relative_path_and_a_home_are_those_of_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, KEY.encode())
    monkeypatch.chdir(tmp_path)
    assert value(api_key(Settings(api_key_file="key"), {})) == KEY
    monkeypatch.setenv("HOME", str(tmp_path))
    assert value(api_key(Settings(api_key_file="~/key"), {})) == KEY


def test_a_secret_is_masked_wherever_it_is_shown() -> None:
    secret = Secret(KEY)
    for text in (repr(secret), str(secret), f"{secret}", f"{secret!r}", repr([secret])):
        assert KEY not in text and "***" in text
    with pytest.raises(TypeError):
        json.dumps(secret)
    assert secret == Secret(KEY) and secret != Secret("another")
