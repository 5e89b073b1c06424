"""Sizes: equal to what the engine allocates and to published figures; never a guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.plan.model_need import need_of
from kvhost.plan.restored import restored
from kvhost.plan.types import ModelNeed
from kvhost.settings import Settings
from kvhost.sizing import arch as sizing_arch
from kvhost.sizing.arch import architecture_of
from kvhost.sizing.kv_bytes import (
    KvSize,
    SizeError,
    Speeds,
    break_even,
    fit,
    needed_speed,
    size_of,
    times_of,
)
from kvhost.sizing.layer import UnknownArchitecture
from tests.sizing_tools import (
    DOC,
    LLAMA,
    MARKS,
    PUBLIC,
    TINY,
    compared,
    engine_record,
    sized,
    table,
)

pytestmark = pytest.mark.runners

#: what the record calls the bytes of the whole cache
POOL = {"started": "allocated_bytes", "specification": "planned_bytes"}


def kv(config: dict[str, Any], dtype: str = "float16", ranks: int = 1) -> KvSize:
    return size_of(architecture_of(config), dtype, state_dtype="float16", ranks=ranks)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_model_takes_what_is_published(name: str) -> None:
    one = PUBLIC[name]
    assert kv(one["config"]).per_token == one["bytes_per_token"]
    assert one["source"].startswith("https://")


def test_what_a_config_leaves_out_is_what_the_family_has() -> None:
    """Gemma 3 says neither its head size nor that every sixth layer keeps every token."""
    assert kv(PUBLIC["gemma-3-12b-it"]["config"]).lasting == 8 * 2 * 8 * 256 * 2


def test_the_known_figures() -> None:
    size = kv(LLAMA)
    assert size.per_token == 128 * 1024
    assert size.sequence(131072) == 16 << 30
    assert kv(LLAMA, "fp8").per_token == 64 * 1024
    assert kv(LLAMA, "q8_0").per_token == 68 * 1024  # 34 bytes for 32 elements
    assert kv(LLAMA, "q4_0").per_token == 36 * 1024  # 18


@pytest.mark.parametrize("name", sorted(engine_record()["models"]))
def test_the_engine_allocates_what_is_said(name: str) -> None:
    """Against the recorded figures of the real vLLM; bench/kv_allocated.py made them."""
    told, found = compared(name)
    assert found == told


def test_every_small_model_was_compared_and_enough_were_started() -> None:
    ways = {name: one["way"] for name, one in engine_record()["models"].items()}
    assert set(ways.values()) <= {"started", "specification"}
    started = {TINY[name]["model_type"] for name, way in ways.items() if way == "started"}
    assert len(started) >= 31
    assert set(engine_record()["models"]) == set(TINY)


@pytest.mark.parametrize("name", sorted(engine_record()["models"]))
def test_the_pool_is_whole_blocks_of_the_largest_group(name: str) -> None:
    """The bytes of the tensors that the engine made, or plans to: pages of one size, the largest
    of its layers, in groups of layers that share the blocks."""
    one = engine_record()["models"][name]
    page = max(layer["padded_bytes"] for layer in one["layers"])
    block = max(one["groups"]) * page
    assert one[POOL[one["way"]]] == one["blocks"] * block
    assert engine_record()["room_bytes"] - block < one[POOL[one["way"]]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "brand_new"}, "'brand_new'"),
        ({"model_type": None}, "(none)"),
        ({"num_hidden_layers": None}, "'num_hidden_layers'"),
        ({"num_attention_heads": 0}, "not above zero"),
        ({"num_attention_heads": 24}, "no multiple of 24"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, "1 kinds of layers"),
        ({"model_type": "gpt_oss", "layer_types": ["retention"] * 32}, "'retention'"),
        ({"model_type": "deepseek_v3"}, "'kv_lora_rank'"),
        ({"model_type": "deepseek_v32"}, "'deepseek_v32'"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 16}, "sliding_attention"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "nemotron-nas", "block_configs": "no"}, "2 kinds"),
    ],
)
def test_what_is_not_known_is_not_guessed(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnknownArchitecture) as caught:
        architecture_of({**LLAMA, **change})
    assert words in str(caught.value)


#: of the models' pages on the hub: heads 28 and 64, 4 and 64 of KV
FLAT: dict[str, Any] = {
    "qwen2_5_vl": {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
                   "num_hidden_layers": 28, "sliding_window": 32768, "use_sliding_window": False,
                   "vision_config": {"hidden_size": 1280, "depth": 32}},
    "cohere": {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 64,
               "num_hidden_layers": 40},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "per_token"),
    [("qwen2_5_vl", 57344), ("qwen2_vl", 57344), ("cohere", 40 * 2 * 64 * 128 * 2)],
)
def test_a_flat_config_and_a_nested_one_are_read_alike(kind: str, per_token: int) -> None:
    told = FLAT.get(kind, FLAT["qwen2_5_vl"])
    assert kv({**told, "model_type": kind}).per_token == per_token
    if kind != "cohere":
        text = {key: value for key, value in told.items() if key != "vision_config"}
        nested = {"model_type": kind, "text_config": {**text, "model_type": f"{kind}_text"}}
        assert kv(nested).per_token == per_token
        with pytest.raises(UnknownArchitecture, match="use_sliding_window"):
            kv({**told, "model_type": kind, "use_sliding_window": True})


@pytest.mark.parametrize(
    ("ranks", "per_token"),
    [(1, 131072), (2, 65536), (8, 16384), (16, 16384), (32, 16384)],
)
def test_ranks_share_the_heads_or_hold_a_copy(ranks: int, per_token: int) -> None:
    assert kv(LLAMA, ranks=ranks).per_token == per_token


def test_ranks_that_cannot_share_are_refused() -> None:
    with pytest.raises(SizeError, match="32 attention heads cannot be shared out over 3"):
        kv(LLAMA, ranks=3)
    heads = {"num_attention_heads": 48, "head_dim": 128, "num_key_value_heads": 12}
    with pytest.raises(SizeError, match="12 KV heads"):
        kv({**LLAMA, **heads}, ranks=8)


def test_a_latent_is_whole_on_every_rank() -> None:
    config = PUBLIC["DeepSeek-V3"]["config"]
    assert kv(config, ranks=8).per_token == kv(config).per_token == 70272
    assert kv(config, ranks=8).stored(1000) == 8 * 70272 * 1000


def test_a_quantised_row_that_is_no_multiple_of_its_block_is_refused() -> None:
    with pytest.raises(SizeError, match="blocks of 32 elements, and a row of this model has 80"):
        kv({**LLAMA, "head_dim": 80}, "q8_0")


def test_groups_of_a_state_are_repeated_where_ranks_are_more() -> None:
    config = TINY["mamba2-ssm"]
    one, four = sized(config, ranks=1), sized(config, ranks=4)
    # 128 inner channels and 2 x 16 of each of two groups, 3 inputs each; 4 heads of 32 x 16
    assert one.fixed == 4 * 2 * (3 * (128 + 2 * 32) + 4 * 32 * 16)
    assert four.fixed == 4 * 2 * (3 * (128 + 4 * 32) + 4 * 32 * 16) // 4


def test_windows_and_states_bound_a_sequence() -> None:
    size = sized(TINY["gemma3-5to1"])
    assert size.per_token == 8 * 128 and size.lasting == 128
    assert size.sequence(100) == 100 * 8 * 128
    assert size.sequence(1000) == 1000 * 128 + 7 * 128 * 128
    assert size.stored(1000) == 1000 * 8 * 128
    state = sized(TINY["falcon-mamba-ssm"])
    assert state.per_token == 0 and state.sequence(1) == state.sequence(10**6)
    assert state.tokens_in(state.fixed) is None
    assert state.tokens_in(state.fixed - 1) == 0


def test_a_drive_that_holds_not_one_state_holds_no_tokens(tmp_path: Path) -> None:
    size = sized(TINY["mamba2-ssm"])
    rooms = {size.fixed: None, size.fixed - 1: 0}
    assert {room: fit("drive", size, room, 10, stored=True).tokens for room in rooms} == rooms
    grows = kv(LLAMA)
    assert fit("drive", grows, 3 * grows.per_token + 5, 10, stored=True).tokens == 3


def test_of_a_state_alone_no_speed_is_told_that_a_drive_needs(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY["mamba2-ssm"]))
    words = [str(path), "--prefill", "5000", "--drive-mb-s", "1"]
    code, text = run(*words)
    assert code == 0 and "MB/s on" not in text
    even = "Restoring is faster from 256 tokens on. Only a state is stored"
    assert even in " ".join(text.split())
    assert "Only a state is stored" in run(*words[:3])[1]
    assert json.loads(run(*words, "--json")[1])["needed_drive_bytes_per_s"] is None


@pytest.mark.parametrize("dtype", ["q4_0", "q8_0", "fp8", "nothing"])
def test_a_state_has_a_dtype_that_the_engine_keeps_states_in(dtype: str) -> None:
    with pytest.raises(SizeError, match="vLLM keeps it in one of auto, float32"):
        sized(TINY["mamba2-ssm"], recurrent=dtype)
    with pytest.raises(SizeError, match="vLLM keeps it in one of auto, float32"):
        sized({**TINY["qwen3-next-gdn"], "mamba_ssm_dtype": dtype})
    assert sized(TINY["mamba2-ssm"], recurrent="fp32").fixed > sized(TINY["mamba2-ssm"]).fixed


def test_tokens_that_fit_are_the_most_that_fit() -> None:
    for config in (LLAMA, TINY["gemma3-5to1"], TINY["jamba-mamba1"], TINY["whisper-cross"]):
        size = kv(config)
        for room in (size.sequence(1), 5_000_001, 1 << 30):
            fits = size.tokens_in(room)
            assert fits is not None
            assert size.sequence(fits) <= room < size.sequence(fits + 1)


def test_break_even_is_where_the_times_cross() -> None:
    size, speeds = kv(LLAMA), Speeds(drive=3e9, prefill=5000, overhead=0.05)
    even = break_even(size, speeds, 256)
    assert even == 512
    assert times_of(size, even, speeds).factor > 1
    assert times_of(size, even - 256, speeds).factor < 1
    needed = needed_speed(size, 5000)
    assert needed == 131072 * 5000
    slow = Speeds(drive=needed * 0.99, prefill=5000)
    assert break_even(size, slow, 256) is None
    assert times_of(size, 1 << 20, slow).factor < 1
    fast = Speeds(drive=needed * 1.01, prefill=5000)
    assert break_even(size, fast, 256) == 256


def test_the_plan_takes_the_same_figures() -> None:
    settings = Settings.model_validate({"dtype": "float16"})
    need = need_of(LLAMA, 5, settings)
    assert need is not None and need.kv_bytes_per_token == 131072 and need.max_context == 131072
    assert need.kv_of_rank(16) == kv(LLAMA, ranks=16).per_token == 16384
    latent = need_of(PUBLIC["DeepSeek-V3"]["config"], 5, settings)
    assert latent is not None and latent.kv_of_rank(8) == 70272  # whole on every rank
    told = need_of(PUBLIC["gemma-3-12b-it"]["config"], 5, settings)  # which leaves its context out
    assert told is not None and told.max_context == 131072
    mixed = {**TINY["mimo-v2-perlayer"], "max_position_embeddings": 9}
    need = need_of(mixed, 5, settings)
    assert need is not None and need.kv_of_rank(1) == need.kv_bytes_per_token
    assert need.kv_of_rank(2) == kv(mixed, ranks=2).per_token
    assert need_of(TINY["falcon-mamba-ssm"] | {"max_position_embeddings": 9}, 5, settings) is None
    assert need_of({**LLAMA, "model_type": "brand_new"}, 5, settings) is None


@pytest.mark.parametrize(
    ("name", "ranks", "of_all"),
    [
        ("Llama-3-8B", 1, 131072),
        ("Llama-3-8B", 8, 131072),
        ("Llama-3-8B", 16, 2 * 131072),  # 8 KV heads: two ranks hold the same
        ("DeepSeek-V3", 8, 8 * 70272),
        ("Qwen3-Next-80B-A3B", 8, 4 * 24576),
    ],
)
def test_a_measured_drive_restores_what_is_stored(name: str, ranks: int, of_all: int) -> None:
    """As `kvhost size` says of the same model: a copy on each rank is in a file of each."""
    config = PUBLIC[name]["config"]
    settings = Settings(tensor_parallel_size=ranks)
    need = need_of(config, 5, settings)
    asked = restored(settings, need)
    size = kv(config, "bfloat16", ranks)
    assert asked["bytes_per_token"] == of_all == size.per_token * ranks
    pages = -(-size.per_token * 256 // 4096)
    assert asked["file_bytes"] == pages * 4096
    two = Settings(tensor_parallel_size=ranks, runner_extra_args=["--pipeline-parallel-size", "2"])
    assert restored(two, need)["bytes_per_token"] == of_all, "each has half of the layers"
    assert restored(two, need)["file_bytes"] == -(-size.per_token * 128 // 4096) * 4096


def test_a_file_of_llama_servers_is_a_whole_slot() -> None:
    """A large one is measured in files of 256 MiB: all that counts is that they are long."""
    need = ModelNeed(5, 12288, 4096)
    settings = Settings(runner="llama_server", max_model_len=2048, verify_prompt_tokens=1024)
    asked = restored(settings, need)
    assert asked == {"bytes_per_token": 12288, "file_bytes": 12288 * 2048, "context": 2048}
    long = Settings(runner="llama_server", max_model_len=32768)
    assert restored(long, need)["file_bytes"] == 12288 * 4096, "the model's own context ends there"
    assert restored(long, ModelNeed(5, 131072, 32768))["file_bytes"] == 256 << 20
    assert restored(long, None)["file_bytes"] == 256 << 20


def test_a_file_of_vllms_own_tier_holds_all_ranks() -> None:
    settings = Settings(tensor_parallel_size=4, cache_kind="native")
    asked = restored(settings, need_of(LLAMA, 5, settings))
    assert asked == {"bytes_per_token": 131072, "file_bytes": 131072 * 256, "context": 32768}
    assert restored(settings, None)["bytes_per_token"] is None


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.main, ["size", *words])
    return done.exit_code, done.output


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_the_command_answers_in_json(model: Path) -> None:
    code, text = run(str(model), "--json", "--gpu-gib", "24", "--weights-gib", "15",
                     "--ram-gib", "64", "--drive-gib", "1000", "--drive-mb-s", "3000",
                     "--prefill", "5000", "--context", "131072")  # fmt: skip
    told = json.loads(text)
    assert code == 0
    assert told["bytes_per_token"] == 131072
    assert told["session"] == {
        "tokens": 131072, "bytes": 16 << 30, "stored_bytes_all_ranks": 16 << 30,
    }  # fmt: skip
    assert {one["place"]: one["sessions"] for one in told["fits"]} == {
        "GPU": 0, "RAM": 4, "drive": 62,
    }  # fmt: skip
    assert told["times"][-1]["tokens"] == 131072
    assert told["needed_drive_bytes_per_s"] == 131072 * 5000


def test_weights_that_do_not_fit_are_said_first(model: Path) -> None:
    code, text = run(str(model), "--gpu-gib", "8", "--weights-gib", "15")
    assert code == 1
    assert text.startswith("The weights do not fit: 15 GiB")
    assert run(str(model), "--gpu-gib", "24", "--weights-gib", "15")[0] == 0


def test_weights_are_counted_where_they_lie(model: Path) -> None:
    (model / "model-1.safetensors").write_bytes(b"x" * 1000)
    assert json.loads(run(str(model), "--json")[1])["weights_bytes"] == 1000
    (model / "model-1.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 77}}')
    assert json.loads(run(str(model), "--json")[1])["weights_bytes"] == 77


def test_an_id_at_hand_is_found_and_nothing_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "not at hand" in run("org/model")[1]
    home = tmp_path / "models--org--model"
    for commit in ("a" * 40, "b" * 40):
        (home / "snapshots" / commit).mkdir(parents=True)
        (home / "snapshots" / commit / "config.json").write_text(json.dumps(LLAMA))
    assert "2 snapshots" in run("org/model")[1]
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("b" * 40)
    assert run("org/model")[0] == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "cannot be read as JSON"), ("[1]", "no JSON object"), ('{"model_type": "x"}', "'x'")],
)
def test_a_bad_config_is_one_clear_error(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    code, text = run(str(path))
    assert code == 1 and words in text and "Traceback" not in text


def test_the_plot_is_one_page_that_loads_nothing(model: Path) -> None:
    assert run(str(model), "--plot", "x.html")[0] == 2
    page = model / "size.html"
    code, _ = run(str(model), "--drive-mb-s", "3000", "--prefill", "5000", "--plot", str(page))
    text = page.read_text()
    assert code == 0 and text.count("<polyline") == 2
    assert "http" not in text.replace("http-equiv", "") and "<script" not in text


def test_the_page_says_what_was_not_compared() -> None:
    text = DOC.read_text()
    line = next(one for one in text.splitlines() if one.startswith("Not compared: "))
    compared_types = {config["model_type"] for config in TINY.values()}
    told = {word.strip("`") for word in line.removeprefix("Not compared: ").rstrip(".").split(", ")}
    assert told == set(sizing_arch.READERS) - compared_types


def test_the_page_has_the_table_of_the_record() -> None:
    assert engine_record()["vllm"].startswith("0.32")
    assert MARKS[0] + table() + MARKS[1] in DOC.read_text()


def test_a_session_that_the_model_does_not_take_is_told(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    for context, told in ((131072, False), (131073, True)):
        done = CliRunner().invoke(
            cli.main, ["size", str(config), "--context", str(context), "--json"]
        )
        notes = json.loads(done.stdout)["notes"]
        assert any("longer than the model takes: 131072" in note for note in notes) is told
