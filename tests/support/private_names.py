"""The private names of other packages that casckpt uses, from its source, and whether the installed versions have them.

A private name has a part that begins with one underscore. The imports of a module give the full name, or `HOLDERS`
does: for attributes of objects, and for names in strings.
"""

from __future__ import annotations

import ast
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
_PRIVATE = re.compile(r"(?:[a-z]\w*\.(?:\w+\.)*)?_[a-zA-Z]\w*(?:\.\w+)*")
_GUARD = re.compile(r"^(?:except|with suppress).*(?:AttributeError|ImportError)|^if .*__version__", re.MULTILINE)
_USES = ast.Import | ast.ImportFrom | ast.Attribute | ast.Constant | ast.ClassDef
_DEFINES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
HOLDERS = {
    "torch.nn.modules.module.Module": "_parameters _buffers _modules _metadata _state_dict_hooks _state_dict_pre_hooks "
    "_load_state_dict_pre_hooks _load_state_dict_post_hooks _save_to_state_dict _load_from_state_dict",
    "torch.nn.modules.module": "_extra_state",
    "torch.optim.lr_scheduler.LRScheduler": "_last_lr",
    "torch.optim.lr_scheduler.SequentialLR": "_schedulers",
    "torch.optim.lr_scheduler.CosineAnnealingLR": "_get_closed_form_lr",
    "torch.optim.lr_scheduler.OneCycleLR": "_schedule_phases _anneal_func_type",
    "torch.utils.data.dataloader._BaseDataLoaderIter": "_dataset _index_sampler _num_workers _num_yielded",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "_mixed_precision_enabled_for_buffers",
    "torch.distributed.fsdp._common_utils": "_fsdp_wrapped_module",
    "torch.distributed.fsdp._init_utils": "_handle _buffer_name_to_orig_dtype",
    "torch.distributed.fsdp._flat_param.FlatParamHandle": "_use_orig_params _training_state",
    "torch.distributed.fsdp._flat_param.FlatParameter": "_fqns _shapes _strides _params _param_infos "
    "_shard_param_infos _shared_param_infos _param_extensions _local_shard",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": "_checkpoint_wrapped_module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.checkpoint.metadata": "_MEM_FORMAT_ENCODING",
    "torch.distributed.tensor.DTensor": "_local_tensor _spec",
    "torch.distributed.ProcessGroup": "_get_backend",
    "torch.distributed.ProcessGroupGloo._Options": "_devices _threads _timeout",
    "torch.UntypedStorage": "_cdata",
    "torch.Tensor": "_indices _values",
    "torchao.prototype.safetensors.safetensors_utils": "_type _data",
    "accelerate.accelerator.Accelerator": "_models _optimizers _schedulers _dataloaders _custom_objects "
    "_save_model_state_pre_hook _load_model_state_pre_hook",
    "accelerate.hooks": "_hf_hook",
    "transformers.trainer.Trainer": "_get_output_dir _init_training_state _load_best_model _load_from_checkpoint "
    "_load_optimizer_and_scheduler _load_rng_state _save _save_checkpoint _save_optimizer_and_scheduler "
    "_save_rng_state _save_scaler",
    "transformers.integrations.peft.PeftAdapterMixin": "_hf_peft_config_loaded",
    "transformers.modeling_utils.PreTrainedModel": "_auto_class",
    "transformers.utils.hub": "_raise_exceptions_for_",  # the beginning of three parameters
    "peft.peft_model.PeftModel": "_get_base_model_class",
    "torchtitan.components.checkpointer.base.BaseCheckpointManager": "_save _load _close _maybe_wait_for_staging "
    "_wait_for_saving",
    "lightning.pytorch.trainer.trainer.Trainer": "_checkpoint_connector",
    "lightning.pytorch.callbacks.weight_averaging.WeightAveraging": "_average_model",
    "megatron_fsdp.megatron_fsdp.MegatronFSDP": "_replace_param_with_distributed_if_needed",
    "megatron_fsdp.param_and_grad_buffer": "_megatron_fsdp_model _shard_order",
    "aiobotocore.httpsession.AIOHTTPSession": "_sessions",
    "aiohttp.connector.BaseConnector": "_conns",
    "botocore.endpoint.EndpointCreator": "_get_verify_value",
    "gcsfs.extended_gcsfs.ExtendedGcsFileSystem": "_is_zonal_bucket",
}
"""Where the attributes are of objects that casckpt gets, and the keys and parameters of other packages."""
_KNOWN = {name: [one for one in HOLDERS if name in HOLDERS[one].split()] for name in " ".join(HOLDERS.values()).split()}
_DOCUMENTED = {"_asdict", "_fields", "_replace"}  # of named tuples
_NO_NAMES = {
    "_age",
    "_beside",
    "_reconstruct",
    "_seconds",
    "_id",
    "_param_names",
    "_StorageInfo",
    "_get_layout",
    "pathlib._local",
    "_core",
}
"""Other strings: keys, and names in pickles."""


class Use(NamedTuple):
    """A private name, the module of casckpt that uses it, and whether this place handles its absence.

    A name without a dot is neither casckpt's own nor in `HOLDERS`.
    """

    name: str
    module: str
    is_handled: bool


@cache
def all_uses() -> list[Use]:
    """Return the uses of private names in casckpt, sorted."""
    package = ROOT / "casckpt"
    trees = {str(path.relative_to(package)): ast.parse(path.read_text()) for path in package.rglob("*.py")}
    own = frozenset(name for tree in trees.values() for name in _defined(ast.walk(tree)))
    return sorted({use for module, tree in trees.items() for use in uses_in(module, tree, own)})


def uses_in(module: str, tree: ast.Module, own: frozenset[str]) -> Iterator[Use]:
    """Yield the uses in a module. ``own``: the names that casckpt defines."""
    nodes = list(ast.walk(tree))
    bound, handled = _bound(nodes), {id(node) for one in nodes for node in _handled_in(one)}
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in (one for one in nodes if isinstance(one, _USES)):
        for name in () if id(node) in inner and _full(node, bound) else _names_in(node, bound, own):
            homes = [one for one in _KNOWN.get(name, []) if _top(one) in module]  # the package that the module is for
            homes += [one for one in _KNOWN.get(name, []) if name not in own or _top(one) in ("torch", "torchao")]
            full = f"{homes[0]}.{name}" if homes else name
            if _PRIVATE.fullmatch(full) and _top(full) != "casckpt" and (homes or name not in _KNOWN):
                yield Use(re.sub(r"\.__\w+__$", "", full), module, id(node) in handled)


def _top(name: str) -> str:
    return name.partition(".")[0]


def _names_in(node: ast.AST, bound: dict[str, str], own: frozenset[str]) -> Iterator[str]:
    """Yield the names that a node uses. Those of casckpt are among them only if `HOLDERS` has them, too."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from (f"{node.module}.{one.name}" if isinstance(node, ast.ImportFrom) else one.name for one in node.names)
    elif isinstance(node, ast.Attribute):
        of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        is_own = node.attr in _DOCUMENTED or (node.attr in own and (of_self or node.attr not in _KNOWN))
        yield from [full] if (full := _full(node, bound)) else [] if is_own else [node.attr]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from {node.value.strip(".")} - _NO_NAMES - _DOCUMENTED - (own - _KNOWN.keys())
    elif isinstance(node, ast.ClassDef):  # the names that its bases in other packages have, too
        bases = [base for base in (_full(one, bound) for one in node.bases) if _top(base) not in ("", "casckpt")]
        ends = [(_top(base), base.rpartition(".")[2]) for base in bases]  # a package may give a class another name
        bases += [one for one in HOLDERS if (_top(one), one.rpartition(".")[2]) in ends]
        inside = [*ast.walk(node)] if bases else []
        used = {one.attr for one in inside if isinstance(one, ast.Attribute)} | {*_defined(inside)}
        yield from (one for one in filter(_PRIVATE.fullmatch, used) if any(has(f"{base}.{one}") for base in bases))


def _full(node: ast.AST, bound: dict[str, str]) -> str:
    """Return the full name that an import gives to an expression, or ""."""
    if isinstance(node, ast.Attribute) and (above := _full(node.value, bound)):
        return f"{above}.{node.attr}"
    return bound.get(node.id, "") if isinstance(node, ast.Name) else ""


def _bound(nodes: list[ast.AST]) -> dict[str, str]:
    """Return the full names of what imports bind, and of variables such as ``dist: Any = torch.distributed``."""
    bound: dict[str, str] = {}
    for node in nodes:
        for one in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            full = f"{node.module}.{one.name}" if isinstance(node, ast.ImportFrom) else one.name
            bound |= {one.asname: full} if one.asname else {full.split(".")[0]: full.split(".")[0]}
            bound |= {one.name: full} if isinstance(node, ast.ImportFrom) and not one.asname else {}
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and node.value and (full := _full(node.value, bound)):
            bound[ast.unparse(node.target)] = full
    return bound


def _handled_in(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes whose missing names a node handles: in `try`, `suppress`, or a test of the version."""
    if isinstance(node, ast.Try | ast.With | ast.If) and _GUARD.search(ast.unparse(_without_body(node))):
        yield from ast.walk(node)
    match node:
        case ast.Call(ast.Name("hasattr"), [_, name]) | ast.Call(ast.Name("getattr"), [_, name, _]):
            yield name


def _without_body(node: ast.Try | ast.With | ast.If) -> ast.stmt:
    if isinstance(node, ast.Try):
        handlers = [ast.ExceptHandler(one.type, one.name, []) for one in node.handlers]
        return ast.Try([], handlers, [], [])
    return ast.With(node.items, [], lineno=0) if isinstance(node, ast.With) else ast.If(node.test, [], [])


def _defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield what nodes define: functions, classes, variables, and attributes of self."""
    for node in nodes:
        if isinstance(node, _DEFINES):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield ast.unparse(node).removeprefix("self.").removeprefix("cls.")


@cache
def has(name: str) -> bool:
    """Return whether an installed package has a name: its source says so, or torch or Python, when imported."""
    above, _, last = name.rpartition(".")
    if not _file(name)[1] or re.search(rf"(?<!\w){last}" + r"\b" * (last[-1:] != "_"), _source(above)):
        return True
    try:
        return _top(name) in {"torch", *sys.stdlib_module_names} and pkgutil.resolve_name(name) is not name
    except (ImportError, AttributeError):
        return False


@cache
def _source(name: str) -> str:
    """Return the source of a module or class, or ""."""
    path, rest = _file(name)
    text = path.read_text() if path is not None else ""
    for node in _tree(text).body if rest else ():
        if isinstance(node, ast.ClassDef) and [node.name] == rest:
            return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
    return "" if rest else text


_tree = cache(ast.parse)


def _file(name: str) -> tuple[Path | None, list[str]]:
    """Return the file of the longest module in a name, and the parts of the name behind it. Nothing is imported."""
    top, *rest = name.split(".")
    folders = getattr(find_spec(top), "submodule_search_locations", None) or ()
    stems = ((Path(folder, *rest[:at]), rest[at:]) for at in range(len(rest), -1, -1) for folder in folders)
    paths = ((path, left) for stem, left in stems for path in (stem / "__init__.py", stem.with_suffix(".py")))
    return next((found for found in paths if found[0].exists()), (None, [name]))


def may_lack(name: str) -> bool:
    """Return whether casckpt handles the absence of a name, and its package is not of the version in constraints.txt.

    With that version, every name must exist. So must those of Python in all its versions.
    """
    package = _top(name)
    if package in sys.stdlib_module_names or not all(use.is_handled for use in all_uses() if use.name == name):
        return False
    pin = f"{package.replace('_', '-')}=={metadata.version(package).split('+')[0]}"
    return pin not in (ROOT / "constraints.txt").read_text().splitlines()


def table() -> str:
    """Return the table of docs/design.md."""
    rows = ["| package | private name | used by |", "| --- | --- | --- |"]
    for name in sorted({use.name for use in all_uses()}):
        uses = [use for use in all_uses() if use.name == name]
        top, _, rest = name.partition(".")
        mark = " (optional)" if all(use.is_handled for use in uses) else ""
        rows.append(f"| {top} | `{rest}`{mark} | {', '.join(sorted({f'`{use.module}`' for use in uses}))} |")
    return "\n".join(rows)
