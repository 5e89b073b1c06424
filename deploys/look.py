"""`kvhost inventory add`: one look at a host that is not in the inventory yet. Changes nothing."""

from paramiko import SSHException
from pyinfra import host, logger
from pyinfra.api import StringCommand

from deploys.common.facts import HostReportText
from deploys.common.prepare import all_settings
from kvhost.commands.asking import answer
from kvhost.report import ReportError, parse_report


def transfer() -> str:
    """sftp, scp, or none: how files can get there."""
    client = getattr(host.connector, "client", None)
    if client is None:
        return "sftp"
    try:
        client.open_sftp().close()
        return "sftp"
    except (SSHException, EOFError):
        ok, _ = host.run_shell_command(StringCommand("command -v scp"), _sudo=False)
        return "scp" if ok else "none"


settings = all_settings()[host.name]
argv = ("--base-dir", settings.base_dir, "--tier-dir", settings.resolved_tier_dir,
        "--service-user", settings.service_user, "--drives")  # fmt: skip
try:
    text = host.get_fact(HostReportText, argv=argv)
    report = parse_report(text)
except ReportError as error:
    hint = "" if text.strip() else (
        ". A provider's proxy that gives a terminal alone runs no commands: take its line for SSH "
        "over a TCP port of the machine"
    )  # fmt: skip
    host.log_styled(f"{error}{hint}", fg="red", log_func=logger.error)
else:
    answer(host.name, {"transfer": transfer(), "report": report.model_dump(mode="json")})
