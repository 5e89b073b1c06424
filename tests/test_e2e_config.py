"""What the installed version does not take is refused before anything that runs is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e_tools import Site

pytestmark = [pytest.mark.e2e, pytest.mark.engine]


def break_it(path: Path, old: str, new: str) -> str:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return text


def test_unknown_keys_of_both_services_are_refused_together_and_nothing_is_touched(
    site: Site,
) -> None:
    if not (site.base / "current").exists():  # run by itself; else test_e2e.py was first
        assert site.up(verify="never").code == 0
    config = (site.base / "etc/vllm.yaml").read_bytes()
    pids = {name: site.record(name)["pid"] for name in ("cache", "runner", "pruner")}
    template, described = (
        site.repo / "templates/vllm.yaml.j2",
        site.repo / "kvhost/services/vllm.py",
    )
    was = {
        template: break_it(template, "{% for", "max-modell-len: 99\n{% for"),
        described: break_it(described, '"num_workers"', '"num_worker"'),
    }
    try:
        done = site.up(verify="never")
    finally:
        for path, text in was.items():
            path.write_text(text)
    assert done.code == 1
    assert "'max-modell-len' is not known to the installed version" in done.text
    assert "the nearest that there is: max-model-len" in done.text
    assert "--l2-adapter: key 'num_worker'" in done.text
    assert "Traceback" not in done.text
    assert (site.base / "etc/vllm.yaml").read_bytes() == config
    assert not (site.base / "state/draft.yaml").exists()
    assert {name: site.record(name)["pid"] for name in pids} == pids
    assert site.up(verify="never").changed() == []


def test_a_broken_template_of_supervisord_is_refused_before_it_is_read(site: Site) -> None:
    config = (site.base / "etc/supervisord.conf").read_bytes()
    pids = {name: site.record(name)["pid"] for name in ("cache", "runner", "pruner")}
    template = site.repo / "templates/supervisord.conf.j2"
    was = break_it(template, "startsecs=2", "startsecz=2")
    try:
        done = site.up(verify="never")
    finally:
        template.write_text(was)
    assert done.code == 1
    assert "startsecz is not known to the installed version; the nearest" in done.text
    assert (site.base / "etc/supervisord.conf").read_bytes() == config
    assert not (site.base / "state/draft.conf").exists()
    assert {name: site.record(name)["pid"] for name in pids} == pids
    assert site.up(verify="never").changed() == []
