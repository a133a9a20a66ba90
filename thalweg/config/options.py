"""The options: one tree of frozen dataclasses. The command line, YAML and keyword arguments are made from its fields.

`None` is "auto": the resolver chooses and says why. A value that the user set is never changed: what cannot be honoured
is an error (`UnsupportedConfig`) that names an alternative. To add a flag, add a field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thalweg.config.backends import DECODE, EXPERTS, FP8, PREFILL
from thalweg.config.context_parallel import SGLANG_STRATEGIES, STRATEGIES
from thalweg.config.server import ServerOptions
from thalweg.config.setting import Section, setting
from thalweg.config.speculative import SpeculativeOptions
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import MOST_HOT_ENTRIES

DTYPES = {"bfloat16": "2 bytes a number", "float32": "4 bytes a number"}
KV_DTYPES = {
    **DTYPES,
    "fp8_e4m3": "1 byte a number, with scales",
    "fp8": "the same as fp8_e4m3",
    "fp8_ds_mla": "the same with scales for each token, rotated keys in bfloat16, FP8 index keys: sparse attention",
}
QUANTIZATIONS = {
    "fp8": "FP8 in blocks with a scale each, or with one for each tensor",
    "compressed-tensors": "what llm-compressor writes",
    "awq": "INT4 of AutoAWQ",
    "gptq": "INT4 of GPTQ",
    "modelopt": "what ModelOpt writes",
    "quark": "what Quark writes",
    "w4afp8": "INT4 experts, FP8 in blocks elsewhere",
    "mxfp4": "MXFP4 experts, as of gpt-oss",
    "blockwise_int8": "INT8 in blocks",
    "w8a8_int8": "INT8 with a scale for each row",
    "none": "bfloat16, float16 or float32",
    "awq_marlin": "the same as awq",
    "gptq_marlin": "the same as gptq",
    "moe_wna16": "awq or gptq",
    "modelopt_fp4": "modelopt with NVFP4",
    "modelopt_fp8": "modelopt with FP8",
    "modelopt_mxfp8": "modelopt with MXFP8",
    "modelopt_mixed": "modelopt with MIXED_PRECISION",
    "gpt_oss_mxfp4": "the same as mxfp4",
}
GRAPH_MODES = {
    "full": "decode and small mixed steps",
    "full_decode_only": "decode steps",
    "full_and_piecewise": "decode steps whole, and others in pieces",
    "piecewise": "steps in pieces only",
    "none": "nothing",
}
POLICIES = {"fcfs": "by arrival", "lpm": "longest cached prefix first", "priority": "by their priority"}
BACKENDS = {
    "triton": "Triton kernels, which Thalweg brings",
    "triton+flashmla": "FlashMLA for many rows, Triton for few rows and for trees",
    "flashmla": "FlashMLA, for MLA models on Hopper",
    "fa3": "FlashAttention 3, for prompts on Hopper",
    "flashinfer": "FlashInfer, never chosen automatically",
    "triton+deep_gemm": "Triton for few tokens, DeepGEMM for many",
    "deep_gemm": "DeepGEMM, on Hopper",
    "cublas": "cuBLAS with scales, on Hopper",
    "torch": "PyTorch on a GPU, for sparse attention",
    "triton_sparse": "Triton kernels for sparse attention",
    "flashmla_sparse": "FlashMLA for sparse attention to bfloat16 latents on Hopper",
    "flashmla_kv": "FlashMLA for sparse attention to FP8 records on Hopper",
    "reference": "plain PyTorch, on a CPU or to check others",
}
REASONING_PARSERS = {
    "deepseek-r1": "the answer begins in the thought",
    "deepseek-v3": "a thought only where the request asks for one",
    "qwen3": "a thought where the text begins with <think>",
    "glm45": "the same, for GLM",
    "none": "thoughts stay in the text",
}
TOOL_CALL_PARSERS = {
    "deepseekv3": "DeepSeek V3 and R1",
    "deepseekv31": "DeepSeek V3.1",
    "deepseekv32": "DeepSeek V3.2 (DSML)",
    "qwen25": "Qwen and Hermes: JSON in <tool_call>",
    "glm45": "GLM-4.5 and later",
    "kimi_k2": "Kimi-K2",
    "llama3": "Llama 3: JSON as the whole answer",
    "none": "calls stay in the text",
}
OWN_SPARSE = {"triton": "Triton kernels", "torch": "PyTorch on a GPU"}
TOPK_BACKENDS = OWN_SPARSE | {"sgl-kernel": "SGLang's default: as auto"}
LOGITS_BACKENDS = {
    "triton": "Triton kernels",
    "deep_gemm": "DeepGEMM on Hopper, of FP8 index keys; Triton for few tokens of prompts and for trees of drafts",
    "deepgemm": "SGLang's spelling of deep_gemm",
    "torch": "PyTorch, where it attends",
}
DSA_BACKENDS = {
    **OWN_SPARSE,
    "flashmla_sparse": "FlashMLA on Hopper, of latents in bfloat16",
    "flashmla_kv": "FlashMLA on Hopper, of FP8 records",
    "flashmla_auto": "the one of the two that reads the KV cache",
}
LAUNCHERS = {
    "local": "you, or a scheduler such as SLURM or Kubernetes",
    "ray": "tasks of the Ray cluster that this machine belongs to",
    "torchrun": "torchrun, once on each machine: it says --nnodes, --node-rank and --dist-init-addr",
}
A2A_BACKENDS = {
    "none": "the same as allgather",
    "allgather": "each device gets the tokens of all data-parallel ranks",
    "alltoall": "each device gets the tokens that need it",
    "deepep": "the library DeepEP",
}
DEEPEP_MODES = {"normal": "DeepEP's kernels for many tokens", "low_latency": "DeepEP's kernels for few tokens"}
EPLB_ALGORITHMS = {"deepseek": "each on its own", "deepseek_hierarchical": "groups of them stay on a node"}
_DEVICES = {"least": 1, "off": 1, "on": 2}  # of each number of devices


def _meanings(*catalogs: Mapping[str, object]) -> dict[str | int, str]:
    return {name: BACKENDS[name] for catalog in catalogs for name in catalog}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Section):
    """Which model, and how much of its context."""

    model: str = setting(
        "",
        "folder of a checkpoint, or org/name on the model hub",
        aliases=("model-path",),
        metavar="DIR|ORG/NAME",
    )
    revision: str | None = setting(None, "branch, tag or commit on the hub", auto="main")
    hf_token: str | None = setting(
        None,
        "access token for the hub",
        auto="the HF_TOKEN variable, or the one stored by `hf auth login`",
        secret=True,
    )
    context_length: int | None = setting(
        None,
        "longest sequence, prompt and output, in tokens",
        foreign=("max-model-len",),
        least=2,
        auto="the model's own, less if memory holds less",
    )
    index_topk_freq: int | None = setting(
        None,
        "for models with sparse attention (DSA): every N-th layer selects context, and the layers between share its"
        " selection (IndexCache)",
        least=1,
        auto="the checkpoint's own",
    )
    index_topk_pattern: str | None = setting(
        None,
        "the same with a letter for each layer, such as FFSS: F selects, S shares. thalweg tune index-cache finds one",
        auto="the checkpoint's own",
    )
    quantization: str | None = setting(
        None,
        "format of the weights as config.json states it. Weights are never converted: another value is refused",
        choices=QUANTIZATIONS,
        auto="as config.json states",
    )
    chat_template: str | None = setting(
        None,
        "how conversations become prompts: a Jinja file, or the name of an encoder",
        auto="the checkpoint's own, else ours",
    )
    reasoning_parser: str | None = setting(
        None, "parser of thoughts", meanings=REASONING_PARSERS, auto="by the chat template"
    )
    tool_call_parser: str | None = setting(
        None,
        "parser of tool calls",
        meanings=TOOL_CALL_PARSERS,
        auto="by the chat template",
    )


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Section):
    """Device, types and loading of the weights."""

    device: str | None = setting(
        None,
        "where the model runs",
        choices={"cpu": "on the processor", "cuda": "on NVIDIA GPUs"},
        auto="a GPU where there is one",
    )
    dtype: str | None = setting(
        None,
        "type of weights and activations that are not quantized",
        choices=DTYPES,
        auto="by device and memory",
    )
    load_format: str = setting(
        "auto",
        "source of the weights",
        choices={"auto": "safetensors files", "dummy": "random numbers; only config.json is read"},
    )
    threads: int | None = setting(None, "threads of the CPU's compute pool", least=1, most=1024, auto="cores - 1")
    cache_dir: str | None = setting(
        None,
        "folder of compiled kernels; `thalweg warmup` fills it",
        auto="~/.cache/thalweg, unless TRITON_CACHE_DIR and DG_JIT_CACHE_DIR say otherwise",
    )
    tuned_kernels: bool = setting(
        True,
        "use the values that `thalweg tune` has found for this device in place of the kernels' own tables",
    )
    warmup: bool = setting(
        True,
        "run every kind of step once before the first request, so that none compiles within one (GPU only)",
        aliases=("skip-server-warmup=false",),
    )
    attention_backend: str | None = setting(
        None,
        "attention backend, where it can serve the model",
        meanings=_meanings(DECODE, PREFILL),
        auto="the fastest that fits",
        off="reference",
        on="triton",
    )
    dsa_prefill_backend: str | None = setting(
        None,
        "what computes sparse attention (DSA) of prompts",
        meanings=DSA_BACKENDS,
        foreign=("nsa-prefill-backend", "nsa-prefill"),
        auto="by --attention-backend, else FlashMLA for V3.2 where it fits, or triton",
    )
    dsa_decode_backend: str | None = setting(
        None,
        "what computes sparse attention (DSA) of decode rows; torch cannot be combined with another backend",
        meanings=DSA_BACKENDS,
        foreign=("nsa-decode-backend", "nsa-decode"),
        auto="by --attention-backend, else triton for V3.2",
    )
    dsa_topk_backend: str | None = setting(
        None,
        "what chooses the highest scores of an indexer (DSA)",
        meanings=TOPK_BACKENDS,
        foreign=("nsa-topk-backend",),
        off="torch",
        on="triton",
        auto="triton beside kernels, torch beside torch",
    )
    dsa_paged_mqa_logits_backend: str | None = setting(
        None,
        "what computes the scores of an indexer (DSA)",
        meanings=LOGITS_BACKENDS,
        off="triton",
        on="deep_gemm",
        auto="deep_gemm where it fits, else triton; torch beside torch",
    )
    moe_runner_backend: str | None = setting(
        None,
        "backend of the experts",
        meanings=_meanings(EXPERTS),
        foreign=("moe-backend",),
        auto="the fastest that fits",
        off="triton",
        on="deep_gemm",
    )
    fp8_gemm_backend: str | None = setting(
        None,
        "backend of FP8 products",
        meanings=_meanings(FP8),
        foreign=("fp8-gemm-runner-backend",),
        auto="the fastest that fits",
        off="triton",
        on="deep_gemm",
    )
    shared_experts_fusion: bool | None = setting(
        None,
        "compute shared experts with the routed ones, in the same kernels",
        aliases=("disable-shared-experts-fusion=false", "enforce-shared-experts-fusion=true"),
        auto="where a checkpoint stores both alike",
        off=False,
    )
    mla: bool = setting(
        True,
        "cache the latents of an MLA model; off: its keys and values, which take many times more memory",
        aliases=("disable-mla=false",),
    )
    deterministic_inference: bool = setting(
        False,
        "the bits of a request's tokens do not depend on the batch, on chunks or on cache hits",
        aliases=("enable-deterministic-inference=true",),
    )
    cuda_graph_mode: str | None = setting(
        None,
        "steps that CUDA graphs capture",
        choices=GRAPH_MODES,
        aliases=("disable-cuda-graph=none",),
        foreign=("enforce-eager=none", "enable-piecewise-cuda-graph=full_and_piecewise"),
        auto="full_and_piecewise where the attention can be captured",
        off="none",
        on="full_and_piecewise",
    )
    cuda_graph_max_bs: int | None = setting(
        None, "largest batch size of a captured decode step", least=1, auto="as --max-running-requests, 256 at most"
    )
    cuda_graph_bs: tuple[int, ...] = setting(
        (), "batch sizes of captured decode steps", metavar="N", auto="1, 2, 4, then every eighth"
    )
    piecewise_cuda_graph_tokens: tuple[int, ...] = setting(
        (),
        "numbers of tokens of steps that are captured in pieces",
        metavar="N",
        auto="16 to 2,304; the largest only where that is faster",
    )


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Section):
    """Memory of the KV cache."""

    mem_fraction_static: float | None = setting(
        None,
        "share of the free memory for weights and KV cache together",
        foreign=("gpu-memory-utilization",),
        least=0.01,
        most=0.99,
        auto=(
            "on a CPU 0.8, and no more cache than all running requests can fill; on a GPU what is free beside all else,"
            " which is measured"
        ),
    )
    max_total_tokens: int | None = setting(None, "tokens that the KV cache holds", least=64, auto="from memory")
    kv_cache_dtype: str | None = setting(
        None, "type of the KV cache", choices=KV_DTYPES, auto="as --dtype", off=None, on="fp8_e4m3"
    )
    page_size: int = setting(64, "tokens a page of the KV cache", choices=(64,), foreign=("block-size",))
    radix_cache: bool = setting(
        True,
        "keep the KV of finished requests for prompts with the same beginning",
        aliases=("disable-radix-cache=false",),
        foreign=("enable-prefix-caching=true", "no-enable-prefix-caching=false"),
    )

    enable_hisparse: bool = setting(
        False,
        "keep the latents of sparse attention (DSA) in host memory, behind a hot set on the device for each request",
        off=False,
    )
    hisparse_device_buffer_size: int | None = setting(
        None, "latents of each layer in a hot set", least=1, most=MOST_HOT_ENTRIES, auto="(2 + drafts) x index_topk"
    )
    hisparse_host_memory_gb: float | None = setting(
        None,
        "GB of host memory for latents, of all processes of a node together",
        least=0.001,
        auto="on a GPU 0.8 of what the container's limit and other programs leave; on a CPU as --mem-fraction-static",
    )
    strip_thinking_cache: bool | None = setting(
        None,
        "do not cache thoughts and the answers after them: the next turn's prompt does not contain them",
        auto="where the chat template drops the thoughts of earlier turns",
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Section):
    """Step size, concurrency and the order of requests."""

    max_running_requests: int | None = setting(
        None, "requests computed at a time", foreign=("max-num-seqs",), least=1, most=65536, auto="by device"
    )
    max_queued_requests: int = setting(0, "most waiting requests; the server answers 429 to more; 0: no limit", least=0)
    chunked_prefill_size: int | None = setting(
        None,
        "token budget of a step; longer prompts are split into chunks. -1: prompts are never split",
        foreign=("max-num-batched-tokens",),
        least=-1,
        auto="by device; on a GPU fewer beside decoding requests, by times measured at the start",
        off=-1,
    )
    max_ttft_ms: float | None = setting(
        None,
        "target: time to the first token; prompts get larger shares of steps to keep it",
        least=1,
        auto="none",
    )
    max_itl_ms: float | None = setting(
        None,
        "target: time between two tokens of a request; prompts get smaller shares of steps to keep it, before"
        " --max-ttft-ms",
        least=1,
        auto="none",
    )
    schedule_policy: str = setting(
        "fcfs",
        "order of waiting requests",
        foreign=("scheduling-policy",),
        choices=POLICIES,
        off="fcfs",
        on="lpm",
    )
    overlap_schedule: bool | None = setting(
        None,
        "plan the next step while the device computes",
        aliases=("disable-overlap-schedule=false", "enable-overlap-schedule=true"),
        foreign=("async-scheduling=true", "no-async-scheduling=false"),
        auto="by device",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunked_prefill_size == 0:
            raise UnsupportedConfig("chunked_prefill_size: must be at least 1, or -1 to never cut a prompt; got 0")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Section):
    """Defaults of requests."""

    random_seed: int | None = setting(
        None,
        "seed from which requests without a seed get theirs",
        foreign=("seed",),
        least=0,
        most=2**63 - 1,
        auto="drawn at start",
    )
    sampling_defaults: str = setting(
        "model",
        "temperature, top_p, top_k, min_p and repetition_penalty of requests that set none",
        choices={"model": "as its generation_config.json recommends", "openai": "1, 1, and the others off"},
    )


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(Section):
    """Number of devices, and how they divide the model."""

    nnodes: int = setting(
        1, "machines that share the devices evenly; each runs the command with its own --node-rank", least=1
    )
    node_rank: int = setting(0, "number of this machine; 0 serves HTTP, the others have devices for it", least=0)
    dist_init_addr: str | None = setting(
        None, "where the first of several machines listens for the others", metavar="HOST:PORT", auto="one machine"
    )
    launcher: str = setting("local", "what runs the command on the other machines", choices=LAUNCHERS)
    tp_size: int = setting(
        1,
        "processes that share every layer, a device each (tensor parallelism)",
        aliases=("tp",),
        foreign=("tensor-parallel-size",),
        **_DEVICES,
    )
    dp_size: int = setting(
        1,
        "groups with requests of their own: copies of the model, of tp_size devices each; with enable_dp_attention,"
        " parts of the tp_size devices, which share the experts",
        aliases=("dp",),
        foreign=("data-parallel-size",),
        **_DEVICES,
    )
    enable_dp_attention: bool = setting(
        False, "dp_size divides tp_size: attention has tp_size / dp_size devices, and all share the experts", off=False
    )
    attn_cp_size: int = setting(
        1,
        "context-parallel ranks: the tokens of each step are split over this many groups of the tp_size devices",
        foreign=("attention-context-parallel-size",),
        **_DEVICES,
    )
    cp_strategy: str | None = setting(
        None,
        "how attn_cp_size groups divide prompts",
        choices=STRATEGIES | {name: f"SGLang's spelling of {own}" for name, own in SGLANG_STRATEGIES.items()},
        auto="interleave",
        foreign=("nsa-prefill-cp-mode", "dsa-prefill-cp-mode"),
    )
    pp_size: int = setting(
        1,
        "stages of consecutive layers (pipeline parallelism)",
        aliases=("pp",),
        foreign=("pipeline-parallel-size",),
        **_DEVICES,
    )
    pp_layer_partition: tuple[int, ...] = setting(
        (),
        "layers of each stage, the first stage first",
        metavar="N",
        auto="as even as they can be, by the least times of their layers",
    )
    dcp_size: int = setting(
        1,
        "decode context parallelism: the KV cache of each sequence is sharded over this many tensor-parallel ranks,"
        " which would all hold the same",
        foreign=("decode-context-parallel-size",),
        **_DEVICES,
    )
    shard_indexer: bool = setting(
        False,
        "for sparse attention (DSA): each tensor-parallel rank scores context by its share of the index heads, and the"
        " scores are added up; off: each by all heads",
    )
    ep_size: int = setting(
        1,
        "groups of devices that the experts are divided over; 1 cuts each expert instead",
        aliases=("ep",),
        foreign=("expert-parallel-size",),
        **_DEVICES,
    )
    moe_a2a_backend: str = setting(
        "none",
        "how tokens get to the devices of their experts",
        choices=A2A_BACKENDS,
        off="none",
        on="alltoall",
    )
    deepep_mode: str | None = setting(
        None,
        "kernels of --moe-a2a-backend deepep",
        choices=DEEPEP_MODES,
        auto="low_latency for steps of up to 128 tokens a device",
    )
    ep_num_redundant_experts: int = setting(
        0, "copies of experts in each layer, for those that most tokens choose", least=0
    )
    init_expert_location: str = setting(
        "trivial",
        "experts of each device at the start. trivial: in their order; a .json or .pt file: its"
        " physical_to_logical_map, or one made of its logical_count",
        metavar="trivial|FILE",
    )
    enable_eplb: bool = setting(
        False, "experts move between devices while requests run, by how many tokens choose each", off=False
    )
    eplb_algorithm: str | None = setting(
        None,
        "which experts move together",
        choices=EPLB_ALGORITHMS,
        auto="deepseek_hierarchical where the router chooses groups",
    )
    eplb_rebalance_num_iterations: int = setting(1000, "steps between two looks at the counts", least=1)
    eplb_rebalance_layers_per_chunk: int | None = setting(
        None, "layers whose experts move before one step", least=1, auto="4 experts of each device, of one layer"
    )
    eplb_min_rebalancing_utilization_threshold: float = setting(
        1.0, "nothing moves if the mean load of a device is above this share of the largest", least=0.0, most=1.0
    )
    moe_dense_tp_size: int | None = setting(
        None,
        "devices that share the dense MLPs of a model with experts: those of the attention, or 1",
        least=1,
        auto="as the attention",
    )
    enable_dp_lm_head: bool | None = setting(
        None,
        "the head is divided over the devices of one attention, so no logits cross data-parallel ranks",
        auto="always",
    )


@dataclass(frozen=True, kw_only=True)
class ListenOptions(Section):
    """Address of the HTTP server."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 is every network this machine has")
    port: int = setting(30000, "port to listen on; 0 picks a free one", least=0, most=65535)
    ssl_certfile: str | None = setting(None, "certificate (PEM): the server speaks HTTPS", auto="plain HTTP")
    ssl_keyfile: str | None = setting(None, "private key of the certificate", auto="in the certificate's file")
    ssl_keyfile_password: str | None = setting(None, "password of the private key", auto="none", secret=True)
    drain_timeout: float = setting(
        30.0, "seconds that running requests get to finish after SIGTERM or Ctrl-C", least=0.0, most=86400.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise UnsupportedConfig("ssl_keyfile: a key needs its certificate: give --ssl-certfile too")


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options. `tree.options_of(model=..., max_total_tokens=...)` takes the fields of all sections flat."""

    model: ModelOptions = field(default_factory=ModelOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    speculative: SpeculativeOptions = field(default_factory=SpeculativeOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    listen: ListenOptions = field(default_factory=ListenOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
