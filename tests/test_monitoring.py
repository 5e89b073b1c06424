"""Monitoring: the collector on a tier, its file in node_exporter, the rules in promtool."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from click.testing import CliRunner

from kvhost.cli import main as kvhost_main
from kvhost.commands import monitoring as cli_monitoring
from kvhost.onhost import drive_health, drive_sys, metrics
from kvhost.onhost.launch_children import boot_id
from kvhost.schema.runners import MoreRunner
from kvhost.services import monitoring
from kvhost.settings import Settings, settings_digest
from tests.e2e_tools import free_ports
from tests.plan_cases import plan
from tests.prometheus_tools import program
from tests.pruner_tools import SCRIPT as PRUNER
from tests.pruner_tools import make_tier, put

REPO = Path(__file__).resolve().parents[1]
RULES = REPO / "templates/monitoring/rules.yml"
DASHBOARD = REPO / "templates/monitoring/dashboard.json"
FIXTURES = REPO / "tests/fixtures/monitoring"
NAME = re.compile(r"\b(kvhost_\w+|vllm:\w+|lmcache_\w+)")
SATA = json.loads((FIXTURES.parent / "sizing/smartctl.json").read_text())["ata"]
SECRET = "sk-planted-5d0e"  # in what the collector reads, never in what it writes


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        text = self.server.pages.get(self.path)  # type: ignore[attr-defined]
        self.send_response(200 if text is not None else 404)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def pages() -> Iterator[Any]:
    """A server of recorded pages: .pages is path -> text."""
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    server.pages = {
        "/vllm/metrics": (FIXTURES / "vllm.txt").read_text(),
        "/lmcache/metrics": (FIXTURES / "lmcache.txt").read_text(),
    }
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


class Host:
    """A base directory as a provisioned host has it, with this process as every service."""

    def __init__(self, base: Path, url: str) -> None:
        self.base, self.url = base, url
        self.tier, self.out = base / "tier", base / "out"
        for name in ("log", "state", "run", "out"):
            (base / name).mkdir(parents=True)
        make_tier(self.tier)
        for name in ("a", "b", "c"):
            put(self.tier, "ns-aa", name)
        self.prune()
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        record = {"pid": os.getpid(), "start_ticks": ticks, "boot_id": boot_id(), "key": SECRET}
        for name in ("cache", "runner", "pruner"):
            (base / f"run/{name}.json").write_text(json.dumps(record))
        self.verdict(persisted="PASS", events={"both": "PASS", "reboot": "INCONCLUSIVE"})

    def prune(self) -> None:
        """One real pass of the real pruner, which writes its status."""
        status = self.base / "log/pruner-status.json"
        words = ["run", "--tier", self.tier, "--limit-bytes", 1 << 20, "--status", status]
        child = subprocess.Popen([sys.executable, PRUNER, *map(str, words)])
        try:
            deadline = time.monotonic() + 60
            while not status.exists():
                assert child.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait(30)

    def verdict(self, **told: Any) -> None:
        text = json.dumps({"receipt": SECRET, "time": "2026-11-29T201500Z", **told})
        (self.base / "state/verified.json").write_text(text)

    def collect(self, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, Any]:
        """A pass in this process; what it says. Its file is then in .text."""
        words = ["--base", self.base, "--tier", self.tier, "--out", self.out]
        words += ["--cache", f"{self.url}/lmcache", "--runner", f"runner={self.url}/vllm"]
        monkeypatch.setattr(sys, "argv", ["metrics.py", *map(str, words), *more])
        assert metrics.main() == 0
        self.text = (self.out / metrics.FILE).read_text()
        return dict(metrics_of(self.text))


def metrics_of(text: str) -> Iterator[tuple[str, float]]:
    for name, labels, value in metrics.SAMPLE.findall(text):
        if not name.startswith("#"):
            yield (f"{name}{{{labels}}}" if labels else name), float(value)


@pytest.fixture
def host(tmp_path: Path, pages: Any, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Its tier lies on a drive whose health log is that of NVMe, at fixed values."""
    log = bytearray(512)
    log[:6] = bytes((4, 69, 1, 90, 10, 7))  # warning, 325 K, spare, threshold, used
    for at, value in ((48, 3), (128, 1000), (160, 2)):
        log[at : at + 16] = value.to_bytes(16, "little")

    def look(name: str) -> dict[str, Any]:
        return {"name": name, "why": None, "health": drive_sys.parse_smart(bytes(log))}

    monkeypatch.setattr(metrics, "look_at", look)
    monkeypatch.setattr(metrics, "names_below", lambda where: ["nvme0n1"])
    return Host(tmp_path / "base", pages.url)


def test_what_a_host_exports(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    found = host.collect(monkeypatch)
    status = json.loads((host.base / "log/pruner-status.json").read_text())
    assert found["kvhost_tier_bytes"] == status["usage_bytes"] == 3 * 65536
    assert found["kvhost_tier_files"] == 3
    assert found["kvhost_tier_limit_bytes"] == 1 << 20
    assert found["kvhost_tier_free_bytes"] == status["free_bytes"] > 0
    assert found["kvhost_pruner_last_run_timestamp_seconds"] == status["time_unix"]
    assert found["kvhost_pruner_ok"] == 1
    assert found['kvhost_verdict{event="all",state="PASS"}'] == 1
    assert found['kvhost_verdict{event="all",state="FAIL"}'] == 0
    assert found['kvhost_verdict{event="reboot",state="INCONCLUSIVE"}'] == 1
    assert found["kvhost_verdict_timestamp_seconds"] == 1795983300  # date -d 2026-11-29T20:15Z +%s
    assert found['kvhost_drive_readable{device="nvme0n1"}'] == 1
    assert found['kvhost_drive_temperature_celsius{device="nvme0n1"}'] == 52
    assert found['kvhost_drive_wear_percent{device="nvme0n1"}'] == 7
    assert found['kvhost_drive_media_errors_total{device="nvme0n1"}'] == 2
    assert found['kvhost_drive_written_bytes_total{device="nvme0n1"}'] == 1_536_000
    # of the recorded pages: both servers say the same of what came from L2
    labels = 'runner="runner",model_name="kvhost-builtin"'
    assert found[f"vllm:external_prefix_cache_hits_total{{{labels}}}"] == 2560
    assert found["lmcache_mp_lookup_hit_l2_tokens_total"] == 2560
    for name in ("cache", "runner", "pruner"):
        assert found[f'kvhost_service_up{{service="{name}"}}'] == 1
        began = found[f'kvhost_service_start_timestamp_seconds{{service="{name}"}}']
        assert abs(began - Path("/proc/self").stat().st_ctime) < 86400
        assert found[f'kvhost_source_readable{{source="{name}"}}'] == 1


def test_every_series_of_rules_and_dashboard_is_exported(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the engine come from the pages that a running engine gave (README there)."""
    host.collect(monkeypatch)
    exported = set(re.findall(r"(?m)^# TYPE (\S+)", host.text))
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = set(NAME.findall(RULES.read_text() + "\n".join(asked) + DASHBOARD.read_text()))
    assert len(named) > 25
    assert named - exported == set()
    # and nothing is passed on that the engine does not have
    assert {*metrics.VLLM, *metrics.LMCACHE} - exported == set()
    records = set(re.findall(r"record: (\S+)", RULES.read_text()))
    assert set(re.findall(r"\bkvhost:[\w:]+", RULES.read_text() + "\n".join(asked))) == records


def test_without_a_cache_server_none_is_told_of_and_no_alert_on_it_can_come(
    host: Host, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.pages["/vllm/metrics"] = (FIXTURES.parent / "metrics/vllm-native.txt").read_text()
    (host.base / "run/cache.json").unlink()
    words = ["--base", host.base, "--tier", host.tier, "--out", host.out]
    words += ["--runner", f"runner={host.url}/vllm"]
    monkeypatch.setattr(sys, "argv", ["metrics.py", *map(str, words)])
    assert metrics.main() == 0
    found = dict(metrics_of((host.out / metrics.FILE).read_text()))
    assert not [name for name in found if '"cache"' in name or name.startswith("lmcache")]
    labels = '{runner="runner",model_name="m",tier="1:fs"}'
    assert found[f"vllm:kv_offload_tiering_chunk_hits_total{labels}"] == 32
    settings = Settings(cache_kind="native", monitoring=True)
    argv = monitoring.argv(settings, settings.paths)
    assert "--cache" not in argv and "runner=http://127.0.0.1:8000" in argv


def test_labels_are_few_and_nothing_secret_is_told(
    host: Host, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.pages["/vllm/metrics"] += (
        f'vllm:num_requests_waiting{{model_name="q\\"{{x}}",prompt="{SECRET}"}} 3\n'
        f'vllm:cache_config_info{{path="/{SECRET}"}} 1\n'
    )
    tenant = f'{{cache_salt="{SECRET}",model_name="/srv/{SECRET}"}} 1000\n'
    pages.pages["/lmcache/metrics"] += "lmcache_mp_lookup_hit_tokens_total" + tenant
    found = host.collect(monkeypatch)
    assert found["lmcache_mp_lookup_hit_tokens_total"] == 3560, "all tenants together"
    assert found['vllm:num_requests_waiting{runner="runner",model_name="q\\"{x}"}'] == 3
    assert SECRET not in host.text
    body = host.text.partition("\n")[2]
    assert str(host.base) not in body
    assert "data" not in re.sub(r"(?m)^#.*$", "", body), "no name of a file"
    labels = set(re.findall(r'[{,](\w+)="', body))
    own = {"service", "source", "event", "state", "device", "runner"}
    assert labels <= own | set(metrics.LABELS)


def test_what_cannot_be_read_is_left_out_and_said(
    host: Host, pages: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (host.base / "state/verified.json").unlink()
    (host.base / "log/pruner-status.json").write_text('{"usage_bytes": true, "files": "many"}')
    (host.base / "run/runner.json").unlink()
    del pages.pages["/lmcache/metrics"]
    found = host.collect(monkeypatch)
    said = json.loads(capsys.readouterr().out)
    assert sorted(said["unreadable"]) == ["cache", "pruner", "verdict"]
    for source, readable in (("verdict", 0), ("pruner", 0), ("cache", 0), ("runner", 1)):
        assert found[f'kvhost_source_readable{{source="{source}"}}'] == readable
    left_out = [n for n in found if n.startswith(("kvhost_tier", "kvhost_verdict", "lmcache"))]
    assert not left_out
    assert found['kvhost_service_up{service="cache"}'] == 0, "it runs, but does not answer"
    assert found['kvhost_service_up{service="runner"}'] == 0, "it answers, but is not ours"


def test_a_drive_that_cannot_be_read_takes_no_alert_of_another(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = vars(metrics)["look_at"]("nvme1n1")
    told = {
        "nvme0n1": {"why": "Input/output error", "health": None},
        "nvme1n1": good,
        "sda": {"why": None, "health": None, "smartctl": None},
        "sdb": {"why": None, "health": None, "smartctl": {"device": {}}},
        "sdc": {"why": None, "health": None, "smartctl": {"smart_status": []}},
        "sdd": {"why": None, "health": None, "smartctl": SATA},
    }
    monkeypatch.setattr(metrics, "look_at", told.__getitem__)
    monkeypatch.setattr(metrics, "names_below", lambda where: list(told))
    found = host.collect(monkeypatch)
    assert found['kvhost_drive_critical_warning{device="nvme1n1"}'] == 4
    assert found['kvhost_drive_wear_percent{device="nvme1n1"}'] == 7
    assert found['kvhost_drive_power_on_hours_total{device="sdd"}'] == 14551
    assert found['kvhost_drive_written_bytes_total{device="sdd"}'] == 64777770148 * 512
    for name in told:
        readable = found[f'kvhost_drive_readable{{device="{name}"}}']
        assert readable == (name in ("nvme1n1", "sdd")), name
    assert found['kvhost_source_readable{source="drive"}'] == 0, "KvhostDriveUnknown comes"
    assert json.loads(capsys.readouterr().out)["unreadable"]["drive"] == (
        "nvme0n1: Input/output error; sda: its health needs smartctl (package smartmontools); "
        "sdb: smartctl says nothing of its health; sdc: AttributeError"
    )


def no_http(page: Page) -> None:
    page.wfile.write(b"SSH-2.0-x\r\n")


def drips(page: Page) -> None:
    page.send_response(200)
    page.end_headers()
    for _ in range(100):
        page.wfile.write(b"# a line\n")
        time.sleep(0.1)


@pytest.mark.parametrize("hangs", ["smartctl", no_http, drips])
def test_what_never_answers_or_is_no_page_ends_no_pass(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: Any
) -> None:
    """All alerts rest on the file of this pass."""
    unread = ["drive"]
    if hangs == "smartctl":
        program = tmp_path / "smartctl"
        program.write_text("#!/bin/sh\nsleep 60\n")
        program.chmod(0o755)
        monkeypatch.setattr("shutil.which", lambda name, path: str(program))
        monkeypatch.setattr(drive_health, "SMARTCTL_S", 0.3)
        monkeypatch.setattr(metrics, "look_at", drive_health.look_at)
        monkeypatch.setattr(metrics, "names_below", lambda where: ["sdzz"])
    else:
        monkeypatch.setattr(Page, "do_GET", hangs)
        monkeypatch.setattr(metrics, "PAGE_S", 0.5)
        unread = ["cache", "runner"]
    began = time.monotonic()
    found = host.collect(monkeypatch)
    assert time.monotonic() - began < 5
    for source in ("drive", "cache", "runner", "pruner", "verdict"):
        assert found[f'kvhost_source_readable{{source="{source}"}}'] == (source not in unread)
    assert found["kvhost_tier_files"] == 3


@pytest.mark.parametrize("told", ["[]", "{", '{"time": "x"}', '{"time": 5, "persisted": "PASS"}',
                                  '{"time": "2026-11-29T201500Z", "persisted": "MAYBE"}',
                                  "[" * 100_000])  # fmt: skip
def test_a_damaged_verdict_is_none(host: Host, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (host.base / "state/verified.json").write_text(told)
    found = host.collect(monkeypatch)
    assert found['kvhost_source_readable{source="verdict"}'] == 0
    assert found["kvhost_tier_files"] == 3, "the rest is told"
    assert not [name for name in found if name.startswith("kvhost_verdict")]


def test_no_link_is_followed(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root writes to a directory that may be node_exporter's, and reads in one of the service."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (host.out / metrics.FILE).symlink_to(victim)
    status = host.base / "log/pruner-status.json"
    status.rename(tmp_path / "elsewhere")
    status.symlink_to(tmp_path / "elsewhere")
    found = host.collect(monkeypatch)
    assert victim.read_text() == "mine"
    assert not (host.out / metrics.FILE).is_symlink()
    assert (host.out / metrics.FILE).stat().st_mode & 0o777 == 0o644
    assert [path.name for path in host.out.iterdir()] == [metrics.FILE]
    assert found['kvhost_source_readable{source="pruner"}'] == 0


def test_node_exporter_takes_the_file(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = host.collect(monkeypatch)
    (port,) = free_ports(1)
    child = subprocess.Popen(
        [
            program("prometheus-node-exporter"),
            *("--collector.disable-defaults", "--collector.textfile"),
            f"--collector.textfile.directory={host.out}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=subprocess.PIPE,
    )
    try:
        page, deadline = "", time.monotonic() + 60
        while not page:
            assert child.poll() is None and time.monotonic() < deadline
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                    page = answer.read().decode()
            except OSError:
                time.sleep(0.1)
    finally:
        child.terminate()
        child.communicate(timeout=30)
    theirs = dict(metrics_of(page))
    assert theirs["node_textfile_scrape_error"] == 0
    missing = {re.sub(r"\{.*", "", name) for name in ours} - set(
        re.findall(r"(?m)^# TYPE (\S+)", page)
    )
    assert not missing


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def promtool(tmp_path: Path, rules: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "rules.yml").write_text(rules)
    course = (FIXTURES / "rules_test.yml").read_text().replace("RULES", "rules.yml")
    (tmp_path / "test.yml").write_text(course)
    words = [program("promtool"), "test", "rules", str(tmp_path / "test.yml")]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)


def test_promtool_accepts_and_tests_the_rules(tmp_path: Path) -> None:
    check = [program("promtool"), "check", "rules", "--lint-fatal", str(RULES)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    done = promtool(tmp_path, RULES.read_text())
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_reads_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    asked = [t["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"]
             for t in panel["targets"]]  # fmt: skip
    assert len(asked) > 12
    rules = [{"record": f"a:{n}", "expr": expr} for n, expr in enumerate(asked)]
    path = tmp_path / "asked.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "a", "rules": rules}]}))
    check = [program("promtool"), "check", "rules", str(path)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_in_a_course_and_tells_what_to_do() -> None:
    course = (FIXTURES / "rules_test.yml").read_text()
    fired = set(re.findall(r'ALERTS\{alertname="(\w+)", alertstate="firing"', course))
    assert fired == {rule["alert"] for rule in alerts()}
    page = (REPO / "docs/troubleshooting.md").read_text()
    for rule in alerts():
        notes = rule["annotations"]
        assert set(notes) == {"summary", "action", "runbook"}
        assert notes["runbook"] == f"docs/troubleshooting.md#{rule['alert'].lower()}"
        assert f"\n### {rule['alert']}\n" in page
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


def test_the_page_lists_the_alerts() -> None:
    page = (REPO / "docs/monitoring.md").read_text()
    rows = re.findall(r"(?m)^\| `(\w+)` \| (\w+) \|", page)
    assert rows == [(rule["alert"], rule["labels"]["severity"]) for rule in alerts()]


def test_off_by_default_and_no_reason_for_another_proof() -> None:
    settings = Settings()
    assert settings.monitoring is False
    assert monitoring.program(settings, settings.paths, "") is None
    assert settings_digest(settings) == settings_digest(Settings(monitoring=True))


def test_the_plan_says_where_figures_go() -> None:
    told = [note for note in plan(monitoring=True).notes if "kvhost.prom" in note]
    assert told and told[0].startswith("Figures are written to /var/lib/prometheus/node-exporter/")
    assert not [note for note in plan().notes if "kvhost.prom" in note]


def test_both_managers_run_the_same_command() -> None:
    more = [MoreRunner(name="second", api_port=8001)]
    settings = Settings(monitoring=True, more_runners=more, cache_http_port=9000)
    argv = monitoring.argv(settings, settings.paths)
    assert argv[-4:] == ("--runner", "runner=http://127.0.0.1:8000",
                         "--runner", "runner-second=http://127.0.0.1:8001")  # fmt: skip
    assert argv[argv.index("--cache") + 1] == "http://127.0.0.1:9000"
    unit = monitoring.unit_text(settings, settings.paths, "x")
    assert f"ExecStart=/usr/bin/python3 {' '.join(argv)}\n" in unit
    assert unit != monitoring.unit_text(settings, settings.paths, "y"), "it is started anew"
    loader = jinja2.FileSystemLoader(REPO / "templates")
    template = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined).get_template(
        "supervisord.conf.j2"
    )
    made = monitoring.program(settings, settings.paths, "x")
    text = template.render(paths=settings.paths, services=(), metrics=made)
    assert f"[program:metrics]\ncommand={settings.paths.tools}/current/bin/python " in text
    assert " ".join(argv) in text
    without = template.render(paths=settings.paths, services=(), metrics=None)
    assert "metrics" not in without


def answering(*answers: dict[str, Any]) -> Any:
    def run(inventory: str, deploy: str, args: tuple[str, ...]) -> int:
        assert (REPO / deploy).exists()
        with Path(os.environ["KVHOST_ANSWERS"]).open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in answers)
        return 0

    return run


def test_the_fleet_as_targets(capsys: pytest.CaptureFixture[str]) -> None:
    a = {"host": "a", "address": "10.0.0.1", "monitoring": True}
    six = {"host": "b", "address": "fd00::1", "monitoring": True}
    code, found = cli_monitoring.targets(answering(a, six), "fleet.py", 9100, ())
    assert code == 0
    assert found == [
        {"targets": ["10.0.0.1:9100"], "labels": {"kvhost": "a"}},
        {"targets": ["[fd00::1]:9100"], "labels": {"kvhost": "b"}},
    ]
    off = {**a, "monitoring": False}
    code, found = cli_monitoring.targets(answering(off, six), "fleet.py", 9100, ())
    assert (code, len(found)) == (1, 1)
    assert "a: it writes no figures" in capsys.readouterr().err
    assert cli_monitoring.targets(answering(), "fleet.py", 9100, ()) == (1, [])


def test_the_command_prints_the_files() -> None:
    for word, path in (("rules", RULES), ("dashboard", DASHBOARD)):
        done = CliRunner().invoke(kvhost_main, ["monitoring", word])
        assert done.exit_code == 0
        assert done.output == path.read_text()
