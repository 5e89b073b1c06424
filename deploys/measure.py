"""`kvhost drives --measure`: fio on the tier of every host, as the service's user; cleaned up."""

from typing import Any

from pyinfra.api import FunctionCommand, operation

from deploys.common.care import ask_host
from deploys.common.context import Visit
from deploys.common.drives import asked_of
from deploys.common.operations import Commands
from deploys.common.refused import provisioned, refused
from deploys.common.runlock import take_lock
from deploys.host.operations import debian_packages
from kvhost.commands.asking import answer, question
from kvhost.plan.types import GIB


def words(at: Visit, asked: dict[str, Any]) -> tuple[str, ...]:
    write = int(float(question()["write_gib"]) * GIB)
    return (
        *("python3", at.script("drive_measure"), "--tier", at.paths.tier_dir, "--user", at.user),
        *("--write-bytes", str(write), "--file-bytes", str(asked["file_bytes"])),
        *("--memory", f"{at.paths.state}/drive-measured.json"),
        *("--keep-bytes", str(int(at.settings.free_floor_gib * GIB))),
        *("--seconds", str(int(question().get("seconds", 60)))),
    )


@operation(is_idempotent=False)
def measure(at: Visit) -> Commands:
    """Measures the tier and tells the command.

    + at: the host
    """
    asked = asked_of(at)

    def run(state: Any, host: Any) -> bool:
        found = ask_host(host, words(at, asked))
        return found is not None and (answer(at.host, {**asked, "measured": found}) or True)

    yield FunctionCommand(run, (), {})


here = provisioned("drive_measure", name="drive: measure")
if here is not None and here.settings.runner == "ollama":
    why = "Ollama keeps no KV cache on disk: there is nothing to measure a drive for"
    refused(name="drive: none", why=why)
elif here is not None:
    take_lock(name="host: one run at a time", run=here)
    if question().get("install"):
        debian_packages(
            name="drive: fio",
            packages=("fio",),
            note=f"{here.paths.state}/packages",
        )
    measure(name="drive: measure", at=here)
