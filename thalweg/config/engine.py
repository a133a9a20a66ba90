"""`EngineConfig`: everything an engine is built from. The resolver makes it; the engine's start-up replaces only what
it measures.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from thalweg.config.context_parallel import INTERLEAVE
from thalweg.core.kernels import KernelConfig, TunedKernel
from thalweg.core.plan import PAGE
from thalweg.core.report import Decision, Report
from thalweg.core.step_times import StepTimes
from thalweg.core.tree import CHAIN, TreeShape


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved configuration of one engine: plain data, sent to the engine's process and written into recordings.

    A field that a flag sets has the flag's name.
    """

    # ---- model and weights ----
    model_path: str
    """Folder of the checkpoint."""
    load_format: str = "auto"
    """Source of the weights: "auto" (safetensors) or "dummy" (random weights)."""
    weight_updates: tuple[str, ...] = ()
    """Folders whose tensors replace those of `model_path`, in this order."""
    dtype: str = "float32"
    """Type of weights and activations that are not quantized: "float32" or "bfloat16"."""
    eos_ids: tuple[int, ...] = ()
    """Tokens that end a sequence."""
    context_length: int = 4096
    """Longest sequence in tokens; start-up lowers it to what the KV cache holds."""
    min_context_length: int = 0
    """Tokens of one sequence that the KV cache must hold, or start-up fails: a context length that the user set."""

    # ---- device and kernels ----
    device: str = "cpu"
    """Either "cpu" or "cuda"."""
    threads: int = 1
    """Threads of torch's CPU pool."""
    decode_attention_backend: str = "reference"
    """Attention of decode rows; "reference" runs the whole model in plain torch, "torch" attention alone."""
    prefill_attention_backend: str = "reference"
    """Attention of all other rows."""
    moe_runner_backend: str = "triton"
    """Backend of the experts."""
    fp8_gemm_backend: str = "triton"
    """Backend of matrix products with FP8 weights."""
    dsa_topk_backend: str = "triton"
    """What chooses the highest scores of an indexer, beside attention on kernels."""
    dsa_paged_mqa_logits_backend: str = "triton"
    """What computes the scores of an indexer."""
    shared_experts_fusion: bool | None = None
    """Whether shared experts are computed with the routed ones; None: where both are stored alike."""
    mla: bool = True
    """Whether an MLA model caches latents; else it caches decompressed keys and values."""
    deterministic_inference: bool = False
    """Whether a token's bits depend on its own sequence alone."""
    tuned_kernels: tuple[TunedKernel, ...] = ()
    """Tuned values that replace those of the kernels' tables."""
    cuda_graph_mode: str = "full_and_piecewise"
    """As the flag; "full" lets whole-step graphs take prompt tokens as rows."""
    cuda_graph_bs: tuple[int, ...] = ()
    """Rows of the decode steps that are captured whole."""
    piecewise_cuda_graph_tokens: tuple[int, ...] = ()
    """Tokens of the steps whose static parts are captured."""
    trim_piecewise_cuda_graphs: bool = False
    """Whether start-up drops the largest of them that are slower than eager steps."""
    cache_dir: str = ""
    """Folder of compiled kernels; "" is the default one."""
    warmup: bool = True
    """Whether every kind of step runs once before the first request."""

    index_topk_pattern: str = ""
    """Of each layer, F: it selects context, S: it shares the last selection; "": as the checkpoint has it."""

    # ---- several devices ----
    nnodes: int = 1
    """Nodes, each with as many of the processes."""
    dist_init_addr: str = ""
    """HOST:PORT of the first node, where the others find it."""
    tp_size: int = 1
    """Processes that share the layers of one copy of the model."""
    pp_size: int = 1
    """Stages of consecutive layers, of `tp_size` processes each."""
    pp_layer_partition: tuple[int, ...] = ()
    """Layers of each stage; (): as even as they can be."""
    dp_size: int = 1
    """Groups with requests of their own: copies, or with `enable_dp_attention` parts of the `tp_size` processes."""
    enable_dp_attention: bool = False
    dcp_size: int = 1
    """Processes of an attention among which the KV of each sequence is dealt out, `PAGE` tokens at a time."""
    shard_indexer: bool = False
    """Whether the ranks of an attention share the heads of its indexer (DSA), and add up their scores."""
    attn_cp_size: int = 1
    """Groups of processes that the tokens of a data-parallel rank's steps are divided over."""
    cp_strategy: str = INTERLEAVE
    """How the tokens of prompts are divided over them, a name in `config.context_parallel`."""
    ep_size: int = 1
    """Groups of processes that the experts are divided over."""
    moe_a2a_backend: str = "none"
    """How tokens get to the ranks of their experts."""
    deepep_mode: str = "auto"
    ep_num_redundant_experts: int = 0
    """Slots for experts of each layer beyond one for each."""
    init_expert_location: str = "trivial"
    """A file with the experts of each slot, or "trivial"."""
    enable_eplb: bool = False
    """Whether experts move while requests run."""
    eplb_algorithm: str = "deepseek"
    eplb_rebalance_num_iterations: int = 1000
    eplb_rebalance_layers_per_chunk: int = 0
    """Layers whose experts move before one step; 0: some experts of one layer."""
    eplb_min_rebalancing_utilization_threshold: float = 1.0
    moe_dense_tp_size: int = 1
    """Processes that share the width of dense MLPs: those of one attention, or 1."""

    # ---- KV cache ----
    max_total_tokens: int = 1024 * PAGE
    """Tokens that the KV cache holds; 0: start-up measures how many fit a GPU."""
    kv_cache_dtype: str = ""
    """Type of the KV cache, a name in `memory.planes.CODECS`; "" is `dtype`."""
    fp8_index_keys: bool = False
    """Whether index keys of sparse attention are e4m3, with a scale for each; else they are `dtype`."""
    radix_cache: bool = True
    hisparse_device_buffer_size: int = 0
    """Latents of a layer in a slot's hot set; 0: all latents are on the device, none in host memory."""
    hisparse_host_memory: int = 0
    """Bytes of host memory for latents; 0: no limit."""

    # ---- scheduler ----
    max_running_requests: int = 64
    max_queued_requests: int = 0
    """Requests that wait at most; 0: no limit."""
    chunked_prefill_size: int = 2048
    """Tokens of one step at most."""
    measures_step_times: bool = False
    """Whether start-up measures `step_times`."""
    step_times: StepTimes | None = None
    """By which the prompt tokens beside decode rows are chosen. None: prompts get all that a step leaves."""
    max_ttft_ms: float = 0.0
    """Target for the time to the first token; 0: none."""
    max_itl_ms: float = 0.0
    """Target for the time of a step with decode rows; 0: none."""
    schedule_policy: str = "fcfs"
    overlap_schedule: bool = False
    """Whether the next step is planned while the device computes."""
    random_seed: int = 0
    """Seed of the seeds drawn for requests that name none."""

    # ---- speculative decoding ----
    speculative_algorithm: str = "NONE"
    """A name in `config.drafters`, or "NONE"."""
    speculative_draft_model_path: str = ""
    """Folder of the drafter's own weights; "" where the checkpoint has them."""
    drafter_left_out: bool = False
    """Whether a drafter was requested and left out: for want of memory, or because it failed."""
    speculative_num_steps: int = 0
    """Depth of a draft: tokens drafted one after the other."""
    speculative_eagle_topk: int = 1
    """Children of a draft token at most; 1 is a chain."""
    speculative_num_draft_tokens: int = 0
    """Tokens of a draft tree with its root. A chain verifies `speculative_num_steps` + 1."""
    speculative_tree: str = "dynamic"
    """Either "dynamic" (grown where the drafter is most certain) or "static"."""
    speculative_adaptive: bool = False
    """Whether the number of drafts of each step is chosen from step times and measured acceptance."""
    speculative_step_times: tuple[tuple[int, int, tuple[float, ...]], ...] = ()
    """(rows, context, seconds by number of drafts); empty: start-up measures them for `speculative_adaptive`."""
    index_share_for_mtp_iteration: bool = False
    """Whether the steps of a NEXTN draft share the first one's selection of context (DSA)."""
    speculative_acceptance: str = "gumbel-max"
    """The rule that accepts drafts, see `sampling.catalog`."""
    speculative_relaxed_topk: int = 10
    speculative_relaxed_delta: float = 0.6
    speculative_simulate_accept_length: float = 0.0
    """Tokens that a verification brings on average in a simulation; 0: off."""

    # ---- process and logs ----
    show_progress: bool = True
    """Whether loading shows a progress bar."""
    log_start: bool = True
    """Whether start-up logs its phases."""
    log_level: str = "info"
    log_format: str = "text"
    crash_dump_folder: str = ""
    """Folder for recordings of the last steps; "" for none."""
    watchdog_timeout: float = 300.0
    """Seconds without a step, while requests wait, after which the engine counts as hung; 0: never."""
    watchdog_action: str = "report"
    """What the client does with a hung engine: "report" it, or "restart" it too."""
    restart_timeout: float = 1800.0
    """Seconds in which a new engine must serve after one has ended; 0: no limit."""

    report: Report = Report()

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache without the null page; 0 before start-up has measured them."""
        return self.max_total_tokens // self.page_size

    @property
    def page_size(self) -> int:
        """Tokens of a page of the scheduler; each process stores `PAGE` of them."""
        return PAGE * self.dcp_size

    @property
    def processes(self) -> int:
        """Of the engine, a device each."""
        return self.copy_processes * self.copies

    @property
    def node_processes(self) -> int:
        """Of one node."""
        return self.processes // self.nnodes

    def node_of(self, process: int) -> int:
        """process: its number in the engine."""
        return process // self.node_processes

    @property
    def copy_processes(self) -> int:
        """Of one copy of the model."""
        return self.tp_size * self.pp_size

    @property
    def copies(self) -> int:
        """Of the model; they share nothing."""
        return 1 if self.enable_dp_attention else self.dp_size

    @property
    def attention_dp(self) -> int:
        """Data-parallel ranks of one copy, which share its experts and agree on each step."""
        return self.dp_size if self.enable_dp_attention else 1

    @property
    def attention_tp(self) -> int:
        """Processes that share the attention and the head; the first has the scheduler."""
        return self.tp_size // (self.attention_dp * self.attn_cp_size)

    @property
    def max_steps_in_flight(self) -> int:
        """1: synchronous. Each further pipeline stage adds one, so that all stages compute; so does planning the next
        step while the device computes.
        """
        return self.pp_size + self.overlap_schedule

    @property
    def tree(self) -> TreeShape:
        if self.speculative_eagle_topk == 1:
            return CHAIN
        is_dynamic, drafts = self.speculative_tree == "dynamic", self.speculative_num_draft_tokens - 1
        return TreeShape(self.speculative_eagle_topk, self.speculative_num_steps, drafts, is_dynamic)

    @property
    def num_drafts(self) -> int:
        """Tokens drafted per sequence and step at most."""
        return self.tree.num_drafts or self.speculative_num_steps

    @property
    def kernels(self) -> KernelConfig:
        """The kernel selection that layers are built with."""
        return KernelConfig(
            decode=self.decode_attention_backend,
            prefill=self.prefill_attention_backend,
            moe=self.moe_runner_backend,
            fusion=self.shared_experts_fusion,
            fp8_gemm=self.fp8_gemm_backend,
            kv="" if self.kv_cache_dtype == self.dtype else self.kv_cache_dtype,
            topk=self.dsa_topk_backend,
            index_scores=self.dsa_paged_mqa_logits_backend,
            fp8_index=self.fp8_index_keys,
            latent=self.mla,
            hot=self.hisparse_device_buffer_size,
            deterministic=self.deterministic_inference,
        )

    def started(self, decisions: Iterable[Decision], **fields: Any) -> EngineConfig:
        """This configuration with what start-up measured or corrected: `fields` replaced and `decisions` appended to
        the report.
        """
        return msgspec.structs.replace(self, report=self.report.append(decisions), **fields)
