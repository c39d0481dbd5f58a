"""Continuous batching of a model with our attention, which steps aside for it.

Continuous batching keeps keys and values in pages, which our attention does not read, and its manager refuses our name.
So the configs of a model name transformers' attention while a manager of it lives: from where it is made until its
thread has ended after a `stop`, or until nobody holds it. Several managers may have one model.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from liger_trainer.attention.config_names import AWAY, NAME, Away
from liger_trainer.attention.interface import default_implementation
from liger_trainer.compat.private import available
from liger_trainer.compat.transformers import CONTINUOUS_BATCHING

_LEFT = f"_{NAME}_configs"  # attribute of a manager: what brings our name back into each config, by the config's id


def name_of(config: Any) -> Any:
    """The attention that `config` names, or will name when no manager needs another."""
    away = AWAY.get(id(config))
    return config._attn_implementation if away is None else away.name


def set_name(config: Any, name: str) -> None:
    """Sets [`name_of`] a config, and not that of configs inside it."""
    if id(config) in AWAY:
        AWAY[id(config)].name = name
    else:
        config._attn_implementation = {"": name}


def _step_aside(manager: Any, model: nn.Module) -> None:
    """Has the configs of `model` name an attention that is not ours, as long as `manager` needs it."""
    left = manager.__dict__.setdefault(_LEFT, {})
    for each in model.modules():
        if not isinstance(each, PreTrainedModel) or id(each.config) in left:
            continue
        config = each.config
        away = AWAY.setdefault(id(config), Away(config, config._attn_implementation, set()))
        away.managers.add(id(manager))
        left[id(config)] = weakref.finalize(manager, _come_back, away, id(manager))
        if config._attn_implementation == NAME:
            config._attn_implementation = {"": default_implementation(type(each))}


def _come_back(away: Away, manager: int) -> None:
    """Takes a manager, by id, from those that keep our name away; brings it back if none is left."""
    away.managers.discard(manager)
    if away.managers:
        return
    del AWAY[id(away.config)]
    if away.name == NAME:  # of all others, transformers takes care
        away.config._attn_implementation = {"": away.name}


def _release(manager: Any) -> None:
    for come_back in manager.__dict__.pop(_LEFT, {}).values():
        come_back()


def _release_after(thread: threading.Thread, manager: Any) -> None:
    thread.join()
    if not manager.is_running():  # again
        _release(manager)


def _install() -> None:
    """Has managers of continuous batching, which refuse our attention, send it away and call it back."""
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    Manager: Any = ContinuousBatchingManager
    switch, start, stop = Manager.switch_to_cb_friendly_attn, Manager.start, Manager.stop

    @functools.wraps(switch)
    def switch_from_ours(manager: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        _step_aside(manager, model)
        switch(manager, model, *args, **kwargs)

    @functools.wraps(start)
    def start_without_ours(manager: Any, *args: Any, **kwargs: Any) -> None:
        _step_aside(manager, manager.model)  # which an earlier stop has called back
        start(manager, *args, **kwargs)

    @functools.wraps(stop)
    def stop_and_release(manager: Any, *args: Any, **kwargs: Any) -> None:
        thread = manager._generation_thread
        stop(manager, *args, **kwargs)
        if thread is not None and thread.is_alive():  # it was not waited for, and still generates
            threading.Thread(target=_release_after, args=(thread, manager), daemon=True).start()
        else:
            _release(manager)

    Manager.switch_to_cb_friendly_attn, Manager.start, Manager.stop = (
        switch_from_ours,
        start_without_ours,
        stop_and_release,
    )


if available(CONTINUOUS_BATCHING):
    _install()
