"""The whole deploy with the runner Ollama on hosts with systemd; the program is a double."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e_tools import Done
from tests.lab.nspawn import Host, Lab
from tests.lab.nspawn_engine import engine_binds
from tests.ollama_site import (
    BASE,
    DROP_IN,
    FOLDER,
    MODEL,
    PLACE,
    UNIT,
    UNIT_TEXT,
    Site,
    api,
    install,
    packed,
    show,
)

pytestmark = [
    pytest.mark.systemd,
    pytest.mark.runners,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces, mounts, containers"),
]
TOOLS = f"{BASE}/tools"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A host with an Ollama of somebody else's, adopted with KV of q8_0."""
    with Lab() as lab:
        host = lab.host("ollama")
        install(host)
        made = Site(lab, tmp_path_factory.mktemp("ollama"), host)
        done = made.pyinfra(ollama_kv_cache_type="q8_0")
        assert done.code == 0, done.text[-5000:]
        yield made


def again(site: Site, *words: str, **data: str) -> Done:
    return site.pyinfra(*words, **{"ollama_kv_cache_type": "q8_0", **data})


def drift(site: Site, **data: str) -> dict[str, Any]:
    text = again(site, "deploys/drift.py", "-y", **data).text
    line = next(line for line in text.splitlines() if line.strip().startswith('{"'))
    return dict(json.loads(line)[site.host.name])


def test_a_unit_of_others_is_adopted_and_not_rewritten(site: Site) -> None:
    assert site.host.read(PLACE) == UNIT_TEXT
    assert "OLLAMA_KV_CACHE_TYPE=q8_0" in show(site.host, "Environment")
    assert json.loads(api(site.host, "ps"))["models"][0]["name"] == MODEL
    report = site.report()
    assert report["persisted"] == "NO_BY_DESIGN"
    (result,) = report["results"]
    met = {row["id"]: (row["figure"], row["met"]) for row in result["verdict"]["conditions"]}
    assert met["kv_type"] == ("q8_0", True)
    assert met["token_bytes"] == (2 * 28 * 8 * 128 * 34 // 32, True)
    assert site.host.root("getent", "passwd", "kvhost", ok=False) == "", "no account is needed"


def test_the_second_run_changes_nothing(site: Site) -> None:
    pid = show(site.host, "MainPID")
    done = again(site, "deploy.py", "-y", "--debug")
    assert done.code == 0, done.text[-3000:]
    assert done.changed() == []
    # the report with all that the operations ask, and the look at Ollama's unit; or one by one
    trips = re.findall(r".*Running command on.*", done.text)
    assert len(trips) <= 3, trips
    assert show(site.host, "MainPID") == pid
    assert "nothing has changed since" in done.text


def test_drift_shows_a_drop_in_that_was_edited_and_a_run_puts_it_back(site: Site) -> None:
    assert drift(site)["status"] == "same"
    text = site.host.read(DROP_IN)
    site.host.write(DROP_IN, text.replace("q8_0", "f16"))
    found = drift(site)
    assert found["status"] == "drift"
    assert [row["what"] for row in found["rows"]] == [DROP_IN]
    assert again(site).code == 0
    assert site.host.read(DROP_IN) == text
    assert drift(site)["status"] == "same"


@pytest.mark.full
def test_a_server_that_runs_without_the_drop_in_is_drift(site: Site) -> None:
    """The file is right, and the server was started before it was."""
    text = site.host.read(DROP_IN)
    site.host.root("rm", DROP_IN)
    site.host.root("systemctl", "daemon-reload")
    site.host.root("systemctl", "restart", UNIT)
    site.host.write(DROP_IN, text)
    site.host.root("systemctl", "daemon-reload")
    found = drift(site)
    assert [row["what"] for row in found["rows"]] == ["the running server"]
    assert again(site).code == 0


def test_a_drop_in_of_others_that_counts_more_is_refused_by_name(site: Site) -> None:
    theirs = f"{FOLDER}/override.conf"
    site.host.write(theirs, "[Service]\nEnvironment=OLLAMA_KV_CACHE_TYPE=q4_0\n")
    site.host.root("systemctl", "daemon-reload")
    pid = show(site.host, "MainPID")
    done = again(site)
    plain = " ".join(done.text.split())
    site.host.root("rm", theirs)
    site.host.root("systemctl", "daemon-reload")
    assert done.code == 1
    assert "ollama_overruled" in plain and "override.conf:2" in plain
    assert show(site.host, "MainPID") == pid, "nothing was touched"


def test_a_kv_type_that_is_not_in_force_fails_the_run(site: Site) -> None:
    done = again(site, model_source="odd:1b")
    assert done.code == 1
    assert "Ollama keeps KV in another type than was asked for" in done.text
    verdict = site.report()["results"][0]["verdict"]
    assert verdict["persisted"] == "NO_BY_DESIGN"
    row = next(row for row in verdict["conditions"] if row["id"] == "kv_type")
    assert (row["figure"], row["met"]) == ("f16", False)
    assert again(site).code == 0


@pytest.mark.full
def test_a_model_of_another_digest_is_refused(site: Site) -> None:
    done = again(site, ollama_model_digest="0" * 11 + "a")
    assert done.code == 1
    assert "has the digest" in done.text and "its name means other weights" in done.text


@pytest.mark.full
def test_a_model_that_cannot_be_pulled_is_said(site: Site) -> None:
    done = again(site, model_source="nobody:1b")
    assert done.code == 1
    assert "could not be pulled: file does not exist" in done.text
    assert "needs the network" in " ".join(done.text.split())


def test_verify_and_the_gate_between_batches(site: Site) -> None:
    done = again(site, "verify.py", "-y")
    assert done.code == 0, done.text[-3000:]
    assert "persisted NO_BY_DESIGN" in done.text
    assert again(site, "deploys/health.py", "-y").code == 0
    site.host.root("systemctl", "stop", UNIT)
    sick = again(site, "deploys/health.py", "-y")
    site.host.root("systemctl", "start", UNIT)
    assert sick.code == 1


def test_there_is_nothing_to_purge_or_to_measure(site: Site) -> None:
    done = again(site, "deploys/purge.py", "-y")
    assert done.code == 1
    assert "there is nothing to purge" in done.text
    done = again(site, "deploys/measure.py", "-y")
    assert done.code == 1
    assert "there is nothing to measure a drive for" in done.text


def test_its_log_is_the_units_journal(site: Site) -> None:
    base = ("--base", BASE, "--json", "--lines", "400")
    told = json.loads(site.host.root("python3", f"{BASE}/bin/logs.py", *base))
    assert list(told) == ["ollama"]
    assert told["ollama"]["source"] == UNIT
    assert any("Listening on" in line for line in told["ollama"]["lines"])


@pytest.mark.full
def test_a_gguf_of_the_host_becomes_a_model(site: Site) -> None:
    site.host.write("/srv/Tiny Model.gguf", "GGUF and more")
    site.host.root("mv", "/srv/Tiny Model.gguf", "/srv/Tiny_Model.gguf")
    done = again(site, model_source="/srv/Tiny_Model.gguf")
    assert done.code == 0, done.text[-3000:]
    names = [row["name"] for row in json.loads(api(site.host, "tags"))["models"]]
    assert any(name.startswith("tiny_model:") for name in names)
    assert again(site, model_source="/srv/Tiny_Model.gguf").changed() == []


def test_removed_the_unit_runs_as_it_was(site: Site) -> None:
    done = again(site, "remove.py", "-y")
    assert done.code == 0, done.text[-3000:]
    assert "ollama.service.d" not in site.host.root("ls", "/etc/systemd/system")
    assert site.host.read(PLACE) == UNIT_TEXT
    assert "KV_CACHE_TYPE" not in show(site.host, "Environment")
    assert show(site.host, "ActiveState") == "active"
    assert site.host.root("ls", "-d", BASE, ok=False) == ""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A host without any Ollama; the tools, which need the network, are there."""
    with Lab() as lab:
        host = lab.host("bare", binds_ro={TOOLS: engine_binds(BASE)[TOOLS]}, boot=False)
        state = host.tree / BASE.lstrip("/") / "state"
        state.mkdir(parents=True)
        (state / "run.lock.guard").touch()  # the mark of an earlier run
        host.boot()
        yield Site(lab, tmp_path_factory.mktemp("bare"), host)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return packed(tmp_path_factory.mktemp("archive") / "ollama-linux-amd64.tgz")


def of_archive(site: Site, where: str, digest: str, **data: str) -> Done:
    given = {"ollama_archive": f"{where}#sha256={digest}", "ollama_kv_cache_type": "q4_0"}
    return site.pyinfra(**{**given, **data})


def test_no_ollama_to_adopt_is_refused(bare: Site) -> None:
    done = bare.pyinfra()
    assert done.code == 1
    assert "no_ollama" in done.text


def left(host: Host) -> str:
    return host.root("ls", "-A", BASE)


def test_a_dry_run_shows_and_does_nothing(bare: Site, archive: tuple[Path, str]) -> None:
    path, digest = archive
    before = left(bare.host)
    done = bare.pyinfra("deploy.py", "--dry", ollama_archive=f"controller:{path}#sha256={digest}")
    assert done.code == 0, done.text[-3000:]
    assert left(bare.host) == before


def test_another_digest_is_refused_before_anything_is_touched(
    bare: Site, archive: tuple[Path, str]
) -> None:
    path, _ = archive
    before = left(bare.host)
    bare.host.write("/srv/other.tgz", "something else")
    for where in (f"controller:{path}", "/srv/other.tgz", "/srv/none.tgz"):
        done = of_archive(bare, where, "0" * 64)
        assert done.code == 1
        assert "ollama_archive" in done.text
        assert left(bare.host) == before


def test_an_archive_of_the_controller_is_run_as_a_service(
    bare: Site, archive: tuple[Path, str]
) -> None:
    path, digest = archive
    done = of_archive(bare, f"controller:{path}", digest)
    assert done.code == 0, done.text[-5000:]
    host = bare.host
    assert json.loads(api(host, "version"))["version"].startswith("0.34")
    assert host.root("systemctl", "is-active", "kvhost-runner").strip() == "active"
    shown = host.root("systemctl", "show", "-p", "User,NoNewPrivileges", "kvhost-runner")
    assert shown.split() == ["User=kvhost", "NoNewPrivileges=yes"]
    verdict = bare.report()["results"][0]["verdict"]
    row = next(row for row in verdict["conditions"] if row["id"] == "kv_type")
    assert (row["figure"], row["met"]) == ("q4_0", True)
    assert left(host).count("bundle") == 0, "the archive's copy is not needed any more"
    done = of_archive(bare, f"controller:{path}", digest)
    assert done.code == 0, done.text[-3000:]
    assert done.changed() == []
    given = {"ollama_archive": f"controller:{path}#sha256={digest}", "ollama_kv_cache_type": "q4_0"}
    assert drift(bare, **given)["status"] == "same"
    host.root("find", f"{BASE}/models", "-name", "double.json", "-delete")  # its list of models
    host.root("rmdir", f"{BASE}/home/.cache/vllm")
    host.root("chown", "daemon", f"{BASE}/models")
    found = {(row["part"], row["what"]) for row in drift(bare, **given)["rows"]}
    assert found == {
        ("model", f"the model {MODEL}"),
        ("file", f"{BASE}/home/.cache/vllm"),
        ("file", f"{BASE}/models"),
    }
    done = of_archive(bare, f"controller:{path}", digest)
    assert done.code == 0, done.text[-3000:]
    assert drift(bare, **given)["status"] == "same"


@pytest.mark.full
def test_after_a_reboot_it_runs_and_verify_says_which_type(
    bare: Site, archive: tuple[Path, str]
) -> None:
    path, digest = archive
    bare.host.reboot()
    given = {"ollama_archive": f"controller:{path}#sha256={digest}", "ollama_kv_cache_type": "q4_0"}
    done = bare.pyinfra("verify.py", "-y", **given)
    assert done.code == 0, done.text[-3000:]
    assert "KV type: q4_0" in " ".join(done.text.split())


@pytest.mark.full
def test_another_archive_takes_its_place_and_an_edited_one_is_unpacked_anew(
    bare: Site, archive: tuple[Path, str], tmp_path: Path
) -> None:
    other, digest = packed(tmp_path / "other.tgz", b"another library")
    done = of_archive(bare, f"controller:{other}", digest)
    assert done.code == 0, done.text[-4000:]
    library = f"{BASE}/current/lib/ollama/libggml-base.so"
    assert bare.host.read(library) == "another library"
    running = bare.host.root("readlink", f"{BASE}/current").strip()
    assert len(bare.host.root("ls", f"{BASE}/envs").split()) == 2, "the old one is kept"
    bare.host.root("sh", "-c", f"echo edited >> {running}/lib/ollama/libggml-base.so")
    done = of_archive(bare, f"controller:{other}", digest)
    assert done.code == 0, done.text[-4000:]
    assert bare.host.read(library) == "another library"
    path, first = archive
    assert of_archive(bare, f"controller:{path}", first).code == 0
    assert bare.host.read(library) == "no library"


LEAVE = """
from deploys import ollama
from deploys.common.prepare import prepare
from deploys.common.runlock import take_lock

run = prepare()
take_lock(name="host: one run at a time", run=run)
ollama.leave(run)
"""


def leaves_for_another_runner(bare: Site) -> None:
    """The step of deploy.py that every other runner has; its engine is not made here."""
    (bare.copy.repo / "leave.py").write_text(LEAVE)
    done = bare.pyinfra("leave.py", "-y", runner="vllm", model_source="builtin")
    assert done.code == 0, done.text[-3000:]
    assert done.changed() == ["ollama: its unit as it was"]
    assert "KV_CACHE_TYPE" not in show(bare.host, "Environment")
    assert show(bare.host, "ActiveState") == "active"
    again = bare.pyinfra(api_port="11500")
    assert again.code == 0, again.text[-3000:]


@pytest.mark.full
def test_its_own_service_goes_when_a_unit_is_adopted(bare: Site) -> None:
    install(bare.host, port=11500)
    done = bare.pyinfra(api_port="11500")
    assert done.code == 0, done.text[-5000:]
    units = bare.host.root("ls", "/etc/systemd/system")
    assert "kvhost-runner.service" not in units
    assert "OLLAMA_KV_CACHE_TYPE=f16" in show(bare.host, "Environment")
    assert bare.pyinfra(api_port="11500").changed() == []
    leaves_for_another_runner(bare)
    done = bare.pyinfra("remove.py", "-y", api_port="11500", remove_models="true")
    assert done.code == 0, done.text[-3000:]
    assert "ollama.service.d" not in bare.host.root("ls", "/etc/systemd/system")


def test_zstd_is_there_for_the_tests() -> None:
    assert shutil.which("zstd"), "test_ollama_archive.py would pass over the .tar.zst"


@pytest.mark.full
def test_a_rolling_change_goes_on_after_such_a_host_and_stops_at_a_wrong_kv_type(
    tmp_path: Path,
) -> None:
    with Lab() as lab:
        hosts = [lab.host("one"), lab.host("two")]
        for host in hosts:
            install(host)
        made = Site(lab, tmp_path, hosts[0])
        done = made.kvhost("up", "--canary", "1", "--batch", "1", ollama_kv_cache_type="q8_0")
        assert done.code == 0, done.text[-4000:]
        assert done.text.count("persisted NO_BY_DESIGN") >= 2
        done = made.kvhost(
            *("up", "--canary", "1", "--batch", "1"),
            ollama_kv_cache_type="q4_0",
            model_source="odd:1b",
        )
        assert done.code == 1
        assert "STOPPED: one" in done.text
        assert "OLLAMA_KV_CACHE_TYPE=q8_0" in hosts[1].root("cat", DROP_IN)
