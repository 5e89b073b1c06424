"""The drive in a plan: what is read, formatted and mounted, what stands against it, notes. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvhost.drives.claim import Claim, Claimed, claim
from kvhost.drives.claim_match import sizes
from kvhost.drives.claim_table import title
from kvhost.drives.types import Drives
from kvhost.plan.types import Action, PlanInputs, Refusal, unreadable
from kvhost.report import HostReport
from kvhost.settings import Settings

READ_BYTES_PER_S = 1e9  # what a plan reckons with; a fast NVMe drive reads several times that
WORN_PERCENT = 80
HOT_C = 70


def claim_of(settings: Settings, report: HostReport) -> Claim:
    """The claim on this host's drives; empty where none is claimed or they are not known."""
    if report.drives.data is None:
        return Claim((), ())
    return claim(settings, report.drives.data)


def drive_actions(settings: Settings, report: HostReport) -> list[Action]:
    """What happens to the drive. None where none is claimed."""
    if not settings.claims_a_drive:
        return []
    found = claim_of(settings, report)
    if not found.claimed:
        return [Action("storage", "the claimed drive", "unknown")]
    return [action for one in found.claimed for action in _actions(settings, one)]


def _actions(settings: Settings, one: Claimed) -> Iterator[Action]:
    name, mount = title(one.device), settings.resolved_drive_mount
    if one.action == "keep":
        yield Action("storage", f"drive {name}, kvhost's, mounted at {mount}", "keep")
        return
    if one.action == "adopt":
        what = f"drive {name}, mounted at {mount}, used as it is"
        yield Action("storage", what, "change", "kvhost's marker is written into it")
        return
    if one.action == "format":
        yield from _format(settings, one)
    yield Action("storage", f"mount {name} at {mount}, now and at every boot", "change")


def _format(settings: Settings, one: Claimed) -> Iterator[Action]:
    device, name = one.device, title(one.device)
    held = [f"{f.kind}: {f.detail}" for f in one.drive.findings]
    if one.resumes:
        yield Action("storage", f"go on with {name}, where a run was cut off", "change")
    elif held:
        yield Action(
            "storage", f"ERASE {name}, {sizes(device.size_bytes)}", "change",
            f"drive_erase allows it; lost is {'; '.join(held)}",
        )  # fmt: skip
    elif settings.drive_blank_check == "sampled":
        what = f"read samples of {name}, {sizes(device.size_bytes)}"
        yield Action("storage", what, "change", "what lies between the samples is lost unseen")
    else:
        minutes = device.size_bytes / READ_BYTES_PER_S / 60
        yield Action(
            "storage", f"read every byte of {name}, {sizes(device.size_bytes)}", "change",
            f"about {max(1, round(minutes))} min at 1 GB/s; a byte that is not zero ends the run",
        )  # fmt: skip
    more = "LUKS2, " if settings.drive_encrypt else ""
    yield Action(
        "storage",
        f"format {name}: GPT, one partition named kvhost, {more}{settings.drive_filesystem}",
        "change",
    )


def drive_refusals(
    settings: Settings, report: HostReport, facts: PlanInputs
) -> Iterator[Refusal]:  # fmt: skip
    """Every reason not to touch the claimed drive."""
    if not settings.claims_a_drive:
        yield from _left_in_use(settings, report)
        return
    if report.drives.data is None:
        yield unreadable("storage", "the drives", report.drives.why)
        return
    yield from claim_of(settings, report).refusals


def _left_in_use(settings: Settings, report: HostReport) -> Iterator[Refusal]:
    """A drive that an earlier run claimed: without it the cache would begin anew elsewhere."""
    used = report.kvhost.data.drive if report.kvhost.data else None
    if used is None or used.status == "absent":
        return
    if not isinstance(used.data, dict):
        yield unreadable("storage", "state/drive.json, the drive in use,", used.why or "no object")
        return
    drive, mount = used.data.get("drive"), used.data.get("mount")
    name = drive.get("by_id") or drive.get("backing") if isinstance(drive, dict) else None
    yield Refusal(
        "storage", "drive_left_in_use",
        "no setting claims a drive, and one is in use",
        "the drive settings of the run before, or no drive in use",
        f"{name or 'a drive'} mounted at {mount}, with its line in /etc/fstab",
        "put the drive settings back, or give the drive back first: kvhost release",
    )  # fmt: skip


def drive_notes(settings: Settings, report: HostReport) -> list[str]:
    """What is worth knowing of the claimed drive and is no reason to refuse it."""
    drives = report.drives.data
    if not settings.claims_a_drive or drives is None:
        return []
    found = claim_of(settings, report)
    notes = [note for one in found.claimed for note in _notes(settings, drives, one)]
    keeps = found.claimed and all(one.action != "format" for one in found.claimed)
    if settings.drive_erase and keeps:
        notes.append("drive_erase is set and not needed: take it out of the inventory.")
    return list(dict.fromkeys(notes))


def _notes(settings: Settings, drives: Drives, one: Claimed) -> Iterator[str]:
    device, name = one.device, title(one.device)
    health, link = device.health, device.pcie.data
    if health.data:
        log = health.data
        if log.critical_warning:
            yield f"{name} gives a critical warning ({log.critical_warning:#x}): replace it soon."
        if log.percentage_used >= WORN_PERCENT:
            yield f"{name} is worn: {log.percentage_used} % of what its maker promises is used."
        if 0 < log.spare_threshold_percent >= log.available_spare_percent:
            yield f"{name} has {log.available_spare_percent} % of its spare blocks left."
        if log.media_errors:
            yield f"{name} had {log.media_errors} errors that it could not correct."
        if log.temperature_c >= HOT_C:
            yield f"{name} is at {log.temperature_c} °C and will slow down."
    elif health.status == "unreadable":
        yield f"The health of {name} could not be read: {health.why}."
    if link and link.is_slower:
        yield (
            f"{name} runs at PCIe {link.speed_gts:g} GT/s x{link.width} and could at "
            f"{link.max_speed_gts:g} GT/s x{link.max_width}: another slot may be faster."
        )
    if device.transport not in ("nvme", "loop"):
        yield f"{name} is attached by {device.transport}: slower than NVMe."
    if device.rotational and device.transport in ("sata", "sas", "scsi", "usb"):
        yield f"{name} has turning platters: loading KV from it may be slower than computing it."
    if device.removable or device.transport == "usb":
        yield f"{name} can be pulled out: the cache is gone for as long as it is."
    if any(f.kind == "shareable" for f in one.drive.findings):
        yield f"{name} can be used by several hosts at once: nothing keeps another one off it."
    marker = device.kvhost.marker.data if device.kvhost else None
    if isinstance(marker, dict) and marker.get("machine_id") not in (None, drives.machine_id):
        yield f"{name} was formatted by kvhost on another machine; its cache is used as it is."
    if one.action == "format" and drives.machine_id is None:
        yield "This host has no /etc/machine-id: a drive that is not blank cannot be erased here."
    if one.action == "format":
        yield from (f"{name}: {note}." for note in device.notes)
