# SPDX-License-Identifier: Apache-2.0
"""Every edited function of a patched tree, called. Run by test_edited.py, not by pytest:

    PYTHONPATH=TREE python tests/series/scenarios.py TREE < paths.json  ->  {path: [lines that ran]}

paths.json: `edited` are the paths of the files whose lines are noted, `overlay` our modules,
`qwen35` is the folder of a Qwen3.5.
TREE stands before the installed vllm and has no compiled part of upstream's. Where a function
needs a running engine, it gets stubs for the names around it.
"""

import contextlib
import importlib.util
import inspect
import io
import json
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

TREE, PATHS = Path(sys.argv[1]), json.load(sys.stdin)
EDITED = {str(TREE / path): path for path in PATHS["edited"]}
ran: dict[str, set[int]] = {path: set() for path in PATHS["edited"]}
sys.modules["torchvision"] = None  # as if it were not installed, before Transformers looks


def trace(frame, event, _):
    """sys.settrace: note the lines of the edited files."""
    path = EDITED.get(frame.f_code.co_filename)
    if path is None:
        return None
    if event == "line":
        ran[path].add(frame.f_lineno)
    return trace


class Stubs(dict):
    """Globals of a function: those that are given, and a mock for every other name."""

    def __missing__(self, name):
        if name in vars(__builtins__):
            raise KeyError(name)
        return self.setdefault(name, mock.MagicMock(name=name))


def with_stubs(function, **known):
    """The same code among stubs."""
    plain = inspect.unwrap(function)
    return types.FunctionType(
        plain.__code__, Stubs(known), plain.__name__, plain.__defaults__, plain.__closure__
    )


def overlay():
    """Every module of ours imports."""
    for path in PATHS["overlay"]:
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        assert importlib.import_module(name).__file__ == str(TREE / path)


def cache_dtypes():
    """Every format is a cache dtype of packed bytes; a misspelt one is refused."""
    import torch

    from vllm.config import CacheConfig
    from vllm.turboquant.formats import FORMATS
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    for name in FORMATS:
        assert CacheConfig(cache_dtype=name).cache_dtype == name
        assert STR_DTYPE_TO_TORCH_DTYPE[name] is torch.uint8
    try:
        CacheConfig(cache_dtype="tdsf_k4v5")
    except ValueError:
        return
    raise AssertionError("tdsf_k4v5 was accepted")


def backend():
    """CpuPlatform names our backend for our dtypes only, and the registry finds it."""
    import torch

    from vllm.platforms.cpu import CpuPlatform
    from vllm.turboquant.formats import FORMATS
    from vllm.v1.attention.backends import tdsf_cpu
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    def chosen(dtype):
        config = AttentionSelectorConfig(128, torch.float32, dtype, 128)
        return CpuPlatform.get_attn_backend_cls(None, config)

    for name in FORMATS:
        short = name.removeprefix("tdsf_").upper()
        path = f"vllm.v1.attention.backends.tdsf_cpu.Tdsf{short}Backend"
        assert chosen(name) == path
        member = AttentionBackendEnum[f"TDSF_{short}_CPU"]
        assert member.get_class() is getattr(tdsf_cpu, f"Tdsf{short}Backend")
    assert "Tdsf" not in chosen("auto")


def command_line():
    """`vllm turboquant` is a command, beside upstream's."""
    if importlib.util.find_spec("orjson") is None:  # new in 0.33, not in the pin's requirements
        sys.modules["orjson"] = mock.MagicMock()
    from vllm.entrypoints.cli.main import main

    text = io.StringIO()
    with mock.patch("sys.argv", ["vllm", "turboquant", "--help"]), contextlib.redirect_stdout(text):
        try:
            main()
        except SystemExit as end:
            assert end.code == 0
    assert "calibrate" in text.getvalue() and "evaluate" in text.getvalue()


def calibration():
    """The engine asks for its constants as the last thing of its construction."""
    from vllm.turboquant import startup
    from vllm.v1.engine.core import EngineCore

    core, config, done = mock.MagicMock(), mock.MagicMock(), []
    config.max_concurrent_batches = core.model_executor.max_concurrent_batches = 1
    build = with_stubs(
        EngineCore.__init__,
        enable_envs_cache=lambda: done.append("environment"),
        resolve_kv_cache_block_sizes=lambda *_: (128, 128),
        len=lambda _: 1,
    )
    with mock.patch.object(startup, "prepare", lambda engine: done.append(engine)):
        build(core, config, mock.MagicMock(), False)
    assert done == ["environment", core]


def compile_cache():
    """A cached function with no finalize_loading is loaded; one that has it is finalized."""
    from vllm.compilation.decorators import _try_load_aot_compiled_fn

    def load(compiled):
        loaded = mock.MagicMock()
        loaded._artifacts.compiled_fn = compiled
        torch = mock.MagicMock()
        torch.compiler.load_compiled_function.return_value = loaded
        with tempfile.NamedTemporaryFile() as file:
            model = mock.MagicMock(forward=lambda: None)
            assert with_stubs(_try_load_aot_compiled_fn, torch=torch)(model, file.name) is loaded
        return model.vllm_config

    load(lambda: None)
    split = mock.MagicMock()
    split.finalize_loading.assert_called_once_with(load(split))


def auto_dtype():
    """`--dtype auto` is float32 without bf16 in hardware, an explicit dtype stays."""
    import torch
    from transformers import LlamaConfig

    from vllm.config.model import _get_and_verify_dtype
    from vllm.turboquant import cpu

    config = LlamaConfig(dtype="bfloat16")
    with mock.patch.object(cpu, "has_fast_bf16", lambda: False):
        for asked, wanted in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
            assert _get_and_verify_dtype("", config, asked, is_pooling_model=False) is wanted


def linear():
    """A layer and an embedding of bf16 numbers keep them as bf16, and give the same answers."""
    import torch

    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.turboquant import linear as ours

    weight = torch.randn(96, 64).bfloat16().float()
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    method, ids = UnquantizedEmbeddingMethod(), torch.tensor([3, 95])
    assert torch.equal(method.embedding(layer, ids), weight[ids])
    with (
        mock.patch.object(ours, "has_fast_bf16", lambda: False),
        mock.patch.object(ours.kernels, "isa", lambda: "any but portable"),
    ):
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    x = torch.randn(5, 64)
    torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), x @ weight.T)
    assert layer.weight.numel() == 0
    assert torch.equal(method.embedding(layer, ids), weight[ids])


def small_hosts():
    """Both cores of a 2-core host compute."""
    from vllm.turboquant import cpu
    from vllm.utils import ompmultiprocessing

    parallel = mock.MagicMock(local_world_size=1, data_parallel_rank_local=0, _api_process_count=1)
    config = mock.MagicMock(parallel_config=parallel, kv_transfer_config=None)
    cores = [types.SimpleNamespace(id=i, physical_core=i, numa_node=0) for i in range(2)]
    resources = mock.MagicMock()
    resources.get_visible_memory_node.return_value = [0]
    resources.get_allowed_cpu_list.return_value = cores
    with (
        mock.patch.object(ompmultiprocessing, "cr_utils", resources),
        mock.patch.object(cpu.os, "sched_getaffinity", lambda _: {0, 1}),
    ):
        assert ompmultiprocessing.OMPProcessManager(config).cpu_lists == [[0, 1]]


def engine_process():
    """The engine's process is made as we say, and first of all gives up its threads."""
    from vllm.turboquant import cpu
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.utils import CoreEngineProcManager

    chosen, config = mock.MagicMock(name="engine_context"), mock.MagicMock()
    config.parallel_config.data_parallel_size = 1
    start = with_stubs(CoreEngineProcManager.__init__, get_mp_context=lambda: "upstream's")
    with mock.patch.object(cpu, "engine_context", chosen):
        start(mock.MagicMock(), 1, 0, 0, config, True, "", mock.MagicMock(), False)
    chosen.assert_called_once_with("upstream's", config)
    assert chosen().Process.call_args.kwargs["target"] is EngineCoreProc.run_engine_core

    first = mock.MagicMock(side_effect=InterruptedError)
    with mock.patch.object(cpu, "compute_alone", first), contextlib.suppress(InterruptedError):
        with_stubs(EngineCoreProc.run_engine_core)(dp_rank=0, local_dp_rank=0)
    first.assert_called_once_with()


def warm_up():
    """A start whose cache has a given size runs few tokens, and keeps its limit."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    for size, tokens in ((1 << 30, 256), (None, 2048)):
        ran_with: list[int] = []
        runner = mock.MagicMock(max_num_tokens=2048)
        runner.cache_config.kv_cache_memory_bytes = size
        runner.profile_run = lambda r=runner, to=ran_with: to.append(r.max_num_tokens)
        with_stubs(CPUModelRunner.warming_up_model)(runner)
        assert ran_with == [tokens] and runner.max_num_tokens == 2048


def ray():
    """Ray's workers on CPU: the newer executor's, with no device of their own."""
    from vllm.platforms import current_platform
    from vllm.v1.executor import ray_utils
    from vllm.v1.executor.abstract import Executor

    parts = ("ray", "ray.actor", "ray.types", "ray.util", "ray.util.scheduling_strategies")
    absent = {name: mock.MagicMock() for name in parts}  # `make test-long` has Ray, others not
    parallel = mock.MagicMock(distributed_executor_backend="ray")
    with mock.patch.dict(sys.modules, absent), mock.patch.object(ray_utils, "ray", absent["ray"]):
        chosen = Executor.get_class(mock.MagicMock(parallel_config=parallel))
        from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

    assert chosen is RayExecutorV2
    assert current_platform.ray_device_key == "CPU" and chosen._get_actor_resource_kwargs() == {}
    where = with_stubs(RayWorkerProc.get_node_and_physical_gpu_ids, current_platform=current_platform)
    assert where(None)[1] == []


def model_runner():
    """A TDSF cache names itself among what model runner V2 lacks, upstream's caches do not."""
    from vllm.config import VllmConfig

    def lacks(dtype):
        config = VllmConfig()
        config.cache_config.cache_dtype = dtype
        return config._get_v2_model_runner_unsupported_features()

    assert "the TDSF KV cache" in lacks("tdsf_k4v4")
    assert "the TDSF KV cache" not in lacks("fp8")


def cuda_backend():
    """CudaPlatform names our Triton backend for our dtypes only, and the registry finds it."""
    import torch

    sys.modules["vllm._C_stable_libtorch"] = mock.MagicMock()  # upstream's kernels are not called
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability
    from vllm.turboquant.formats import FORMATS
    from vllm.v1.attention.backends import tdsf_triton
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    class Ampere(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(8, 0)

    def chosen(dtype, selected=None):
        config = AttentionSelectorConfig(128, torch.bfloat16, dtype, 128)
        return Ampere.get_attn_backend_cls(selected, config)

    for name in FORMATS:
        short = name.removeprefix("tdsf_").upper()
        assert chosen(name) == f"vllm.v1.attention.backends.tdsf_triton.Tdsf{short}Backend"
        member = AttentionBackendEnum[f"TDSF_{short}_TRITON"]
        assert member.get_class() is getattr(tdsf_triton, f"Tdsf{short}Backend")
    upstreams = AttentionBackendEnum.TRITON_ATTN
    assert chosen("auto", upstreams) == upstreams.get_path()
    try:
        chosen("tdsf_k4v4", upstreams)
    except ValueError as refusal:
        assert "TRITON_ATTN" in str(refusal)
        return
    raise AssertionError("a backend that cannot read the format was accepted")


def ptxas():
    """The package's own version is asked for its ptxas as soon as the package is imported."""
    import vllm
    from vllm.turboquant import ptxas

    with mock.patch.object(ptxas, "take_ptxas") as take:
        importlib.reload(vllm)
    take.assert_called_once_with(vllm.__version__)


def rope():
    """YaRN given alone keeps the model's rope_theta; other dictionaries are set as they are."""
    from transformers import LlamaConfig

    from vllm.config import ModelConfig

    config = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    yarn = {"rope_type": "yarn", "factor": 4.0}
    ModelConfig._apply_dict_overrides(None, config, {"rope_parameters": yarn, "other": {"a": 1}})
    assert config.rope_parameters == yarn | {"rope_theta": 5e5}
    assert config.other == {"a": 1}


def cached_prefix():
    """20 tokens after a cached prefix of 50 are not taken for a first chunk beside one of 100."""
    import torch

    from vllm.v1.attention.backends import turboquant_attn as module

    class Impl(module.TurboQuantAttentionImpl):
        """Records the chunks that are attended, and whether the cache is read for them."""

        def __init__(self):
            self.scale, self.calls = 1.0, []

        def _flash_attn_varlen(self, q, **_):
            self.calls.append((len(q), "no cache"))
            return q

        def _continuation_prefill(self, layer, q, *_):
            self.calls.append((len(q), "cache"))
            return q

    def attended(queries, lengths):
        starts = torch.tensor([0, queries[0], sum(queries)], dtype=torch.int32)
        rows, none = torch.randn(sum(queries), 2, 32), torch.empty(0)
        metadata = module.TurboQuantMetadata(
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            slot_mapping=torch.arange(sum(queries)),
            block_table=torch.zeros(2, 8, dtype=torch.int32),
            query_start_loc=starts,
            max_query_len=max(queries),
            max_seq_len=max(lengths),
        )
        impl = Impl()
        assert torch.equal(
            impl._prefill_attention(rows, rows, rows, none, metadata, none, none), rows
        )
        return impl.calls

    with (
        mock.patch.object(module, "_HAS_FLASH_ATTN", True),
        mock.patch.object(module, "_CONTINUATION_DECODE_THRESHOLD", 0),
    ):
        assert attended([100, 20], [100, 70]) == [(100, "no cache"), (20, "cache")]
        assert attended([100, 20], [100, 20]) == [(120, "no cache")]


def text_only():
    """Without torchvision Qwen3.5's class is imported, and served without its vision tower."""
    from vllm.turboquant import vision

    find = importlib.util.find_spec
    for installed in (False, True):
        with mock.patch.object(
            vision.importlib.util,
            "find_spec",
            lambda name: installed if name == "torchvision" else find(name),
        ):
            assert qwen35().multimodal_config.language_model_only is not installed
    from vllm.model_executor.models import qwen2_vl, qwen3_vl

    assert qwen2_vl.smart_resize is qwen3_vl.image_smart_resize is vision.image_smart_resize


def qwen35():
    """The configuration of the tiny Qwen3.5, whose class is looked at in this process."""
    from vllm.config import ModelConfig
    from vllm.model_executor.models import registry

    def look(entry):
        return registry._ModelInfo.from_model_cls(entry.load_model_cls())

    with mock.patch.object(registry._LazyRegisteredModel, "inspect_model_cls", look):
        return ModelConfig(model=PATHS["qwen35"], dtype="float32")


def hybrid():
    """In a float32 model the gated delta net's operator and all that it keeps are bf16."""
    import torch

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    state = MambaStateDtypeCalculator.gated_delta_net_state_dtype
    assert state(torch.float32, "auto", "float32") == (torch.bfloat16, torch.float32)
    assert state(torch.float16, "auto", "float32") == (torch.float16, torch.float32)

    alone = types.SimpleNamespace(world_size=1, rank_in_group=0)
    config = VllmConfig(model_config=qwen35())
    with set_current_vllm_config(config), mock.patch.object(parallel_state, "_TP", alone):
        text = config.model_config.hf_text_config
        layer = QwenGatedDeltaNetAttention(text, config, prefix="layers.0")
    kept = {name for name, weight in layer.named_parameters() if weight.dtype == torch.bfloat16}
    assert kept == {"conv1d.weight", "dt_bias"}

    def operator(mixed_qkv, b, a, output, layer_name):
        assert {t.dtype for t in (mixed_qkv, b, a, output)} == {torch.bfloat16}
        output.copy_(mixed_qkv + b + a)

    inputs, output = torch.randn(3, 5, 4), torch.zeros(5, 4)
    core = gdn_attention.cpu_gdn_attention_core
    with mock.patch.object(gdn_attention, "cpu_gdn_attention_core", operator):
        core(*inputs, output, "layers.0")
        assert torch.equal(output, sum(inputs.bfloat16().unbind()).float())
    idle = types.SimpleNamespace(attn_metadata=None, no_compile_layers={"layers.0": layer})
    with mock.patch.object(gdn_attention, "get_forward_context", lambda: idle):
        core(*inputs.bfloat16(), output.zero_(), "layers.0")  # upstream's, on bf16 as it is
        assert not output.any()


def windows():
    """Of a Qwen2 with windows on some layers, each layer has its own, and the model is built."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.models.qwen2 import Qwen2Model
    from vllm.turboquant import windows

    kinds = ["full_attention", "sliding_attention"]
    text = mock.MagicMock(
        model_type="qwen2", layer_types=kinds, sliding_window=64, max_window_layers=1
    )
    model = mock.MagicMock(hf_text_config=text)
    model.model_config.hf_config.get_text_config.return_value = text
    config = VllmConfig(model_config=qwen35())
    names = ("layers.0.attn", "layers.1.attn", "draft.layers.2.attn")
    with (
        set_current_vllm_config(config),
        mock.patch.object(windows, "get_current_vllm_config", lambda: mock.Mock(model_config=model)),
    ):
        layers = [Attention(4, 64, 1.0, cache_config=config.cache_config, prefix=n) for n in names]
        assert [layer.sliding_window for layer in layers] == [None, 64, None]
    written = inspect.getclosurevars(Qwen2Model.__init__).nonlocals["old_init"]
    build = with_stubs(written, make_layers=lambda *_, **__: (0, 2, None))
    build(object.__new__(Qwen2Model), vllm_config=model, prefix="", decoder_layer_type=None)


SCENARIOS = (
    overlay, cache_dtypes, backend, command_line, calibration, compile_cache, auto_dtype, linear,
    small_hosts, engine_process, warm_up, ray, model_runner, ptxas, rope, cached_prefix, text_only,
    hybrid, windows, cuda_backend,
)  # fmt: skip

if __name__ == "__main__":
    sys.settrace(trace)
    try:
        for scenario in SCENARIOS:
            scenario()
    finally:
        sys.settrace(None)
    print(json.dumps({path: sorted(lines) for path, lines in ran.items()}))
