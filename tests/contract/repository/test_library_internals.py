"""Private names and patches of other libraries: each still exists, and each patch is still needed.

If one of these tests fails after an upgrade, either change the code that uses the name, or remove the patch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]

PRIVATE_NAMES: dict[str, str] = {
    # Attributes of modules and tensors that the public API cannot replace one by one.
    "_parameters": "torch.nn.Module",
    "_buffers": "torch.nn.Module",
    "_apply": "torch.nn.Module",
    "_load_state_dict_pre_hooks": "torch.nn.Module",
    "_load_state_dict_post_hooks": "torch.nn.Module",
    "_non_persistent_buffers_set": "torch.nn.Module",
    "_version": "torch.Tensor",
    "_cdata": "torch.UntypedStorage",
    "_untyped_storage": "torch.storage.TypedStorage",
    # Fused and grouped operations of torch, and the hooks of its optimizers.
    "_fused_adamw_": "torch",
    "_fused_rms_norm": "torch.ops.aten",
    "_fused_rms_norm_backward": "torch.ops.aten",
    "_foreach_add_": "torch",
    "_foreach_copy_": "torch",
    "_foreach_div_": "torch",
    "_foreach_lerp_": "torch",
    "_foreach_mul_": "torch",
    "_foreach_norm": "torch",
    "_foreach_sub_": "torch",
    "_step_supports_amp_scaling": "torch.optim.Adam",
    "_init_group": "torch.optim.AdamW",
    "_optimizer_load_state_dict_pre_hooks": "torch.optim.Optimizer",
    "_optimizer_load_state_dict_post_hooks": "torch.optim.Optimizer",
    "_optimizer_step_post_hooks": "torch.optim.Optimizer",
    "_optimizer_step_pre_hooks": "torch.optim.Optimizer",
    "_global_optimizer_post_hooks": "torch.optim.optimizer",
    "_global_optimizer_pre_hooks": "torch.optim.optimizer",
    # torch's initialization of CUDA in progress, in which it reads the properties of GPUs.
    "_tls": "torch.cuda",
    "_autograd": "torch._C",
    "_profiler_enabled": "torch._C._autograd",
    "_last_lr": "torch.optim.lr_scheduler.LRScheduler",
    "_step_count": "torch.optim.lr_scheduler.LRScheduler",
    # What peft's disable_adapter() sets.
    "_disable_adapters": "peft.tuners.tuners_utils.BaseTunerLayer",
    # Which layers get_peft_model rejects; it has no public function.
    "_check_lora_target_modules_mamba": "peft.tuners.tuners_utils",
    # Replicas whose gradients have the same buckets in every step.
    "_push_all_rebuilt_params": "torch.distributed.Reducer",
    "_post_forward": "torch.nn.parallel.DistributedDataParallel",
    "_rebuild_buckets": "torch.distributed.Reducer",
    # Process groups, stores, pipelines and compilation.
    "_C": "torch",
    "_get_default_store": "torch.distributed.distributed_c10d",
    "_local_tensor": "torch.distributed.tensor.DTensor",
    "_monitor_workers": "torch.distributed.elastic.agent.server.api.SimpleElasticAgent",
    "_remaining_restarts": "torch.distributed.elastic.agent.server.api.SimpleElasticAgent",
    "_rendezvous": "torch.distributed.elastic.agent.server.api.SimpleElasticAgent",
    "_restart_workers": "torch.distributed.elastic.agent.server.api.SimpleElasticAgent",
    "_shutdown": "torch.distributed.elastic.agent.server.api.SimpleElasticAgent",
    "_start_workers": "torch.distributed.elastic.agent.server.api.SimpleElasticAgent",
    "_stop_workers": "torch.distributed.elastic.agent.server.api.SimpleElasticAgent",
    "_world": "torch.distributed.distributed_c10d",
    "_n_microbatches": "torch.distributed.pipelining.schedules",
    "_inductor": "torch",
    "_dynamo": "torch",
    "_python_dispatch": "torch.utils",
    "_pytree": "torch.utils",
    "_reparametrize_module": "torch.nn.utils.stateless",
    # What a failed forward pass leaves in a module of fsdp2.
    "_fully_shard": "torch.distributed.fsdp",
    "_fsdp_common": "torch.distributed.fsdp._fully_shard",
    "_get_fsdp_state": "torch.distributed.fsdp.FSDPModule",
    "_fsdp_api": "torch.distributed.fsdp._fully_shard",
    "_fsdp_param_group": "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
    "_state_ctx": "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
    "_training_state": "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
    "_pre_forward_hook_handle": "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
    "_forward_pre_hooks": "torch.nn.Module",
    "_unsharded_param": "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
    "_all_gather_result": "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    # When the gradients of a group of fsdp2 on one rank have only to be cast.
    "_all_reduce_hook": "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    "_post_accumulate_grad_hooks": "torch.Tensor",
    # A group of fsdp2 whose parameters have several types.
    "_init_mp_dtypes": "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    "_orig_dtype": "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    "_reduce_dtype": "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    "_sharded_state": "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    "_subclasses": "torch",
    # What a model reads of a parameter that fsdp2 has not gathered.
    "_fsdp_param": "torch.distributed.fsdp._fully_shard",
    "_setattr_on_modules": "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
    "_module_info": "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
    "_make_wrapper_subclass": "torch.Tensor",
    "_disabled_torch_function_impl": "torch._C",
    # Which buffers a model creates in its type, and layers with running statistics.
    "_from_config": "transformers.PreTrainedModel",
    "_BatchNorm": "torch.nn.modules.batchnorm",
    # Module paths whose functions compute this rank's part of a DTensor, and end data loader workers.
    "_utils": "torch.distributed.tensor",
    "_SIGCHLD_handler_set": "torch.utils.data._utils.signal_handling",
    "_remove_worker_pids": "torch.utils.data._utils.signal_handling",
    "_mark_worker_as_unavailable": "torch.utils.data.dataloader",
    "_worker_pids_set": "torch.utils.data.dataloader",
    "_workers": "torch.utils.data.dataloader",
    "_workers_done_event": "torch.utils.data.dataloader",
    "_workers_status": "torch.utils.data.dataloader",
    "_nested_dict": "torch.distributed.checkpoint",
    "_StridedShard": "torch.distributed.tensor.placement_types",
    # The names that torch.save writes into files.
    "_get_dtype_from_pickle_storage_type": "torch.storage",
    "_get_layout": "torch.serialization",
    "_rebuild_device_tensor_from_numpy": "torch._utils",
    "_rebuild_from_type_v2": "torch._tensor",
    "_rebuild_meta_tensor_no_storage": "torch._utils",
    "_rebuild_parameter": "torch._utils",
    "_rebuild_parameter_with_state": "torch._utils",
    "_rebuild_tensor": "torch._utils",
    "_rebuild_tensor_v2": "torch._utils",
    "_rebuild_tensor_v3": "torch._utils",
    # What transformers' model classes declare about themselves.
    "_attn_implementation": "transformers.PreTrainedConfig",
    "_attn_implementation_internal": "transformers.PreTrainedConfig",
    "_can_set_attn_implementation": "transformers.PreTrainedModel",
    "_init_weights": "transformers.PreTrainedModel",
    "_is_stateful": "transformers.PreTrainedModel",
    "_keys_to_ignore_on_load_missing": "transformers.PreTrainedModel",
    "_keys_to_ignore_on_load_unexpected": "transformers.PreTrainedModel",
    "_keep_in_fp32_modules": "transformers.PreTrainedModel",
    "_keep_in_fp32_modules_strict": "transformers.PreTrainedModel",
    "_model_mapping": "transformers.AutoModelForCausalLM",
    "_no_split_modules": "transformers.PreTrainedModel",
    "_supports_attention_backend": "transformers.PreTrainedModel",
    "_supports_sdpa": "transformers.PreTrainedModel",
    "_tied_weights_keys": "transformers.PreTrainedModel",
    "_load_from_checkpoint": "transformers.Trainer",
    "_compile_jinja_template": "transformers.utils.chat_template_utils",
    # Base classes of allowed targets.
    "_BaseAutoModelClass": "transformers.models.auto.auto_factory",
    "_Loss": "torch.nn.modules.loss",
    # How a stream of datasets is composed, and which modules read files.
    "_PACKAGED_DATASETS_MODULES": "datasets.packaged_modules",
    "_distributed": "datasets.IterableDataset",
    "_ex_iterable": "datasets.IterableDataset",
    # The standard library and jinja2.
    "_Unpickler": "pickle",
    "_SubParsersAction": "argparse",
    "_actions": "argparse.ArgumentParser",
    "_reconstructor": "copyreg",
    "_run_exitfuncs": "atexit",
    "_exit": "os",
    "_current_frames": "sys",
    "_generate": "jinja2.Environment",
    "_parse": "jinja2.Environment",
}
"""Private name -> a module or class that defines it, or in whose source it occurs."""

SHARED_WITH_OWN_CODE = {
    "_apply",
    "_buffers",
    "_generate",
    "_init_group",
    "_monitor_workers",
    "_optimizer_step_post_hooks",
    "_optimizer_step_pre_hooks",
    "_parameters",
    "_post_forward",
    "_parse",
    "_remaining_restarts",
    "_rendezvous",
    "_restart_workers",
    "_shutdown",
    "_start_workers",
    "_stop_workers",
    "_workers",
}
"""Names that this package also defines itself or reads from self, so that the search below cannot attribute them."""


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_a_private_name_that_this_package_uses_exists(name: str) -> None:
    owner = _resolved(PRIVATE_NAMES[name])
    # Attributes that a constructor creates exist only in the source of the class.
    found = hasattr(owner, name) or re.search(rf"\b{name}\b", inspect.getsource(owner))
    assert found, f"{PRIVATE_NAMES[name]} no longer has {name}; find its uses with grep"


ATTRIBUTE = re.compile(r"(?<=[\w)])\.(_[A-Za-z]\w*)|attr\([\w.]+, \"(_[A-Za-z]\w*)\"")
IMPORT = re.compile(r"^\s*from (?!automodel_ckpt)([\w.]+) import (\([^)]*\)|.*)", re.MULTILINE)
OWN_NAME = re.compile(r"(?:(?<![\w.\"'])|self\.)(_[A-Za-z]\w*)")


def test_the_table_lists_every_private_name_of_a_library_that_this_package_uses() -> None:
    # Regular expressions, because parsing all modules takes seconds.
    attributes, imported, own = set(), set(), set()
    for path in _sources():
        text = path.read_text()
        for module, names in IMPORT.findall(text):
            imported |= set(re.findall(r"\b_[A-Za-z]\w*", f"{module} {names}"))
        code = re.sub(
            r"#.*|``.*?``|^r?\"\"\".*?\"\"\"", "", IMPORT.sub("", text), flags=re.MULTILINE
        )
        attributes |= {name for pair in ATTRIBUTE.findall(code) for name in pair if name}
        own |= set(OWN_NAME.findall(code))
    own.add("_stored_layout")  # an attribute that this package sets on modules
    own.add("_extra_state")  # a part of names in checkpoints of Megatron
    found = imported | (attributes - own)
    listed = PRIVATE_NAMES.keys() - SHARED_WITH_OWN_CODE
    assert found - listed == set(), "use a public name, or add it to PRIVATE_NAMES with its owner"
    assert not listed - found, "remove it from PRIVATE_NAMES"


def _resolved(path: str) -> Any:
    """The module or the attribute of a module with this dotted path."""
    try:
        return importlib.import_module(path)
    except ImportError:
        parent, _, name = path.rpartition(".")
        return getattr(_resolved(parent), name)


def _sources() -> Iterator[Path]:
    for directory in ("automodel_ckpt", "recipes"):
        for path in sorted((ROOT / directory).rglob("*.py")):
            # automodel_ckpt/recipes and automodel_ckpt/examples are links.
            if not any(parent.is_symlink() for parent in path.parents):
                yield path


# Patches: assignments to objects of another library, each with the reason why it is still needed.


def test_transformers_still_has_no_setting_for_the_environment_of_chat_templates() -> None:
    rendering = importlib.import_module("transformers.utils.chat_template_utils")
    source = inspect.getsource(rendering)
    assert "jinja_env = ImmutableSandboxedEnvironment(" in source, "the patch has no effect"
    parameters = inspect.signature(rendering.render_jinja_template).parameters
    settings = [name for name in parameters if "env" in name]
    assert not settings, f"use {settings} instead of the patch in bounded_templates.py"


def test_torch_still_raises_the_death_of_a_worker_in_a_signal_handler_unless_it_is_set_already() -> (
    None
):
    from torch.utils.data._utils import signal_handling

    source = inspect.getsource(signal_handling._set_SIGCHLD_handler)
    assert "signal.signal(signal.SIGCHLD, handler)" in source, (
        "remove the assignment to _SIGCHLD_handler_set from data/batches/micro_batches.py"
    )
    assert "if _SIGCHLD_handler_set:\n        return" in source, "the assignment has no effect"


def test_torch_still_waits_for_workers_and_signals_them_when_its_iterator_ends() -> None:
    from torch.utils.data import dataloader

    iterator: Any = vars(dataloader)["_MultiProcessingDataLoaderIter"]
    source = inspect.getsource(iterator._shutdown_workers)
    assert "w.join(timeout=_utils.MP_STATUS_CHECK_INTERVAL)" in source
    assert "w.terminate()" in source, (
        "data/batches/micro_batches.py need not end the workers itself"
    )


def test_torch_still_wraps_the_steps_of_optimizers_without_the_mark_hooked() -> None:
    from torch.optim import Adam, Optimizer

    assert '"hooked", None' in inspect.getsource(Optimizer._patch_step_function)
    assert 'getattr(self, "grad_scale", None)' in inspect.getsource(Adam.step), (
        "torch's step no longer divides by grad_scale; see optim/build.py"
    )
    assert 'getattr(self, "found_inf", None)' in inspect.getsource(Adam.step), (
        "torch's step no longer reads found_inf; see optim/build.py"
    )


def test_transformers_still_looks_attention_up_by_the_name_sdpa_and_makes_masks_of_all_pairs() -> (
    None
):
    import torch
    from transformers.masking_utils import causal_mask_function, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parameters = inspect.signature(sdpa_mask).parameters
    # models/attention/by_document.py gets these by name in place of sdpa_mask.
    assert {
        "batch_size",
        "q_length",
        "kv_length",
        "q_offset",
        "kv_offset",
        "mask_function",
        "attention_mask",
        "local_size",
        "allow_is_causal_skip",
        "use_vmap",
    } <= parameters.keys()
    documents = torch.tensor([0, 0, 0, 1, 1])

    def within_documents(batch: Any, head: Any, query: Any, key: Any) -> Any:
        is_causal = causal_mask_function(batch, head, query, key)
        return is_causal & (documents[query] == documents[key])

    options = {"mask_function": within_documents, "allow_is_causal_skip": False}
    mask = sdpa_mask(batch_size=1, q_length=5, kv_length=5, **options)
    assert isinstance(mask, torch.Tensor) and mask.shape == (1, 1, 5, 5), (
        "transformers no longer computes all pairs; models/attention/by_document.py may be unnecessary"
    )
    assert "sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys()


def test_torch_still_requires_as_many_micro_batches_as_stages_for_its_schedules() -> None:
    from torch.distributed.pipelining import schedules

    source = inspect.getsource(schedules)
    assert "must be greater than" in source, (
        "create schedules with the real number in parallel/pipeline.py"
    )
