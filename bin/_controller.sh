# Sourced by bin/up and bin/test: sets up the controller's environment in .venv, once a lock.
# Needs python3 3.11-3.13, and root (then Debian's python3-venv is installed where it lacks) or
# python3-venv. Honours pip's own configuration. Sets $venv.

say() { printf '%s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

find_python() {
    for candidate in ${KVHOST_PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if command -v "$candidate" > /dev/null && "$candidate" -c \
            'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

controller() {
    venv=$repo/.venv
    lock=$repo/locks/controller.txt
    # the test is whether pip finished: a run that was killed leaves no stamp
    if [ -f "$venv/.kvhost-lock" ] && cmp -s "$lock" "$venv/.kvhost-lock"; then
        return 0
    fi
    python=$(find_python) || die "No Python 3.11, 3.12 or 3.13 found here. On Debian 12 or later and
Ubuntu 24.04 or later: apt-get install python3 python3-venv. Elsewhere: KVHOST_PYTHON=/path/to/python3"
    if ! "$python" -c 'import ensurepip' 2> /dev/null; then
        package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        [ "$(id -u)" = 0 ] || die "$python has no venv module. As root: apt-get install $package"
        say "installing $package"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package"; } \
            >&2 || die "apt-get could not install $package"
    fi
    say "setting up the controller's environment in .venv (once)"
    rm -rf "$venv"
    "$python" -m venv "$venv" || die "$python could not make $venv"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --require-hashes \
        --only-binary :all: -r "$lock" >&2 ||
        die "pip could not install locks/controller.txt; see its message above (no network? then
set pip's index, or find-links, in pip's configuration)"
    # the repository itself, without building anything: its modules and the command kvhost
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf '%s\n' "$repo" > "$site/kvhost.pth"
    printf '#!%s\nimport sys\nfrom kvhost.cli import main\nsys.exit(main())\n' \
        "$venv/bin/python" > "$venv/bin/kvhost"
    chmod 755 "$venv/bin/kvhost"
    cp "$lock" "$venv/.kvhost-lock"
}
