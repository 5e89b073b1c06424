"""What the pages say of the code is so: causes, refusals, tables, paths, links."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhost.driver import decide as driver
from kvhost.driver import mend as driver_mend
from kvhost.driver import module as driver_module
from kvhost.drives import claim, claim_reasons
from kvhost.engine import bundle
from kvhost.engine.packages import FILESYSTEM_PACKAGES, drive_packages, needed_packages
from kvhost.llama.verdict import TABLE as LLAMA_TABLE
from kvhost.ollama import plan as ollama_plan
from kvhost.ollama.verdict import TABLE as OLLAMA_TABLE
from kvhost.onhost import abi_check, engine_pip
from kvhost.paths import HostPaths
from kvhost.plan import accelerator as plan_accelerator
from kvhost.plan import drives as plan_drives
from kvhost.plan import gpus as plan_gpus
from kvhost.plan import llama as plan_llama
from kvhost.plan import lock as plan_lock
from kvhost.plan import memory as plan_memory
from kvhost.plan import native as plan_native
from kvhost.plan import pod as plan_pod
from kvhost.plan import refusals as plan_refusals
from kvhost.plan import stopped as plan_stopped
from kvhost.plan import storage as plan_storage
from kvhost.plan import types as plan_types
from kvhost.plan import upgrade as plan_upgrade
from kvhost.services import store as services_store
from kvhost.services.vllm import service_env
from kvhost.settings import Settings
from kvhost.verdict.causes import TABLE
from kvhost.verdict.foreign import RULES as FOREIGN_RULES
from kvhost.verdict.foreign import ForeignRule
from kvhost.verdict.foreign_causes import TABLE as FOREIGN_TABLE
from kvhost.verdict.judge import RULES, Rule
from kvhost.verdict.rules import PAGE

REPO = Path(__file__).parents[1]
CAUSES = {row.slug for row in TABLE} | {row.slug for row in FOREIGN_TABLE}
CAUSES |= {row.slug for row in LLAMA_TABLE} | {row.slug for row in OLLAMA_TABLE}
#: Words with a slash that begin like these are paths of the repository, not of a host.
TOPS = ("deploys", "docs", "group_data", "inventories", "kvhost", "templates", "tests", "bench")


def page(name: str) -> str:
    return (REPO / name).read_text(encoding="utf-8")


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    return [REPO / name for name in listed.stdout.split() if (REPO / name).exists()]


PAGES = [path for path in tracked("*.md") if "fixtures" not in path.parts]


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings: small letters, no punctuation, spaces become hyphens."""
    text = re.sub(r"(?ms)^```.*?^```", "", text)
    titles = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def first_cells(text: str, heading: str) -> list[str]:
    """First cell of each row of the tables below a heading, without the head."""
    part = re.split(r"(?m)^#+ ", text.partition(heading)[2].partition("\n")[2])[0]
    rows = re.findall(r"(?m)^\| (.+?) \|", part)
    return [row for row in rows if not row.startswith("---")]


def names(cells: list[str]) -> set[str]:
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize("slug", sorted(CAUSES))
def test_every_cause_has_its_place_in_troubleshooting(slug: str) -> None:
    assert slug in anchors(page(PAGE))


def test_every_cause_in_troubleshooting_is_one() -> None:
    part = page(PAGE).partition("## The verdict is not PASS")[2]
    part = re.split(r"(?m)^## ", part)[0]
    assert set(re.findall(r"(?m)^### (.+)$", part)) == CAUSES


def refusal_codes() -> Iterator[str]:
    for module in (
        bundle,
        plan_refusals,
        plan_storage,
        plan_pod,
        plan_lock,
        plan_native,
        claim,
        claim_reasons,
        plan_upgrade,
        plan_accelerator,
        plan_gpus,
        driver,
        driver_mend,
        driver_module,
        plan_drives,
        ollama_plan,
        plan_llama,
        plan_memory,
        services_store,
        plan_stopped,
    ):
        for call in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                place = {"Refusal": 1, "no": 0, "refusal": 0}.get(call.func.id)
                code = call.args[place] if place is not None else None
                if isinstance(code, ast.Constant):
                    yield str(code.value)
    yield plan_types.unreadable("host", "anything", None).code


def test_every_refusal_of_the_plan_is_explained_and_no_other() -> None:
    codes = set(refusal_codes())
    assert len(codes) > 20
    assert names(first_cells(page(PAGE), "## The plan refuses a host")) == codes


def test_every_check_of_an_environment_is_explained() -> None:
    gpu = {name for name, _ in abi_check.GPU_CHECKS}
    checks = {name for name, _ in abi_check.CHECKS} | {"no silent fallback"} | gpu
    cells = first_cells(page(PAGE), "### the-abi-check-failed")
    assert {name for cell in cells[1:] for name in cell.split(", ")} == checks
    assert names(first_cells(page("docs/engine.md"), "## The ABI check")) == checks


def test_every_failure_of_uv_that_has_a_hint_is_explained() -> None:
    cells = first_cells(page(PAGE), "### uv-could-not-install")[1:]
    said = {part.strip() for cell in cells for part in cell.split(",")}
    for marks, _ in engine_pip.HINTS:
        assert said & set(marks), marks


def not_met(rule: Rule | ForeignRule) -> str:
    if rule.order == "first":
        return "FAIL, before all"
    if rule.order == "precondition":
        return "INCONCLUSIVE, before any FAIL"
    return {
        "fail": "FAIL",
        "inconclusive": "INCONCLUSIVE",
        "note": "nothing, it is only said",
    }[rule.weight]


def test_the_verdicts_conditions_are_those_of_the_judge() -> None:
    rows = re.findall(r"(?m)^\| `(\w+)` \| (.+?) \| .+? \| (.+?) \|$", page("docs/verdict.md"))
    assert rows == [(rule.id, rule.question, not_met(rule)) for rule in RULES]


def test_the_conditions_of_servers_of_others_are_those_of_their_judge() -> None:
    part = page("docs/verdict.md").partition("## Servers that kvhost did not install")[2]
    rows = re.findall(r"(?m)^\| (\w+) \| (.+?) \| .+? \| (.+?) \|$", part.partition("\n## ")[0])
    wanted = [(rule.id, rule.question, not_met(rule)) for rule in FOREIGN_RULES]
    assert rows[1:] == wanted  # the first is the header


def test_every_variable_of_the_services_has_its_reason() -> None:
    settings = Settings()
    paths = HostPaths(base_dir="/b", tier_dir="/t")
    cells = first_cells(page("docs/engine.md"), "## The services' environment variables")
    assert names(cells) == set(service_env(settings, paths))


def test_every_package_that_is_left_out_has_its_reason() -> None:
    lines = page("locks/cpu.overrides").splitlines()
    left = {re.split(r"[ ;=]", line)[0] for line in lines if line and not line.startswith("#")}
    assert names(first_cells(page("docs/engine.md"), "## What is left out")) == left


def test_every_option_of_pip_that_is_honoured_is_listed() -> None:
    source = Path(str(engine_pip.__file__)).read_text()
    options = set(re.findall(r'pip(?:\.get\(|\[)"([a-z-]+)"', source))
    options |= set(re.findall(r'\("([a-z-]+)", "[A-Z_]+"\)', source))
    assert len(options) == 11
    assert names(first_cells(page("docs/engine.md"), "## Where packages come from")) == options


def test_every_package_that_is_installed_is_a_hazard_by_name() -> None:
    hazards = page("docs/hazards.md")
    of_drives = {
        name
        for filesystem in FILESYSTEM_PACKAGES
        for name in drive_packages(
            Settings(
                drive_model="S*", drive_count=2, drive_encrypt=True, drive_filesystem=filesystem
            )
        )
    }
    assert len(of_drives) == 5
    of_runners = ("libnuma1", "libgomp1", "g++")
    for name in (*needed_packages("/opt/python/bin/python3", gpu=True), *of_drives, *of_runners):
        assert f"`{name}`" in hazards


def test_every_test_file_double_and_area_is_described() -> None:
    text = page("docs/testing.md")
    files = {path.name for path in tracked("tests/test_*.py")}
    assert names(first_cells(text, "## What each file proves")) == files
    for double in tracked("tests/doubles/*.py"):
        assert f"`{double.relative_to(REPO)}`" in text
    markers = tomllib.loads(page("pyproject.toml"))["tool"]["pytest"]["ini_options"]["markers"]
    areas = {marker.partition(":")[0] for marker in markers} - {"full"}
    assert names(first_cells(text, "## Tiers and areas")) == areas


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPO)))
def test_paths_and_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    wrong = []
    for word in re.findall(r"`([\w.-]+(?:/[\w.-]+)+)`", text):
        top, _, rest = word.partition("/")
        if top == "bin" and rest.endswith(".py"):  # of a host
            found = (REPO / "kvhost/onhost" / rest).exists()
        elif top in (*TOPS, "bin", "locks"):
            found = (REPO / word).exists()
        else:
            continue
        wrong += [] if found else [word]
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file) if file else path
        if not there.exists() or (anchor and anchor not in anchors(there.read_text())):
            wrong.append(target)
    assert not wrong


def test_pages_that_the_code_and_the_pages_name_exist() -> None:
    missing = {
        f"{path.relative_to(REPO)}: {name}"
        for path in tracked("*.py", "*.md", "*.sh", "*.in", "*.yaml", "*.overrides", "bin/*")
        for name in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
        if not (REPO / name).exists()
    }
    assert not missing


@pytest.mark.parametrize("command", ["bin/up", "bin/test"])
def test_the_commands_of_the_readme_are_there(command: str) -> None:
    assert command in page("README.md")
    assert os.access(REPO / command, os.X_OK)
