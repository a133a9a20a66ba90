"""Options and their three spellings: command line, YAML, Python."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from thalweg.config import backends
from thalweg.config.args import TITLES, ParsedOptions, options_parser, parse_options
from thalweg.config.foreign import NO_EFFECT_FLAGS
from thalweg.config.machine import Machine
from thalweg.config.options import ListenOptions, MemoryOptions, ModelOptions, Options
from thalweg.config.setting import Section, Setting, setting, settings_of
from thalweg.config.tree import (
    command_line,
    non_defaults,
    options_of,
    read_yaml,
    replace,
    sections,
    settings,
    spellings,
)
from thalweg.core.errors import UnsupportedConfig
from tools.configuration_page import document

ROOT = Path(__file__).parents[2]


def parse(*argv: str) -> ParsedOptions:
    return parse_options(options_parser("thalweg serve", "test"), argv)


def some_value(one: Setting) -> Any:
    """A value that is not the default."""
    if one.choices:
        value = next((choice for choice in one.choices if choice != one.default), one.choices[0])
    elif one.kind is bool:
        value = not one.default
    elif one.kind is str:
        value = "http://abc" if one.name.endswith("_endpoint") else "abc"
    else:
        low, high = one.least, one.most
        value = one.kind(max(low or 0, 0) + (1 if high is None or high > 1 else 0.25))
    return (value,) if one.many else value


# The key of a certificate needs its certificate: the only field that cannot stand alone.
ALONE = {"ssl_keyfile": {"ssl_certfile": "cert.pem"}}


def test_the_tree_stays_small() -> None:
    assert len(settings()) <= 130, "aliases and the spellings of other engines are not counted"
    assert set(TITLES) == set(sections())


def test_every_setting_says_what_it_does_and_what_auto_means() -> None:
    for one in settings().values():
        assert one.help and one.help[0] not in " ." and "\n" not in one.help, one.name
        assert not one.optional or one.auto, f"{one.name}: what does the resolver choose?"


def test_names_are_unique_over_sections_aliases_and_habits() -> None:
    names = [*spellings(), *(flag.partition(" ")[0].replace("-", "_") for flag in NO_EFFECT_FLAGS)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", list(settings()))
def test_each_setting_by_flag_by_yaml_and_by_name(name: str, tmp_path: Path) -> None:
    one, more = settings()[name], ALONE.get(name, {})
    value = some_value(one)
    expected = options_of(**{name: value}, **more)
    assert vars(vars(expected)[one.section])[name] == value
    shown = value[0] if one.many else value
    flag = [one.flag if value else f"--no-{one.flag[2:]}"] if one.kind is bool else [one.flag, str(shown)]
    extra = [word for key, text in more.items() for word in (settings()[key].flag, text)]
    assert parse(*flag, *extra).options == expected
    file = tmp_path / "config.yaml"
    file.write_text("".join(f"{key.replace('_', '-')}: {_yaml(v)}\n" for key, v in ({name: shown} | more).items()))
    assert parse("--config", str(file)).options == expected
    file.write_text(
        f"{one.section}:\n" + "".join(f"  {key}: {_yaml(v)}\n" for key, v in ({name: shown} | more).items())
    )
    assert parse("--config", str(file)).options == expected
    assert options_of(**non_defaults(expected)) == expected


def _yaml(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("--model-path x", "model", "x"),
        ("x", "model", "x"),
        ("--tp 1", "tp_size", 1),
        ("--tensor-parallel-size 1", "tp_size", 1),
        ("--max-model-len 99", "context_length", 99),
        ("--context-length=99", "context_length", 99),
        ("--context_length 99", "context_length", 99),
        ("--max-num-seqs 3", "max_running_requests", 3),
        ("--max_num_batched_tokens=64", "chunked_prefill_size", 64),
        ("--disable-radix-cache", "radix_cache", False),
        ("--no-enable-prefix-caching", "radix_cache", False),
        ("--enable-prefix-caching", "radix_cache", True),
        ("--disable-overlap-schedule", "overlap_schedule", False),
        ("--async-scheduling", "overlap_schedule", True),
        ("--mem-fraction-static auto", "mem_fraction_static", None),
        ("--chunked-prefill-size -1", "chunked_prefill_size", -1),
        ("--api-key a --api-key b", "api_key", ("a", "b")),
        ("--port 1 --port 2", "port", 2),
    ],
)
def test_common_flag_spellings_are_accepted(flags: str, name: str, value: Any) -> None:
    parsed = parse(*flags.split())
    assert vars(vars(parsed.options)[settings()[name].section])[name] == value


def test_a_list_adds_up_over_its_spellings() -> None:
    assert parse(
        "--cors-origins", "x", "--allowed-origins", "y", "--cors-origins", "z"
    ).options.server.cors_origins == (
        "x",
        "z",
        "y",
    )


def test_errors_hide_secrets_and_name_the_wrong_entry() -> None:
    for values in {"api_key": ["sk-real", True]}, {"hf_token": ["sk-real"]}, {"api_key": {"sk-real": 1}}:
        with pytest.raises(UnsupportedConfig, match="expected") as caught:
            options_of(**values)
        assert "sk-real" not in str(caught.value)
    with pytest.raises(UnsupportedConfig, match="got True$"):
        options_of(cors_origins=["x", True])


def test_flag_names_of_other_engines_print_one_notice_each() -> None:
    parsed = parse(
        "--max-model-len",
        "9",
        "--disable-radix-cache",
        "--trust-remote-code",
        "--tp-size",
        "1",
        "--tokenizer-mode",
        "auto",
    )
    assert parsed.notices == (
        "--max-model-len is called --context-length here",
        "--trust-remote-code changes nothing: no code of a checkpoint is ever run",
        "--tokenizer-mode changes nothing: there is one way to tokenize",
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--portt 3", ("unknown flag --portt", "--port")),
        ("--max-runing-requests=3", ("--max-running-requests",)),
        ("--speculative-algorithm MEDUSA", ("--speculative-algorithm:", "NEXTN", "MEDUSA")),
        ("--mem-frac 0.5", ("unknown flag --mem-frac",)),
        ("one two", ("'two'",)),
        ("one --model two", ("--model: given twice", "one", "two")),
        ("--port", ("--port", "expected")),
        ("--max-model-len -3", ("--max-model-len: must be at least 2, got -3",)),
        ("--context-length 5 --max-model-len 6", ("--context-length: given twice", "5", "6")),
        ("--radix-cache --disable-radix-cache", ("--radix-cache: given twice", "True", "False")),
        ("--model one --model-path two", ("model", "given twice", "one", "two")),
        ("--metrics --no-metrics", ("--metrics: given twice", "True", "False")),
        ("--port abc", ("port", "whole number", "abc")),
        ("--port 70000", ("port", "at most 65535", "70000")),
        ("--mem-fraction-static nan", ("--mem-fraction-static:", "nan")),
        ("--mem-fraction-static 80", ("--mem-fraction-static:", "0.99", "80")),
        ("--schedule-policy lifo", ("--schedule-policy:", "fcfs, lpm, priority", "lifo")),
        ("--page-size 16", ("--page-size:", "64", "16")),
        ("--dtype float16", ("--dtype: must be one of bfloat16, float32; got 'float16'; use bfloat16",)),
        ("--quantization awk", ("--quantization: must be one of fp8, compressed-tensors", "got 'awk'; use awq")),
        ("--nnodes 0", ("nnodes", "at least 1", "0")),
        ("--chunked-prefill-size 0", ("chunked_prefill_size", "-1")),
        ("--ssl-keyfile key.pem", ("ssl_keyfile", "--ssl-certfile")),
        ("--config /nowhere.yaml", ("/nowhere.yaml", "No such file")),
    ],
)
def test_errors_name_the_flag_and_the_nearest(argv: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedConfig) as caught:
        parse(*argv.split())
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: x", ("file.yaml", "port", "whole number", "'x'")),
        ("prot: 3", ("file.yaml", "prot", "port")),
        ("memory: 3", ("memory", "section")),
        ("memory:\n  port: 3", ("port", "listen", "memory")),
        ("port: 3\nlisten:\n  port: 4", ("port", "twice", "3", "4")),
        ("radix_cache: maybe", ("radix_cache", "true or false", "maybe")),
        ("disable_radix_cache: 3", ("disable_radix_cache", "true or false")),
        ("- 1\n- 2", ("file.yaml", "list")),
        ("a: [", ("file.yaml", "not YAML")),
    ],
)
def test_errors_in_yaml_name_file_and_field(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(UnsupportedConfig) as caught:
        parse("--config", str(path))
    assert all(word in str(caught.value) for word in words), caught.value


def test_flags_win_over_yaml(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("port: 1\nmax-num-seqs: 7\ndisable-radix-cache: true\napi_key: [a, b]\n")
    config = parse("--config", str(path), "--port", "2").options
    assert (config.listen.port, config.schedule.max_running_requests, config.memory.radix_cache) == (2, 7, False)
    assert config.server.api_key == ("a", "b")
    assert read_yaml(path)["radix_cache"] is False


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ListenOptions(port="30000"), "port"),  # type: ignore[arg-type]
        (lambda: ListenOptions(port=-1), "port"),
        (lambda: MemoryOptions(radix_cache=1), "radix_cache"),  # type: ignore[arg-type]
        (lambda: MemoryOptions(mem_fraction_static=float("inf")), "mem_fraction_static"),
        (lambda: ModelOptions(context_length=True), "context_length"),
        (lambda: options_of(modle="x"), "modle: no such setting; did you mean model?"),
        (lambda: options_of(max_model_len=4, context_length=5), "context_length: given twice"),
    ],
)
def test_python_has_the_same_checks(make: Any, field: str) -> None:
    with pytest.raises(UnsupportedConfig, match=field.replace("?", r"\?")):
        make()


def test_what_is_printed_hides_secrets() -> None:
    config = options_of(model="m", radix_cache=False, threads=3, cuda_graph_bs=(1, 2))
    words = command_line(non_defaults(config))
    wanted = "--model m --threads 3 --cuda-graph-bs 1 --cuda-graph-bs 2 --no-radix-cache"
    assert words == wanted.split() and parse(*words).options == config
    secrets = options_of(hf_token="t", api_key=("k",), ssl_certfile="c", ssl_keyfile_password="p")
    assert command_line(non_defaults(secrets)) == ["--ssl-certfile", "c"]


def test_a_list_of_numbers_may_follow_its_flag() -> None:
    """As SGLang's users write it; a model after it is still a model."""
    for words in (
        ["--cuda-graph-bs", "1", "2", "4"], ["--cuda_graph_bs=1", "2", "--cuda-graph-bs", "4"],
        ["--cuda-graph-bs", "1,2,4"], ["--cuda-graph-bs=1,2", "4"],
    ):  # fmt: skip
        assert parse(*words).options.load.cuda_graph_bs == (1, 2, 4)
    assert parse("--cuda-graph-bs", "1", "2", "models/m").args.positional_model == "models/m"


def test_lists_of_other_words_keep_their_commas() -> None:
    assert non_defaults(parse("--served-model-name", "a,b").options)["served_model_name"] == ("a,b",)
    with pytest.raises(UnsupportedConfig, match="expected a list, each a whole number, got 'x'"):
        parse("--pp-layer-partition", "3,x")


def test_backends_of_sparse_attention_have_their_older_names() -> None:
    for role in ("prefill", "decode", "topk"):
        for name in (f"--dsa-{role}-backend", f"--nsa-{role}-backend"):
            assert getattr(parse(name, "triton").options.load, f"dsa_{role}_backend") == "triton"


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--enable-flashinfer-mla", "--attention-backend flashinfer"),
        ("--enable-ep-moe", "use --ep-size"),
        ("--torch-compile-max-bs", "not needed"),
        ("--profile", "thalweg roofline"),
    ],
)
def test_old_spellings_of_other_engines_name_the_present_one(flag: str, instead: str) -> None:
    with pytest.raises(UnsupportedConfig, match=instead):
        parse(flag)


def test_secrets_come_from_the_environment_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line can be read by every user of the machine."""
    (tmp_path / "keys").write_text("k1\nk2\n\n")
    monkeypatch.setenv("THALWEG_API_KEY_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("THALWEG_ADMIN_API_KEY", "root")
    options = parse("--model", "m").options
    assert options.server.api_key == ("k1", "k2") and options.server.admin_api_key == "root"
    given = parse("--model", "m", "--api-key", "other")
    assert given.options.server.api_key == ("other",), "the command line wins"
    assert "THALWEG_API_KEY_FILE" in given.notices[0] and "other" not in given.notices[0]
    monkeypatch.setenv("THALWEG_API_KEY", "a,b")
    with pytest.raises(UnsupportedConfig, match="THALWEG_API_KEY and THALWEG_API_KEY_FILE"):
        parse("--model", "m")
    monkeypatch.delenv("THALWEG_API_KEY_FILE")
    assert parse("--model", "m").options.server.api_key == ("a", "b")
    monkeypatch.setenv("THALWEG_ADMIN_API_KEY_FILE", str(tmp_path / "none"))
    monkeypatch.delenv("THALWEG_ADMIN_API_KEY")
    with pytest.raises(UnsupportedConfig, match="THALWEG_ADMIN_API_KEY_FILE: .*No such file"):
        parse("--model", "m")


def test_replace_keeps_the_rest() -> None:
    config = replace(options_of(model="m", port=5), max_num_seqs=3)
    assert non_defaults(config) == {"model": "m", "port": 5, "max_running_requests": 3}


def test_values_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().listen.port = 5  # type: ignore[misc]


@drawn(st.text(max_size=12))
def test_any_text_is_a_value_or_an_error_that_names_the_setting(text: str) -> None:
    for name in ("port", "mem_fraction_static", "radix_cache", "schedule_policy", "max_total_tokens"):
        try:
            config = options_of(**{name: text})
        except UnsupportedConfig as error:
            assert str(error).startswith(name)
        else:
            assert vars(vars(config)[settings()[name].section])[name] is not text or name == "schedule_policy"


def test_a_new_setting_is_one_field() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wind(Section):
        speed: float | None = setting(None, "how fast", aliases=("v",), least=0.5, auto="by wind")
        names: tuple[str, ...] = setting((), "who")

    speed, names = settings_of(Wind, "section")
    assert (speed.flag, speed.optional, speed.kind, speed.shown_default) == ("--speed", True, float, "by wind")
    assert speed.parse("2") == 2.0 and speed.parse("auto") is None and names.parse("x") == ("x",)
    with pytest.raises(UnsupportedConfig, match="speed: must be at least 0.5, got 0.1"):
        Wind(speed=0.1)


def test_the_page_in_docs_is_what_the_settings_say() -> None:
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == document(), "run `make docs`"


def test_the_machine() -> None:
    machine = Machine.here()
    assert machine.cores >= 1 and 0 < machine.free <= machine.memory and machine.cpu


def test_help_of_serve_lists_every_setting_with_its_default() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "thalweg", "serve", "--help"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    words = " ".join(done.stdout.split())
    for one in settings().values():
        assert one.flag in words
        assert " ".join(f"(default: {one.shown_default})".split()) in words or not one.shown_default, one.name
    assert all(f"{title}:" in done.stdout for title in TITLES.values())


def spelled(options: Options) -> dict[str, Any]:
    return {name: value for name, value in non_defaults(options).items() if name != "model"}


def speculative(*words: str) -> dict[str, Any]:
    return spelled(parse_options(options_parser("t", "t"), ["m", *words]).options)


def test_sglang_hisparse_config_is_accepted() -> None:
    words = ["--enable-hisparse", "--hisparse-config", '{"top_k": 2048, "device_buffer_size": 6144}']
    assert speculative(*words) == {"enable_hisparse": True, "hisparse_device_buffer_size": 6144}
    notices = parse_options(options_parser("t", "t"), ["m", *words]).notices
    assert [words for words in notices if "--hisparse-device-buffer-size 6144" in words] and len(notices) == 2


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ('{"host_to_device_ratio": 2}', "use --hisparse-host-memory-gb"),
        ('{"top_k": 512}', "index_topk in the model's config.json"),
        ('{"device_bufer_size": 4096}', "did you mean device_buffer_size"),
        ("4096", "expected an object"),
        ("{", "hisparse_config: not JSON"),
    ],
)
def test_sglang_hisparse_config_without_an_equivalent_is_refused(tree: str, told: str) -> None:
    with pytest.raises(UnsupportedConfig, match=told):
        parse_options(options_parser("t", "t"), ["m", "--hisparse-config", tree])


@pytest.mark.parametrize(
    ("tree", "wanted"),
    [
        ({"method": "mtp", "num_speculative_tokens": 3}, ("NEXTN", None, 3)),
        ({"method": "glm4_moe_mtp"}, ("NEXTN", None, None)),
        ({"method": "eagle3", "model": "org/head", "draft_tensor_parallel_size": 1}, ("EAGLE3", "org/head", None)),
        ({"model": "org/small", "quantization": None}, (None, "org/small", None)),
        ({"model": "[ngram]", "num_speculative_tokens": "5", "disable_by_batch_size": 4}, ("NGRAM", None, 5)),
    ],
)
def test_vllm_speculative_config_is_accepted(
    tree: dict[str, Any], wanted: tuple[str | None, str | None, int | None]
) -> None:
    names = ("speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps")
    values = {name: value for name, value in zip(names, wanted, strict=True) if value is not None}
    assert speculative("--speculative-config", json.dumps(tree)) == values
    assert spelled(options_of(model="m", speculative_config=tree)) == values, "as YAML has it"
    notices = parse_options(options_parser("t", "t"), ["m", f"--speculative-config={json.dumps(tree)}"]).notices
    assert len(notices) == len([value for value in tree.values() if value is not None])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--speculative-config", "mtp"], ("not JSON", "single quotes", "--speculative-algorithm")),
        (["--speculative-config", "[]"], ("expected an object",)),
        (["--speculative-config", '{"method": "medusa"}'], ("'medusa' is not here", "NGRAM")),
        (["--speculative-config", '{"prompt_lookup_max": 4}'], ("prompt_lookup_max has no equal", "2 to 5")),
        (
            ["--speculative-config", '{"draft_tensor_parallel_size": 2}'],
            ("draft_tensor_parallel_size", "as its target"),
        ),
        (["--speculative-config", '{"num_speculative_token": 2}'], ("did you mean num_speculative_tokens?",)),
        (
            ["--speculative-config", '{"num_speculative_tokens": "x"}'],
            ("speculative_num_steps: expected a whole number",),
        ),
        (
            ["--mtp", "2", "--speculative-config", '{"method": "mtp"}', "--speculative-algorithm", "NGRAM"],
            ("--speculative-algorithm: given twice",),
        ),
        (["--speculative-config.method", "mtp"], ("one object", '"method"')),
        (["--speculative-token-map", "x"], ("--speculative-token-map: not needed: ",)),
        (["--speculative-draft-load-format=dummy"], ("--load-format",)),
        (["--speculative-ngram-max-match-window-size", "8"], ("not needed", "2 to 5")),
        (["--speculative-algorithm", "medusa"], ("must be one of NEXTN",)),
    ],
)
def test_vllm_speculative_config_without_an_equivalent_is_refused(words: list[str], told: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedConfig) as refused:
        speculative(*words)
    assert all(word in str(refused.value) for word in told), refused.value


def test_choices_ignore_case() -> None:
    assert speculative("--speculative-algorithm", "nextn") == {"speculative_algorithm": "NEXTN"}
    assert speculative("--speculative-algo", "Eagle3")["speculative_algorithm"] == "EAGLE3"
    assert options_of(model="m", schedule_policy="LPM").schedule.schedule_policy == "lpm"


def test_backends_in_help_are_those_of_the_catalogs() -> None:
    for name, catalogs in (
        ("attention_backend", (backends.DECODE, backends.PREFILL)),
        ("moe_runner_backend", (backends.EXPERTS,)),
        ("fp8_gemm_backend", (backends.FP8,)),
    ):
        assert all(backend in settings()[name].meanings for catalog in catalogs for backend in catalog), name
