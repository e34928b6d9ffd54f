"""Import paths of before, so that programs of their users run unchanged: the ancestor's, for modules that are now in
`atroposlib.compat`, and our own, for modules that an environment's author may import and that are now in a directory.

An old name gives the same module as the new name: a reward registered under one is known under the other.
`python -m` takes old names too. Nothing is loaded before such a name is imported.
"""

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

# A package stands for the modules in it too.
MOVED = {
    "atroposlib.api.utils": "atroposlib.compat.batching",
    "atroposlib.cli.dpo": "atroposlib.compat.commands.dpo",
    "atroposlib.cli.generation": "atroposlib.compat.commands.generation",
    "atroposlib.cli.inference_node_wandb_watcher": "atroposlib.compat.commands.inference_node_wandb_watcher",
    "atroposlib.cli.sft": "atroposlib.compat.commands.sft",
    "atroposlib.cli.view_run": "atroposlib.compat.commands.view_run",
    "atroposlib.cli.view_run_multimodal": "atroposlib.compat.commands.view_run",
    "atroposlib.envs.constants": "atroposlib.compat.constants",
    "atroposlib.envs.eval": "atroposlib.compat.eval",
    "atroposlib.envs.reward_fns": "atroposlib.compat.reward_fns",
    "atroposlib.envs.server_handling.managed_server_proxy": "atroposlib.compat.commands.managed_server_proxy",
    "atroposlib.frontend": "atroposlib.compat.commands",
    "atroposlib.utils.advantages": "atroposlib.compat.advantages",
    "atroposlib.utils.best_of_n_selection": "atroposlib.compat.best_of_n_selection",
    "atroposlib.utils.cli": "atroposlib.compat.cli",
    "atroposlib.utils.display": "atroposlib.compat.display",
    "atroposlib.utils.force_diverse_samples": "atroposlib.compat.force_diverse_samples",
    "atroposlib.utils.io": "atroposlib.compat.io",
    "atroposlib.utils.message_history_utils": "atroposlib.compat.message_history_utils",
    "atroposlib.utils.metrics": "atroposlib.compat.metrics",
    "atroposlib.utils.tokenizers.qwen_fixed_tokenizer": "atroposlib.compat.qwen_fixed_tokenizer",
}
# Ours, for two more releases, for those modules that authors import.
IN_DIRECTORIES = {
    "atroposlib.envs.author_checks": "atroposlib.envs.authors.author_checks",
    "atroposlib.envs.author_errors": "atroposlib.envs.authors.author_errors",
    "atroposlib.envs.author_methods": "atroposlib.envs.authors.author_checks",
    "atroposlib.envs.chat_template": "atroposlib.envs.sampling.chat_template",
    "atroposlib.envs.cli": "atroposlib.envs.commands.cli",
    "atroposlib.envs.dataset": "atroposlib.envs.data.dataset",
    "atroposlib.envs.environment": "atroposlib.envs.run.environment",
    "atroposlib.envs.evaluation_metrics": "atroposlib.envs.evaluation.evaluation_metrics",
    "atroposlib.envs.html_report": "atroposlib.envs.files.html_report",
    "atroposlib.envs.kept_answers": "atroposlib.envs.evaluation.kept_answers",
    "atroposlib.envs.known_answers": "atroposlib.envs.data.known_answers",
    "atroposlib.envs.mcp_tools": "atroposlib.envs.foreign.mcp_tools",
    "atroposlib.envs.problems": "atroposlib.envs.data.problems",
    "atroposlib.envs.process": "atroposlib.envs.commands.process",
    "atroposlib.envs.prompt_limits": "atroposlib.envs.data.prompt_limits",
    "atroposlib.envs.records": "atroposlib.envs.files.records",
    "atroposlib.envs.sampled_evaluation": "atroposlib.envs.evaluation.sampled_evaluation",
    "atroposlib.envs.sampling_fields": "atroposlib.envs.sampling.sampling_fields",
    "atroposlib.envs.serve": "atroposlib.envs.commands.serve",
    "atroposlib.envs.server_handling.admission": "atroposlib.envs.server_handling.dispatching.admission",
    "atroposlib.envs.server_handling.affinity": "atroposlib.envs.server_handling.dispatching.affinity",
    "atroposlib.envs.server_handling.chat_rendering": "atroposlib.envs.server_handling.sequences.chat_rendering",
    "atroposlib.envs.server_handling.dispatch": "atroposlib.envs.server_handling.dispatching.dispatch",
    "atroposlib.envs.server_handling.health": "atroposlib.envs.server_handling.dispatching.health",
    "atroposlib.envs.server_handling.reply_checks": "atroposlib.envs.server_handling.sequences.reply_checks",
    "atroposlib.envs.server_handling.sampling": "atroposlib.envs.server_handling.sequences.sampling",
    "atroposlib.envs.server_handling.sampling_ledger": "atroposlib.envs.server_handling.sequences.sampling_ledger",
    "atroposlib.envs.server_handling.sequence_book": "atroposlib.envs.server_handling.sequences.sequence_book",
    "atroposlib.envs.server_handling.throttle": "atroposlib.envs.server_handling.dispatching.throttle",
    "atroposlib.envs.time_limit": "atroposlib.envs.limits.time_limit",
    "atroposlib.envs.worker_pool": "atroposlib.envs.run.worker_pool",
}
# A module that is still where it was, and the one that now defines names of it.
MOVED_NAMES = {"atroposlib.api.server": "atroposlib.compat.api_models"}


def new_name(name: str) -> str | None:
    """Return the present path of the module `name`; None when it has not moved."""
    if name in IN_DIRECTORIES:
        return IN_DIRECTORIES[name]
    return next((new + name.removeprefix(old) for old, new in MOVED.items() if f"{name}.".startswith(f"{old}.")), None)


def moved_attribute(module: str, name: str) -> object:
    """Return what `module` formerly defined as `name`, for its `__getattr__`. Raises AttributeError."""
    attribute = None if name.startswith("_") else getattr(importlib.import_module(MOVED_NAMES[module]), name, None)
    if attribute is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return attribute


class OldPaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Python asks `find_spec` for each module that is not loaded yet, then has the spec's loader make the module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for an old name, None for every other one."""
        is_old = name.startswith("atroposlib.") and new_name(name) is not None
        return ModuleSpec(name, self) if is_old else None

    def exec_module(self, module: ModuleType) -> None:
        """Let the old name, and those of the modules in it that are loaded already, stand for the new ones."""
        old, new = module.__name__, new_name(module.__name__) or ""
        sys.modules[old] = importlib.import_module(new)
        sys.modules.update(
            {old + name.removeprefix(new): found for name, found in sys.modules.items() if name.startswith(f"{new}.")}
        )

    def get_code(self, name: str) -> CodeType | None:
        """The program that `python -m name` runs."""
        spec = importlib.util.find_spec(new_name(name) or name)
        assert spec is not None
        assert isinstance(spec.loader, importlib.abc.InspectLoader)
        return spec.loader.get_code(spec.name)


sys.meta_path.insert(0, OldPaths())
