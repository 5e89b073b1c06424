"""The door to the settings: data of hosts in, checked `Settings` or one error with all problems.

The schema itself is in kvhost/schema/settings.py; read secrets with kvhost/secrets.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvhost.basics import API_KEY_VARIABLE, SHARED_PASSWORD_VARIABLE
from kvhost.schema.combinations import combination_problems
from kvhost.schema.drives import HOST_DATA_ONLY
from kvhost.schema.llama import LlamaSettings
from kvhost.schema.ollama import OllamaSettings
from kvhost.schema.problems import (
    Problem,
    Refusal,
    SettingsError,
    holds_a_secret,
    names_a_secret,
    nearest,
    short,
    shown,
)
from kvhost.schema.runners import MoreRunner
from kvhost.schema.settings import Settings
from kvhost.schema.unsupported import NOT_SETTINGS, OTHER_NAMES

__all__ = [
    "API_KEY_VARIABLE",
    "Problem",
    "Settings",
    "SettingsError",
    "field_notes",
    "settings_digest",
    "validate_hosts",
]

_SECRET_SETTINGS = {
    "api_key_file": API_KEY_VARIABLE,
    "hf_token_file": "HF_TOKEN",
    "shared_tier_password_file": SHARED_PASSWORD_VARIABLE,
}
_SHARED = ("shared_tier", "shared_tier_access_key", "shared_tier_region", "shared_tier_timeout_s")
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
    "multiple_of": ("a multiple of", "multiple_of"),
}
_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_unicode": "text that can be written as UTF-8",
    "list_type": "a list of texts",
}


def validate_hosts(
    data_by_host: Mapping[str, Mapping[str, object]],
    foreign_keys: frozenset[str],
    env: Mapping[str, str] | None = None,
    elsewhere: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Settings]:
    """Check the data of all hosts, and only then return the settings of each, in the same order.

    `foreign_keys` are pyinfra's own (`ssh_user`, `_sudo`) and are let through unread; every other
    key must be a setting. `env` is the controller's environment (`os.environ` without it): only
    whether it has the variables with secrets matters here. `elsewhere`: host -> key -> the place
    ("--data", "a group") that a key comes from when it is not the host's own data; the keys of
    HOST_DATA_ONLY are refused from there. Raises `SettingsError` with every problem of every host,
    each once with the hosts that have it.
    """
    given = os.environ if env is None else env
    in_env = frozenset(name for name in _SECRET_SETTINGS.values() if given.get(name))
    settings: dict[str, Settings] = {}
    problems: dict[Problem, list[str]] = {}
    for host, data in data_by_host.items():
        checked = _check_host(data, foreign_keys, in_env)
        misplaced = list(_misplaced((elsewhere or {}).get(host, {})))
        if misplaced:
            checked = misplaced + (checked if isinstance(checked, list) else [])
        if isinstance(checked, Settings):
            settings[host] = checked
            checked = _reboots_the_controller(host, checked)
        for problem in checked:
            problems.setdefault(problem, []).append(host)
    if problems:
        raise SettingsError(problems, len(data_by_host))
    return settings


def _reboots_the_controller(host: str, settings: Settings) -> list[Problem]:
    """pyinfra's name of the machine that it runs on is @local."""
    if settings.driver_reboot and host.startswith("@local"):
        return [
            Problem(
                "driver_reboot",
                "the machine that kvhost itself runs on cannot be rebooted in the middle of a run",
                "driver_reboot = false: the run says when to reboot, and the next one goes on",
            )
        ]
    asked = "reboot" in settings.events and host.startswith("@local")
    if not asked or settings.reboot_local:
        return []
    what = "the test would reboot the machine that kvhost itself runs on"
    write = "reboot_local = true (kvhost verify goes on after it), or verify_events without reboot"
    return [Problem("verify_events, reboot_local", what, write)]


def settings_digest(settings: Settings) -> str:
    """SHA-256 (64 hex digits) over what the host's state depends on, as canonical JSON.

    Left out are the settings of the run and the verdict and the names of files on the controller;
    what is *in* those files (lock, key, token) has digests of its own in the receipt. A default
    that is written out gives the same digest as one that is not.
    """
    content = settings.model_dump(mode="json")
    content["tier_dir"] = settings.resolved_tier_dir
    content["cache_limit_gib"] = settings.limit_gib
    if settings.claims_a_drive:
        content["drive_mount"] = settings.resolved_drive_mount
    # receipts of before these settings existed stay what they are
    later = ("more_runners", "gpus", "gpu_memory_share", "tensor_parallel_size", *_SHARED)
    for key in (*later, *LlamaSettings.model_fields, *OllamaSettings.model_fields):
        if content[key] == Settings.model_fields[key].default:
            del content[key]
    reaching = {key: content[key] for key in content if field_notes(key)["reaches_host"]}
    canonical = json.dumps(reaching, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def field_notes(key: str) -> dict[str, Any]:
    """What the schema says about a setting: group, unit, example, reaches_host."""
    notes = Settings.model_fields[key].json_schema_extra
    if not isinstance(notes, dict):
        raise TypeError(f"the setting {key} has no notes in the schema")
    return dict(notes)


def _check_host(
    data: Mapping[str, object], foreign_keys: frozenset[str], in_env: frozenset[str]
) -> Settings | list[Problem]:
    problems: list[Problem] = []
    ours: dict[str, object] = {}
    bad: set[str] = set()
    for key, value in data.items():
        if not isinstance(key, str):
            what = "is not text, and so no setting"
            problems.append(
                Problem(f"a key of type {type(key).__name__}", what, "its name in quotes")
            )
        elif key in Settings.model_fields:
            if holds_a_secret(value):
                problems.append(_secret_in_setting(key))
                bad.add(key)
            else:
                ours[key] = value
        elif key not in foreign_keys:
            problems.append(_unknown(key, value, foreign_keys))
    try:
        checked = Settings.model_validate(ours, context={"in_env": in_env})
    except ValidationError as error:
        details = error.errors(include_url=False)
    else:
        return problems or checked
    for detail in details:
        if detail["loc"]:  # a single value; without a place it is the combinations, run below
            key = str(detail["loc"][0])
            bad.add(key)
            problems.append(_of_value(key, ours.get(key), detail))
    problems.extend(_of_combinations(ours, bad, in_env))
    return problems


def _misplaced(places: Mapping[str, str]) -> Iterator[Problem]:
    for key in sorted(HOST_DATA_ONLY & set(places)):
        yield Problem(
            key,
            f"comes from {places[key]}, where it could reach more than the one host that it is for",
            f"{_write(key)} in the data of that host in the inventory: ('host', {{'{key}': '…'}})",
        )


def _of_combinations(
    ours: Mapping[str, object], bad: set[str], in_env: frozenset[str]
) -> Iterator[Problem]:
    """Rules that look at no value which is wrong by itself, so that all problems come at once."""
    good: dict[str, Any] = {key: value for key, value in ours.items() if key not in bad}
    if "more_runners" in good:  # model_construct takes what it is given
        good["more_runners"] = [MoreRunner.model_validate(one) for one in good["more_runners"]]
    for keys, problem in combination_problems(Settings.model_construct(**good), in_env):
        if keys.isdisjoint(bad):
            yield problem


def _write(key: str, value: object = None) -> str:
    return f"{key} = {field_notes(key)['example'] if value is None else value!r}"


def _secret_in_setting(key: str) -> Problem:
    if key in _SECRET_SETTINGS:
        what = "looks like the secret itself (not shown); it must name a file that holds it"
        return Problem(key, what, _secret_goes(key))
    what = "looks like a secret (not shown), and settings are not secret: they reach files and logs"
    return Problem(key, what, f"{_write(key)}; {_secret_goes('api_key_file')} for a key")


def _secret_goes(key: str) -> str:
    return (
        f"{_write(key)} (a file on the controller, mode 0600), or {_SECRET_SETTINGS[key]} in the "
        "controller's environment"
    )


def _unknown(key: str, value: object, foreign_keys: frozenset[str]) -> Problem:
    name = key if re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", key) else short(key)
    if holds_a_secret(key):
        name = "(a key that looks like a secret, not shown)"
    meant = OTHER_NAMES.get(key.lower()) or nearest(key, {*Settings.model_fields, *foreign_keys})
    if key.lower() in NOT_SETTINGS:
        return Problem(name, *NOT_SETTINGS[key.lower()])
    file_meant = nearest(key, _SECRET_SETTINGS, cutoff=0.85)  # api_key_fil, not api_key
    if (names_a_secret(key) and file_meant is None) or holds_a_secret([key, value]):
        of_the_hub = re.search(r"hf|hug", key, re.IGNORECASE)
        file_key = "hf_token_file" if of_the_hub else "api_key_file"
        what = "is not a setting, and a secret is never given as data (the value is not shown)"
        return Problem(name, what, _secret_goes(file_key))
    if meant is None:
        return Problem(name, "is not a setting", "nothing; docs/settings.md has what there is")
    # not the value itself, which may be a secret, nor an example, which is somebody else's
    own = meant in Settings.model_fields
    write = f"{meant} = the value that was given" if own else f"{meant} (pyinfra's own)"
    return Problem(name, f"is not a setting; did you mean {meant}?", write)


def _choices(kind: Any) -> list[str]:
    """The texts of a Literal, also of one that may be left out (Literal | None)."""
    return [
        word
        for part in get_args(kind)
        for word in ([part] if isinstance(part, str) else _choices(part))
    ]


def _of_value(key: str, value: object, detail: ErrorDetails) -> Problem:
    """One error of pydantic in our words."""
    if key == "more_runners":
        return _of_runner(detail)
    kind, context = detail["type"], detail.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, Refusal):
        return Problem(key, cause.what, _write(key, cause.write))
    given = shown(key, value)
    unit = field_notes(key)["unit"]
    if kind == "literal_error":
        choices = _choices(Settings.model_fields[key].annotation)
        meant = nearest(value, choices) if isinstance(value, str) else None
        what = f"must be {' or '.join(choices)}, not {given}"
        return Problem(key, what, _write(key, meant or choices[0]))
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        what = f"must be {words} {context[name]} {unit}, not {given}"
        return Problem(key, what, _write(key))
    if len(detail["loc"]) > 1:
        what = f"item {int(detail['loc'][1]) + 1} of the list must be text, in quotes"
        return Problem(key, what, _write(key))
    if kind in _KINDS:
        what = f"must be {_KINDS[kind]}{f' ({unit})' if unit else ''}, not {given}"
        write = _write(key)
        if kind == "string_type" and isinstance(value, (int, float)) and not unit:
            write += f" (text that looks like a number, on the command line: --data '{key}=\"1\"')"
        return Problem(key, what, write)
    return Problem(key, f"{detail['msg']}, not {given}", _write(key))


def _of_runner(detail: ErrorDetails) -> Problem:
    """One error in an entry of more_runners, said with the entry's number and key."""
    _, *where = detail["loc"]
    if not where:
        return Problem("more_runners", "must be a list of runners", _write("more_runners"))
    place, cause = f"item {int(where[0]) + 1}", detail.get("ctx", {}).get("error")
    if len(where) == 1:
        what = f"{place} must be a mapping with name and api_port"
        return Problem("more_runners", what, _write("more_runners"))
    name = short(str(where[1])).strip("'")
    if detail["type"] == "missing":
        what = f"{place} has no {name}"
    elif detail["type"] == "extra_forbidden":
        meant = nearest(str(where[1]), MoreRunner.model_fields)
        what = f"{place}: a further runner has no {name} of its own"
        if where[1] in Settings.model_fields:
            what += ": it is one for all runners of a host, which share their cache"
        elif meant:
            what += f"; did you mean {meant}?"
    else:
        what = f"{place}, {name}: {cause.what if isinstance(cause, Refusal) else detail['msg']}"
    return Problem("more_runners", what, _write("more_runners"))
