"""What kvhost would do about a driver: on recorded hosts, on systems it knows and does not."""

from __future__ import annotations

from typing import Any

import pytest

from kvhost.driver.decide import decide, expected_gpus
from kvhost.driver.mend import INSTALL, OTHERS, Mend, mend_of
from kvhost.driver.sources import NVIDIA, MirrorError, Source, mirror_of
from kvhost.onhost import driver_look
from kvhost.report import HostReport
from kvhost.settings import Settings
from tests.plan_cases import changed, ok, service
from tests.test_driver import BY_ID, CASES, MATRIX, facts_of

BOOTED = {"pid1.comm": "systemd", "pid1.systemd": True, "pid1.container": None}
UBUNTU = {"os": ok({"id": "ubuntu", "version_id": "24.04", "id_like": ["debian"],
                    "pretty": "Ubuntu 24.04"})}  # fmt: skip
FEDORA = {"os": ok({"id": "fedora", "version_id": "43", "id_like": [], "pretty": "Fedora 43"})}
OLD = BY_ID["driver 570 under torch for CUDA 13"]
NONE = {**OLD, "proc": "", "smi": None, "headers": True}
MIRROR = Source("https://mirror.example.org/cuda/", key="KEY")
ALLOWED: dict[str, Any] = {"driver_install": True}


def report_of(case: dict[str, Any], host: dict[str, Any]) -> HostReport:
    report = changed({**BOOTED, "pid1.container": case.get("container"), **host})
    driver = report.driver.model_validate(ok(facts_of(case)))
    return report.model_copy(update={"driver": driver})


def mended(
    case: dict[str, Any], host: dict[str, Any] | None = None, mirror: Source | None = None,
    **settings: Any,
) -> Mend | None:  # fmt: skip
    report = report_of(case, host or {})
    lock = MATRIX.locks[case.get("lock", "cu13-0.32.0-x86_64")]
    container = report.pid1.data.container if report.pid1.data else None
    facts = report.driver.data
    assert facts is not None
    decision = decide(facts, lock, MATRIX, container)
    return mend_of(Settings(**{**ALLOWED, **settings}), report, decision, mirror)


def order(got: Mend | None) -> dict[str, Any]:
    assert got is not None and not got.refusals, got
    return got.order


def codes(got: Mend | None) -> list[str]:
    assert got is not None
    return [refusal.code for refusal in got.refusals]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_every_recorded_host_is_mended_or_left_as_its_refusal_says(case: dict[str, Any]) -> None:
    expected = case["expect"]
    able = len(expected) == 1 and expected[0] in INSTALL | OTHERS and not case.get("container")
    got = mended(case)
    assert (got is not None) == able
    if got is None:
        return
    assert got.order["code"] == expected[0]
    install = got.order["install"]
    if expected[0] in INSTALL:
        assert install["branch"] == 580
    if install:
        # never a name without its branch or pin, never the CUDA toolkit
        assert not [name for name in install["names"] if "toolkit" in name or name == "nvidia-open"]


def test_nothing_is_done_without_the_setting() -> None:
    assert mended(OLD, driver_install=False) is None


def test_a_good_driver_and_a_host_without_a_gpu_are_left_alone() -> None:
    assert (
        mended(BY_ID["two 4090 without NVSwitch, where the fabric manager has nothing to do"])
        is None
    )
    assert mended({**OLD, "pci": [], "smi": None, "proc": ""}) is None


def test_debian_gets_nvidias_packages_of_the_branch_from_nvidias_repository() -> None:
    got = order(mended(NONE))
    assert got["install"] == {
        "branch": 580,
        "version": None,
        "main": "nvidia-driver-cuda",
        "names": ["nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced"],
        "source": {
            "uri": "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/",
            "key": None,
            "key_url": "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/"
            "3bf863cc.pub",
            "fingerprint": "EB693B3035CD5710E231E123A4B469963BF863CC",
        },
    }
    assert got["headers"] == "linux-headers-6.8.0-60-generic"


def test_ubuntu_gets_the_distributions_and_signed_modules_with_secure_boot() -> None:
    got = order(mended(NONE, UBUNTU))
    assert got["install"]["names"] == ["nvidia-headless-580-server-open", "nvidia-utils-580-server"]
    assert got["install"]["source"] is None
    for secure in (True, None):  # what could not be read is taken for on
        signed = order(mended({**NONE, "secure_boot": secure}, UBUNTU))
        assert signed["install"]["names"] == [
            "nvidia-headless-no-dkms-580-server-open",
            "linux-modules-nvidia-580-server-open-6.8.0-60-generic",
            "nvidia-utils-580-server",
        ]
        assert signed["headers"] is None  # nothing is compiled


def test_a_mirror_takes_the_place_of_either() -> None:
    for host in ({}, UBUNTU):
        source = order(mended(NONE, host, MIRROR))["install"]["source"]
        assert (source["uri"], source["key"]) == (MIRROR.uri, "KEY")
    assert codes(mended(NONE, FEDORA)) == ["driver_source_unknown"]
    assert codes(mended(NONE, FEDORA, MIRROR)) == []


def test_every_fingerprint_ends_as_the_name_of_its_key() -> None:
    for path, key, fingerprint in NVIDIA.values():
        assert len(fingerprint) == 40
        assert fingerprint.endswith(key.removesuffix(".pub").upper())
        assert path.endswith("x86_64")


def test_the_flavour_that_the_card_requires() -> None:
    blackwell = {**NONE, "pci": ["0x2b85 none"]}
    assert "nvidia-kernel-open-dkms" in order(mended(blackwell))["install"]["names"]


def test_fabric_manager_comes_with_nvswitch() -> None:
    assert "nvidia-fabricmanager" in order(mended({**NONE, "switches": 4}))["install"]["names"]
    names = order(mended({**NONE, "switches": 4}, UBUNTU))["install"]["names"]
    assert "nvidia-fabricmanager-580" in names


@pytest.mark.parametrize(
    "case, host, settings, code",
    [
        ({**NONE, "secure_boot": True}, {}, {}, "driver_needs_mok"),
        ({**NONE, "secure_boot": None}, {}, {}, "driver_needs_mok"),
        (NONE, {"pid1.systemd": False, "pid1.comm": "bash"}, {}, "driver_no_systemd"),
        (NONE, FEDORA, {}, "driver_source_unknown"),
        (NONE, {}, {"driver_version": "570.86.10"}, "driver_version_of_other_branch"),
        (NONE, {"kvhost.services": ok([service("runner", 4711)])}, {}, "driver_in_use"),
    ],
)
def test_what_stands_against_it_is_refused(
    case: dict[str, Any], host: dict[str, Any], settings: dict[str, Any], code: str
) -> None:
    assert codes(mended(case, host, **settings)) == [code]


def test_only_what_is_needed_is_done() -> None:
    [built] = [c for c in CASES if c["expect"] == ["module_not_built"] and c.get("headers")][:1]
    got = order(mended(built))
    assert (got["install"], got["build"]) == (None, True)
    mismatch = next(
        c for c in CASES if c["expect"] == ["driver_mismatch"] and "reboot" in c["words"]
    )
    got = order(mended(mismatch))
    assert (got["install"], got["headers"], got["build"]) == (None, None, False)
    useless = next(c for c in CASES if "a reboot does not help" in c["words"])
    assert order(mended(useless))["install"]["branch"] == 580
    held = {**NONE, "pci": ["0x2236 nouveau"], "nouveau": True}
    assert order(mended(held))["install"]["branch"] == 580
    ready = {**held, "module_kernels": ["6.8.0-60-generic"]}
    assert order(mended(ready))["install"] is None


def test_the_plan_says_what_it_costs() -> None:
    got = mended(NONE)
    assert got is not None and "driver_reboot is off" in got.cost
    got = mended(NONE, driver_reboot=True)
    assert got is not None and "reboots the host" in got.cost


def test_a_key_that_is_none_is_refused(tmp_path: Any) -> None:
    key = tmp_path / "key.asc"
    given: dict[str, Any] = {
        "driver_repository": "http://m.example.org/",
        "driver_repository_key": str(key),
    }
    with pytest.raises(MirrorError, match="cannot be read"):
        mirror_of(Settings(**ALLOWED, **given))
    for text in ("nothing", "-----BEGIN PGP PRIVATE KEY BLOCK-----\n"):
        key.write_text(text)
        with pytest.raises(MirrorError, match="is no public key"):
            mirror_of(Settings(**ALLOWED, **given))
    key.write_text("-----BEGIN PGP PUBLIC KEY BLOCK-----\n")
    got = mirror_of(Settings(**ALLOWED, **given))
    assert got is not None and got.uri == "http://m.example.org/"
    assert mirror_of(Settings(**ALLOWED)) is None


def test_the_gpus_that_cuda_should_see() -> None:
    assert expected_gpus(report_of({**NONE, "pci": ["0x2684 nvidia", "0x2b85 vfio-pci"]}, {})) == [
        "8.9"
    ]
    assert expected_gpus(report_of({**NONE, "pci": ["0x2684 nvidia", "0x9999 nvidia"]}, {})) == [
        "8.9",
        "?",
    ]


def test_which_packages_are_a_drivers() -> None:
    own = (
        "nvidia-driver-cuda libnvidia-ml1 libcuda1 libnvcuvid1 cuda-drivers-580 nvidia-smi "
        "linux-modules-nvidia-580-server-open-6.8.0-60-generic xserver-xorg-video-nvidia-580"
    )
    others = (
        "libnvme1 nvme-cli libcudart13 cuda-toolkit-13-0 nvidia-container-toolkit dkms "
        "libnvidia-container1 linux-modules-6.8.0-60-generic linux-image-6.8.0-60-generic"
    )
    assert [name for name in own.split() if not driver_look.DRIVER.match(name)] == []
    assert [name for name in others.split() if driver_look.DRIVER.match(name)] == []


@pytest.mark.parametrize(
    "version, upstream",
    [
        ("580.95.05-1", "580.95.05"),
        ("580.95.05-0ubuntu0.24.04.1", "580.95.05"),
        ("1:580.95.05-1~deb12u1", "580.95.05"),
        ("580.95.05+ds-1", "580.95.05"),
    ],
)
def test_the_drivers_version_in_a_packages(version: str, upstream: str) -> None:
    assert driver_look.upstream(version) == upstream
