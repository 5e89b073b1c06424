"""systemd's units, made of the one description in describe.py. Pure.

What each line is for stands here; what was tried of it, and where, is in docs/services.md.
"""

from __future__ import annotations

import shlex

from kvhost.paths import HostPaths
from kvhost.services.served import model_dir
from kvhost.services.service import Service, script, unit_file
from kvhost.settings import Settings

Line = tuple[str, object]

#: a service that fails this often within the time that so many tries can take is given up
TRIES = 5
RESTART_PAUSE_S = 2
#: launch.py waits at most this long for what a service needs, pauses and gaps included: 120 s for
#: the cache server, GPU_WAIT_S for the GPUs
LAUNCH_S = 300
#: exit of launch.py for a description that no retry will mend
UNUSABLE = 78


def unit_text(service: Service, settings: Settings, paths: HostPaths, *, gpu: bool) -> str:
    """One unit file. ``gpu``: whether the engine is one for GPUs, whose devices it must see."""
    sections: dict[str, list[Line]] = {
        "Unit": unit_lines(service, settings, paths),
        "Service": [
            *run_lines(service, settings.service_user, paths),
            *limit_lines(service),
            *sandbox_lines(service, settings, paths, gpu=gpu),
        ],
        "Install": [("WantedBy", "multi-user.target")],
    }
    parts = [
        # by this line services.py tells its own from others'
        f"# Written by kvhost for {paths.base_dir}. Changes here are undone by the next run:",
        f"# put yours into {unit_file(service.name)}.d/ (systemctl edit).",
    ]
    for section, lines in sections.items():
        parts += ["", f"[{section}]", *(f"{key}={value}" for key, value in lines)]
    return "\n".join(parts) + "\n"


def start_limit_s(service: Service) -> int:
    """Seconds that one start may take, until the service has answered."""
    return LAUNCH_S + service.ready_s


def unit_lines(service: Service, settings: Settings, paths: HostPaths) -> list[Line]:
    needs = [unit_file(name) for name in service.after]
    places = dict.fromkeys((paths.base_dir, *service.writes))
    return [
        ("Description", f"kvhost: {service.title}"),
        *((("After", " ".join(needs)), ("Wants", " ".join(needs))) if needs else ()),
        # neither Requires= nor PartOf=: the runner serves on without the cache, and registers again
        ("RequiresMountsFor", " ".join(map(escaped, places))),
        ("StartLimitBurst", TRIES),
        ("StartLimitIntervalSec", TRIES * (start_limit_s(service) + 60)),
    ]


def run_lines(service: Service, user: str, paths: HostPaths) -> list[Line]:
    spec = f"{paths.etc}/{service.name}.json"
    lines: list[Line] = [("Type", "exec")]
    if service.closed_ports:
        ports = ",".join(map(str, service.closed_ports))
        close = ("/usr/bin/python3", f"{paths.bin}/close_ports.py", "--ports", ports)
        lines += [("ExecStartPre", "+" + command((*close, "--user", user)))]
    lines += [
        ("ExecStart", command((*script(paths, "launch"), spec))),
    ]
    if service.ready:
        ready = ("/usr/bin/" + service.ready[0], *service.ready[1:])
        # as root, outside of the sandbox: it counts its request in state/, which is root's
        waits = command((*ready, "--timeout", str(service.ready_s)))
        # systemd waits for it also when the service has ended: it is told whom to watch
        lines += [("ExecStartPost", f"+{waits} --main $MAINPID")]
    secrets = dict.fromkeys(service.secret_env.values())
    return [
        *lines,
        *(("LoadCredential", f"{path.rpartition('/')[2]}:{escaped(path)}") for path in secrets),
        ("TimeoutStartSec", start_limit_s(service)),
        ("Restart", "always"),
        ("RestartSec", RESTART_PAUSE_S),  # launch.py adds a growing pause after quick failures
        ("RestartPreventExitStatus", UNUSABLE),
        # launch.py alone is told: it stops its service in order and ends what is left. Told at the
        # same time, vLLM's workers would end under requests that the API server still answers.
        ("KillMode", "mixed"),
        ("TimeoutStopSec", service.stop_timeout_s + 15),
        ("StandardOutput", "journal"),
        ("StandardError", "journal"),
        ("SyslogIdentifier", f"kvhost-{service.name}"),
    ]


def limit_lines(service: Service) -> list[Line]:
    return [
        ("LimitNOFILE", 1 << 20),
        ("LimitMEMLOCK", "infinity"),
        ("LimitCORE", 0),  # a core holds prompts and keys
        # short of memory, the machine loses these before its sshd
        ("OOMScoreAdjust", 300),
        ("MemoryAccounting", "yes"),
        ("IOAccounting", "yes"),
        ("TasksMax", 8192),
    ]


def sandbox_lines(
    service: Service, settings: Settings, paths: HostPaths, *, gpu: bool
) -> list[Line]:
    """What the service cannot do. Each line was tried with the real engine on CPU."""
    used = (paths.base_dir, settings.paths.tier_dir, model_dir(settings, paths))
    writes = dict.fromkeys((paths.home, paths.log, paths.run, *service.writes))
    return [
        ("User", settings.service_user),
        ("Group", settings.service_user),
        ("UMask", "0077"),
        ("NoNewPrivileges", "yes"),
        ("CapabilityBoundingSet", ""),
        ("AmbientCapabilities", ""),
        ("ProtectSystem", "strict"),
        ("ReadWritePaths", " ".join(map(escaped, writes))),
        ("ProtectHome", "read-only" if below(used, "/home", "/root", "/run/user") else "yes"),
        ("PrivateTmp", "no" if below(used, "/tmp", "/var/tmp") else "yes"),
        # only a GPU can prove which of its devices are needed, and there is none here
        *(() if gpu else (("PrivateDevices", "yes"),)),
        # neither ProtectKernelTunables nor ProtectControlGroups: in a container they uncover the
        # machine's boot_id, and the service's record would be of another boot (docs/services.md)
        ("ProtectKernelModules", "yes"),
        ("ProtectKernelLogs", "yes"),
        ("ProtectHostname", "yes"),
        ("RestrictNamespaces", "yes"),
        ("RestrictSUIDSGID", "yes"),
        ("RestrictRealtime", "yes"),
        ("LockPersonality", "yes"),
        ("RemoveIPC", "no"),  # both services are one user: the end of one must not take the other's
        ("SystemCallArchitectures", "native"),
        ("SystemCallFilter", "@system-service"),
        ("SystemCallErrorNumber", "EPERM"),
    ]


def below(paths: tuple[str, ...], *tops: str) -> bool:
    return any(path == top or path.startswith(top + "/") for path in paths for top in tops)


def escaped(path: str) -> str:
    """A path as one word of a unit's list (systemd.syntax(7), specifiers)."""
    return command((path,))


def command(argv: tuple[str, ...]) -> str:
    """A command line of a unit: quoted as systemd reads it, no specifiers, no variables."""
    words = []
    for word in argv:
        plain = word.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
        if shlex.quote(word) == word:
            words.append(plain)
        else:
            words.append('"' + plain.replace('"', '\\"') + '"')
    return " ".join(words)
