#!/bin/sh
# Makes all lock files anew: locks/compile.sh   (needs a package index; ends with `git diff locks/`)
# UV and PYTHON name the programs; further arguments go to `uv pip compile`.
set -eu
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv} python=${PYTHON:-.venv/bin/python}

more=
for argument in "$@"; do more="$more --uv-arg=$argument"; done
# shellcheck disable=SC2086
"$python" -m kvhost.cli lock --all $more

for name in tools controller llama-server; do
    { echo "# Made by locks/compile.sh from $name.in. Do not edit."
      "$uv" pip compile -q --no-header --no-annotate --generate-hashes "locks/$name.in" \
          --universal --python-version 3.11 "$@"; } > "locks/$name.txt.new"
    mv "locks/$name.txt.new" "locks/$name.txt"
done
