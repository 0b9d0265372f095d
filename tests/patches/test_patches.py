"""An unpatched, half-patched or wrongly patched vLLM is impossible: what stops it, and what an installation leaves.

Scenarios that install run in forked children (see conftest), so this process keeps the vLLM it found.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import vllm_patches
from vllm_patches import _seam

Run = Callable[..., object]
FOLDER = Path(vllm_patches.__file__).parent
FIELDS = ("Seam", "Process", "Kind", "Why", "Delta", "No seam", "Remove")
FIELD = re.compile(rf"^\s*({'|'.join(FIELDS)}):\s+|(?<=\S)\s+(Kind):\s+", re.MULTILINE)


def header(module: ModuleType) -> dict[str, str]:
    parts = FIELD.split(ast.get_docstring(ast.parse(Path(module.__file__ or "").read_text())) or "")
    assert parts[0] == "", "the header is the whole docstring"
    found = [(a or b, " ".join(text.split())) for a, b, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)]
    assert [name for name, _ in found] == list(FIELDS)
    return dict(found)


def module_of(name: str) -> ModuleType:
    import importlib

    return importlib.import_module(f"vllm_patches.{name}")


# -- what is written down ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", vllm_patches.MODULES)
def test_every_patch_says_what_it_is(name: str) -> None:
    module = module_of(name)
    said = header(module)
    assert said["Seam"] == module.SEAM.target
    assert said["Kind"] == module.SEAM.kind
    assert said["Process"] in {"api", "engine", "worker"}
    assert all(said.values())


def test_every_file_of_the_package_is_a_listed_patch() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "_seam"}
    assert files == set(vllm_patches.MODULES)
    assert len(set(vllm_patches.MODULES)) == len(vllm_patches.MODULES)


def test_no_two_patches_share_a_target() -> None:
    targets = [seam.target for seam in vllm_patches.seams()]
    assert len(set(targets)) == len(targets)


def test_pins_are_exactly_what_the_patches_stand_on() -> None:
    assert set(vllm_patches.pins()) == {target for seam in vllm_patches.seams() for target in seam.pinned}
    assert dict(vllm_patches.examine()) == dict.fromkeys(vllm_patches.pins(), "ok")


def test_a_patch_pins_its_target_and_an_addition_pins_none() -> None:
    for seam in vllm_patches.seams():
        assert (seam.target in seam.pinned) == (seam.kind == "wrap")


def test_a_digest_covers_decorators_and_body_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(text: str) -> str:
        path = tmp_path / f"m{abs(hash(text))}.py"
        path.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return _seam.digest(f"{path.stem}:C.f")

    plain = of("class C:\n    @dec\n    def f(self):\n        return 1\n")
    assert of("import os\n\nclass C:\n    x = 1\n    @dec\n    def f(self):\n        return 1\n    y = 2\n") == plain
    assert of("class C:\n    @other\n    def f(self):\n        return 1\n") != plain
    assert of("class C:\n    @dec\n    def f(self):\n        return 2\n") != plain


@pytest.mark.parametrize(
    "target",
    [
        "vllm.no_such:f",
        "vllm.no_such.module:f",
        "vllm.plugins:no_such",
        "vllm.v1.core.block_pool:BlockPool.no_such",
    ],
)
def test_a_target_that_is_gone_is_named(target: str) -> None:
    with pytest.raises(_seam.SeamError, match="no_such"):
        _seam.source_of(target)


# -- installing -------------------------------------------------------------------------------------------------------


def test_importing_every_patch_changes_nothing(forked: Run) -> None:
    forked(
        """
        import importlib, inspect
        def now(target):
            module, _, path = target.partition(":")
            owner = importlib.import_module(module)
            *parents, name = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            return inspect.getattr_static(owner, name, None)
        before = {t: now(t) for t in TARGETS}
        assert "vllm_patches" not in sys.modules
        import vllm_patches
        assert [s.target for s in vllm_patches.seams()] == TARGETS
        assert all(now(t) is was for t, was in before.items())
        assert "retire.engine.worker" not in sys.modules and "retire.engine.scheduler" not in sys.modules
        """,
        prelude=f"import sys\nTARGETS = {[seam.target for seam in vllm_patches.seams()]}\n",
    )


def test_installation_is_complete_and_idempotent(forked: Run) -> None:
    forked(
        """
        assert marked() == []
        first = seal.install()
        assert marked() == [s.target for s in SEAMS]
        installed = {s.target: now(s.target) for s in SEAMS}
        assert seal.install() is first is seal.require() is seal.current()
        assert all(now(t) is value for t, value in installed.items())
        assert first.vllm == "0.32.0" and first.runner == "v1 v2" and len(first.pins) == 16
        assert seal.of_worker(None) == first.as_dict()
        """
    )


def test_a_wrap_keeps_name_and_original(forked: Run) -> None:
    forked(
        """
        seal.install()
        for seam in SEAMS:
            if seam.kind == "wrap":
                assert now(seam.target).__wrapped__ is BEFORE[seam.target], seam.target
                assert now(seam.target).__qualname__ == BEFORE[seam.target].__qualname__
        """
    )


def test_safe_points_can_be_taken_out_and_put_back(forked: Run) -> None:
    forked(
        """
        seal.install()
        patched = {s.target: now(s.target) for s in SEAMS}
        modules = {name for names in vllm_patches.SAFE_POINTS.values() for name in names}
        assert modules == {name for name in vllm_patches.MODULES if name.endswith("_safe_point")}
        safe_points = {importlib.import_module("vllm_patches." + name).SEAM.target for name in modules}
        for _ in range(2):
            for layers in vllm_patches.SAFE_POINTS:
                seal.switch(layers, live=False)
        assert {t for t in patched if now(t) is not patched[t]} == safe_points
        assert all(now(t) is BEFORE[t] for t in safe_points)
        assert seal.install() is seal.require() and seal.doctor() == 0, "sealed is sealed"
        seal.switch("linear", live=True)
        assert {t for t in patched if now(t) is not patched[t]} == {t for t in safe_points if "attention" in t}
        seal.switch("attention", live=True)
        assert all(now(t) is value for t, value in patched.items())
        """
    )


@pytest.mark.parametrize("live", [True, False])
def test_a_wrapper_that_came_later_is_not_lost(forked: Run, live: bool) -> None:
    forked(
        f"""
        import functools
        seal.install()
        target = "vllm.model_executor.layers.linear:RowParallelLinear.forward"
        seal.switch("linear", live={live})
        inner = now(target)
        @functools.wraps(inner)
        def foreign(*args, **kwargs):
            return inner(*args, **kwargs)
        put(target, foreign)
        for live in (True, False):
            try:
                seal.switch("linear", live=live)
            except SeamError as error:
                assert target in str(error)
            else:
                raise AssertionError("the foreign wrapper is gone")
            assert now(target) is foreign
        """
    )


def test_a_process_without_patches_has_nothing_to_switch(forked: Run) -> None:
    forked(
        """
        for layers in vllm_patches.SAFE_POINTS:
            try:
                seal.switch(layers, live=True)
            except SeamError:
                pass
            else:
                raise AssertionError
        assert marked() == [] and same_as_before()
        """
    )


def test_vllms_own_layers_find_what_is_in_place(forked: Run) -> None:
    """Operations look the context up by its name in their module; linear layers do not hide the class's method."""
    forked(
        """
        seal.install()
        from vllm.model_executor.layers import linear
        from vllm.model_executor.layers.attention import attention
        for operation in (attention.unified_kv_cache_update, attention.unified_attention_with_output):
            inner = inspect.unwrap(operation)
            assert inner.__globals__ is vars(attention) and "get_attention_context" in inner.__code__.co_names
        for live in (False, True):
            seal.switch("linear", live=live)
            for name in ("MergedColumnParallelLinear", "QKVParallelLinear"):
                assert getattr(linear, name).forward is linear.ColumnParallelLinear.forward
            assert hasattr(linear.QKVParallelLinear.forward, _seam.MARK) is live
        """
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_latent_attention_asks_before_it_attends(forked: Run, compiled: bool) -> None:
    """Its operation is the same in eager and in compiled mode; a layer without metadata gives zeros."""
    forked(
        f"""
        import torch
        from types import SimpleNamespace
        from retire.engine import worker
        asked, step = [], SimpleNamespace(armed=True)
        worker.guard = lambda: step
        seal.install()
        from vllm.forward_context import ForwardContext, override_forward_context
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention
        class Layer(MLAAttention):
            chunked_prefill_workspace_size = 1
        layer = Layer.__new__(Layer)
        torch.nn.Module.__init__(layer)
        named = dict(layer_name="model.layers.0.attn", use_direct_call=False, hisparse_cache=None)
        named |= dict(kv_cache=torch.empty(0), kv_cache_dtype="auto", _k_scale=torch.ones(1))
        named |= dict.fromkeys(("num_heads", "v_head_dim", "qk_nope_head_dim"), 1)
        for name, value in named.items():
            setattr(layer, name, value)
        context = SimpleNamespace(attn_metadata=None, slot_mapping={{}}, no_compile_layers={{layer.layer_name: layer}})
        forward = torch.compile(layer.forward, backend="eager", fullgraph=True) if {compiled} else layer.forward

        def attend():
            with override_forward_context(context):
                return forward(torch.ones(2, 1, 1), torch.ones(2, 1), torch.ones(2, 1, 1), torch.Size((2, 1)))

        step.attention_point = asked.append
        assert attend().tolist() == [[0.0], [0.0]] and asked == [layer.layer_name]
        step.armed = False
        attend()
        step.armed = True
        seal.switch("attention", live=False)
        attend()
        assert asked == [layer.layer_name], "idle layers ask nothing"
        seal.switch("attention", live=True)

        def fenced(name):
            raise worker.StepFenced

        step.attention_point = fenced
        try:
            attend()
        except worker.StepFenced:
            pass
        else:
            raise AssertionError("the step went on")
        """
    )


@pytest.mark.parametrize(
    "target",
    [
        "vllm.v1.core.block_pool:BlockPool.get_new_blocks",  # a target
        "vllm.v1.core.sched.scheduler:Scheduler._preempt_request",  # relied on by a wrap
        "vllm.v1.engine.core:EngineCoreProc._invoke_utility_method",  # relied on by an addition
    ],
)
def test_changed_source_is_refused_by_name(forked: Run, tmp_path: Path, target: str) -> None:
    """A copy of the file, one line added to the function, stands where the module says its source is."""
    forked(
        f"""
        from pathlib import Path
        target, folder = {target!r}, Path({str(tmp_path)!r})
        module, name = target.partition(":")[0], target.rpartition(".")[2]
        spec = importlib.import_module(module).__spec__
        lines = Path(spec.origin).read_text().splitlines()
        text = _seam.source_of(target).splitlines()
        first = next(i for i in range(len(lines)) if lines[i : i + len(text)] == text)
        _seam._parsed.cache_clear()
        lines.insert(first + len(text), " " * (len(text[-1]) - len(text[-1].lstrip())) + "pass")
        spec.origin = str(folder / "changed.py")
        Path(spec.origin).write_text("\\n".join(lines))
        message = refused()
        assert target in message and "differs" in message, message
        assert marked() == [] and same_as_before()
        """
    )


def test_another_version_of_vllm_is_refused(forked: Run) -> None:
    forked(
        """
        import vllm
        vllm.__version__ = "0.33.0"
        message = refused()
        assert "0.32.0" in message and "0.33.0" in message
        assert marked() == [] and same_as_before()
        """
    )


FOREIGN = {
    "functools.wraps": """
        @functools.wraps(original)
        def foreign(*args, **kwargs):
            return original(*args, **kwargs)
        """,
    "plain function": """
        def foreign(*args, **kwargs):
            return original(*args, **kwargs)
        """,
    "partial": "foreign = functools.partial(original)",
}


DECORATED = ("vllm.v1.worker.gpu_worker:Worker.execute_model", "vllm.v1.worker.gpu_worker:Worker.sample_tokens")
WRAPS = [seam.target for seam in vllm_patches.seams() if seam.kind == "wrap"]


@pytest.mark.parametrize(
    ("target", "how"),
    [
        *((target, "functools.wraps") for target in WRAPS),
        *((target, how) for target in (WRAPS[0], DECORATED[0]) for how in ("plain function", "partial")),
    ],
)
def test_a_foreign_wrapper_on_any_target_stops_the_whole_installation(forked: Run, target: str, how: str) -> None:
    forked(
        f"""
        import functools
        target = {target!r}
        original = now(target)
        vllm_patches.examine = lambda: iter(())  # the source on disk is as it was; spare the parsing
        {FOREIGN[how].strip()}
        put(target, foreign)
        message = refused()
        assert target in message, message
        assert marked() == [] and same_as_before(but=(target,)) and now(target) is foreign
        """
    )


def test_a_wrapper_around_what_a_decorator_of_upstream_covers_is_foreign_too(forked: Run) -> None:
    """The decorated function re-wrapped: as many layers as upstream has, one of them somebody else's."""
    forked(
        """
        import functools
        target = "vllm.v1.worker.gpu_worker:Worker.execute_model"
        inner = inspect.unwrap(now(target))
        @functools.wraps(inner)
        def foreign(*args, **kwargs):
            return inner(*args, **kwargs)
        put(target, foreign)
        assert target in refused()
        assert marked() == []
        """
    )


def test_an_addition_that_exists_already_is_refused(forked: Run) -> None:
    forked(
        """
        from vllm.v1.engine.core import EngineCore
        EngineCore.retire_seal = lambda self: []
        message = refused()
        assert "EngineCore.retire_seal exists already" in message
        del EngineCore.retire_seal
        assert marked() == [] and same_as_before()
        """
    )


@pytest.mark.parametrize("position", [0, 7, len(vllm_patches.MODULES) - 1])
def test_a_failure_in_the_middle_undoes_what_stood_before_it(forked: Run, position: int) -> None:
    forked(
        f"""
        from dataclasses import replace
        broken = SEAMS[{position}]
        def build(original):
            assert marked() == [seam.target for seam in SEAMS[:{position}]]
            raise KeyboardInterrupt("in the middle")
        module = importlib.import_module("vllm_patches." + vllm_patches.MODULES[{position}])
        module.SEAM = replace(broken, build=build)
        try:
            seal.install()
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("installed")
        assert marked() == [] and same_as_before() and seal.current() is None
        module.SEAM = broken
        seal.install()
        assert marked() == [seam.target for seam in SEAMS]
        """
    )


# -- the entry point --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugins", [None, "", "other", "retired"])
def test_installed_but_unnamed_is_inert(forked: Run, plugins: str | None) -> None:
    forked(
        f"""
        import vllm.plugins
        plugins = {plugins!r}
        if plugins is not None:
            os.environ["VLLM_PLUGINS"] = plugins
        hook = sys.excepthook
        vllm.plugins.plugins_loaded = False
        vllm.plugins.load_general_plugins()
        import retire.plugin
        retire.plugin.general()
        assert seal.current() is None and marked() == [] and same_as_before() and sys.excepthook is hook
        try:
            seal.require()
        except SeamError:
            pass
        else:
            raise AssertionError
        """
    )


@pytest.mark.parametrize("plugins", ["retire", "other,retire"])
def test_named_is_sealed_by_vllm_itself(forked: Run, plugins: str) -> None:
    forked(
        f"""
        import vllm.plugins
        os.environ["VLLM_PLUGINS"] = {plugins!r}
        vllm.plugins.plugins_loaded = False
        vllm.plugins.load_general_plugins()
        assert seal.current() is not None and marked() == [s.target for s in SEAMS]
        import retire.plugin
        retire.plugin.general()
        assert all(not hasattr(getattr(now(s.target), "__wrapped__", None), _seam.MARK) for s in SEAMS)
        """
    )


def test_scheduler_and_worker_refuse_to_start_unsealed(forked: Run) -> None:
    forked(
        """
        from retire.engine.scheduler import VersionedScheduler
        from retire.engine.worker import guard
        for start in (VersionedScheduler, guard):
            try:
                start()
            except SeamError as error:
                assert "without RETIRE's patches" in str(error)
            else:
                raise AssertionError(start)
        """
    )


# -- retire doctor ----------------------------------------------------------------------------------------------------


def doctor(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("retire")), "doctor"]
    return subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=300
    )


def test_doctor_finds_this_installation_healthy(tmp_path: Path) -> None:
    done = doctor(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(target in done.stdout for target in vllm_patches.pins())
    assert "seal     would be granted" in done.stdout
    assert "FAIL" not in done.stdout


def test_doctor_names_the_pin_that_does_not_fit(tmp_path: Path) -> None:
    copy = tmp_path / "path" / "vllm_patches"
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("__pycache__"))
    target, digest = (
        "vllm.v1.core.block_pool:BlockPool.touch",
        vllm_patches.pins()["vllm.v1.core.block_pool:BlockPool.touch"],
    )
    pins = copy / "pins.toml"
    pins.write_text(pins.read_text().replace(digest, digest[::-1]))
    done = doctor(tmp_path, PYTHONPATH=str(copy.parent))
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1
    assert target in failed[0]
    assert "seal     refused" in done.stdout


# -- configurations ---------------------------------------------------------------------------------------------------


def config(**changes: object) -> SimpleNamespace:
    values: dict[str, object] = {
        "parallel_config.tensor_parallel_size": 1,
        "parallel_config.pipeline_parallel_size": 1,
        "parallel_config.data_parallel_size": 1,
        "parallel_config.enable_dbo": False,
        "parallel_config.distributed_executor_backend": "mp",
        "cache_config.enable_prefix_caching": True,
        "model_config.is_hybrid": False,
        "model_config.is_attention_free": False,
        "model_config.max_model_len": 8192,
        "scheduler_config.async_scheduling": False,
        "offload_config.offload_backend": "auto",
        "offload_config.prefetch": SimpleNamespace(offload_group_size=0),
        "kv_transfer_config": None,
        "speculative_config": None,
        "use_v2_model_runner": False,
    }
    owners = ("parallel_config", "cache_config", "model_config", "scheduler_config", "offload_config")
    made = SimpleNamespace(**{owner: SimpleNamespace() for owner in owners})
    for path, value in {**values, **changes}.items():
        owner, _, name = path.rpartition(".")
        setattr(getattr(made, owner) if owner else made, name, value)
    return made


SOMEBODYS_CONNECTOR = SimpleNamespace(kv_connector="OffloadingConnector", kv_connector_module_path=None)


def speculation(method: str, draft_tokens: int = 8192) -> SimpleNamespace:
    draft_model = SimpleNamespace(max_model_len=draft_tokens)
    return SimpleNamespace(method=method, draft_model_config=draft_model, use_eagle=lambda: method == "eagle3")


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation_that_is_fenced_is_served(method: str) -> None:
    from retire.engine.configuration import refusals

    assert refusals(config(speculative_config=speculation(method)), api_processes=1) == []


def test_a_plain_configuration_is_served() -> None:
    from retire.engine.configuration import check, refusals

    assert refusals(config(), api_processes=1) == []
    check(config(), api_processes=1)


@pytest.mark.parametrize(
    ("accelerator", "given", "taken"), [(True, None, "mp"), (True, "uni", "uni"), (False, None, None)]
)
def test_an_accelerators_worker_has_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, accelerator: bool, given: str | None, taken: str | None
) -> None:
    from vllm.platforms import current_platform

    from retire.engine.configuration import add_worker_process

    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda _: accelerator)
    arguments = SimpleNamespace(distributed_executor_backend=given)
    add_worker_process(arguments)
    assert arguments.distributed_executor_backend == taken


@pytest.mark.parametrize("second_runner", [False, True])
def test_what_an_accelerator_does_by_default_is_served(monkeypatch: pytest.MonkeyPatch, second_runner: bool) -> None:
    from vllm.platforms import current_platform

    from retire.engine.configuration import refusals

    by_default = {"scheduler_config.async_scheduling": True, "use_v2_model_runner": second_runner}
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    (unknown_device,) = refusals(config(**by_default), api_processes=1)
    assert "neither a CPU nor of CUDA's kind" in unknown_device
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda _: True)
    assert refusals(config(**by_default), api_processes=1) == []
    (in_one_process,) = refusals(
        config(**by_default, **{"parallel_config.distributed_executor_backend": "uni"}), api_processes=1
    )
    assert "--distributed-executor-backend mp" in in_one_process
    (no_async, *no_drafts) = refusals(
        config(**by_default, speculative_config=speculation("draft_model")), api_processes=1
    )
    assert "--no-async-scheduling" in no_async
    assert len(no_drafts) == second_runner


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("parallel_config.tensor_parallel_size", 2, "tensor parallelism"),
        ("parallel_config.pipeline_parallel_size", 2, "pipeline parallelism"),
        ("parallel_config.data_parallel_size", 2, "data parallelism"),
        ("kv_transfer_config", SOMEBODYS_CONNECTOR, "KV connector"),
        ("parallel_config.enable_dbo", True, "--enable-dbo"),
        ("model_config.is_hybrid", True, "Mamba"),
        ("model_config.is_attention_free", True, "Mamba"),
        ("cache_config.enable_prefix_caching", False, "--no-enable-prefix-caching"),
        ("offload_config.offload_backend", "prefetch", "--offload-group-size"),
        ("offload_config.prefetch", SimpleNamespace(offload_group_size=2), "--offload-group-size"),
        ("speculative_config", speculation("eagle3"), "EAGLE"),
        ("speculative_config", speculation("suffix"), "ngram and draft_model"),
        ("speculative_config", speculation("draft_model", draft_tokens=4096), "shorter than --max-model-len"),
        ("use_v2_model_runner", True, "VLLM_USE_V2_MODEL_RUNNER"),
    ],
)
def test_each_configuration_without_guarantees_is_refused(field: str, value: object, words: str) -> None:
    from retire.engine.configuration import check, refusals

    found = refusals(config(**{field: value}), api_processes=1)
    assert len(found) == 1
    assert words in found[0]
    with pytest.raises(_seam.SeamError, match="cannot serve this configuration") as caught:
        check(config(**{field: value}), api_processes=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("isolate", [True, False])
def test_what_vllm_keeps_without_knowing_whose_it_is_is_refused_with_several_tenants(
    monkeypatch: pytest.MonkeyPatch, isolate: bool
) -> None:
    from retire.core.types import TenantId
    from retire.engine.configuration import check_tenants
    from retire.tenants import Registry, Tenant

    several = Registry([Tenant(TenantId(name)) for name in ("acme", "beta")], isolated=isolate)
    text, images = (config(**{"model_config.is_multimodal_model": value}) for value in (False, True))
    check_tenants(text, several)
    check_tenants(images, Registry.single())
    if isolate:
        with pytest.raises(_seam.SeamError, match="multimodal"):
            check_tenants(images, several)
    else:
        check_tenants(images, several)
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    check_tenants(text, Registry.single())
    with pytest.raises(_seam.SeamError, match="RESPONSES_API_STORE"):
        check_tenants(text, several)


def test_several_api_processes_are_refused() -> None:
    from retire.engine.configuration import refusals

    assert ["--api-server-count" in reason for reason in refusals(config(), api_processes=2)] == [True]


def test_everything_in_the_way_is_named_at_once() -> None:
    from retire.engine.configuration import check

    both = config(**{"parallel_config.tensor_parallel_size": 2, "kv_transfer_config": SOMEBODYS_CONNECTOR})
    with pytest.raises(_seam.SeamError, match=r"tensor parallelism.*; .*KV connector"):
        check(both, api_processes=1)


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of an engine, as far as our connector is concerned."""
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "")
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU")  # and back to what it was when the test is over
    return SimpleNamespace(kv_transfer_config=None)


def test_our_connector_is_named_for_the_engine_and_passes_the_check(arguments: SimpleNamespace) -> None:
    from retire.engine import configuration

    configuration.add_tier(arguments, 1 << 20)
    named = arguments.kv_transfer_config
    assert (named.kv_connector, named.kv_load_failure_policy) == ("RetireTier", "recompute")
    assert configuration.refusals(config(kv_transfer_config=named), api_processes=1) == []
    assert os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "1", "no core of the model's is set aside for it"


def test_without_host_memory_or_beside_a_connector_of_the_users_none_is_named(arguments: SimpleNamespace) -> None:
    from retire.engine import configuration

    configuration.add_tier(arguments, 0)
    assert arguments.kv_transfer_config is None
    arguments.kv_transfer_config = SOMEBODYS_CONNECTOR
    configuration.add_tier(arguments, 1 << 20)
    assert arguments.kv_transfer_config is SOMEBODYS_CONNECTOR


def test_upstream_finds_the_connector_and_keeps_its_hybrid_cache_manager(arguments: SimpleNamespace) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from retire.engine import configuration

    configuration.add_tier(arguments, 1 << 20)
    found = KVConnectorFactory.get_connector_class(arguments.kv_transfer_config)
    assert (found.__module__, found.__abstractmethods__) == (configuration.TIER_MODULE, frozenset())
    assert KVConnectorFactory.supports_hma_config(arguments.kv_transfer_config)


REFUSED = {  # arguments, environment, what the line has to name
    "tensor parallelism": ("tensor_parallel_size=2", {}, "tensor parallelism"),
    "no size": ("", {"RETIRE_DRAM_BYTES": "-1"}, "RETIRE_DRAM_BYTES: '-1' is no size"),
    "too large": ("", {"RETIRE_DRAM_BYTES": "9999TiB"}, "that this machine has"),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, subprocess.Popen[str]]]:
    """For every reason a process that makes a configuration, side by side, and the state directory it was told."""
    from retire import models

    started = {}
    for name, (flags, environment, _) in REFUSED.items():
        folder = tmp_path_factory.mktemp("refused")
        (folder / "start.py").write_text(
            "from vllm.engine.arg_utils import EngineArgs\n"
            "if __name__ == '__main__':\n"
            f"    EngineArgs(model={models.resolve('tiny-llama')!r}, {flags}).create_engine_config()\n"
        )
        ours = {"VLLM_PLUGINS": "retire", "RETIRE_STATE_DIR": str(folder / "state"), "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            [sys.executable, str(folder / "start.py")],
            env={**os.environ, **ours, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started[name] = (folder / "state", process)
    return started


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refused_start_ends_with_one_line(
    refused: dict[str, tuple[Path, subprocess.Popen[str]]], reason: str
) -> None:
    state, process = refused[reason]
    _, said = process.communicate(timeout=300)
    assert process.returncode != 0, said
    lines = [line for line in said.splitlines() if line.startswith("retire: ")]
    assert len(lines) == 1
    assert REFUSED[reason][2] in lines[0]
    assert "Traceback" not in said
    assert not state.exists(), "a refused start leaves no state behind"
