"""The driver: what is decided on recorded hosts (tests/fixtures/drivers.yaml has the sources)."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvhost.driver import cards as driver_cards
from kvhost.driver.cards import chip_of
from kvhost.driver.decide import Decision, decide
from kvhost.driver.types import DriverFacts
from kvhost.engine.matrix import load_matrix
from kvhost.onhost import DRIVE_SCRIPTS, REPORT_SCRIPTS, report_gpu
from tests.report_tools import put

REPO = Path(__file__).parents[1]
MATRIX = load_matrix(REPO / "locks")
CASES: list[dict[str, Any]] = yaml.safe_load((REPO / "tests/fixtures/drivers.yaml").read_text())
BY_ID = {case["id"]: case for case in CASES}
KEYS = {"id", "source", "added", "expect", "words", "lock", "container", "kernel", "proc",
        "modinfo", "smi", "library", "dpkg", "pci", "switches", "nouveau", "headers", "log",
        "module_kernels", "secure_boot", "reboot_for"}  # fmt: skip


def smi_xml(told: dict[str, Any]) -> str:
    """What nvidia-smi -q -x prints, as far as it is read: a document of its schema's form."""
    rows = []
    for number, (name, architecture, device, mib, *more) in enumerate(told["gpus"]):
        fabric = next((m[7:] for m in more if m.startswith("fabric:")), "N/A")
        uuid = next((m[5:] for m in more if m.startswith("uuid:")), "GPU-513536b6")
        rows.append(f"""
	<gpu id="00000000:{number + 1:02X}:00.0">
		<product_name>{name}</product_name>
		<product_architecture>{architecture or "N/A"}</product_architecture>
		<persistence_mode>{"Enabled" if "persistence" in more else "Disabled"}</persistence_mode>
		<mig_mode><current_mig>{"Enabled" if "mig" in more else "N/A"}</current_mig></mig_mode>
		<serial>1650522003820</serial><uuid>{uuid}</uuid>
		<pci><pci_device_id>{device[2:].upper()}10DE</pci_device_id></pci>
		<fb_memory_usage><total>{f"{mib} MiB" if mib else "N/A"}</total></fb_memory_usage>
		<fabric><state>{fabric}</state></fabric>
		<processes><process_info><process_name>/secret</process_name></process_info></processes>
	</gpu>""")
    return (
        f'<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM '
        f'"nvsmi_device_v{told.get("schema", 12)}.dtd">\n<nvidia_smi_log>\n'
        f"\t<driver_version>{told['driver']}</driver_version>\n"
        f"\t<cuda_version>{told['cuda']}</cuda_version>{''.join(rows)}\n</nvidia_smi_log>\n"
    )


def facts_of(case: dict[str, Any]) -> DriverFacts:
    """Through the same parsers that the host's script uses."""
    assert set(case) <= KEYS
    smi: dict[str, Any] | None = case.get("smi")
    if smi and "gpus" in smi:
        smi = {"exit": 0, "said": [], "log": report_gpu.parse_smi(smi_xml(smi))}
    elif smi:
        smi = {**smi, "log": None}
    rows = [row.split() for row in case["pci"]]
    cards = [
        {"address": f"0000:{n + 1:02x}:00.0", "device": device,
         "driver": None if driver == "none" else driver}
        for n, (device, driver) in enumerate(rows)
    ]  # fmt: skip
    return DriverFacts.model_validate({
        "kernel": case.get("kernel", "6.8.0-60-generic"),
        "gpus": cards,
        "nvswitches": case.get("switches", 0),
        "nodes": [],
        "loaded": report_gpu.parse_proc_version(case.get("proc", "")),
        "on_disk": report_gpu.parse_modinfo(case.get("modinfo", "")),
        "module_kernels": case.get("module_kernels", []),
        "headers": case.get("headers", False),
        "nouveau": case.get("nouveau", False),
        "library": case.get("library"),
        "smi": smi,
        "packages": report_gpu.parse_packages(case.get("dpkg", "")),
        "secure_boot": case.get("secure_boot", False),
        "reboot_for": case.get("reboot_for", []),
        "fabric_manager": False,
        "unattended_upgrades": False,
        "kernel_log": case.get("log", []),
    })  # fmt: skip


def decided(case: dict[str, Any], **changes: Any) -> Decision:
    lock = MATRIX.locks[case.get("lock", "cu13-0.32.0-x86_64")]
    facts = facts_of(case).model_copy(update=changes)
    return decide(facts, lock, MATRIX, case.get("container"))


def told(got: Decision) -> str:
    rows = [f"{r.what}; {r.needed}; {r.found}; {r.fix}" for r in got.refusals]
    return "\n".join([got.words, *rows, *got.notes])


def test_there_are_enough_recorded_hosts_each_with_its_source() -> None:
    assert len(CASES) >= 25
    assert len(BY_ID) == len(CASES)
    for case in CASES:
        assert case["source"].startswith("github.com/"), case["id"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_each_recorded_host(case: dict[str, Any]) -> None:
    got = decided(case)
    assert [refusal.code for refusal in got.refusals] == case["expect"]
    for words in case["words"]:
        assert words in told(got)
    for refusal in got.refusals:
        assert "accelerator" in refusal.fix  # the way out without the GPU is always named
        assert "latest" not in refusal.fix
        assert "disable" not in refusal.fix.lower()


GOOD = BY_ID["two 4090 without NVSwitch, where the fabric manager has nothing to do"]
OLD = BY_ID["driver 570 under torch for CUDA 13"]
H100 = BY_ID["an H100 machine whose fabric manager was killed"]


def changed(case: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**copy.deepcopy(case), **more}


# what is changed of a recorded host, refusals, words
VARIANTS: list[tuple[str, dict[str, Any], list[str], str]] = [
    ("no GPU at all", changed(GOOD, pci=[], smi=None, proc=""), ["no_gpu"], "none on the PCI bus"),
    ("no GPU in a container", changed(GOOD, pci=[], smi=None, proc="", container="podman"),
     ["no_gpu"], "that this podman container sees"),
    ("nothing installed", changed(GOOD, smi=None, proc="", library=None), ["driver_missing"],
     "install branch 580, open module"),
    ("no driver in a container", changed(GOOD, smi=None, proc="", library=None, container="docker"),
     ["driver_not_in_container"], "docker run --gpus all"),
    ("nouveau holds it", changed(GOOD, smi=None, proc="", library=None, nouveau=True,
     pci=["0x2684 nouveau"]), ["nouveau_holds_gpu"], "install branch 580"),
    ("nouveau was faster than the driver", changed(GOOD, smi=None, proc="", nouveau=True,
     modinfo="version: 580.65.06\nlicense: NVIDIA", pci=["0x2684 nouveau"]),
     ["nouveau_holds_gpu"], "blacklist nouveau"),
    ("a proprietary module under Blackwell", changed(GOOD, pci=["0x2b85 nvidia"],
     proc=GOOD["proc"].replace("Open Kernel Module for x86_64", "x86_64 Kernel Module")),
     ["module_flavour"], "the open kernel module"),
    ("a module that is not the libraries' in a container", changed(GOOD, library="580.95.05",
     container="docker"), ["driver_mismatch"], "from the image"),
    ("no user space", changed(GOOD, smi=None, library=None), ["userspace_missing"], "580.65.06"),
    ("no user space in a container", changed(GOOD, smi=None, library=None, container="docker"),
     ["userspace_missing"], "NVIDIA_DRIVER_CAPABILITIES"),
    ("nvidia-smi is not installed, the libraries are", changed(GOOD, smi=None), [], "as it is"),
    ("a module that modinfo does not know", changed(GOOD, smi=None, proc="",
     module_kernels=["6.8.0-60-generic"]), ["module_not_loaded"], "lies ready for kernel 6.8.0"),
    ("nvidia-smi does not end", changed(GOOD, smi={"exit": None, "said": [
     "TimeoutExpired: Command 'nvidia-smi' timed out after 20 seconds"]}),
     ["gpu_not_answering"], "enable --now nvidia-persistenced"),
    ("a card that is not known", changed(GOOD, pci=["0x4242 nvidia"]), [], "0x4242"),
    ("a display card beside it", changed(GOOD, pci=["0x2684 nvidia", "0x1d01 nvidia"]), [],
     "no code for NVIDIA GeForce RTX 4090, which"),
    ("one of two kept for a virtual machine", changed(GOOD, pci=["0x2684 nvidia",
     "0x2684 vfio-pci"]), [], "left alone: 0000:02:00.0"),
    ("a new kernel waits", changed(BY_ID["a new kernel without the module"],
     reboot_for=["linux-image-3.13.0-88-generic"]), ["module_not_built"],
     "reboot into the new kernel"),
]  # fmt: skip


@pytest.mark.parametrize("name, case, codes, words", VARIANTS, ids=[row[0] for row in VARIANTS])
def test_small_changes_of_recorded_hosts(
    name: str, case: dict[str, Any], codes: list[str], words: str
) -> None:
    got = decided(case)
    assert [refusal.code for refusal in got.refusals] == codes
    assert words in told(got)


def test_in_a_container_the_pairs_that_this_driver_runs_are_named() -> None:
    case = changed(OLD, container="docker")
    older = MATRIX.locks["cu13-0.26.0-x86_64"].model_copy(
        update={"name": "cu12-0.19.0-x86_64", "vllm": "0.19.0", "driver_least": 525}
    )
    matrix = MATRIX.model_copy(update={"locks": {**MATRIX.locks, older.name: older}})
    got = decide(facts_of(case), MATRIX.locks["cu13-0.32.0-x86_64"], matrix, "docker")
    assert "engine_lock = 'cu12-0.19.0-x86_64', which this driver runs" in got.refusals[0].fix


def test_a_fabric_manager_must_run_and_be_of_the_drivers_version() -> None:
    good = changed(H100, smi={**H100["smi"], "gpus": [[*g[:4], "fabric:Completed"]
                                                     for g in H100["smi"]["gpus"]]})  # fmt: skip
    assert decided(good, fabric_manager=True).refusals == ()
    other = changed(H100, dpkg="nvidia-fabricmanager-580 580.95.05-1 install ok installed")
    assert "must be of the driver's version" in decided(other).refusals[0].fix
    same = changed(H100, dpkg="nvidia-fabricmanager-580 1:580.105.08-1 hold ok installed")
    assert "must be" not in decided(same).refusals[0].fix


def test_what_is_only_told() -> None:
    case = changed(GOOD, dpkg="nvidia-driver-580 580.65.06-1 install ok installed\n"
                              "libnvidia-compute-580 580.65.06-1 hold ok installed")  # fmt: skip
    got = told(decided(case, unattended_upgrades=True, reboot_for=["libc6"]))
    assert "apt-mark hold nvidia-driver-580." in got
    assert "asks for a reboot, for libc6" in got
    ada, ampere = GOOD["smi"]["gpus"][0], ["NVIDIA GeForce RTX 3090", "Ampere", "0x2204", 24576]
    mixed = changed(GOOD, pci=["0x2684 nvidia", "0x2204 nvidia"],
                    smi={**GOOD["smi"], "gpus": [ada, ampere]})  # fmt: skip
    words = "GPUs of different kinds: NVIDIA GeForce RTX 4090, NVIDIA GeForce RTX 3090"
    assert words in told(decided(mixed))
    one = changed(GOOD, smi={**GOOD["smi"], "gpus": GOOD["smi"]["gpus"][:1]})
    assert "nvidia-smi lists 1 of 2 GPUs" in told(decided(one))


def test_the_blocks_of_ids_do_not_overlap() -> None:
    for (_, last, *_), (first, end, *_) in itertools.pairwise(driver_cards._BLOCKS):
        assert last < first <= end
    hopper = chip_of("0x2330")
    assert hopper is not None and hopper.capability == "9.0"
    assert chip_of(None) is chip_of("") is chip_of("0xffff") is None


# The script, on files as the kernel lays them out, and on programs that say what was recorded


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report_gpu, "ROOT", tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return tmp_path


def program(root: Path, name: str, says: str, code: int = 0) -> None:
    said = put(root / "programs" / f"{name}.txt", says)
    put(root / "programs" / name, f"#!/bin/sh\ncat {said}\nexit {code}\n").chmod(0o755)


def pci(root: Path, address: str, kind: str, device: str, bound: str | None, vendor: str) -> None:
    top = root / "sys/bus/pci/devices" / address
    for name, value in (("vendor", vendor), ("class", kind), ("device", device)):
        put(top / name, value + "\n")
    if bound:
        (root / "sys/bus/pci/drivers" / bound).mkdir(parents=True, exist_ok=True)
        (top / "driver").symlink_to(root / "sys/bus/pci/drivers" / bound)


def test_the_script_reads_a_host_with_gpus(root: Path) -> None:
    pci(root, "0000:01:00.0", "0x030000", "0x2684", "nvidia", "0x10de")
    pci(root, "0000:01:00.1", "0x040300", "0x22ba", "snd_hda_intel", "0x10de")
    pci(root, "0000:02:00.0", "0x030200", "0x2330", "nouveau", "0x10de")
    pci(root, "0000:07:00.0", "0x068000", "0x22a3", "nvidia-nvswitch", "0x10de")
    pci(root, "0000:03:00.0", "0x030000", "0x744c", "amdgpu", "0x1002")
    put(root / "proc/driver/nvidia/version", GOOD["proc"] + "\nGCC version: gcc 13\n")
    put(root / "proc/77/comm", "nv-fabricmanage\n")
    (root / "sys/module/nouveau").mkdir(parents=True)
    put(root / "sys/firmware/efi/efivars" / report_gpu.SECURE_BOOT, "\x06\0\0\0\x01")
    put(root / "run/reboot-required.pkgs", "libc6\nlinux-base\nlibc6\n")
    put(root / "lib/modules/6.8.0-60-generic/updates/dkms/nvidia.ko.zst", "")
    put(root / "lib/modules/6.8.0-71-generic/kernel/drivers/gpu/nouveau.ko", "")
    put(root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.65.06", "")
    put(root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "")
    program(root, "nvidia-smi", "a warning first\n" + smi_xml(GOOD["smi"]))
    program(root, "modinfo", "filename: /x\nversion:        580.65.06\nlicense:   Dual MIT/GPL\n")
    program(root, "dpkg-query", "nvidia-utils-580 580.65.06-1 hold ok installed\n"
                                "nvidia-old 1 deinstall ok config-files\n")  # fmt: skip
    program(root, "dmesg", "[1] usb 1-1: new device\n[2] NVRM: loading NVIDIA UNIX\n")
    facts = DriverFacts.model_validate(report_gpu.driver())
    assert [(c.device, c.driver) for c in facts.gpus] == [
        ("0x2684", "nvidia"), ("0x2330", "nouveau")
    ]  # fmt: skip
    assert (facts.nvswitches, facts.fabric_manager, facts.nouveau) == (1, True, True)
    assert facts.loaded and (facts.loaded.version, facts.loaded.open) == ("580.65.06", True)
    assert facts.on_disk and facts.on_disk.open is True
    assert facts.module_kernels == ["6.8.0-60-generic"]
    assert (facts.library, facts.secure_boot) == ("580.65.06", True)
    assert facts.reboot_for == ["libc6", "linux-base"]
    assert facts.packages["nvidia-utils-580"].held
    assert list(facts.packages) == ["nvidia-utils-580"]
    assert facts.kernel_log == ["[2] NVRM: loading NVIDIA UNIX"]
    assert facts.smi and facts.smi.log and len(facts.smi.log.gpus) == 2
    assert facts.smi.log.gpus[0].memory_mib == 24564
    whole = str(report_gpu.driver())
    # its serial number stays where it is; by its UUID a runner chooses it
    assert "secret" not in whole and "1650522003820" not in whole
    assert facts.smi.log.gpus[0].uuid == "GPU-513536b6"


def test_the_scripts_that_the_report_runs_and_imports_travel_with_it() -> None:
    onhost = REPO / "kvhost/onhost"
    sent = (REPO / "deploys/common/sent.py").read_text()
    run = r'(?:with_name\(|here / )"(\w+\.py)"'
    names = set(re.findall(run, (onhost / "report.py").read_text()))
    for script in REPORT_SCRIPTS:
        imported = re.findall(r"(?m)^    (?:from|import) (\w+)", (onhost / script).read_text())
        names |= {f"{name}.py" for name in imported if (onhost / f"{name}.py").exists()}
    assert {"report_gpu.py", "masking.py"} <= names
    other = names - {*REPORT_SCRIPTS, *DRIVE_SCRIPTS}
    assert [name for name in other if f'"{name}"' not in sent] == []


def test_the_script_reads_a_host_without_any(root: Path) -> None:
    facts = DriverFacts.model_validate(report_gpu.driver())
    assert facts.gpus == [] and facts.loaded is None and facts.secure_boot is False
    put(root / "sys/firmware/efi/efivars/Boot0000-x", "")
    assert report_gpu.secure_boot() is False  # firmware without Secure Boot
    put(root / "sys/firmware/efi/efivars" / report_gpu.SECURE_BOOT, "\x06\0\0\0\0")
    assert report_gpu.secure_boot() is False


def test_debians_own_names_of_module_and_library(root: Path) -> None:
    put(root / "usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.535.247.01", "")
    put(root / "lib/modules/6.1.0-37-amd64/updates/dkms/nvidia-current.ko.xz", "")
    says = 'case "$1" in nvidia-current) echo "version: 535.247.01";; *) exit 1;; esac'
    put(root / "programs/modinfo", f"#!/bin/sh\n{says}\n").chmod(0o755)
    assert report_gpu.library_version() == "535.247.01"
    assert report_gpu.module_kernels() == ["6.1.0-37-amd64"]
    assert report_gpu.module_on_disk() == {"version": "535.247.01", "open": False, "signer": None}


def test_what_nvidia_smi_says_when_it_fails_is_kept(root: Path) -> None:
    program(root, "nvidia-smi", "No devices were found\n", 6)
    assert report_gpu.smi() == {"exit": 6, "said": ["No devices were found"], "log": None}
    program(root, "nvidia-smi", "<?xml version='1.0'?><broken", 0)
    assert report_gpu.smi() == {"exit": 0, "said": ["<?xml version='1.0'?><broken"], "log": None}
