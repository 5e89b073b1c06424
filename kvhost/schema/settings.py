"""The schema of the settings: the only list of them, and what each may be.

Keys are flat because pyinfra merges data by key: a dictionary in a group would replace the whole
one of `all`. docs/settings.md is made from this schema (`python -m kvhost.schema.docs_gen`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ValidationInfo, model_validator

from kvhost.paths import HostPaths
from kvhost.schema import values as _values
from kvhost.schema.combinations import combination_problems
from kvhost.schema.driver import DriverSettings
from kvhost.schema.field import setting
from kvhost.schema.llama import LlamaSettings
from kvhost.schema.llama_args import llama_extra_args
from kvhost.schema.monitoring import MonitoringSettings
from kvhost.schema.ollama import OllamaSettings
from kvhost.schema.problems import CombinationError
from kvhost.schema.runner_args import runner_extra_args as _check_runner_args
from kvhost.schema.runners import RunnerSettings
from kvhost.schema.shared import SharedSettings
from kvhost.schema.unsupported import (
    cache_kind_in_this_version,
    l2_adapter_in_this_version,
)

DIRECTORY_LIMIT_GIB = 20.0  # of a tier on a filesystem that others use too
OLLAMA_PORT = 11434
BLOCK_TOKENS = 128  # vLLM's KV block on a CPU; a chunk of LMCache is a whole number of blocks


def _runner_args(items: list[str], info: ValidationInfo) -> list[str]:
    """By the rules of the runner, whose setting stands before this one. Ollama takes none, which
    the combinations say; an unknown runner has no rules."""
    check = {"vllm": _check_runner_args, "llama_server": llama_extra_args}
    rules = check.get(info.data.get("runner", ""))
    return rules(items) if rules else items


_BaseDir = Annotated[str, AfterValidator(_values.base_dir)]
_TierDir = Annotated[str, AfterValidator(_values.tier_dir)]
_HostPath = Annotated[str, AfterValidator(_values.host_path)]
_ServiceUser = Annotated[str, AfterValidator(_values.service_user)]
_AutoOrPath = Annotated[str, AfterValidator(_values.auto_or_host_path)]
_ControllerPath = Annotated[str, AfterValidator(_values.controller_path)]
_Bundle = Annotated[str, AfterValidator(_values.engine_bundle)]
_Wheel = Annotated[str, AfterValidator(_values.engine_wheel)]
_ModelSource = Annotated[str, AfterValidator(_values.model_source)]
_Revision = Annotated[str, AfterValidator(_values.model_revision)]
_ModelName = Annotated[str, AfterValidator(_values.served_model_name)]
_Runner = Literal["vllm", "llama_server", "ollama"]
_L2Adapter = Annotated[Literal["fs", "fs_native"], BeforeValidator(l2_adapter_in_this_version)]
_CacheKind = Annotated[Literal["mp", "native"], BeforeValidator(cache_kind_in_this_version)]
_Host = Annotated[str, AfterValidator(_values.api_host)]
_Port = Annotated[int, AfterValidator(_values.port)]
_RunnerArgs = Annotated[list[str], AfterValidator(_runner_args)]
_Events = Annotated[list[str], AfterValidator(_values.verify_events)]
_Url = Annotated[str, AfterValidator(_values.hub_url)]
_Line = Annotated[str, AfterValidator(_values.one_line)]

_PLACE, _ENGINE, _MODEL = "Where it lies", "Engine", "Model"
_CACHE, _API, _RUN = "Cache", "Serving", "Run and verdict"


class Settings(
    RunnerSettings,
    LlamaSettings,
    OllamaSettings,
    DriverSettings,
    MonitoringSettings,
    SharedSettings,
):
    """Everything that can be set for a host. Frozen; an unknown key or a wrong type is an error.

    Types are strict: a whole number may stand for a number, nothing else is converted. Secrets
    that come from the environment are made known by the validation context
    `{"in_env": {"KVHOST_API_KEY"}}`; `validate_hosts` does that.
    """

    base_dir: _BaseDir = setting(
        _PLACE,
        "/var/lib/kvhost",
        "Directory on the host that holds everything of kvhost.",
        example="/srv/kvhost",
    )
    tier_dir: _TierDir | None = setting(
        _PLACE,
        None,
        "Directory on the host that holds the KV cache; without it, tier on the claimed drive, or "
        "in base_dir.",
        example="/mnt/nvme/kv",
    )
    volume_dir: _HostPath | None = setting(
        _PLACE,
        None,
        "Directory on the host where the volume of a rented container is mounted: what kvhost "
        "keeps must lie below it, because the container's own disk is lost when it is stopped.",
        example="/workspace",
    )
    service_user: _ServiceUser = setting(
        _PLACE,
        "kvhost",
        "Login that the services run as and that owns the cache; made if it is missing.",
        example="kvhost",
    )

    accelerator: Literal["auto", "cpu", "cuda"] = setting(
        _ENGINE,
        "auto",
        "What the engine computes on; auto takes the GPU where there is one.",
        example="cpu",
    )
    python: _AutoOrPath = setting(
        _ENGINE,
        "auto",
        "Interpreter on the host for the engine, as an absolute path; auto looks for one that the "
        "lock was made for.",
        example="/usr/bin/python3.11",
    )
    engine_lock: _Line = setting(
        _ENGINE,
        "auto",
        "What the engine is installed from: a lock of locks/matrix.yaml (kvhost matrix), or its "
        "versions as VLLM+LMCACHE; auto takes the newest that fits the host.",
        example="cpu-x86_64",
        reaches_host=False,
    )
    engine_wheel: _Wheel | None = setting(
        _ENGINE,
        None,
        "CPU wheel of the vLLM maintainers, as a URL or an absolute path on the host, that takes "
        "the place of the third party's build in the lock.",
        example=f"/srv/wheels/vllm-0.32.0+cpu-cp38-abi3-linux_x86_64.whl#sha256={'0' * 64}",
    )
    engine_bundle: _Bundle | None = setting(
        _ENGINE,
        None,
        "Bundle that the engine is installed from without a network (kvhost bundle): a directory "
        "on the controller, or, after host:, one that lies on the host already.",
        example="bundles/cpu-x86_64-py3.11",
        reaches_host=False,
    )
    runner: _Runner = setting(
        _ENGINE, "vllm", "Program that serves the model.", example="llama_server"
    )
    runner_extra_args: _RunnerArgs = setting(
        _ENGINE,
        [],
        "Further flags for the runner, one item for each word; those that kvhost sets itself, or "
        "that would break the cache or show a key, are refused.",
        example=["--max-num-seqs", "4"],
    )
    engine_kv_gib: int = setting(
        _ENGINE,
        1,
        "Memory for the engine's own KV blocks on a CPU (VLLM_CPU_KVCACHE_SPACE), for each rank; "
        "without it, more than the default where a max_model_len that is set needs it.",
        unit="GiB",
        example=4,
        ge=1,
        le=4096,
    )

    model_source: _ModelSource = setting(
        _MODEL,
        "builtin",
        "What is served: the small model that kvhost makes itself (builtin), an absolute path on "
        "the host (for llama_server, of a .gguf file), org/name on the Hugging Face hub, or, after "
        "controller:, a directory on the controller that is sent to the host; with ollama, a name "
        "of its library with its tag, or the path of a GGUF on the host.",
        example="/srv/models/llama",
    )
    model_revision: _Revision | None = setting(
        _MODEL,
        None,
        "Commit of the model on the hub; needed with org/name, refused with any other source.",
        example="0123456789abcdef0123456789abcdef01234567",
    )
    model_dir: _TierDir | None = setting(
        _MODEL,
        None,
        "Directory on the host for models that are fetched from the hub or sent; without it, "
        "models on the claimed drive, or in base_dir.",
        example="/mnt/nvme/models",
    )
    served_model_name: _ModelName | None = setting(
        _MODEL,
        None,
        "Name that clients ask for; without it, a name is taken from model_source.",
        example="assistant",
    )
    max_model_len: int = setting(
        _MODEL,
        32768,
        "Longest prompt and answer together; without it, less than the default where the model or "
        "the memory for KV ends before.",
        unit="tokens",
        example=16384,
        ge=512,
        le=16_777_216,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        _MODEL,
        "auto",
        "Type that the model computes in; auto follows the model.",
        example="float32",
    )
    # Those that vLLM 0.32.0 takes on a CPU too (its CPU attention knows these four).
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = setting(
        _MODEL,
        "auto",
        "Type that KV is kept in; auto is the model's, and another one begins a new cache.",
        example="fp8",
    )
    hf_token_file: _ControllerPath | None = setting(
        _MODEL,
        None,
        "File on the controller, readable by its owner alone, with the token for the hub; without "
        "it, HF_TOKEN in the controller's environment; used only with org/name.",
        example="secrets/hf_token",
        reaches_host=False,
    )

    hf_endpoint: _Url | None = setting(
        _MODEL,
        None,
        "Address of a mirror of the Hugging Face hub that models are fetched from.",
        example="https://hub.example.org",
        reaches_host=False,
    )

    cache_kind: _CacheKind = setting(
        _CACHE,
        "mp",
        "Cache behind the engine: mp, the multiprocess server of LMCache, or native, vLLM's own "
        "tiering (docs/native.md); another one begins a new cache.",
        example="native",
    )
    l2_adapter: _L2Adapter = setting(
        _CACHE, "fs_native", "How the cache server reads and writes its files.", example="fs"
    )
    cache_limit_gib: float | None = setting(
        _CACHE,
        None,
        "What the files of the cache may take, passed for at most one interval of the pruner; "
        "without it, 20 in a directory, and on a drive of its own all but free_floor_gib.",
        unit="GiB",
        example=200.0,
        ge=0.01,
        le=1_048_576,
    )
    cache_high_watermark: float = setting(
        _CACHE,
        0.95,
        "Part of cache_limit_gib from which the pruner removes files.",
        unit="fraction of cache_limit_gib",
        example=0.9,
        gt=0,
        le=1,
    )
    cache_low_watermark: float = setting(
        _CACHE,
        0.85,
        "Part of cache_limit_gib down to which the pruner removes files.",
        unit="fraction of cache_limit_gib",
        example=0.7,
        gt=0,
        lt=1,
    )
    free_floor_gib: float = setting(
        _CACHE,
        2.0,
        "Free space that is always left on the filesystem of the cache.",
        unit="GiB",
        example=10.0,
        gt=0,
        le=1_048_576,
    )
    pruner_interval_s: float = setting(
        _CACHE,
        5.0,
        "Time between two looks of the pruner.",
        unit="seconds",
        example=1.0,
        ge=0.1,
        le=3600,
    )
    l1_gib: int = setting(
        _CACHE,
        1,
        "Memory of the cache server, with cache_kind native of vLLM (/dev/shm), that KV passes "
        "through; with llama_server, of its cache of prompts that are in no slot (--cache-ram).",
        unit="GiB",
        example=8,
        ge=1,
        le=4096,
    )
    chunk_size: int = setting(
        _CACHE,
        256,
        "Tokens in one file of the cache; a multiple of 128, the engine's block on a CPU, and "
        "another one begins a new cache.",
        unit="tokens",
        example=512,
        ge=BLOCK_TOKENS,
        le=65_536,
        multiple_of=BLOCK_TOKENS,
    )
    cache_port: _Port = setting(
        _CACHE, 5555, "Port of the cache server on 127.0.0.1.", unit="port", example=5600
    )
    cache_http_port: _Port = setting(
        _CACHE,
        8085,
        "Port on 127.0.0.1 for the state and the counters of the cache server.",
        unit="port",
        example=8090,
    )
    heartbeat_s: float = setting(
        _CACHE,
        2.0,
        "How often the engine asks whether the cache server is there.",
        unit="seconds",
        example=5.0,
        ge=0.1,
        le=60,
    )
    mq_timeout_s: float = setting(
        _CACHE,
        10.0,
        "How long the engine waits for the cache server before it goes on without it; with the "
        "default of LMCache, 300, a restart of the server kills vLLM.",
        unit="seconds",
        example=5.0,
        ge=1,
        le=120,
    )

    api_host: _Host = setting(
        _API,
        "127.0.0.1",
        "Address that the API listens on; one beyond loopback needs a key.",
        example="0.0.0.0",
    )
    api_port: _Port = setting(
        _API, 8000, "Port of the API; without it, 11434 with ollama.", unit="port", example=8100
    )
    api_key_file: _ControllerPath | None = setting(
        _API,
        None,
        "File on the controller, readable by its owner alone, with the key that clients must "
        "send; without it, KVHOST_API_KEY in the controller's environment.",
        example="secrets/api_key",
        reaches_host=False,
    )

    drain_s: int = setting(
        _RUN,
        30,
        "How long requests that a stop of vLLM finds at work may go on; 0 ends them at once.",
        unit="seconds",
        example=60,
        ge=0,
        le=120,
    )

    ready_timeout_s: int = setting(
        _RUN,
        600,
        "How long a service may take until it answers.",
        unit="seconds",
        example=1800,
        ge=1,
        le=86_400,
    )
    verify: Literal["auto", "always", "never"] = setting(
        _RUN,
        "auto",
        "When a deploy tests whether the cache survives a restart; auto is after a change.",
        example="always",
        reaches_host=False,
    )
    verify_prompt_tokens: int = setting(
        _RUN,
        8200,
        "Length of the random prompt of that test; without it, less than the default where "
        "max_model_len is less.",
        unit="tokens",
        example=4100,
        ge=2 * BLOCK_TOKENS,
        le=16_777_216,
        reaches_host=False,
    )
    verify_min_hit: float = setting(
        _RUN,
        0.95,
        "Part of the prompt that must come from the disk after the restart.",
        unit="fraction of the prompt",
        example=0.9,
        gt=0,
        le=1,
        reaches_host=False,
    )
    verify_events: _Events = setting(
        _RUN,
        ["both"],
        "What that test does: runner, cache or both are restarted, kill (-9 of both in a write), "
        "other (a second pair beside them), reboot (of the host); with cache_kind native runner "
        "(without it), kill and reboot.",
        example=["both", "kill"],
        reaches_host=False,
    )
    reboot_local: bool = setting(
        _RUN,
        False,
        "Whether the event reboot may reboot the machine that kvhost itself runs on (@local).",
        example=True,
        reaches_host=False,
    )
    disrupt: bool = setting(
        _RUN,
        False,
        "Whether the test may restart a server that is in use.",
        example=True,
        reaches_host=False,
    )
    retry_failed: bool = setting(
        _RUN,
        False,
        "Whether a lock that failed with these very settings, and was gone back from, is tried "
        "again.",
        example=True,
        reaches_host=False,
    )
    remove_cache: bool = setting(
        _RUN,
        False,
        "Whether remove.py takes the KV cache away too.",
        example=True,
        reaches_host=False,
    )
    remove_models: bool = setting(
        _RUN,
        False,
        "Whether remove.py takes away the models below base_dir too.",
        example=True,
        reaches_host=False,
    )
    break_lock: _Line | None = setting(
        _RUN,
        None,
        "Id of another run, as the refusal prints it, whose lock is to be broken.",
        example="102c4c8cef6b-f33dac",
        reaches_host=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _ports_of_its_own(cls, data: Any) -> Any:
        """Ollama's clients know its port."""
        if isinstance(data, dict) and data.get("runner") == "ollama" and "api_port" not in data:
            return {**data, "api_port": OLLAMA_PORT}
        return data

    @model_validator(mode="after")
    def _fit_together(self, info: ValidationInfo) -> Settings:
        context = info.context if isinstance(info.context, dict) else {}
        in_env: frozenset[str] = frozenset(context.get("in_env", ()))
        problems = [problem for _, problem in combination_problems(self, in_env)]
        if problems:
            raise CombinationError(problems)
        return self

    @property
    def native(self) -> bool:
        """Whether vLLM keeps its cache itself, and there is no cache server."""
        return self.cache_kind == "native" and self.runner == "vllm"

    @property
    def tier_format(self) -> str:
        """What writes the files of the cache: none reads another's."""
        return "native" if self.native else self.l2_adapter

    @property
    def cache_ports(self) -> dict[str, int]:
        """Setting -> port on 127.0.0.1 of the cache server; empty without one."""
        ports = {"cache_port": self.cache_port, "cache_http_port": self.cache_http_port}
        return {} if self.native or self.runner != "vllm" else ports

    @property
    def events(self) -> list[str]:
        """Events of the restart test; the default is the restart of all that there is."""
        default = type(self).model_fields["verify_events"].default
        return ["runner"] if self.native and self.verify_events == default else self.verify_events

    @property
    def limit_gib(self) -> float | None:
        """What the cache may take, in GiB; None: all of its drive but the floor."""
        if self.cache_limit_gib is None and not self.claims_a_drive:
            return DIRECTORY_LIMIT_GIB
        return self.cache_limit_gib

    @property
    def resolved_tier_dir(self) -> str:
        """Absolute path of the cache's directory on the host."""
        if self.tier_dir is not None:
            return self.tier_dir
        return f"{self.resolved_drive_mount if self.claims_a_drive else self.base_dir}/tier"

    @property
    def resolved_model_dir(self) -> str:
        """Absolute path of the directory on the host for models that are fetched or sent."""
        if self.model_dir is not None:
            return self.model_dir
        return f"{self.resolved_drive_mount if self.claims_a_drive else self.base_dir}/models"

    @property
    def resolved_drive_mount(self) -> str:
        """Absolute path that a claimed drive is mounted at."""
        return f"{self.base_dir}/drive" if self.drive_mount is None else self.drive_mount

    @property
    def paths(self) -> HostPaths:
        """Where everything lies on the host."""
        return HostPaths(base_dir=self.base_dir, tier_dir=self.resolved_tier_dir)
